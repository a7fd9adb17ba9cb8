"""Large parts and folds that several transactions write while other namespaces are present."""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.buffers import batches, failpoints
from service.buffers.changes import Add, Delete
from service.buffers.gradients import Coded, Rows
from service.buffers.lmdb.slots import CHUNK_BYTES
from service.buffers.lmdb.store import LmdbStore
from service.buffers.parts import Forget
from service.buffers.perform import Outcome, Request
from service.buffers.pushes import Part
from service.codecs.codes import block_count
from service.engine.fair_queue import FairQueue
from service.errors import StoreFull, UnknownBuffer
from tests.buffers.calls import LARGE, PUSH_SECONDS, add, create, do, ones, part, send_part, value
from tests.buffers.stores import PATIENCE, Clock, Reopen, entries_of, open_lmdb, wrong
from tests.buffers.test_lmdb_parts import ODD, values_in, wait_for_folds
from tests.kernels.equality import assert_same_bits

CHUNKS = 3
"""Chunks of a buffer of `LARGE` float32: a part with one takes as many transactions."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the directory of the store of `reopen`."""
    return tmp_path / "store"


@pytest.fixture
def store(reopen: Reopen, monkeypatch: pytest.MonkeyPatch) -> LmdbStore:
    """Return a store whose transactions write one chunk, as if another namespace were always present."""
    monkeypatch.setattr(FairQueue, "is_shared", lambda self: True)
    monkeypatch.setattr(batches, "TURN_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(batches, "MOST_SHARED_BYTES", CHUNK_BYTES)
    store = reopen()
    create(store, "a", "b", shape=(LARGE,))
    create(store, "small")
    return store


class Between:
    """What to do once, in the writer thread, when the next transaction is committed; `commits` counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, do: Callable[[], Any], *, at: int = 1) -> None:
        self._do, self._at, self.commits, self.done = do, at, 0, threading.Event()
        monkeypatch.setattr(failpoints, "action", self._hit)

    def _hit(self, point: str) -> None:
        if point == "committed":
            self.commits += 1
            if self.commits == self._at:
                self._do()
                self.done.set()


def numbers(seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(LARGE).astype(np.float32)


def assert_nothing_left(store: LmdbStore, path: Path, *, pushes: int = 0, values: int = 0) -> None:
    """Check a store that is to be closed: no slot is lost, and only so much is left."""
    do(store)  # behind what the writer asks itself for
    store.close()
    entries = entries_of(path)
    assert (entries["pushes"], entries["values"], wrong(path)) == (pushes, values, [])


# ----- turns -----


def test_others_have_their_turns_while_a_part_is_written(
    store: LmdbStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, other = list[str](), store.within("other")
    create(other, "small")

    def add_now() -> None:
        done = other.submit(Request([Add(name="small", gradient=ones(2))]))
        done.add_done_callback(lambda _: order.append("other"))

    between = Between(monkeypatch, add_now)
    future = send_part(store, 1, {"a": numbers(1), "b": numbers(2)}, request="one")
    future.add_done_callback(lambda _: order.append("part"))
    assert future.result(PATIENCE).staged == [1]
    assert order == ["other", "part"]
    assert between.commits == 2 * CHUNKS
    assert value(store, "a").tolist() == [0] * LARGE
    assert [(name, push.numbers, push.nbytes) for name, push in store.pushes()] == [("p", [1], 8 * LARGE)]
    part(store, 2, {})
    assert_same_bits(value(store, "a"), numbers(1))
    assert_same_bits(value(store, "b"), numbers(2))
    assert_nothing_left(other, path, values=3)


def test_a_part_alone_is_written_in_one_transaction(store: LmdbStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FairQueue, "is_shared", lambda self: False)
    before = store.generation()
    part(store, 1, {"a": numbers(), "b": numbers()}, request="one")
    assert store.generation() == before + 1


@pytest.mark.parametrize("odd", [1.0, *ODD[::3]])
@pytest.mark.parametrize("at", [0, LARGE // 2, LARGE - 1])
def test_the_first_push_becomes_the_sum_unless_it_has_odd_numbers(store: LmdbStore, odd: Any, at: int) -> None:
    gradient = numbers()
    gradient[at] = odd
    part(store, 1, {"a": gradient}, request="one")
    ((_, push),) = store.pushes()
    _, place, _ = push.staged[1].gradients["a"]
    assert place[3] == (odd == 1)
    part(store, 2, {})
    add(store, "b", gradient)
    assert_same_bits(value(store, "a"), value(store, "b"))


def test_a_part_has_gradients_of_all_kinds(store: LmdbStore, path: Path) -> None:
    """Sparse ones, small ones, one in 8 bits, one array for two buffers, and one that is not contiguous."""
    create(store, "rows", "turned", shape=(LARGE // 8, 8))
    create(store, "c", "coded", shape=(LARGE,))
    codes = np.random.default_rng(5).integers(-127, 128, LARGE).astype(np.int8)
    coded = Coded(codes, np.random.default_rng(6).random(block_count(LARGE), np.float32))
    rows = Rows(np.arange(LARGE // 8), np.random.default_rng(1).standard_normal((LARGE // 8, 8)))
    turned, same = np.random.default_rng(2).standard_normal((8, LARGE // 8)).T, numbers(3)
    gradients = {"rows": rows, "turned": turned, "a": same, "b": same, "c": numbers(4), "small": [1, 2], "coded": coded}
    part(store, 1, gradients, request="one")
    part(store, 2, {})
    wait_for_folds(store, len(gradients))
    for name, gradient in gradients.items():
        before = value(store, name)
        do(store, Delete(name=name))
        create(store, name, shape=before.shape)
        add(store, name, gradient)
        assert_same_bits(value(store, name), before)
    assert_nothing_left(store, path, values=len(gradients))


def test_parts_side_by_side_are_staged_once(store: LmdbStore, path: Path) -> None:
    """Two parts, each sent twice."""
    sent = [(1, {"a": numbers(1)}), (2, {"b": numbers(2)})] * 2
    outcomes = [send_part(store, *each, parts=3, request=str(each[0])) for each in sent]
    assert sorted(future.result(PATIENCE).replayed for future in outcomes) == [False, False, True, True]
    assert [push.numbers for _, push in store.pushes()] == [[1, 2]]
    assert values_in(store) == 2
    part(store, 3, {}, parts=3)
    assert_same_bits(value(store, "a"), numbers(1))
    assert_same_bits(value(store, "b"), numbers(2))
    assert_nothing_left(store, path, values=2)


@pytest.mark.parametrize("again", [{"a": ones(LARGE)}, {"nowhere": ones(LARGE)}])
def test_a_part_that_will_not_be_staged_is_not_written(
    store: LmdbStore, monkeypatch: pytest.MonkeyPatch, again: dict[str, Any]
) -> None:
    """A repeated part, and one that is refused."""
    part(store, 1, {"a": ones(LARGE)}, request="one")
    hits = Counter[str]()
    monkeypatch.setattr(failpoints, "action", lambda point: hits.update([point]))
    number = 1 if "a" in again else 2
    with pytest.raises(UnknownBuffer) if number == 2 else nullcontext():
        assert part(store, number, again, request="one").replayed
    assert not hits["chunk"]


# ----- what happens between the turns -----


def test_a_part_whose_buffer_is_deleted_meanwhile_is_refused(
    store: LmdbStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Between(monkeypatch, lambda: store.submit(Request([Delete(name="a")])))
    with pytest.raises(UnknownBuffer):
        part(store, 1, {"b": numbers(), "a": numbers(1)}, request="one")
    assert [push.refusal is not None for _, push in store.pushes()] == [True]
    assert_nothing_left(store, path, pushes=1)


def test_a_part_begins_the_push_again_that_was_forgotten_meanwhile(
    store: LmdbStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part(store, 1, {"b": numbers()}, request="one")
    forgotten = Request([Forget()], part=Part("p", 0, 1, "", bytes(16), 0))
    Between(monkeypatch, lambda: store.submit(forgotten))
    part(store, 2, {"a": numbers(1)}, request="two")
    assert [push.numbers for _, push in store.pushes()] == [[2]]
    assert_nothing_left(store, path, pushes=1, values=1)


@pytest.mark.parametrize("at", range(1, CHUNKS))
def test_a_part_that_takes_too_long_begins_its_push_again(
    store: LmdbStore, path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """What it has written is forgotten with the push, and is written again at once."""
    part(store, 1, {"b": numbers()}, request="one")
    Between(monkeypatch, lambda: clock.advance(PUSH_SECONDS + 1), at=at)
    part(store, 2, {"a": numbers(1)}, request="two")
    assert [(push.numbers, push.began) for _, push in store.pushes()] == [([2], clock.now)]
    part(store, 1, {"b": numbers(2)}, request="one")
    assert_same_bits(value(store, "a"), numbers(1))
    assert_nothing_left(store, path, values=2)


@pytest.mark.parametrize("at", range(1, CHUNKS))
def test_a_store_that_closes_finishes_the_part(
    store: LmdbStore, reopen: Reopen, path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    closing = threading.Thread(target=store.close)

    def close() -> None:
        closing.start()
        while not store._writer._batches._closed:
            time.sleep(0.001)

    between = Between(monkeypatch, close, at=at)
    part(store, 1, {"a": numbers()}, request="one")
    closing.join()
    assert between.commits == at + 1
    assert (entries_of(path)["pushes"], entries_of(path)["values"], wrong(path)) == (1, 1, [])
    store = reopen()
    part(store, 2, {})
    assert_same_bits(value(store, "a"), numbers())


def test_no_list_has_what_is_not_completely_written(store: LmdbStore, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[object]()
    Between(monkeypatch, lambda: seen.append(store.pushes()), at=1)
    part(store, 1, {"a": numbers()}, request="one")
    assert (seen, len(store.pushes())) == ([[]], 1)


@pytest.mark.parametrize("at", range(1, CHUNKS + 1))
def test_a_failure_frees_what_was_written(
    store: LmdbStore, path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    chunks = 0

    def fail(point: str) -> None:
        nonlocal chunks
        chunks += point == "chunk"
        if point == "chunk" and chunks >= at:
            raise OSError("no write")

    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "action", fail)
        with pytest.raises(Exception, match="no write"):
            part(store, 1, {"a": numbers()}, request="one")
        do(store)
    assert store.pushes() == []
    assert values_in(store) == 0
    assert part(store, 1, {"a": numbers()}, request="one").staged == [1]
    assert_nothing_left(store, path, pushes=1, values=1)


def test_a_full_store_frees_what_was_written(
    store: LmdbStore, reopen: Reopen, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = [f"b{number}" for number in range(4)]
    create(store, *many, shape=(LARGE,))
    create(store, "one", shape=(CHUNK_BYTES // 4,))
    store = reopen(max_bytes=4 << 20)
    for name in [*many, "one"]:
        add(store, name, 1.0)
    hits = Counter[str]()
    monkeypatch.setattr(failpoints, "action", lambda point: hits.update([point]))
    with pytest.raises(StoreFull, match="limit"):
        part(store, 1, {"a": numbers()}, request="one")
    do(store)
    assert hits["chunk"] == CHUNKS + 1  # the last transaction is tried again
    assert (store.pushes(), values_in(store)) == ([], len(many) + 1)
    do(store, Delete(name="b0"))
    part(store, 1, {"a": numbers()}, request="one")
    assert_nothing_left(store, path, pushes=1, values=len(many) + 1)


# ----- folds -----


def test_a_value_that_is_half_folded_has_the_whole_sum(
    store: LmdbStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads between the turns, another push, an add, and a new life of the store."""
    expected, rounds = numbers(0), 0
    add(store, "a", expected)
    seen = list[int]()

    def look() -> None:
        seen.append(values_in(store))
        assert_same_bits(value(store, "a"), expected)

    for number in range(1, 4):
        part(store, 1, {"a": numbers(number)}, push=str(number), request="one")
    between = Between(monkeypatch, lambda: None)
    futures = []
    for number in range(1, 4):
        expected = expected + numbers(number)
        futures.append(send_part(store, 2, {}, push=str(number)))
        futures[-1].result(PATIENCE)
        look()
    end = time.monotonic() + PATIENCE
    while values_in(store) > 1:
        assert time.monotonic() < end
        look()
        rounds += 1
    look()
    assert between.commits >= 3 + CHUNKS
    assert_nothing_left(store, path, values=1)


@pytest.mark.parametrize("turns", range(1, CHUNKS))
def test_a_fold_goes_on_after_a_new_start(
    store: LmdbStore, reopen: Reopen, path: Path, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    add(store, "a", numbers(0))
    part(store, 1, {"a": numbers(1)}, request="one")

    def stop() -> None:
        store._writer._closing = True  # folds are left

    between = Between(monkeypatch, stop, at=1 + turns)
    part(store, 2, {})
    assert between.done.wait(PATIENCE)
    store.close()
    assert (entries_of(path)["values"], wrong(path)) == (2, [])
    expected = numbers(0) + numbers(1)
    store = reopen()
    assert_same_bits(value(store, "a"), expected)
    for number in (2, 3):
        part(store, 1, {"a": numbers(number)}, push=str(number), request="one")
        part(store, 2, {}, push=str(number))
        expected = expected + numbers(number)
        assert_same_bits(value(store, "a"), expected)
    add(store, "a", numbers(4))
    assert_same_bits(value(store, "a"), expected + numbers(4))
    assert_nothing_left(store, path, values=1)


# ----- crashes -----


def test_copies_at_every_step_are_whole(
    store: LmdbStore, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each copy is the store that a crash at this step of staging, completing or folding would leave."""
    gradients = {"a": numbers(1), "b": numbers(2)}
    for name in gradients:
        add(store, name, numbers(0))
    copies, hits = list[Path](), Counter[str]()

    def copy(point: str) -> None:
        hits[point] += 1
        directory = tmp_path / f"{point} {hits[point]}"
        directory.mkdir()
        for file in ("data.mdb", "values"):
            shutil.copy(path / file, directory)
        copies.append(directory)

    parts: list[Callable[[LmdbStore], Outcome]] = [
        lambda store: part(store, 1, {"a": gradients["a"]}, request="one"),
        lambda store: part(store, 2, {"b": gradients["b"]}, request="two"),
    ]
    monkeypatch.setattr(failpoints, "action", copy)
    for each in parts:
        each(store)
    wait_for_folds(store, 2)
    store.close()
    monkeypatch.setattr(failpoints, "action", None)
    assert hits["committed"] >= 4 * CHUNKS
    before, after = ({name: numbers(0) + more for name, more in each.items()} for each in ({"a": 0, "b": 0}, gradients))
    drafts = 0
    for directory in copies:
        assert wrong(directory) == []
        drafts += entries_of(directory)["pushes"] > 0
        clock = Clock()
        copied = open_lmdb(directory, clock)
        expected = after if copied.record("a").count == 2 else before
        for name in gradients:
            assert copied.record(name).count == copied.record("a").count
            assert_same_bits(value(copied, name), expected[name])
        assert [each(copied) for each in parts][1].receipts["a"]["count"] == 2
        for name in gradients:
            assert_same_bits(value(copied, name), after[name])
        clock.advance(PUSH_SECONDS + 2)
        add(copied, "a", 0.0)
        for name in gradients:
            add(copied, name, numbers(3))
            assert_same_bits(value(copied, name), after[name] + numbers(3))
        assert_nothing_left(copied, directory, values=2)
    assert drafts > CHUNKS
