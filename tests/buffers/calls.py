"""Short forms of the requests and checks that the tests of the stores make."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from service.buffers.changes import Add, Change, Create
from service.buffers.gradients import Coded, Rows
from service.buffers.lmdb.slots import CHUNK_BYTES
from service.buffers.perform import Outcome, Request
from service.buffers.pushes import Part
from service.buffers.record import Key, Receipt, Record, Spec
from service.buffers.store import Store
from service.dtypes import DTYPES, Array
from service.errors import GradserveError
from tests.buffers.stores import PATIENCE

LARGE = 5 * (CHUNK_BYTES // 8) + 3
"""Elements of a buffer that has several chunks in any dtype, the last chunk partly full."""


def key(text: str = "k", *, caller: str = "ann", request: str = "a request") -> Key:
    return Key(caller, text, request.encode().ljust(16)[:16])


def spec(shape: tuple[int, ...] = (2,), dtype: str = "float32", **rules: Any) -> Spec:
    return Spec(shape, DTYPES[dtype], **rules)


def ones(*shape: int, dtype: Any = np.float32) -> Array:
    return np.ones(shape, dtype)


def do(store: Store, *changes: Change, key: Key | None = None) -> Outcome:
    """Return the outcome of a request for these changes."""
    return store.submit(Request(changes, key)).result(PATIENCE)


def request(*changes: Change) -> Request:
    return Request(changes)


def create(store: Store, *names: str, shape: tuple[int, ...] = (2,), dtype: str = "float32", **rules: Any) -> None:
    do(store, *[Create(name=name, spec=spec(shape, dtype, **rules)) for name in names])


def add(store: Store, name: str, gradient: Any, **rest: Any) -> Receipt:
    """Add a gradient and return the receipt. Plain numbers make a float32 gradient."""
    array = np.asarray(gradient, np.float32) if isinstance(gradient, float | int | list) else gradient
    return do(store, Add(name=name, gradient=array, **rest)).receipts[name]


def tensors_of(change: Add) -> dict[str, Array]:
    """Return the tensors of a gradient in a body, by the ends of their names."""
    if isinstance(change.gradient, Coded):
        return {"/codes": change.gradient.codes, "/scales": change.gradient.scales}
    assert isinstance(change.gradient, np.ndarray)
    return {"": change.gradient}


PUSH_SECONDS = 900.0


def send_part(
    store: Store,
    number: int,
    gradients: Mapping[str, Any],
    *,
    push: str = "p",
    parts: int = 2,
    weight: float = 1.0,
    step: int | None = None,
    contributor: str | None = None,
    most: int = 1 << 14,
    request: str = "",
) -> Future[Outcome]:
    """Send a part of a push. By default its request has the same bytes whenever it has the same gradients."""
    text = request or repr(
        [(name, getattr(each, "tolist", lambda each=each: each)()) for name, each in gradients.items()]
    )
    mark = f"{hash(text):+x}".encode().ljust(16)[:16]
    place = Part(push, number, parts, store.namespace, mark, PUSH_SECONDS, weight, step, contributor, most)
    more: dict[str, Any] = {"weight": weight, "step": step, "contributor": contributor}
    numbers = {
        name: each if isinstance(each, Rows | Coded | np.ndarray) else np.asarray(each, np.float32)
        for name, each in gradients.items()
    }
    adds = [Add(name=name, tensor=name, gradient=each, **more) for name, each in numbers.items()]
    return store.submit(Request(adds, part=place))


def part(store: Store, *arguments: Any, **more: Any) -> Outcome:
    """Send a part of a push, and return its outcome."""
    return send_part(store, *arguments, **more).result(PATIENCE)


def value(store: Store, name: str, step: int | None = None) -> Array:
    (snapshot,) = store.read([name], step)
    return snapshot.value


def state(store: Store) -> dict[str, tuple[Record, list[bytes]]]:
    """Return the record and the bytes of every readable value of each buffer."""
    found = {}
    for record in store.records():
        steps = [None, *(one.step for one in record.closed)]
        found[record.name] = (record, [value(store, record.name, step).tobytes() for step in steps])
    return found


def fails_alone(store: Store, error: type[GradserveError], *changes: Change) -> GradserveError:
    """Return the error of a request, after a check that nothing changed."""
    before = state(store)
    with pytest.raises(error) as caught:
        do(store, *changes)
    assert state(store) == before
    return caught.value


def told(name: str, step: int, version: int, count: int, weight: float, **more: Any) -> dict[str, Any]:
    """Return the receipt of a change that leaves the buffer in this state."""
    state = {"step": step, "version": version, "count": count, "weight": weight}
    return {"name": name, "updated": True, "closed": False, **state, **more}
