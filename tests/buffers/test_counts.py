"""The limit of buffers in a namespace holds for every way to create buffers."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import lmdb
import numpy as np
import pytest

from service.buffers.changes import Add, Create, Delete, Take, Zero
from service.buffers.lmdb.format import COUNT, TIME, keep
from service.buffers.names import BufferName
from service.buffers.perform import Request
from service.buffers.record import Record
from service.buffers.restore import Restore
from service.buffers.sets import Set
from service.buffers.store import Store
from service.errors import NonfiniteGradient, TooManyBuffers
from tests.buffers.calls import add, create, do, key, ones, spec, state
from tests.buffers.stores import PATIENCE, Clock, Gate, Reopen, open_lmdb, open_postgres, start, waiting, wrong

MOST = 3


@pytest.fixture
def reopen(reopen: Reopen) -> Reopen:
    """Return `reopen` with a limit of three buffers in a namespace."""
    return partial(reopen, max_buffers=MOST)


@pytest.fixture(params=["lmdb", "postgres"])
def store(request: pytest.FixtureRequest, clock: Clock, reopen: Reopen) -> Iterator[Store]:
    """Return a store with a limit of three buffers in a namespace."""
    store: Store
    if request.param == "postgres":
        url: str = request.getfixturevalue("postgres_url")
        store = open_postgres(url, clock, schema=f"test_{uuid.uuid4().hex}", max_buffers=MOST)
    else:
        store = reopen()
    yield store
    store.close()


def refused(store: Store, *names: str) -> TooManyBuffers:
    """Return the error of creating these buffers, after a check that nothing changed."""
    before = state(store)
    with pytest.raises(TooManyBuffers) as caught:
        create(store, *names)
    assert state(store) == before
    return caught.value


def test_a_buffer_beyond_the_limit_is_refused(store: Store) -> None:
    create(store, "a", "b", "c")
    same = 0
    for _ in range(10):
        generation = store.generation()
        error = refused(store, "d")
        assert error.detail.startswith("The namespace has 3 buffers; the limit is 3 (GRADSERVE_MAX_BUFFERS)")
        assert error.context == {"limit": 3, "count": 3, "buffer": "d"}
        same += store.generation() == generation
    assert same >= 2  # PostgreSQL may tell of changes of other stores
    add(store, "c", [1, 2])
    do(store, Zero(name="a"), Take(name="b"))
    refused(store, "d")


def test_a_request_creates_all_its_buffers_or_none(store: Store) -> None:
    create(store, "a")
    error = refused(store, "b", "c", "d")
    assert (error.context["count"], error.context["buffer"]) == (3, "d")
    create(store, "a", "b", "c")
    refused(store, "a", "b", "c", "d")
    create(store, "b")
    create(store, "c", "a")


def test_a_repeated_create_is_answered_at_the_limit(store: Store) -> None:
    made = do(store, Create(name="a", spec=spec()), key=key())
    create(store, "b", "c")
    again = do(store, Create(name="a", spec=spec()), key=key())
    assert (again.replayed, again.receipts) == (True, made.receipts)
    do(store, Delete(name="a"))
    create(store, "d")
    assert do(store, Create(name="a", spec=spec()), key=key()).replayed
    refused(store, "a")


def test_a_deleted_buffer_does_not_count(store: Store) -> None:
    create(store, "a", "b", "c")
    for name in ("d", "e", "f", "a", "b", "c"):
        do(store, Delete(name=store.records()[0].name))
        create(store, name)
        refused(store, "z")
    do(store, Delete(name="c"), Create(name="x", spec=spec()))
    assert [one.name for one in store.records()] == ["e", "f", "x"]


def test_a_restored_buffer_counts(store: Store, clock: Clock) -> None:
    create(store, "a", "b")
    record = Record(BufferName("", "c"), spec(), 0, clock.now, clock.now, count=1)
    do(store, Restore(name="c", record=record, value=ones(2)))
    before = state(store)
    with pytest.raises(TooManyBuffers):
        do(store, Restore(name="d", record=record.changed(full_name=BufferName("", "d")), value=ones(2)))
    assert state(store) == before
    ann = store.within("ann")  # the limit is that of the new name
    do(ann, Restore(name="c", record=record, value=ones(2)))
    assert [one.name for one in ann.records()] == ["c"]


def test_a_buffer_that_a_set_creates_counts(store: Store) -> None:
    sets = [Set(name=name, gradient=ones(2), spec=spec()) for name in "abcd"]
    do(store, *sets[:2])
    before = state(store)
    with pytest.raises(TooManyBuffers) as caught:
        do(store, *sets)
    assert caught.value.context == {"limit": 3, "count": 3, "buffer": "d"}
    assert state(store) == before
    do(store, *sets[:3])
    do(store, *sets[:3])
    refused(store, "d")


def test_an_expired_buffer_does_not_count(store: Store, clock: Clock) -> None:
    create(store, "a", "b", ttl_seconds=10.0)
    create(store, "c")
    clock.advance(5)
    add(store, "b", [1, 2])
    clock.advance(4.9)
    refused(store, "d")
    clock.advance(0.1)
    create(store, "d")
    refused(store, "e")
    clock.advance(5)
    create(store, "e")
    refused(store, "f")
    assert [one.name for one in store.records()] == ["c", "d", "e"]


def test_an_expired_buffer_can_be_created_again_at_the_limit(store: Store, clock: Clock) -> None:
    create(store, "a", "b", "c", ttl_seconds=10.0)
    clock.advance(10)
    create(store, "b", "a")
    create(store, "c", "a")
    refused(store, "d")


def test_a_place_of_an_expired_buffer_is_given_once(store: Store, clock: Clock) -> None:
    create(store, "a", ttl_seconds=10.0)
    create(store, "b", "c")
    clock.advance(10)
    create(store, "d")
    refused(store, "a")


def test_each_namespace_has_its_own_limit(store: Store, clock: Clock) -> None:
    spaces = {name: store.within(name) for name in ("", "ann", "an", "z")}
    create(spaces["z"], *[f"{number}" for number in range(MOST)], ttl_seconds=10.0)
    for space in spaces.values():
        if space is not spaces["z"]:
            create(space, "a", "b")
            create(space, "c")
        error = refused(space, "d")
        assert (error.context["count"], error.context["buffer"], "~" in error.detail) == (3, "d", False)
    do(spaces["ann"], Delete(name="a"))
    clock.advance(10)
    for name in ("", "an"):
        refused(spaces[name], "d")
    create(spaces["ann"], "d")
    refused(spaces["ann"], "a")
    create(spaces["z"], "d", "e", "f")
    refused(spaces["z"], "g")


def test_a_failed_request_does_not_count(store: Store) -> None:
    create(store, "a", nonfinite="reject")
    for _ in range(4):
        with pytest.raises(NonfiniteGradient):
            do(store, Create(name="b", spec=spec()), Add(name="a", gradient=ones(2) * np.inf))
    create(store, "b", "c")
    refused(store, "d")


def test_concurrent_creates_keep_the_limit(store: Store) -> None:
    futures = [store.submit(Request([Delete(name="x")]))]
    with ThreadPoolExecutor(8) as pool:

        def attempt(number: int) -> str:
            error = store.submit(Request([Create(name=f"b{number}", spec=spec())])).exception(PATIENCE)
            return type(error).__name__

        results = Counter(pool.map(attempt, range(60)))
    assert results == {"NoneType": MOST, "TooManyBuffers": 60 - MOST}
    assert len(store.records()) == MOST
    assert futures[0].exception(PATIENCE)


# ----- on a disk -----


def test_requests_in_one_transaction_keep_the_limit(reopen: Reopen, monkeypatch: pytest.MonkeyPatch) -> None:
    store, gate = reopen(), Gate(monkeypatch)
    create(store, "a")
    requests = [
        Request([Create(name="b", spec=spec()), Create(name="c", spec=spec()), Create(name="d", spec=spec())]),
        Request([Create(name="b", spec=spec())]),
        Request([Create(name="c", spec=spec()), Create(name="d", spec=spec())]),
        Request([Create(name="c", spec=spec())]),
        Request([Create(name="d", spec=spec())]),
        Request([Delete(name="c")]),
        Request([Create(name="d", spec=spec())]),
        Request([Create(name="c", spec=spec())]),
    ]
    errors = [one.exception(PATIENCE) for one in gate.together(store, requests)]
    assert [error is None for error in errors] == [False, True, False, True, False, True, True, False]
    assert [one.name for one in store.records()] == ["a", "b", "d"]
    refused(store, "c")


def test_counts_survive_reopening(reopen: Reopen) -> None:
    create(reopen(), "a", "b")
    create(reopen().within("ann"), "a", "b", "c")
    store = reopen()
    refused(store.within("ann"), "d")
    create(store, "c")
    refused(store, "d")


CREATOR = """
import sys
from pathlib import Path
from service.buffers.changes import (Create, Delete)
from service.buffers.perform import Request
from service.buffers.lmdb.store import LmdbStore
from service.buffers.record import Spec
from service.dtypes import FLOAT32
from service.errors import TooManyBuffers

store = LmdbStore(Path(sys.argv[1]), max_bytes=1 << 28, max_buffers=int(sys.argv[3]))
print("ready", flush=True)
sys.stdin.readline()
made = 0
for number in range(60):
    try:
        store.submit(Request([Create(name=f"{sys.argv[2]}.{number}", spec=Spec((2,), FLOAT32))])).result(60)
    except TooManyBuffers:
        continue
    made += 1
    if number < 20 and number % 4 == 0:
        store.submit(Request([Delete(name=f"{sys.argv[2]}.{number}")])).result(60)
        made -= 1
print(made)
store.close()
"""


def test_processes_share_the_limit(reopen: Reopen, tmp_path: Path) -> None:
    most = 50
    processes = [waiting(CREATOR, tmp_path / "store", name, most) for name in ("one", "two")]
    for process in processes:
        start(process)
    made = [int(process.communicate(timeout=PATIENCE)[0]) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sum(made) == most
    assert len(reopen().records()) == most


def meta(path: Path) -> dict[bytes, bytes]:
    with lmdb.open(str(path), max_dbs=8, readonly=True) as env:
        database = env.open_db(b"meta", create=False)
        with env.begin() as txn:
            return {bytes(name): bytes(value) for name, value in txn.cursor(db=database)}


@pytest.mark.parametrize("damage", ["no counts", "a wrong count", "a damaged count", "the count of another"])
def test_the_next_start_counts_again(reopen: Reopen, tmp_path: Path, damage: str) -> None:
    store = reopen()
    create(store, "a", "b")
    create(store.within("ann"), "a")
    store.close()
    with lmdb.open(str(tmp_path / "store"), max_dbs=8) as env, env.begin(write=True) as txn:
        database = env.open_db(b"meta", txn=txn)
        if damage == "a wrong count":
            keep(txn, database, COUNT, TIME.pack(77))
        elif damage == "a damaged count":
            txn.put(COUNT, TIME.pack(77), db=database)
        elif damage == "the count of another":
            txn.put(COUNT + b"aon", txn.pop(COUNT + b"ann", db=database) or b"", db=database)
        else:
            for name in (COUNT, COUNT + b"ann"):
                txn.delete(name, db=database)
    assert wrong(tmp_path / "store")
    store = reopen()
    create(store, "c")
    refused(store, "d")
    store.close()
    found = {name: value[:-8] for name, value in meta(tmp_path / "store").items() if name.startswith(COUNT)}
    assert found == {COUNT: TIME.pack(3), COUNT + b"ann": TIME.pack(1)}


def test_an_empty_namespace_leaves_no_count(reopen: Reopen, tmp_path: Path) -> None:
    store = reopen()
    for name in ("ann", "bob"):
        create(store.within(name), "a")
        do(store.within(name), Delete(name="a"))
    store.close()
    assert not [name for name in meta(tmp_path / "store") if name.startswith(COUNT)]


def test_a_deleted_damaged_buffer_does_not_count(reopen: Reopen, tmp_path: Path) -> None:
    store = reopen()
    create(store, "a", "b", "c")
    store.close()
    with lmdb.open(str(tmp_path / "store"), max_dbs=8) as env, env.begin(write=True) as txn:
        txn.put(b"b", b"nonsense nonsense", db=env.open_db(b"buffers", txn=txn))
    store = reopen()
    refused(store, "d")
    do(store, Delete(name="b"))
    create(store, "d")
    refused(store, "e")


def test_many_expired_buffers_make_room_for_as_many(tmp_path: Path, clock: Clock) -> None:
    most = 250
    store = open_lmdb(tmp_path / "store", clock, max_buffers=most)
    create(store, *[f"old{number}" for number in range(most)], ttl_seconds=10.0)
    clock.advance(5)
    for number in range(120):
        add(store, f"old{number}", [1, 2])
    clock.advance(5)
    names = [f"new{number}" for number in range(most - 120)]
    with pytest.raises(TooManyBuffers):
        create(store, *names, "one.more")
    create(store, *names)
    refused(store, "one.more")
    store.close()
