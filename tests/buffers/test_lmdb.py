"""The promises of a store on a disk: buffers survive a restart whole, and processes share the store."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import lmdb
import numpy as np
import pytest

from service.buffers import failpoints
from service.buffers.changes import Add, Change, Create, Delete, Take, Zero
from service.buffers.lmdb import caches, value_writer
from service.buffers.lmdb.environment import Environment
from service.buffers.names import BufferName
from service.buffers.perform import Outcome
from service.buffers.record import Record, Spec
from service.buffers.rules import SetRules
from service.buffers.steps import Closed
from service.dtypes import FLOAT32
from service.errors import StoreFailed
from service.kernels.gather import GatheredRows
from tests.buffers.calls import LARGE, add, create, do, key, ones, request, spec, state, value
from tests.buffers.stores import (
    KEY_SECONDS,
    PATIENCE,
    Clock,
    Gate,
    Reopen,
    entries_of,
    open_lmdb,
    start,
    waiting,
    wrong,
)
from tests.kernels.equality import assert_same_bits

# ----- durability -----


def test_a_reopened_store_has_everything(reopen: Reopen, clock: Clock) -> None:
    store = reopen()
    create(store, "a", shape=(LARGE,), dtype="bfloat16", keep=3)
    create(store, "b", shape=(), nonfinite="reject", quorum=2, ttl_seconds=1e6)
    create(store, "c", shape=(0, 3), dtype="float64")
    numbers = np.random.default_rng(1).normal(size=LARGE)
    for step in range(3):
        add(store, "a", numbers, weight=0.1 * step)
        do(store, Take(name="a"))
    add(store, "a", numbers, overwrite=True)
    add(store, "b", 1 / 3, weight=1 / 3)
    taken = do(store, Take(name="a"), key=key())
    before, generation = state(store), store.generation()
    store = reopen()
    assert state(store) == before
    assert store.generation() == generation
    again = do(store, Take(name="a"), key=key())
    assert again.receipts == taken.receipts
    assert_same_bits(again.values["a"], taken.values["a"])
    assert add(store, "b", 1.0)["closed"]
    create(store, "d")
    add(store, "d", [1, 2])
    changed = state(reopen())
    assert changed["a"] == before["a"]
    assert changed["d"][1] == [np.array([1, 2], np.float32).tobytes()]


def test_close_finishes_submitted_requests(reopen: Reopen) -> None:
    store = reopen()
    create(store, "a")
    futures = [store.submit(request(Add(name="a", gradient=ones(2)))) for _ in range(50)]
    store = reopen()
    assert all(one.done() for one in futures)
    assert [one.result().receipts["a"]["count"] for one in futures] == list(range(1, 51))
    assert store.record("a").count == 50


def test_a_closed_store_raises_store_failed(reopen: Reopen) -> None:
    store = reopen()
    create(store, "a")
    store.close()
    store.close()
    uses: list[Callable[[], object]] = [
        lambda: do(store, Zero(name="a")),
        lambda: store.record("a"),
        lambda: store.records(),
        lambda: store.read(["a"]),
        lambda: store.recall(key()),
        lambda: store.generation(),
    ]
    for use in uses:
        with pytest.raises(StoreFailed):
            use()


def test_a_store_opens_after_a_batch_that_creates_and_deletes(reopen: Reopen, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMDB counts pages that a transaction took and gave back, but may never write them."""
    store, gate = reopen(), Gate(monkeypatch)
    create(store, "stays", shape=(LARGE,))
    for size in (10, 20_000, LARGE, 5 * LARGE):
        changes: list[Change] = [
            Create(name="a", spec=spec((size,))),
            Add(name="a", gradient=ones(size)),
            Take(name="a"),
            Add(name="a", gradient=ones(size)),
            Delete(name="a"),
            Add(name="stays", gradient=ones(1)),
        ]
        for one in gate.together(store, [request(change) for change in changes]):
            one.result(PATIENCE)
        before = state(store)
        store = reopen()
        assert state(store) == before


@pytest.mark.parametrize("readonly", [False, True])
def test_a_harmlessly_short_file_is_lengthened(
    reopen: Reopen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, readonly: bool
) -> None:
    path = tmp_path / "store"
    store = reopen()
    create(store, "a", shape=(LARGE,))
    add(store, "a", ones(1))
    store.close()
    with lmdb.open(str(path), max_dbs=8, map_size=1 << 30) as env:
        meta = env.open_db(b"meta")
        with env.begin(write=True) as txn:
            txn.put(b"large", bytes(1 << 20), db=meta)
            txn.put(b"small", b"1", db=meta)
            txn.delete(b"large", db=meta)
        pages = env.info()["last_pgno"] + 1
    before = (path / "data.mdb").read_bytes()
    assert len(before) < pages * 4096

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("service.buffers.lmdb.environment.reserve", full)
        with pytest.raises(StoreFailed, match="No space left on device"):
            Environment(path, max_bytes=1 << 30, readonly=readonly)
    assert (path / "data.mdb").read_bytes() == before
    Environment(path, max_bytes=1 << 30, readonly=readonly).close()
    assert (path / "data.mdb").read_bytes() == before.ljust(pages * 4096, b"\0")
    store = reopen()
    assert add(store, "a", ones(1))["count"] == 2
    assert value(store, "a").tolist() == [2] * LARGE


def test_the_writer_knows_the_number_of_its_last_transaction(reopen: Reopen) -> None:
    """By it the writer knows that no other process has written since."""
    store = reopen()
    create(store, "stays", quorum=2, ttl_seconds=5.0)
    requests: list[list[Change]] = [
        [Create(name="a", spec=spec())],
        [Zero(name="a")],
        [Take(name="a")],
        [Add(name="a", gradient=ones(2), overwrite=True, weight=0.0)],
        [SetRules(name="a", rules={"quorum": 3})],
        [Add(name="stays", gradient=ones(2)), Delete(name="a")],
        [Create(name="b", spec=spec((0,))), Create(name="c", spec=spec())],
        [Delete(name="b"), Zero(name="c")],
        [Delete(name="c")],
        [Delete(name="stays")],
    ]
    for changes in requests:
        before = store.generation()
        do(store, *changes)
        assert store._writer._state.last == store.generation() == before + 1
    do(store, Create(name="a", spec=spec()), key=key())
    generation = store.generation()
    assert do(store, Create(name="a", spec=spec()), key=key()).replayed
    assert store._writer._state.last == store.generation() == generation


# ----- processes -----


ADDER = """
import sys
from pathlib import Path
import numpy as np
from service.buffers.lmdb.store import LmdbStore
from service.buffers.changes import (Add)
from service.buffers.perform import Request

store = LmdbStore(Path(sys.argv[1]), max_bytes=1 << 30)
gradient = np.full(20_000, float(sys.argv[2]), np.float32)
print("ready", flush=True)
sys.stdin.readline()
for turn in range(int(sys.argv[3])):
    changes = [Add(name=name, gradient=gradient) for name in ("a", "b")]
    store.submit(Request(changes)).result(60)
    if turn == 0:
        print("adding", flush=True)
store.close()
"""


def adding(path: Path, number: int, times: int) -> subprocess.Popen[str]:
    """Start a process that adds `number` to the buffers a and b, once the process reads a line."""
    return waiting(ADDER, path, number, times)


def test_processes_share_a_store(reopen: Reopen, tmp_path: Path) -> None:
    store = reopen()
    create(store, "a", "b", shape=(20_000,))
    generation = store.generation()
    processes = [adding(tmp_path / "store", number, 40) for number in (1, 2)]
    for process in processes:
        start(process)
    for _ in range(40):
        do(store, *[Add(name=name, gradient=np.full(20_000, 4, np.float32)) for name in ("b", "a")])
        first, second = store.read(["a", "b"])
        assert first.record.count == second.record.count
        assert (first.value == second.value).all()
    for process in processes:
        process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
    for snapshot in store.read(["a", "b"]):
        assert (snapshot.record.count, snapshot.record.version) == (120, 120)
        assert (snapshot.value == 40 * (1 + 2 + 4)).all()
    assert store.generation() >= generation + 80


def test_an_add_of_nothing_writes_no_chunk(reopen: Reopen, monkeypatch: pytest.MonkeyPatch) -> None:
    store, hits = reopen(), Counter[str]()
    create(store, "a", shape=(LARGE,))
    add(store, "a", 1.0)
    monkeypatch.setattr(failpoints, "action", lambda point: hits.update([point]))
    add(store, "a", 0.0)
    add(store, "a", ones(LARGE), weight=0.0)
    assert hits == dict.fromkeys(["made", "before commit", "committed"], 2)
    add(store, "a", 1.0)
    assert hits["chunk"] > 1


def test_copies_at_every_step_of_the_writer_are_whole(
    reopen: Reopen, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each copy is the store that a crash at this step would leave."""
    store = reopen()
    create(store, "a", shape=(LARGE,))
    futures: list[Future[Outcome]] = []
    copies: list[tuple[Path, str, int]] = []
    hits = Counter[str]()

    def copy(point: str) -> None:
        hits[point] += 1
        if hits[point] % 3 == 1 and hits[point] < 12:
            directory = tmp_path / f"{point} {hits[point]}"
            directory.mkdir()
            for file in ("data.mdb", "values"):
                shutil.copy(tmp_path / "store" / file, directory)
            copies.append((directory, point, sum(one.done() for one in futures)))

    monkeypatch.setattr(failpoints, "action", copy)
    for _ in range(15):
        futures.append(store.submit(request(Add(name="a", gradient=ones(1)))))
        futures[-1].result(PATIENCE)
    monkeypatch.setattr(failpoints, "action", None)
    assert Counter(point for _, point, _ in copies) == dict.fromkeys(["chunk", "made", "before commit", "committed"], 4)
    for directory, point, answered in copies:
        copied = open_lmdb(directory, clock)
        count = copied.record("a").count
        assert count == answered + (point == "committed")
        assert (value(copied, "a") == count).all()
        assert add(copied, "a", ones(1))["count"] == count + 1
        copied.close()


def test_copies_while_another_process_adds_are_whole(reopen: Reopen, tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "store"
    store = reopen()
    create(store, "a", "b", shape=(20_000,))
    store.close()
    process = adding(path, 1, 200)
    with lmdb.open(str(path), max_dbs=8, readonly=True) as env:
        start(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "adding\n"
        for number in range(10):
            directory = tmp_path / f"copy{number}"
            directory.mkdir()
            with env.begin():  # a reader keeps LMDB from reusing pages of its snapshot and later ones
                for file in ("data.mdb", "values"):
                    shutil.copy(path / file, directory)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    counts = []
    for number in range(10):
        copied = open_lmdb(tmp_path / f"copy{number}", clock)
        first, second = copied.read(["a", "b"])
        assert first.record.count == second.record.count > 0
        assert (first.value == first.record.count).all()
        assert (second.value == first.record.count).all()
        counts.append(first.record.count)
        copied.close()
    assert counts == sorted(counts)
    assert reopen().record("a").count == 200


# ----- values -----


@pytest.mark.parametrize("elements", [600, LARGE])
def test_mixed_changes_keep_the_right_value(reopen: Reopen, monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    """Some values are cached, others are not, some gradients wait, and the cache is too small."""
    monkeypatch.setattr(caches, "MOST_BYTES_OF_VALUES", 3 * (elements * 4 + 2 * caches.ARRAY_BYTES))
    store, names, draw = reopen(), ["a", "b", "c", "d", "e"], random.Random(3)
    shape = (elements // 3, 3) if elements % 3 == 0 else (elements, 1)
    create(store, *names, shape=shape)
    expected = {name: np.zeros(shape, np.float32) for name in names}
    for turn in range(200):
        name = draw.choice(names)
        match draw.randrange(6):
            case 0:
                rows = np.full((2, shape[1]), turn, np.float32)
                places = np.array([turn % shape[0], 0])
                add(store, name, GatheredRows(np.array(shape), places, rows))
                expected[name][turn % shape[0]] += turn
                expected[name][0] += turn
            case 1:
                add(store, name, np.full(shape, turn, np.float32), overwrite=True)
                expected[name][...] = turn
            case 2:
                do(store, draw.choice([Zero(name=name), Take(name=name)]))
                expected[name][...] = 0
            case _:
                do(store, *[Add(name=name, gradient=np.full(shape, turn, np.float32)) for name in {name, "a"}])
                for each in {name, "a"}:
                    expected[each] += turn
    for name in names:
        np.testing.assert_array_equal(value(store, name), expected[name], err_msg=name)
    store = reopen()
    for name in names:
        np.testing.assert_array_equal(value(store, name), expected[name], err_msg=name)


def test_short_writes_are_completed(reopen: Reopen, monkeypatch: pytest.MonkeyPatch) -> None:
    store, write = reopen(), os.pwrite
    create(store, "a", shape=(LARGE,))
    gradient = np.random.default_rng(1).normal(size=LARGE).astype(np.float32)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda fd, data, offset: write(fd, data[:10_000], offset))
        add(store, "a", gradient)
    assert_same_bits(value(reopen(), "a"), gradient)


def test_only_a_few_sparse_gradients_wait(reopen: Reopen, tmp_path: Path) -> None:
    """Each waiting gradient slows every read and every later add."""
    store, most = reopen(), value_writer.MOST_WAITING_GRADIENTS
    create(store, "a", shape=(LARGE, 1))
    for number in range(2 * most + 2):
        add(store, "a", GatheredRows(np.array([LARGE, 1]), np.array([number, 0]), np.ones((2, 1), np.float32)))
        if number + 1 in (most, most + 1, 2 * most + 1):
            store.close()
            waiting = (number + 1) % (most + 1)
            assert entries_of(tmp_path / "store")["values"] == 1 + 2 * waiting
            store = reopen()
    found = value(store, "a")[:, 0]
    assert found[0] == 2 * most + 3
    assert set(found[1 : 2 * most + 2]) == {1}
    assert not found[2 * most + 2 :].any()


def test_the_cache_keeps_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "MOST_BYTES_OF_VALUES", 2 * (16 + caches.ARRAY_BYTES))
    cache = caches.ValueCache()
    values = {number: caches.CachedValue(ones(4), []) for number in range(3)}
    for number, cached in values.items():
        cache.put(number, cached)
    assert cache.take(0) is None
    assert cache.take(1) is values[1]
    assert cache.take(1) is None
    cache.put(3, values[0])
    assert cache.take(2) is values[2]
    cache.clear()
    assert cache.take(3) is None


def test_ids_of_values_are_never_reused(reopen: Reopen) -> None:
    seen = set()
    for _ in range(3):
        store = reopen()
        for _ in range(3):
            create(store, "a", "z")
            add(store, "z", [1, 2])
            add(store, "a", [1, 2])
            record = store.record("a")
            assert record.value not in seen
            seen.add(record.value)
            assert replace(record, value=None).count == 1
            do(store, Delete(name="a"))
            do(store, Delete(name="z"))


# ----- expiry -----


COUNTER = """
import sys, time
from pathlib import Path
from tests.buffers.stores import entries_of
path, expected, *databases = sys.argv[1:]
for _ in range(1000):
    entries = entries_of(Path(path))
    if sum(entries[name] for name in databases) == int(expected):
        sys.exit(0)
    time.sleep(0.01)
sys.exit(f"not {expected}: {entries}")
"""


def wait_for_entries(path: Path, expected: int, *databases: str) -> None:
    """Wait in another process until the databases of an open store have the expected number of entries."""
    command = [sys.executable, "-c", COUNTER, str(path), str(expected), *databases]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=PATIENCE)
    assert done.returncode == 0, done.stderr


def test_expired_keys_are_removed_during_adds(reopen: Reopen, clock: Clock, tmp_path: Path) -> None:
    store = reopen()
    create(store, "a")
    for number in range(30):
        do(store, Add(name="a", gradient=ones(2)), key=key(str(number)))
    clock.advance(KEY_SECONDS / 2)
    do(store, Add(name="a", gradient=ones(2)), key=key("younger"))
    clock.advance(KEY_SECONDS / 2)
    for _ in range(10):
        add(store, "a", [0, 0])
    assert do(store, Add(name="a", gradient=ones(2)), key=key("younger")).replayed
    store.close()
    entries = entries_of(tmp_path / "store")
    assert (entries["keys"], entries["outcomes"]) == (1, 1)
    store = reopen()
    clock.advance(KEY_SECONDS / 2)
    add(store, "a", [0, 0])
    store.close()
    entries = entries_of(tmp_path / "store")
    assert (entries["keys"], entries["outcomes"]) == (0, 0)


@pytest.mark.usefixtures("at_once")
def test_expired_keys_are_removed_when_idle(reopen: Reopen, clock: Clock, tmp_path: Path) -> None:
    store = reopen()
    create(store, "a")
    for number in range(30):
        do(store, Add(name="a", gradient=ones(2)), key=key(str(number)))
    clock.advance(KEY_SECONDS)
    wait_for_entries(tmp_path / "store", 0, "keys", "outcomes")
    assert add(store, "a", [1, 2])["count"] == 31


@pytest.mark.usefixtures("untidied")
def test_expired_buffers_are_removed_during_adds(reopen: Reopen, clock: Clock, tmp_path: Path) -> None:
    store = reopen()
    create(store, "a")
    create(store, "lives", ttl_seconds=100.0)
    create(store, *[f"b{number}" for number in range(999)], ttl_seconds=10.0)
    create(store, "large", shape=(LARGE,), ttl_seconds=10.0, keep=2)
    for _ in range(2):
        add(store, "large", ones(LARGE))
        do(store, Take(name="large"))
    clock.advance(20)
    for _ in range(10):
        clock.advance(2)
        add(store, "a", [1, 2])
    store.close()
    entries = entries_of(tmp_path / "store")
    assert (entries["buffers"], entries["values"], entries["deadlines"]) == (2, 1, 1)


@pytest.mark.usefixtures("untidied")
def test_removal_keeps_pace_with_expiry(reopen: Reopen, clock: Clock, tmp_path: Path) -> None:
    store = reopen()
    create(store, *[f"b{number}" for number in range(500)], ttl_seconds=10.0)
    clock.advance(20)
    for number in range(50):
        create(store, f"c{number}", ttl_seconds=10.0)
    store.close()
    assert entries_of(tmp_path / "store")["buffers"] == 50


def test_the_writers_memory_has_bounds() -> None:
    closed = tuple(Closed(step, step, 1, 1.0, None) for step in range(1000))
    last, *names = [BufferName("", str(number)) for number in range(caches.MOST_RECORDS + 1)]
    record = Record(last, Spec((), FLOAT32, keep=1000), 1, 0.0, 0.0, closed=closed, packed_bytes=1 << 14)
    records = caches.RecordCache()
    for name in names[: caches.MOST_BYTES_OF_RECORDS >> 14] * 2:
        records.remember({name: record})
    assert records[names[0]] is record
    records.remember({last: record})
    assert not records
    records.remember(dict.fromkeys(names))
    assert records[names[0]] is None
    records.remember({last: None})
    assert not records
    records.remember({last: record})
    assert records[last] is record


def test_a_stored_name_begins_with_its_namespace(reopen: Reopen, tmp_path: Path) -> None:
    store = reopen()
    for namespace in ("", "ann", "bob"):
        create(store.within(namespace), "w", ttl_seconds=10.0)
    store.close()
    with lmdb.open(str(tmp_path / "store"), max_dbs=8, readonly=True) as env, env.begin() as txn:
        names = [key for key, _ in txn.cursor(env.open_db(b"buffers", txn=txn, create=False))]
        due = [key[8:] for key, _ in txn.cursor(env.open_db(b"deadlines", txn=txn, create=False))]
    assert names == due == [b"w", b"~ann/w", b"~bob/w"]


@pytest.mark.usefixtures("at_once")
def test_expired_buffers_are_removed_when_idle(reopen: Reopen, clock: Clock, tmp_path: Path) -> None:
    store = reopen()
    create(store, "stays", "also", shape=(LARGE,))
    create(store, "a", "b", "c", shape=(LARGE,), ttl_seconds=10.0)
    for name in ("a", "b", "c"):
        add(store, name, ones(1))
        do(store, Take(name=name))
        add(store, name, ones(1))
    clock.advance(9)
    add(store, "b", ones(1))
    clock.advance(1)
    wait_for_entries(tmp_path / "store", 3 + 2, "buffers", "values")
    assert add(store, "b", ones(1))["count"] == 3
    clock.advance(10)
    wait_for_entries(tmp_path / "store", 2, "buffers", "values", "deadlines")


def test_the_doctor_finds_a_deadline_that_is_not_scheduled(reopen: Reopen, tmp_path: Path) -> None:
    store, path = reopen(), tmp_path / "store"
    create(store, "a", deadline_seconds=100.0)
    add(store, "a", [1, 2])
    add(store, "a", [1, 2])
    store.close()
    assert (entries_of(path)["deadlines"], wrong(path)) == (1, [])
    with lmdb.open(str(path), max_dbs=8) as env, env.begin(write=True) as txn:
        txn.drop(env.open_db(b"deadlines", txn=txn), delete=False)
    assert [line for line in wrong(path) if "the deadline of the buffer 'a' is not scheduled" in line]


def test_ends_of_steps_and_of_buffers_leave_no_deadlines(reopen: Reopen, tmp_path: Path, clock: Clock) -> None:
    """Steps that close before their deadline, and buffers that are deleted."""
    store = reopen()
    create(store, "stays", ttl_seconds=1e9)
    create(store, *"abc", deadline_seconds=100.0, quorum=2)
    for name in "aabc":
        add(store, name, [1, 2])
        clock.advance(1)
    do(store, Zero(name="b"))
    do(store, Delete(name="c"))
    for _ in range(5):
        create(store, "d", ttl_seconds=1e9)
        clock.advance(3)
        add(store, "d", ones(2))
        do(store, Delete(name="d"))
    store.close()
    assert entries_of(tmp_path / "store")["deadlines"] == 1
