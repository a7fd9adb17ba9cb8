"""A full store or disk: nothing changes until there is room."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import lmdb
import numpy as np
import pytest

from service.buffers import failpoints
from service.buffers.changes import Add, Create, Delete, Take, Zero
from service.buffers.lmdb import environment
from service.buffers.lmdb.slots import CHUNK_BYTES
from service.buffers.lmdb.store import LmdbStore
from service.buffers.perform import Request
from service.errors import StoreFailed, StoreFull
from tests.buffers.calls import LARGE, add, create, do, key, ones, part, request, spec, state, value
from tests.buffers.stores import PATIENCE, Clock, Gate, open_lmdb, wrong


def fills(store: LmdbStore, elements: int) -> list[str]:
    """Create buffers and add each buffer's number to it until the store is full. Return their names."""
    names: list[str] = []
    for number in range(10_000):
        name, gradient = f"fill{number:04}", np.full(elements, number, np.float32)
        created = store.submit(request(Create(name=name, spec=spec((elements,)))))
        added = store.submit(request(Add(name=name, gradient=gradient)))
        if error := created.exception(PATIENCE) or added.exception(PATIENCE):
            assert type(error) is StoreFull, error
            assert "nothing was changed" in error.detail
            break
        names.append(name)
    there = state(store)
    assert set(there) - {name, "more"} == set(names)
    assert name not in there or (there[name][0].count, set(there[name][1][0])) == (0, {0})
    for number, full in enumerate(names):
        assert there[full][0].count == 1
        assert there[full][1] == [np.full(elements, number, np.float32).tobytes()]
    return names


@pytest.mark.parametrize("elements", [10, 400, 20_000])
def test_a_full_store_changes_nothing_until_there_is_room(tmp_path: Path, clock: Clock, elements: int) -> None:
    max_bytes = 1 << 18 if elements < 1000 else 3 << 20
    store = open_lmdb(tmp_path, clock, max_bytes=max_bytes)
    names = fills(store, elements)
    assert len(names) >= 5
    removed = names[1::2]
    for name in removed:
        do(store, Delete(name=name))
    for name in removed[:2]:
        create(store, name, shape=(elements,))
        add(store, name, ones(elements))
    assert set(value(store, names[0])) == {0.0}
    assert set(value(store, names[1])) == {1.0}
    store.close()
    again = open_lmdb(tmp_path, clock, max_bytes=max_bytes)
    assert again.record(names[1]).count == 1
    again.close()


def test_a_push_that_finds_no_room_to_be_folded_waits(tmp_path: Path, clock: Clock) -> None:
    """The sums and the gradient need 9 slots, and the fold 3 more, but the store has 11."""
    store = open_lmdb(tmp_path, clock, max_bytes=11 * CHUNK_BYTES)
    create(store, "a", "filler", shape=(LARGE,))
    add(store, "a", ones(LARGE))
    add(store, "filler", ones(LARGE))
    part(store, 1, {"a": ones(LARGE)}, request="one")
    part(store, 2, {})
    store.submit(Request([])).result(PATIENCE)  # behind the fold
    assert value(store, "a").tolist() == [2] * LARGE
    with pytest.raises(StoreFull):
        add(store, "a", ones(LARGE))
    do(store, Delete(name="filler"))
    assert add(store, "a", ones(LARGE))["count"] == 3
    assert value(store, "a").tolist() == [3] * LARGE
    store.close()
    assert wrong(tmp_path) == []


def test_a_request_too_large_for_the_store_fails_alone(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, gate = open_lmdb(tmp_path, clock, max_bytes=1 << 20), Gate(monkeypatch)
    create(store, "small")
    create(store, "large", shape=(1_000_000,))
    requests = [request(Add(name="small", gradient=ones(2))) for _ in range(10)]
    requests.insert(5, request(Add(name="small", gradient=ones(2)), Add(name="large", gradient=ones(1))))
    futures = gate.together(store, requests)
    errors = [one.exception(PATIENCE) for one in futures]
    assert [type(error) for error in errors] == [*[type(None)] * 5, StoreFull, *[type(None)] * 5]
    assert (store.record("small").count, store.record("large").count) == (10, 0)
    store.close()


def test_requests_that_change_nothing_need_no_room(tmp_path: Path, clock: Clock) -> None:
    """The limit was lowered. Answering 507 to a repeated add would make the client add twice."""
    first = open_lmdb(tmp_path, clock, max_bytes=1 << 26)
    creating, adding = Create(name="a", spec=spec((400_000,))), Add(name="a", gradient=ones(400_000))
    created, added = do(first, creating, key=key("create")), do(first, adding, key=key("add"))
    first.close()
    store = open_lmdb(tmp_path, clock, max_bytes=1 << 20)
    for changes, name, outcome in ((creating, "create", created), (adding, "add", added)):
        again = do(store, changes, key=key(name))
        assert (again.receipts, again.replayed) == (outcome.receipts, True)
    assert do(store, creating).receipts["a"]["created"] is False
    assert do(store, replace(adding, do_update=False)).receipts["a"]["count"] == 1
    for change in (adding, Create(name="b", spec=spec())):
        with pytest.raises(StoreFull):
            do(store, change)
    assert store.record("a").count == 1
    store.close()


def test_expired_keys_make_room_in_a_full_store(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removing one key takes little room. Removing many at once takes more than the store has."""
    monkeypatch.setattr("service.buffers.lmdb.reader.MARGIN_BYTES", 1 << 20)
    store = open_lmdb(tmp_path, clock, max_bytes=1 << 18)
    names = [f"{number}{'x' * 150}" for number in range(100)]
    create(store, *names)
    made = 0
    for many in (100, 10, 1):
        with suppress(StoreFull):
            while made < 10_000:
                do(store, *[Zero(name=name) for name in names[:many]], key=key(f"k{made}"))
                made += 1
    assert made < 10_000
    clock.advance(25 * 3600)
    for _ in range(100):
        try:
            create(store, "new")
            break
        except StoreFull:
            continue
    assert add(store, "new", [1, 2])["count"] == 1
    store.close()


CHUNK_FLOATS = CHUNK_BYTES // 4
"""Elements of a float32 buffer whose value takes one slot."""


@pytest.fixture
def roomy(tmp_path: Path, clock: Clock) -> Iterator[LmdbStore]:
    """Yield a store of sixteen slots; LMDB itself takes some of them."""
    store = open_lmdb(tmp_path, clock, max_bytes=16 * CHUNK_BYTES)
    yield store
    store.close()


@pytest.mark.parametrize("requests", [["a"], ["abcdef"], ["a", "b"]], ids=["an add", "many buffers", "a batch"])
def test_the_slots_freed_last_are_reused(
    roomy: LmdbStore, monkeypatch: pytest.MonkeyPatch, requests: list[str]
) -> None:
    """Each time the requests need six slots. Each request adds to its buffers; those of a batch share a transaction."""
    names = "".join(requests)
    size, gate = 6 // len(names) * CHUNK_FLOATS, Gate(monkeypatch)
    create(roomy, *names, shape=(size,))
    for count in range(1, 9):
        adds = [request(*[Add(name=name, gradient=ones(size)) for name in some]) for some in requests]
        futures = gate.together(roomy, adds) if len(adds) > 1 else [roomy.submit(adds[0])]
        done = [one.result(PATIENCE).receipts for one in futures]
        assert [one["count"] for receipts in done for one in receipts.values()] == [count] * len(names)
    assert {*value(roomy, "a")} == {8.0}


def test_an_add_reuses_the_slots_of_a_deleted_buffer(roomy: LmdbStore) -> None:
    size = 3 * CHUNK_FLOATS
    names = ["a", "b", "c", "d", "e"]
    create(roomy, *names, "next", shape=(size,))
    for name in names:
        add(roomy, name, ones(size))
    for name, count in zip(names, range(1, 6), strict=True):
        do(roomy, Delete(name=name))
        assert add(roomy, "next", ones(size))["count"] == count


def test_a_request_without_room_is_tried_twice_only(roomy: LmdbStore, monkeypatch: pytest.MonkeyPatch) -> None:
    create(roomy, "large", shape=(20 * CHUNK_FLOATS,))
    tries = Counter[str]()
    monkeypatch.setattr(failpoints, "action", lambda point: tries.update([point]))
    for expected in (2, 3, 4):  # the second time, no slots can be freed
        with pytest.raises(StoreFull):
            add(roomy, "large", ones(1))
        assert tries["chunk"] == 16 * expected


def test_a_request_without_room_commits_nothing_beside_readers(roomy: LmdbStore) -> None:
    create(roomy, "a", "large", shape=(20 * CHUNK_FLOATS,))
    before = roomy.generation()
    with ThreadPoolExecutor(2) as pool:
        for _ in range(20):
            reading = [pool.submit(roomy.read, ["a"]) for _ in range(4)]
            with pytest.raises(StoreFull):
                add(roomy, "large", ones(1))
            for one in reading:
                one.result(PATIENCE)
    assert roomy.generation() <= before + 1


def test_slots_held_by_a_reader_are_free_once_it_ends(roomy: LmdbStore, tmp_path: Path) -> None:
    """The reader is killed, and no commit follows."""
    size = 6 * CHUNK_FLOATS
    create(roomy, "a", shape=(size,))
    add(roomy, "a", ones(size))
    code = (
        "import sys, time, pathlib; from service.buffers.lmdb.environment import Environment\n"
        "env = Environment(pathlib.Path(sys.argv[1]), max_bytes=int(sys.argv[2]), readonly=True)\n"
        "with env.reading(): print('reads', flush=True); time.sleep(600)"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path), str(16 * CHUNK_BYTES)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"reads\n"
        count = 1
        with suppress(StoreFull):
            while count < 9:
                count = add(roomy, "a", ones(size))["count"]
        assert count < 9
        with pytest.raises(StoreFull):
            add(roomy, "a", ones(size))
        reader.kill()
    assert add(roomy, "a", ones(size))["count"] == count + 1


@pytest.mark.usefixtures("untidied")
def test_expired_buffers_make_room(roomy: LmdbStore, clock: Clock) -> None:
    size = 3 * CHUNK_FLOATS
    create(roomy, "stays", shape=(size,))
    names = ["a", "b", "c", "d"]
    create(roomy, *names, shape=(size,), ttl_seconds=10.0)
    for name in names:
        add(roomy, name, ones(size))
    add(roomy, "stays", ones(size))
    with pytest.raises(StoreFull):
        add(roomy, "stays", ones(size))
    clock.advance(10)
    assert add(roomy, "stays", ones(size))["count"] == 2
    assert roomy.size()[0] == 1


@pytest.mark.usefixtures("untidied")
def test_small_expired_buffers_make_room(tmp_path: Path, clock: Clock) -> None:
    store = open_lmdb(tmp_path, clock, max_bytes=1 << 18)
    create(store, "stays", "new", shape=(400,))
    add(store, "stays", ones(400))
    rules = spec((400,), ttl_seconds=10.0)
    error, number = None, 0
    while error is None:
        number += 1
        changes = Create(name=f"a{number}", spec=rules), Add(name=f"a{number}", gradient=ones(400))
        errors = [one.exception(PATIENCE) for one in [store.submit(request(change)) for change in changes]]
        error = errors[0] or errors[1]
    assert type(error) is StoreFull
    clock.advance(9.5)
    with pytest.raises(StoreFull):
        add(store, "new", ones(400))
    clock.advance(0.5)  # too soon for another look at expired buffers if there were room
    assert add(store, "new", ones(400))["count"] == 1
    assert set(value(store, "stays")) == {1.0}
    store.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)  # a failed test may have left its store open


def test_a_full_disk_changes_nothing_until_there_is_room(small_disk: Path, clock: Clock) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(1 << 20))
    store = open_lmdb(small_disk / "store", clock)
    create(store, "more", shape=(200_000,))
    names = fills(store, 20_000)
    assert names
    before = state(store)
    for _ in range(3):
        with pytest.raises(StoreFull, match="^The disk of the store.* is full.*; nothing was changed"):
            do(store, Add(name="more", gradient=ones(200_000)))
    assert state(store) == before
    before.pop("more")
    ballast.unlink()
    assert add(store, "more", ones(1))["count"] == 1
    assert {name: found for name, found in state(store).items() if name != "more"} == before
    store.close()
    again = open_lmdb(small_disk / "store", clock)
    assert {name: found for name, found in state(again).items() if name != "more"} == before
    again.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_an_exceeded_quota_counts_as_a_full_disk(number: int) -> None:
    for failed in (lmdb.Error(f"mdb_txn_commit: {os.strerror(number)}"), OSError(number, os.strerror(number))):
        error = environment.as_client_error(failed, Path(), 1)
        assert isinstance(error, StoreFull)
        assert os.strerror(number) in error.detail
        assert "nothing was changed" in error.detail


@pytest.mark.parametrize(
    "failed", [OSError(errno.EIO, os.strerror(errno.EIO), "/secret/values"), lmdb.Error("x"), lmdb.CorruptedError("x")]
)
def test_a_client_does_not_read_where_the_store_is(failed: Exception, tmp_path: Path) -> None:
    error = environment.as_client_error(failed, tmp_path, 1)
    assert isinstance(error, StoreFailed)
    assert "secret" not in error.detail
    assert str(tmp_path) not in error.detail


def test_freed_slots_are_reused(tmp_path: Path, clock: Clock) -> None:
    store = open_lmdb(tmp_path, clock, max_bytes=16 << 20)
    create(store, "stays")
    for _ in range(30):
        create(store, "a", shape=(LARGE,), keep=2)
        for _ in range(3):
            add(store, "a", ones(1))
            do(store, Take(name="a"))
        do(store, Delete(name="a"))
    store.close()
    assert (tmp_path / "data.mdb").stat().st_size < 4 << 20
    assert (tmp_path / "values").stat().st_size < 16 << 20
