"""The read-only face of an LMDB store, for `gradserve doctor` and `gradserve export`. A server may use the store."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from service.buffers.lmdb.clock import clock_of
from service.buffers.lmdb.environment import Environment
from service.buffers.lmdb.format import DUE, TIME, due_entry, name_of
from service.buffers.lmdb.reader import Reader
from service.buffers.lmdb.slots import CHUNK_BYTES, stored_number
from service.buffers.lmdb.values import StoredGradient
from service.buffers.pushes import Place
from service.buffers.readonly import WRONG
from service.buffers.record import Spec
from service.dtypes import Array
from service.errors import BufferCorrupt


class LmdbMoment(Reader):
    """The state of a store that a transaction sees, for `gradserve export` and `gradserve doctor`."""

    def streamed(self, spec: Spec, value: int | None) -> Iterator[Array]:
        return self.values.streamed(spec, value)

    def check_staged(self, place: Place) -> None:
        self.values.check(StoredGradient(*place[:3]))

    def faults(self) -> list[str]:
        return self.damaged_pages()  # LMDB might end the process

    def other_findings(self, values: Collection[int]) -> Iterator[str]:
        slots = dict[int, list[int]]()
        for value in values:
            slots.setdefault(value, [])
            with suppress(BufferCorrupt):
                slots |= self.values.slots_of(value)
        used, free, total = Counter(itertools.chain(*slots.values())), self.free_slots(), self.slot_count()
        yield f"{len(used)} slots in use, {len(free)} free"
        if lost := set(range(total)) - used.keys() - set(free):
            yield f"{len(lost)} slots of {CHUNK_BYTES} bytes are lost to damage; to regain them, export to a new store"
        yield f"{self.entries()['keys']} idempotency keys"
        if damaged := self.keys.damaged():
            yield f"{WRONG}{damaged} idempotency keys are damaged: a retry with one is found all the same, or fails"
        yield from self._miscounted()
        yield from self._unscheduled()
        for value in sorted(set(self.value_ids()) - slots.keys()):
            yield f"{WRONG}value {value} belongs to no buffer and no graph that can be read"
        for slot in sorted({slot for slot, count in used.items() if count > 1} | used.keys() & set(free)):
            yield f"{WRONG}slot {slot} has more than one use"
        for slot in sorted(slot for slot in {*used, *free} if not 0 <= slot < total):
            yield f"{WRONG}the slots in use or free are damaged: {slot} is none of the {total}"
        if (largest := max(slots, default=0)) > (last := stored_number(self._env, self._txn, b"last_id")):
            yield f"{WRONG}the value {largest} is in use, but {last} should be the last"

    def _unscheduled(self) -> Iterator[str]:
        """Yield a line for each buffer that the store would not delete, or whose step it would not close, in time."""
        with self._txn.cursor(db=self._env.deadlines) as cursor:
            entries = itertools.takewhile(lambda key: bytes(key[:1]) < DUE, cursor.iternext(values=False))
            timed = {name_of(key[TIME.size :]) for key in entries}
        for name, record in self.sound_records():
            is_older = bool(self._env.older) and name.is_push
            if not is_older and record is not None and record.expires is not None and name not in timed:
                yield f"{WRONG}{name.shown} is not scheduled: once it has expired, it takes room until a request comes"
            entry = None if record is None else due_entry(record)
            if entry is not None and self._txn.get(entry, db=self._env.deadlines) is None:
                yield (
                    f"{WRONG}the deadline of the buffer {name.joined!r} is not scheduled: its step closes only when a"
                    " request comes for it"
                )

    def _miscounted(self) -> Iterator[str]:
        """Yield a line for each namespace whose count is wrong."""
        counts, counted = self.counts(), self.count_all()
        for namespace in sorted(counts | counted):
            stored, actual = counts.get(namespace, 0), counted.get(namespace, 0)
            if stored != actual:
                yield (
                    f"{WRONG}the namespace {namespace!r} has {actual} buffers, not {stored}, as counted for"
                    " GRADSERVE_MAX_BUFFERS; restart the server, which then counts again"
                )
        uses, used = self.keys.uses(), self.keys.count_all()
        for namespace in sorted(uses | used):
            if uses.get(namespace) != used.get(namespace):
                yield (
                    f"{WRONG}the idempotency keys of the namespace {namespace!r} are counted wrong: its share of"
                    " GRADSERVE_STORE_BYTES is wrong until they expire"
                )


class LmdbReadOnly:
    """A store that is only read."""

    def __init__(self, env: Environment) -> None:
        self._env = env

    def described(self) -> Iterator[str]:
        env = self._env
        yield f"store {env.path}, format {env.format}"
        yield f"data.mdb {env.file_bytes()} bytes, values {env.file.disk_bytes()}; limit {env.max_bytes}"

    def now(self) -> float:
        return clock_of(self._env, readonly=True)()

    @contextmanager
    def reading(self) -> Iterator[LmdbMoment]:
        with self._env.reading() as txn:
            yield LmdbMoment(self._env, txn)


@contextmanager
def opened_readonly(path: Path, max_bytes: int) -> Iterator[LmdbReadOnly]:
    """Open the store in the directory `path`. Raises `StoreFailed` if it cannot be opened."""
    env = Environment(path, max_bytes=max_bytes, readonly=True)
    try:
        yield LmdbReadOnly(env)
    finally:
        env.close()
