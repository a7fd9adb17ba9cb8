"""Damage in what a store keeps: the store reports it, and other buffers stay whole."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from service.buffers.changes import Add, Delete, Take, Zero
from service.buffers.names import BufferName
from service.buffers.perform import Request, Wide
from service.buffers.store import Store
from service.errors import BufferCorrupt, KeyReused
from tests.buffers.calls import LARGE, add, create, do, key, ones, value
from tests.buffers.stores import PATIENCE, Clock
from tests.kernels.equality import assert_same_bits

Reopen = Callable[..., Store]

TTL = 12345.678
"""The time to live of the buffers whose records are damaged: tests find them by it."""


@pytest.mark.parametrize("elements", [600, LARGE])
def test_a_damaged_value_harms_one_buffer(reopen_damaged: Reopen, elements: int) -> None:
    store = reopen_damaged()
    create(store, "hurt", "well", "z", shape=(elements,))
    numbers = np.random.default_rng(1).normal(size=elements).astype(np.float32)
    add(store, "hurt", numbers)
    for name in ("well", "z"):
        add(store, name, ones(1))
    store = reopen_damaged(numbers[elements // 2 : elements // 2 + 100].tobytes())
    for _ in range(2):
        with pytest.raises(BufferCorrupt, match="damaged") as caught:
            do(store, Add(name="well", gradient=ones(1)), Take(name="hurt"), Add(name="z", gradient=ones(1)))
        assert caught.value.context == {"buffer": "hurt"}
    with pytest.raises(BufferCorrupt, match=r"\(the buffer is 'hurt'\)$") as caught:
        store.read(["well", "hurt"])
    assert caught.value.context == {"buffer": "hurt"}
    assert [record.count for record in store.records()] == [1, 1, 1]
    assert value(store, "well").tolist() == [1] * elements
    assert add(store, "well", ones(1))["count"] == 2
    assert do(store, Take(name="z")).values["z"].tolist() == [1] * elements
    do(store, Delete(name="hurt"))
    create(store, "hurt", shape=(elements,))
    add(store, "hurt", numbers)
    assert_same_bits(value(reopen_damaged(), "hurt"), numbers)


@pytest.mark.parametrize("elements", [600, LARGE])
@pytest.mark.parametrize("how", ["overwrite", "zero"])
def test_a_damaged_value_can_be_replaced(reopen_damaged: Reopen, how: str, elements: int) -> None:
    store = reopen_damaged()
    create(store, "a", shape=(elements,))
    numbers = np.random.default_rng(1).normal(size=elements).astype(np.float32)
    add(store, "a", numbers)
    store = reopen_damaged(numbers[elements - 200 : elements - 100].tobytes())
    with pytest.raises(BufferCorrupt):
        value(store, "a")
    change = Zero(name="a") if how == "zero" else Add(name="a", gradient=numbers, overwrite=True)
    do(store, change)
    assert_same_bits(value(store, "a"), np.zeros(elements, np.float32) if how == "zero" else numbers)


def test_a_damaged_closed_step_harms_no_other_step(reopen_damaged: Reopen) -> None:
    store = reopen_damaged()
    create(store, "a", shape=(600,), keep=2)
    numbers = np.random.default_rng(1).normal(size=600).astype(np.float32)
    for gradient in (numbers, 2 * numbers):
        add(store, "a", gradient)
        do(store, Take(name="a"))
    add(store, "a", ones(1))
    store = reopen_damaged(numbers[300:400].tobytes())
    with pytest.raises(BufferCorrupt):
        value(store, "a", 0)
    assert_same_bits(value(store, "a", 1), 2 * numbers)
    assert value(store, "a").tolist() == [1] * 600
    assert add(store, "a", ones(1))["count"] == 2
    do(store, Take(name="a"))
    do(store, Delete(name="a"))
    assert store.records() == []


@pytest.fixture
def hurt(reopen_damaged: Reopen) -> Store:
    """Return a store with the buffers "hurt", whose record is damaged and expires, and "well"."""
    store = reopen_damaged()
    create(store, "hurt", ttl_seconds=TTL)
    create(store, "well")
    add(store, "hurt", [1, 2])
    add(store, "well", [1, 2])
    return reopen_damaged(f"{TTL}".encode())


def test_a_damaged_record_harms_one_buffer(hurt: Store) -> None:
    uses: list[Callable[[], object]] = [
        lambda: hurt.record("hurt"),
        lambda: hurt.read(["well", "hurt"]),
        lambda: do(hurt, Add(name="hurt", gradient=ones(2))),
        lambda: do(hurt, Add(name="well", gradient=ones(2)), Add(name="hurt", gradient=ones(2))),
        lambda: do(hurt, Delete(name="well"), Delete(name="hurt")),
        lambda: create(hurt, "hurt"),
    ]
    for use in uses:
        with pytest.raises(BufferCorrupt, match="'hurt' is damaged on the disk") as caught:
            use()
        assert caught.value.context == {"buffer": "hurt"}
    assert value(hurt, "well").tolist() == [1, 2]
    assert add(hurt, "well", [1, 2])["count"] == 2
    assert [record.name for record in hurt.records()] == ["well"]
    assert [record.name for record in hurt.records(limit=1)] == ["well"]
    assert [*hurt.look([BufferName("", "hurt"), BufferName("", "well")])] == [BufferName("", "well")]
    assert (hurt.names("w"), hurt.names("")) == (["well"], ["hurt", "well"])


def test_a_damaged_record_harms_no_request_for_another_prefix(hurt: Store) -> None:
    def change(prefix: str) -> list[str]:
        wide = Request([], wide=Wide(prefix, lambda name: Zero(name=name)))
        return [*hurt.submit(wide).result(PATIENCE).receipts]

    with pytest.raises(BufferCorrupt, match="'hurt' is damaged on the disk"):
        change("")
    assert value(hurt, "well").tolist() == [1, 2]
    assert change("w") == ["well"]
    assert value(hurt, "well").tolist() == [0, 0]
    do(hurt, Delete(name="hurt"))
    assert change("") == ["well"]
    assert hurt.names("") == ["well"]


def test_a_damaged_record_harms_no_other_namespace(reopen_damaged: Reopen) -> None:
    store = reopen_damaged()
    create(store, "well")
    for name in ("hurt", "well"):
        create(store.within("ann"), name, ttl_seconds=TTL if name == "hurt" else None)
    create(store.within("bob"), "well")
    store = reopen_damaged(f"{TTL}".encode())
    for namespace in ("", "bob"):
        assert store.within(namespace).names("") == ["well"]
    with pytest.raises(BufferCorrupt, match="of the buffer 'hurt' is damaged") as caught:
        store.within("ann").read(store.within("ann").names(""))
    assert caught.value.context == {"buffer": "hurt"}


def test_an_expired_damaged_record_harms_no_other_buffer(hurt: Store, clock: Clock) -> None:
    clock.advance(20_000)
    for count in range(2, 8):
        clock.advance(2)
        assert add(hurt, "well", [1, 2])["count"] == count


def test_a_repeated_delete_of_a_damaged_record_counts_once(hurt: Store) -> None:
    deleted = do(hurt, Delete(name="hurt"), key=key())
    again = do(hurt, Delete(name="hurt"), key=key())
    assert (again.replayed, again.receipts) == (True, deleted.receipts)
    create(hurt, "hurt")
    add(hurt, "hurt", [3, 4])
    assert do(hurt, Delete(name="hurt"), key=key()).replayed
    assert value(hurt, "hurt").tolist() == [3, 4]
    with pytest.raises(KeyReused):
        do(hurt, Delete(name="hurt"), key=key(request="another"))
