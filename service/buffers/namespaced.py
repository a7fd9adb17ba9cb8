"""The part of a store that one namespace sees: its buffers, under their own names, and its idempotency keys.

Inside the store, a buffer of the namespace `ann` is called `~ann/` and its name. Both characters are in no name, and
`~` comes behind all that are, so that the buffers of the namespace without a name come first, as they stand.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from service.buffers.perform import Outcome, Request
from service.buffers.record import Key, Known, Receipt, Record, Snapshot
from service.buffers.store import Store, told
from service.errors import BufferCorrupt, GradserveError

T = TypeVar("T")


class Namespaced:
    """A store of which `namespace` is all there is; "" is the one without a name."""

    def __init__(self, store: Store, namespace: str) -> None:
        self._store, self._namespace = store, namespace
        self.blocks = store.blocks
        self._head = f"~{namespace}/" if namespace else ""

    def submit(self, request: Request) -> Future[Outcome]:
        if not self._head:
            return self._store.submit(request)
        changes = [replace(change, name=self._head + change.name) for change in request.changes]
        key = None if request.key is None else self._scoped(request.key)
        inner = self._store.submit(replace(request, changes=changes, key=key))
        outer: Future[Outcome] = Future()

        def finish(done: Future[Outcome]) -> None:
            if not outer.set_running_or_notify_cancel():
                return
            try:
                with self._seen_from_inside():
                    outer.set_result(self._outcome(done.result()))
            except BaseException as error:
                outer.set_exception(told(error))

        held = weakref.ref(inner)  # which leads to `outer`: in a cycle, both and their values would stay for long

        def cancel(done: Future[Outcome]) -> None:
            if done.cancelled() and (waiting := held()) is not None:
                waiting.cancel()

        inner.add_done_callback(finish)
        outer.add_done_callback(cancel)
        return outer

    def record(self, name: str) -> Record:
        with self._seen_from_inside():
            return self._own(self._store.record(self._head + name))

    def records(
        self, prefix: str = "", after: str = "", limit: int | None = None, *, strict: bool = False
    ) -> list[Record]:
        try:
            with self._seen_from_inside():
                found = self._store.records(self._head + prefix, self._head + after, limit, strict=strict)
        except BufferCorrupt as error:
            if self._head or not error.context["buffer"].startswith("~"):
                raise
            found = self._store.records(prefix, after, limit)  # it is another's, and these come behind all of its own
        return [self._own(one) for one in found if self._head or not one.name.startswith("~")]

    def read(self, names: Sequence[str], epoch: int | None = None) -> list[Snapshot]:
        with self._seen_from_inside():
            found = self._store.read([self._head + name for name in names], epoch)
        return [replace(one, record=self._own(one.record)) for one in found]

    def recall(self, key: Key) -> Known | None:
        known = self._store.recall(self._scoped(key))
        if known is None or not self._head:
            return known
        ids = {self._bare(name): one for name, one in known.ids.items()}
        return known._replace(receipts=self._receipts(known.receipts), ids=ids)

    def generation(self) -> int:
        return self._store.generation()

    def size(self) -> tuple[int, int]:
        return self._store.size()

    def close(self) -> None:
        self._store.close()

    def _scoped(self, key: Key) -> Key:
        return key._replace(caller=self._namespace)

    def _bare(self, name: str) -> str:
        return name[len(self._head) :]

    def _own(self, record: Record) -> Record:
        return record.changed(name=self._bare(record.name)) if self._head else record

    def _receipts(self, receipts: Mapping[str, Receipt]) -> dict[str, Receipt]:
        return {self._bare(name): {**one, "name": self._bare(name)} for name, one in receipts.items()}

    def _outcome(self, outcome: Outcome) -> Outcome:
        values = {self._bare(name): value for name, value in outcome.values.items()}
        return replace(outcome, receipts=self._receipts(outcome.receipts), values=values)

    @contextmanager
    def _seen_from_inside(self) -> Iterator[None]:
        """Let errors tell the names that the namespace knows."""
        try:
            yield
        except GradserveError as error:
            if self._head:
                error.detail = error.detail.replace(self._head, "")
                error.context = {name: self._bare_in(one) for name, one in error.context.items()}
            raise

    def _bare_in(self, value: Any) -> Any:
        if isinstance(value, str):
            return value.removeprefix(self._head)
        if isinstance(value, dict):
            return {self._bare_in(name): self._bare_in(one) for name, one in value.items()}
        return value
