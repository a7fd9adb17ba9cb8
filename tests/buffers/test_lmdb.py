"""What only a store on a disk promises: to be there again, whole, and to be shared by processes."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import lmdb
import numpy as np
import pytest

from service.buffers import _values
from service.buffers import lmdb as module
from service.buffers._environment import Environment
from service.buffers._slots import CHUNK
from service.buffers.changes import Add, Change, Create, Delete, Outcome, Request, Take, Zero
from service.buffers.lmdb import LmdbStore
from service.errors import (
    BufferCorrupt,
    GradserveError,
    KeyReused,
    NonfiniteGradient,
    ShapeMismatch,
    StaleEpoch,
    StoreFailed,
    StoreFull,
    UnknownBuffer,
)
from service.kernels.gather import GatheredRows
from tests.buffers.calls import KEY_SECONDS, PATIENCE, Clock, add, create, do, key, ones, open_lmdb, spec, state, value
from tests.buffers.test_contract import LARGE, entries_of
from tests.kernels.equality import assert_same_bits


class Gate:
    """Holds the writer before a commit, so that what is submitted meanwhile comes in one batch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._wanted, self._held, self._opened = False, threading.Event(), threading.Event()
        monkeypatch.setattr(module, "reached", self._reached)

    def _reached(self, point: str) -> None:
        if point == "before commit" and self._wanted:
            self._wanted = False
            self._held.set()
            self._opened.wait(PATIENCE)

    def together(self, store: LmdbStore, requests: Sequence[Request]) -> list[Future[Outcome]]:
        self._held.clear()
        self._opened.clear()
        self._wanted = True
        first = store.submit(Request([]))
        assert self._held.wait(PATIENCE)
        futures = [store.submit(request) for request in requests]
        self._opened.set()
        first.result(PATIENCE)
        return futures


def request(*changes: Change) -> Request:
    return Request(changes)


def fills(store: LmdbStore, elements: int) -> list[str]:
    """Names of buffers, full of their number each, that were created and added to until the store was full."""
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


# ----- durability -----


def test_everything_is_there_again(reopen: Callable[[], LmdbStore], clock: Clock) -> None:
    store = reopen()
    create(store, "a", shape=(LARGE,), dtype="bfloat16", keep=3)
    create(store, "b", shape=(), nonfinite="reject", quorum=2, ttl_seconds=1e6)
    create(store, "c", shape=(0, 3), dtype="float64")
    numbers = np.random.default_rng(1).normal(size=LARGE)
    for epoch in range(3):
        add(store, "a", numbers, weight=0.1 * epoch)
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


def test_what_was_submitted_is_finished_before_it_closes(reopen: Callable[[], LmdbStore]) -> None:
    store = reopen()
    create(store, "a")
    futures = [store.submit(request(Add(name="a", gradient=ones(2)))) for _ in range(50)]
    store = reopen()
    assert all(one.done() for one in futures)
    assert [one.result().receipts["a"]["count"] for one in futures] == list(range(1, 51))
    assert store.record("a").count == 50


def test_a_closed_store_says_so(reopen: Callable[[], LmdbStore]) -> None:
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


def test_a_store_that_deleted_in_the_batch_that_created_opens_again(
    reopen: Callable[[], LmdbStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that a transaction took and gave back are counted, but perhaps never written."""
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


def test_a_file_that_is_short_without_harm_is_left_as_it_is(reopen: Callable[[], LmdbStore], tmp_path: Path) -> None:
    """Another process may be writing to it."""
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
    for readonly in (True, False):
        Environment(path, max_bytes=1 << 30, readonly=readonly).close()
        assert (path / "data.mdb").read_bytes() == before
    store = reopen()
    assert add(store, "a", ones(1))["count"] == 2
    assert value(store, "a").tolist() == [2] * LARGE


# ----- processes -----

ADDER = """
import sys
from pathlib import Path
import numpy as np
from service.buffers.lmdb import LmdbStore
from service.buffers.changes import Add, Request

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
    """A process that adds `number` to the buffers a and b, once it reads a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", ADDER, str(path), str(number), str(times)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def start(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_processes_share_a_store(reopen: Callable[[], LmdbStore], tmp_path: Path) -> None:
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


def test_copies_at_every_step_of_the_writer_are_whole(
    reopen: Callable[[], LmdbStore], tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is what a crash at that moment would leave."""
    store = reopen()
    create(store, "a", shape=(LARGE,))
    futures: list[Future[Outcome]] = []
    copies: list[tuple[Path, str, int]] = []
    reached = Counter[str]()

    def copy(point: str) -> None:
        reached[point] += 1
        if reached[point] % 3 == 1 and reached[point] < 12:
            directory = tmp_path / f"{point} {reached[point]}"
            directory.mkdir()
            for file in ("data.mdb", "values"):
                shutil.copy(tmp_path / "store" / file, directory)
            copies.append((directory, point, sum(one.done() for one in futures)))

    monkeypatch.setattr(module, "reached", copy)
    for _ in range(15):
        futures.append(store.submit(request(Add(name="a", gradient=ones(1)))))
        futures[-1].result(PATIENCE)
    monkeypatch.setattr(module, "reached", lambda point: None)
    assert Counter(point for _, point, _ in copies) == dict.fromkeys(["chunk", "made", "before commit", "committed"], 4)
    for directory, point, answered in copies:
        copied = open_lmdb(directory, clock)
        count = copied.record("a").count
        assert count == answered + (point == "committed")
        assert (value(copied, "a") == count).all()
        assert add(copied, "a", ones(1))["count"] == count + 1
        copied.close()


def test_copies_while_another_process_adds_are_whole(
    reopen: Callable[[], LmdbStore], tmp_path: Path, clock: Clock
) -> None:
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
            with env.begin():  # a reader keeps the pages of its moment, and of later ones, from being used again
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


# ----- damage -----


def prepared(reopen: Callable[[], LmdbStore]) -> None:
    store = reopen()
    create(store, "a", shape=(LARGE,))
    add(store, "a", ones(1))
    store.close()


@pytest.mark.parametrize(
    ("found", "message"), [(b"2", "has format 2, but .* up to 1: use"), (b"10", "has format 10"), (b"", "has format ,")]
)
def test_another_format_is_refused(reopen: Callable[[], LmdbStore], tmp_path: Path, found: bytes, message: str) -> None:
    prepared(reopen)
    with lmdb.open(str(tmp_path / "store"), max_dbs=8) as env, env.begin(write=True) as txn:
        txn.put(b"format", found, db=env.open_db(b"meta", txn=txn))
    before = (tmp_path / "store" / "data.mdb").read_bytes()
    with pytest.raises(StoreFailed, match=message):
        reopen()
    assert (tmp_path / "store" / "data.mdb").read_bytes() == before


@pytest.mark.parametrize("locks_stay", [True, False])
@pytest.mark.parametrize("emptied", [True, False])
def test_a_store_whose_data_is_gone_is_not_made_anew(
    reopen: Callable[[], LmdbStore], tmp_path: Path, emptied: bool, locks_stay: bool
) -> None:
    prepared(reopen)
    data = tmp_path / "store" / "data.mdb"
    data.unlink()
    if emptied:
        data.touch()
    if not locks_stay:
        (tmp_path / "store" / "lock.mdb").unlink()
    with pytest.raises(StoreFailed, match=r"is damaged: data\.mdb is missing or empty$"):
        reopen()
    assert not data.exists() or not data.stat().st_size


@pytest.mark.parametrize("left", [1, 100, 4095, 4096, 4097, 8191, 8192, 3 * 4096, -3 * 4096, -4096, -1])
def test_a_store_that_is_cut_short(reopen: Callable[[], LmdbStore], tmp_path: Path, left: int) -> None:
    prepared(reopen)
    data = tmp_path / "store" / "data.mdb"
    whole = data.read_bytes()
    data.write_bytes(whole[:left])
    if 0 < left <= 3 * 4096:
        with pytest.raises(StoreFailed, match=r"^The store in .*/store (is cut short|cannot be opened|cannot be read)"):
            reopen()
        assert data.read_bytes() == whole[:left]
        data.write_bytes(whole)
    with suppress(StoreFailed):  # unless only pages were lost that nothing needs
        assert value(reopen(), "a").tolist() == [1] * LARGE
    data.write_bytes(whole)
    store = reopen()
    assert value(store, "a").tolist() == [1] * LARGE


@pytest.mark.parametrize("left", [0, 1, 4096, -4096, -1])
def test_values_that_are_cut_short(reopen: Callable[[], LmdbStore], tmp_path: Path, left: int) -> None:
    prepared(reopen)
    create(reopen(), "small")
    values = tmp_path / "store" / "values"
    values.write_bytes(values.read_bytes()[:left])
    store = reopen()
    assert value(store, "small").tolist() == [0, 0]
    with pytest.raises(BufferCorrupt):
        value(store, "a")
    with pytest.raises(BufferCorrupt):
        add(store, "a", ones(1))
    do(store, Zero(name="a"))
    assert add(store, "a", ones(1))["count"] == 1
    assert value(store, "a").tolist() == [1] * LARGE


def test_what_is_no_store_at_all(reopen: Callable[[], LmdbStore], tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "data.mdb").write_bytes(b"notes to myself\n" * 5000)
    with pytest.raises(StoreFailed, match="cannot be opened"):
        reopen()


def test_a_file_is_no_directory(reopen: Callable[[], LmdbStore], tmp_path: Path) -> None:
    (tmp_path / "store").write_text("x")
    with pytest.raises(StoreFailed, match="cannot be opened"):
        reopen()


def flip(directory: Path, pattern: bytes) -> None:
    """Change a bit of the byte in the middle of each place in the store where `pattern` is."""
    flipped = 0
    for path in (directory / "data.mdb", directory / "values"):
        data = bytearray(path.read_bytes())
        place = data.find(pattern)
        while place >= 0:
            data[place + len(pattern) // 2] ^= 1
            place, flipped = data.find(pattern, place + 1), flipped + 1
        path.write_bytes(data)
    assert flipped


def test_a_damaged_value_harms_one_buffer(reopen: Callable[[], LmdbStore], tmp_path: Path) -> None:
    store = reopen()
    create(store, "hurt", "well", "z", shape=(LARGE,))
    numbers = np.random.default_rng(1).normal(size=LARGE).astype(np.float32)
    add(store, "hurt", numbers)
    for name in ("well", "z"):
        add(store, name, ones(1))
    store.close()
    flip(tmp_path / "store", numbers[LARGE // 2 : LARGE // 2 + 100].tobytes())
    store = reopen()
    for change in [Take(name="hurt"), Add(name="hurt", gradient=ones(1))]:
        with pytest.raises(BufferCorrupt, match="is damaged on the disk"):
            do(store, Add(name="well", gradient=ones(1)), change, Add(name="z", gradient=ones(1)))
    with pytest.raises(BufferCorrupt):
        store.read(["well", "hurt"])
    assert [record.count for record in store.records()] == [1, 1, 1]
    assert value(store, "well").tolist() == [1] * LARGE
    assert add(store, "well", ones(1))["count"] == 2
    assert do(store, Take(name="z")).values["z"].tolist() == [1] * LARGE
    do(store, Delete(name="hurt"))
    create(store, "hurt", shape=(LARGE,))
    add(store, "hurt", numbers)
    assert_same_bits(value(reopen(), "hurt"), numbers)


@pytest.mark.parametrize("how", ["overwrite", "zero"])
def test_a_damaged_value_can_be_replaced(reopen: Callable[[], LmdbStore], tmp_path: Path, how: str) -> None:
    store = reopen()
    create(store, "a", shape=(LARGE,))
    numbers = np.random.default_rng(1).normal(size=LARGE).astype(np.float32)
    add(store, "a", numbers)
    store.close()
    flip(tmp_path / "store", numbers[LARGE - 200 : LARGE - 100].tobytes())
    store = reopen()
    with pytest.raises(BufferCorrupt):
        value(store, "a")
    change = Zero(name="a") if how == "zero" else Add(name="a", gradient=numbers, overwrite=True)
    do(store, change)
    assert_same_bits(value(store, "a"), np.zeros(LARGE, np.float32) if how == "zero" else numbers)


@pytest.fixture
def hurt(reopen: Callable[[], LmdbStore], tmp_path: Path) -> LmdbStore:
    """A store in which the record of the buffer "hurt", which expires, is damaged, and "well" is not."""
    store = reopen()
    create(store, "hurt", ttl_seconds=12345.678)
    create(store, "well")
    add(store, "hurt", [1, 2])
    add(store, "well", [1, 2])
    store.close()
    flip(tmp_path / "store", b"12345.678")
    return reopen()


def test_a_damaged_record_harms_one_buffer(hurt: LmdbStore) -> None:
    uses: list[Callable[[], object]] = [
        lambda: hurt.record("hurt"),
        lambda: hurt.read(["well", "hurt"]),
        lambda: do(hurt, Add(name="well", gradient=ones(2)), Add(name="hurt", gradient=ones(2))),
        lambda: create(hurt, "hurt"),
    ]
    for use in uses:
        with pytest.raises(BufferCorrupt, match="'hurt' is damaged on the disk") as caught:
            use()
        assert caught.value.context == {"buffer": "hurt"}
    assert value(hurt, "well").tolist() == [1, 2]
    assert add(hurt, "well", [1, 2])["count"] == 2
    assert [record.name for record in hurt.records("w")] == ["well"]


def test_a_damaged_record_that_is_due_harms_nobody_else(hurt: LmdbStore, clock: Clock) -> None:
    clock.advance(20_000)
    for count in range(2, 8):
        clock.advance(2)
        assert add(hurt, "well", [1, 2])["count"] == count


def test_a_delete_of_a_damaged_record_is_made_once(hurt: LmdbStore) -> None:
    deleted = do(hurt, Delete(name="hurt"), key=key())
    again = do(hurt, Delete(name="hurt"), key=key())
    assert (again.replayed, again.receipts) == (True, deleted.receipts)
    create(hurt, "hurt")
    add(hurt, "hurt", [3, 4])
    assert do(hurt, Delete(name="hurt"), key=key()).replayed
    assert value(hurt, "hurt").tolist() == [3, 4]
    with pytest.raises(KeyReused):
        do(hurt, Delete(name="hurt"), key=key(request="another"))


@pytest.mark.usefixtures("at_once")
def test_a_damaged_record_that_is_due_does_not_stop_the_writer(hurt: LmdbStore, clock: Clock) -> None:
    clock.advance(20_000)
    time.sleep(0.2)
    for _ in range(2):  # the first may still come into the transaction that looks at what is due
        future = hurt.submit(request(Add(name="well", gradient=ones(2))))
        future.exception(5)
    assert future.result().receipts["well"]["updated"]


# ----- full -----


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


def test_one_request_that_is_too_much_fails_alone(
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


CHUNK_FLOATS = CHUNK // 4
"""Elements of a float32 buffer whose value takes one slot."""


@pytest.fixture
def roomy(tmp_path: Path, clock: Clock) -> Iterator[LmdbStore]:
    """A store of sixteen slots, some of which LMDB itself takes."""
    store = open_lmdb(tmp_path, clock, max_bytes=16 * CHUNK)
    yield store
    store.close()


@pytest.fixture
def untidied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer does nothing about what has expired while it is idle."""
    monkeypatch.setattr(LmdbStore, "_tidy_up", lambda self: None)


def test_what_was_freed_last_is_room_for_the_next(roomy: LmdbStore) -> None:
    size = 6 * CHUNK_FLOATS
    create(roomy, "a", shape=(size,))
    for count in range(1, 9):
        assert add(roomy, "a", ones(size))["count"] == count
    assert set(value(roomy, "a")) == {8.0}


def test_what_was_deleted_is_room_for_others(roomy: LmdbStore) -> None:
    size = 3 * CHUNK_FLOATS
    names = ["a", "b", "c", "d", "e"]
    create(roomy, *names, "next", shape=(size,))
    for name in names:
        add(roomy, name, ones(size))
    for name, count in zip(names, range(1, 6), strict=True):
        do(roomy, Delete(name=name))
        assert add(roomy, "next", ones(size))["count"] == count


def test_a_request_for_many_finds_what_was_freed_last(roomy: LmdbStore) -> None:
    size = CHUNK_FLOATS
    names = [f"a{number}" for number in range(6)]
    create(roomy, *names, shape=(size,))
    for count in range(1, 6):
        outcome = do(roomy, *[Add(name=name, gradient=ones(size)) for name in names])
        assert [one["count"] for one in outcome.receipts.values()] == [count] * 6


def test_a_batch_finds_what_was_freed_last(roomy: LmdbStore, monkeypatch: pytest.MonkeyPatch) -> None:
    size, gate = 3 * CHUNK_FLOATS, Gate(monkeypatch)
    create(roomy, "a", "b", shape=(size,))
    for count in range(1, 6):
        adds = [request(Add(name=name, gradient=ones(size))) for name in ("a", "b")]
        done = [one.result(PATIENCE).receipts for one in gate.together(roomy, adds)]
        assert [one["count"] for receipts in done for one in receipts.values()] == [count] * 2


def test_what_finds_no_room_is_tried_twice_only(roomy: LmdbStore, monkeypatch: pytest.MonkeyPatch) -> None:
    create(roomy, "large", shape=(20 * CHUNK_FLOATS,))
    tries = Counter[str]()
    monkeypatch.setattr(module, "reached", lambda point: tries.update([point]))
    for expected in (2, 3, 4):  # there is nothing to make room of the second time
        with pytest.raises(StoreFull):
            add(roomy, "large", ones(1))
        assert tries["chunk"] == 16 * expected


@pytest.mark.usefixtures("untidied")
def test_buffers_that_have_expired_are_room_for_others(roomy: LmdbStore, clock: Clock) -> None:
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
def test_small_buffers_that_have_expired_are_room_for_others(tmp_path: Path, clock: Clock) -> None:
    store = open_lmdb(tmp_path, clock, max_bytes=1 << 18)
    create(store, "stays", "new", shape=(400,))
    add(store, "stays", ones(400))
    rules = spec((400,), ttl_seconds=10.0)
    error, number = None, 0
    while error is None:
        number += 1
        changes = Create(name=f"a{number}", spec=rules), Add(name=f"a{number}", gradient=ones(400))
        error = [store.submit(request(change)) for change in changes][-1].exception(PATIENCE)
    assert type(error) is StoreFull
    clock.advance(9.5)
    with pytest.raises(StoreFull):
        add(store, "new", ones(400))
    clock.advance(0.5)  # too soon for another look at what has expired, were there room
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
    subprocess.run(["umount", "--lazy", disk], check=True)  # a store that a test left open may use it


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


# ----- group commit -----


def test_requests_that_wait_share_a_transaction(
    reopen: Callable[[], LmdbStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, gate = reopen(), Gate(monkeypatch)
    create(store, "a", "b")
    before = store.generation()
    names = ["a" if number % 2 else "b" for number in range(64)]
    futures = gate.together(store, [request(Add(name=name, gradient=ones(2))) for name in names])
    counts = [one.result(PATIENCE).receipts[name]["count"] for one, name in zip(futures, names, strict=True)]
    assert counts == [1 + number // 2 for number in range(64)]
    assert store.generation() - before <= 2


def test_one_that_fails_in_a_batch_fails_alone(
    reopen: Callable[[], LmdbStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, gate = reopen(), Gate(monkeypatch)
    create(store, "a", "b", shape=(LARGE,), nonfinite="reject")
    nan = ones(LARGE)
    nan[-1] = np.nan
    good = Add(name="a", gradient=ones(LARGE))
    bad: dict[int, tuple[Request, type[GradserveError]]] = {
        0: (request(Add(name="a", gradient=nan)), NonfiniteGradient),
        7: (request(good, Add(name="b", gradient=nan)), NonfiniteGradient),
        8: (request(Add(name="a", gradient=nan, overwrite=True)), NonfiniteGradient),
        13: (request(good, Add(name="b", gradient=ones(3))), ShapeMismatch),
        14: (request(good, Delete(name="nowhere")), UnknownBuffer),
        15: (request(good, Add(name="b", gradient=nan, epoch=3)), StaleEpoch),
        29: (Request([good, Add(name="b", gradient=nan)], key()), NonfiniteGradient),
    }
    requests = [bad[number][0] if number in bad else request(good) for number in range(30)]
    futures = gate.together(store, requests)
    for number, future in enumerate(futures):
        error = future.exception(PATIENCE)
        assert type(error) is (bad[number][1] if number in bad else type(None))
    counts = [one.result().receipts["a"]["count"] for number, one in enumerate(futures) if number not in bad]
    assert counts == list(range(1, 24))
    assert set(value(store, "a")) == {23.0}
    assert not value(store, "b").any()
    assert store.recall(key()) is None


@pytest.mark.parametrize("failing", ["the gradient", "the commit"])
@pytest.mark.parametrize("elements", [2, LARGE])
def test_after_a_failure_the_sum_is_what_it_was(
    reopen: Callable[[], LmdbStore], monkeypatch: pytest.MonkeyPatch, elements: int, failing: str
) -> None:
    """The writer remembers values, and a request that fails has changed them already."""
    store = reopen()
    create(store, "a", "b", shape=(elements,), nonfinite="reject")
    add(store, "a", ones(1))
    add(store, "a", ones(1))
    wrong = ones(elements)
    with monkeypatch.context() as patch:
        if failing == "the gradient":
            wrong[-1] = np.nan
        else:

            def fail(point: str) -> None:
                if point == "before commit":
                    raise OSError("no commit")

            patch.setattr(module, "reached", fail)
        with pytest.raises((NonfiniteGradient, StoreFailed)):
            do(store, Add(name="b", gradient=ones(1)), Add(name="a", gradient=wrong))
    do(store, *[Add(name=name, gradient=ones(1)) for name in ("a", "b")])
    assert set(value(store, "a")) == {3}
    assert set(value(store, "b")) == {1}


@pytest.mark.parametrize("elements", [600, LARGE])
def test_all_ways_to_change_a_value_by_turns(
    reopen: Callable[[], LmdbStore], monkeypatch: pytest.MonkeyPatch, elements: int
) -> None:
    """Some are remembered, others are not, some wait, and more are to be remembered than may be."""
    monkeypatch.setattr(_values, "KEPT_BYTES", 3 * (elements * 4 + 2 * _values.ARRAY_BYTES))
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


def test_few_sparse_gradients_wait(reopen: Callable[[], LmdbStore], tmp_path: Path) -> None:
    """Each that waits makes every read, and every add after it, longer."""
    store, most = reopen(), _values.MOST_GRADIENTS
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


def test_a_buffer_that_is_deleted_leaves_no_deadline(
    reopen: Callable[[], LmdbStore], clock: Clock, tmp_path: Path
) -> None:
    store = reopen()
    create(store, "stays", ttl_seconds=1e9)
    for _ in range(5):
        create(store, "a", ttl_seconds=1e9)
        clock.advance(3)
        add(store, "a", ones(2))
        do(store, Delete(name="a"))
    store.close()
    assert entries_of(tmp_path / "store")["deadlines"] == 1


def test_no_more_values_are_kept_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_values, "KEPT_BYTES", 2 * (16 + _values.ARRAY_BYTES))
    kept, arrays = _values.Kept(), {number: ones(4) for number in range(3)}
    for number, array in arrays.items():
        kept.keep(number, array)
    assert kept.take(0) is None
    assert kept.take(1) is arrays[1]
    assert kept.take(1) is None
    kept.keep(3, arrays[0])
    assert kept.take(2) is arrays[2]
    kept.clear()
    assert kept.take(3) is None


def test_requests_that_repeat_a_key_in_one_batch(
    reopen: Callable[[], LmdbStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, gate = reopen(), Gate(monkeypatch)
    create(store, "a")
    futures = gate.together(store, [Request([Add(name="a", gradient=ones(2))], key()) for _ in range(10)])
    outcomes = [one.result(PATIENCE) for one in futures]
    assert [one.replayed for one in outcomes] == [False] + [True] * 9
    assert all(one.receipts == outcomes[0].receipts for one in outcomes)
    assert store.record("a").count == 1


def test_cancelled_requests_change_nothing(reopen: Callable[[], LmdbStore], monkeypatch: pytest.MonkeyPatch) -> None:
    store = reopen()
    create(store, "a")
    held, opened = threading.Event(), threading.Event()

    def wait(point: str) -> None:
        held.set()
        opened.wait(PATIENCE)

    monkeypatch.setattr(module, "reached", wait)
    first = store.submit(request(Add(name="a", gradient=ones(2))))
    assert held.wait(PATIENCE)
    others = [store.submit(request(Add(name="a", gradient=ones(2)))) for _ in range(4)]
    assert [one.cancel() for one in (first, *others[::2])] == [False, True, True]
    opened.set()
    for one in (first, *others[1::2]):
        one.result(PATIENCE)
    assert store.record("a").count == 3


# ----- what has expired -----

COUNTER = """
import sys
from pathlib import Path
from tests.buffers.test_contract import entries_of
print(sum(entries_of(Path(sys.argv[1]))[name] for name in sys.argv[2:]))
"""


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer looks for what has expired as soon as it has nothing to do."""
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.01)


def comes_to(path: Path, expected: int, *databases: str) -> bool:
    """Whether the databases of a store that is open have so many entries before patience ends."""
    for _ in range(40):
        counted = subprocess.run(
            [sys.executable, "-c", COUNTER, str(path), *databases],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[2],
        )
        if int(counted.stdout) == expected:
            return True
        time.sleep(0.1)
    return False


def test_keys_that_have_expired_are_forgotten_as_adds_go_on(
    reopen: Callable[[], LmdbStore], clock: Clock, tmp_path: Path
) -> None:
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
    assert (entries["keys"], entries["times"]) == (1, 1)
    store = reopen()
    clock.advance(KEY_SECONDS / 2)
    add(store, "a", [0, 0])
    store.close()
    entries = entries_of(tmp_path / "store")
    assert (entries["keys"], entries["times"]) == (0, 0)


@pytest.mark.usefixtures("at_once")
def test_keys_that_have_expired_are_forgotten_when_idle(
    reopen: Callable[[], LmdbStore], clock: Clock, tmp_path: Path
) -> None:
    store = reopen()
    create(store, "a")
    for number in range(30):
        do(store, Add(name="a", gradient=ones(2)), key=key(str(number)))
    clock.advance(KEY_SECONDS)
    assert comes_to(tmp_path / "store", 0, "keys", "times")
    assert add(store, "a", [1, 2])["count"] == 31


@pytest.mark.usefixtures("untidied")
def test_many_buffers_that_have_expired_are_removed_as_adds_go_on(
    reopen: Callable[[], LmdbStore], clock: Clock, tmp_path: Path
) -> None:
    store = reopen()
    create(store, "a")
    create(store, *[f"b{number}" for number in range(1000)], ttl_seconds=10.0)
    clock.advance(20)
    for _ in range(10):
        clock.advance(2)
        add(store, "a", [1, 2])
    store.close()
    assert entries_of(tmp_path / "store")["buffers"] == 1


@pytest.mark.usefixtures("at_once")
def test_buffers_that_have_expired_are_removed_when_idle(
    reopen: Callable[[], LmdbStore], clock: Clock, tmp_path: Path
) -> None:
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
    assert comes_to(tmp_path / "store", 3 + 2, "buffers", "values")
    assert add(store, "b", ones(1))["count"] == 3
    clock.advance(10)
    assert comes_to(tmp_path / "store", 2, "buffers", "values", "deadlines")


def test_room_of_what_was_freed_is_used_again(tmp_path: Path, clock: Clock) -> None:
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


def test_ids_of_values_are_never_used_again(reopen: Callable[[], LmdbStore]) -> None:
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
