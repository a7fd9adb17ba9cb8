"""The writer serves namespaces in turns: much work of one does not hold a small request of another."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from service.buffers import batches
from service.buffers.batches import Batches
from service.buffers.changes import Add, Change, Take
from service.buffers.lmdb.store import LmdbStore
from service.buffers.perform import Request
from tests.buffers.calls import LARGE, create, do, key, ones
from tests.buffers.stores import PATIENCE, Gate, Reopen

MANY = 200
"""Buffers of a request that names many."""


def broadcasts(store: LmdbStore) -> list[Request]:
    return [Request([Add(name="large", gradient=ones(1))]) for _ in range(10)]


def takes(store: LmdbStore) -> list[Request]:
    return [Request([Take(name=f"b{number}") for number in range(MANY)]) for _ in range(10)]


def replays(store: LmdbStore) -> list[Request]:
    changes: list[Change] = [Add(name=f"b{number}", gradient=ones(1)) for number in range(MANY)]
    do(store, *changes, key=key())
    return [Request(changes, key()) for _ in range(10)]


@pytest.mark.parametrize("greedy", [broadcasts, takes, replays])
def test_a_small_add_waits_for_one_large_request(
    reopen: Reopen, monkeypatch: pytest.MonkeyPatch, greedy: Callable[[LmdbStore], list[Request]]
) -> None:
    monkeypatch.setattr(batches, "MOST_SHARED_BYTES", 1 << 20)
    store, gate, order = reopen(), Gate(monkeypatch), list[int]()
    one, other = store.within("one"), store.within("other")
    create(one, "large", shape=(2 * LARGE,))
    create(one, *[f"b{number}" for number in range(MANY)])
    create(other, "small")
    requests = greedy(one)
    with gate.holding(other):
        futures = [one.submit(request) for request in requests]
        futures.append(other.submit(Request([Add(name="small", gradient=ones(2))])))
        for number, future in enumerate(futures):
            future.add_done_callback(lambda _, number=number: order.append(number))  # type: ignore[misc]
    for future in futures:
        future.result(PATIENCE)
    assert order[:2] in ([0, 10], [10, 0])
    assert [number for number in order if number != 10] == [*range(10)]


def test_large_requests_of_one_namespace_share_a_transaction(reopen: Reopen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MOST_SHARED_BYTES", 1)
    store, gate = reopen(), Gate(monkeypatch)
    create(store, "large", shape=(LARGE,))
    before = store.generation()
    for future in gate.together(store, broadcasts(store)):
        future.result(PATIENCE)
    assert store.generation() - before <= 2


class Queued(NamedTuple):
    """What waits in these tests."""

    namespace: str
    work: int = 1


def waiting(most_bytes: int = 1000) -> Batches[Queued]:
    return Batches(lambda request: request.work, most=3, long_seconds=1.0, most_bytes=most_bytes)


def test_a_namespace_rests_after_a_long_transaction_while_others_are_present() -> None:
    queue = waiting()
    for namespace in ("long", "other", "long", "other"):
        queue.put(Queued(namespace))
        (taken,) = queue.take(0) or []
        assert taken.namespace == namespace
        queue.charge(0.0)
    queue.put(Queued("long"))
    assert queue.take(0)
    queue.charge(100.0)
    queue.put(Queued("long"))
    assert queue.take(0.01) == []
    queue.put(Queued("other"))
    assert [one.namespace for one in queue.take(0) or []] == ["other"]
    queue.charge(0.0)
    queue.close()  # what waits is finished without a rest
    assert [one.namespace for one in queue.take(0) or []] == ["long"]
    assert queue.take(0) is None
    assert not queue.put(Queued("other"))


def test_a_namespace_alone_does_not_rest() -> None:
    queue = waiting()
    for _ in range(3):
        queue.put(Queued("long"))
        assert queue.take(0)
        queue.charge(100.0)


def test_a_transaction_has_no_more_requests_and_bytes_than_it_may() -> None:
    queue = waiting(most_bytes=10)
    for work in (4, 6, 1, 50, 1, 1, 1, 1):
        queue.put(Queued("one", work))
    taken = [[request.work for request in queue.take(0) or []] for _ in range(4)]
    assert taken == [[4, 6], [1], [50], [1, 1, 1]]
