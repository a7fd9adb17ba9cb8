"""Pushes in parts on the disk: staged gradients become sums, or wait beside them, and a crash finds all or nothing."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from service.buffers import batches, failpoints
from service.buffers.changes import Add, Delete, Take, Zero
from service.buffers.gradients import Rows
from service.buffers.lmdb import writer
from service.buffers.lmdb.reader import reading
from service.buffers.lmdb.store import LmdbStore
from service.buffers.perform import Outcome, Request
from service.buffers.pushes import Part
from service.errors import BufferCorrupt, GradserveError
from tests.buffers.calls import LARGE, PUSH_SECONDS, add, create, do, ones, part, value
from tests.buffers.stores import PATIENCE, Clock, Gate, Reopen, entries_of, flip, open_lmdb, wrong
from tests.buffers.test_lmdb import wait_for_entries
from tests.kernels.equality import assert_same_bits

MANY = [f"b{number}" for number in range(5)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the directory of the store of `reopen`."""
    return tmp_path / "store"


@pytest.fixture
def unfolded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the writer fold nothing by itself, as if its process ended after each commit."""
    monkeypatch.setattr("service.buffers.lmdb.writer.folds", lambda values: [])


@pytest.fixture
def hits(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return a count of the points that the writer comes to."""
    found = Counter[str]()
    monkeypatch.setattr(failpoints, "action", lambda point: found.update([point]))
    return found


def whole(store: LmdbStore, gradient: Any, *, name: str = "a", push: str = "p", **more: Any) -> None:
    """Push a gradient in two parts: the second is empty."""
    part(store, 1, {name: gradient}, push=push, request="one", **more)
    part(store, 2, {}, push=push, request="two", **more)


def completing(store: LmdbStore, push: str) -> Request:
    """Return the request of an empty second part."""
    return Request([], part=Part(push, 2, 2, store.namespace, bytes(16), PUSH_SECONDS))


def values_in(store: LmdbStore) -> int:
    with reading(store._env) as reader:
        return reader.entries()["values"]


def wait_for_folds(store: LmdbStore, values: int) -> None:
    """Wait until nothing waits: then the store has these values and no others."""
    end = time.monotonic() + PATIENCE
    while values_in(store) > values:
        assert time.monotonic() < end
        time.sleep(0.002)
    assert values_in(store) == values


# ----- sums without a look at the numbers -----


def test_the_first_push_becomes_the_sum(reopen: Reopen, path: Path, hits: Counter[str]) -> None:
    store = reopen()
    create(store, *MANY, shape=(LARGE,))
    part(store, 1, {name: ones(LARGE) for name in MANY}, request="one")
    assert hits["chunk"] > 0
    hits.clear()
    part(store, 2, {})
    add(store, "b0", 0.0)
    assert hits["chunk"] == 0
    store.close()
    assert (entries_of(path)["values"], wrong(path)) == (5, [])
    store = reopen()
    assert all(value(store, name).tolist() == [1] * LARGE for name in MANY)


ODD = [-0.0, np.nan, -np.nan, np.array(0x7F800123, np.uint32).view(np.float32)[()]]
"""Numbers whose bits an add to zeros changes, or may change."""


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("weight", [1.0, -1.0])
def test_odd_numbers_end_as_after_an_add(reopen: Reopen, odd: Any, weight: float) -> None:
    store, gradient = reopen(), ones(LARGE)
    gradient[LARGE // 2] = odd
    create(store, "a", "b", shape=(LARGE,))
    for number in range(3):
        whole(store, gradient, push=str(number), weight=weight)
        add(store, "b", gradient, weight=weight)
        assert_same_bits(value(store, "a"), value(store, "b"))


@pytest.mark.usefixtures("unfolded")
def test_what_waits_is_added_by_reads_and_by_the_next_add(reopen: Reopen, path: Path) -> None:
    """Gradients that are narrower and wider than the value, broadcast, and sparse."""
    store, rng = reopen(), np.random.default_rng(5)
    shape = (LARGE // 8, 8)
    create(store, "a", "b", shape=shape, dtype="float32")
    rows = Rows(np.array([5, 1, 5]), rng.standard_normal((3, 8)))
    wide, narrow = rng.standard_normal(shape), rng.standard_normal(shape).astype(np.float16)
    gradients: list[Any] = [wide, narrow, wide[:1], wide.astype(np.float32), rows, np.float64(0.1), wide]
    for number, gradient in enumerate(gradients):
        whole(store, gradient, push=str(number), weight=0.7)
        add(store, "b", gradient, weight=0.7)
        assert_same_bits(value(store, "a"), value(store, "b"))
        store = reopen()
        assert_same_bits(value(store, "a"), value(store, "b"))
    for name in "ab":
        add(store, name, 1.0)
    assert_same_bits(value(store, "a"), value(store, "b"))
    store.close()
    assert (entries_of(path)["values"], wrong(path)) == (2, [])


@pytest.mark.usefixtures("unfolded")
def test_only_so_much_waits(reopen: Reopen, path: Path) -> None:
    """32 gradients, or twice the bytes of the value that reads take into memory. The next is added with them all."""
    store = reopen()
    create(store, "a", shape=(LARGE,))
    create(store, "b", shape=(2, LARGE))
    add(store, "a", 1.0)
    add(store, "b", 1.0)
    for number in range(33):
        whole(store, ones(LARGE), push=str(number))
        assert values_in(store) == 2 + (number + 1) % 33
    for number in range(5):
        whole(store, ones(LARGE), name="b", push=f"broadcast {number}")
        assert values_in(store) == 2 + (number + 1) % 5
    assert value(store, "a").tolist() == [34] * LARGE
    assert value(store, "b").tolist() == [[6] * LARGE] * 2
    store.close()
    assert wrong(path) == []


# ----- folds -----


def test_what_waits_is_folded_soon(reopen: Reopen, path: Path, hits: Counter[str]) -> None:
    store = reopen()
    create(store, *MANY, shape=(LARGE,))
    for number in range(3):
        part(store, 1, {name: ones(LARGE) for name in MANY}, push=str(number), request="one")
        hits.clear()
        part(store, 2, {}, push=str(number))
        wait_for_folds(store, 5)
        assert bool(hits["chunk"]) == (number > 0)
    before = store.generation()
    store.close()
    assert wrong(path) == []
    store = reopen()
    assert store.generation() == before
    assert all(value(store, name).tolist() == [3] * LARGE for name in MANY)


def test_pushes_that_are_completed_together_are_folded_by_and_by(
    reopen: Reopen, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, gate, pushes = reopen(), Gate(monkeypatch), [str(number) for number in range(10)]
    create(store, "a", shape=(LARGE,))
    numbers = np.random.default_rng(3).standard_normal((10, LARGE)).astype(np.float32)
    for push, gradient in zip(pushes, numbers, strict=True):
        part(store, 1, {"a": gradient}, push=push, request="one")
    before = store.generation()
    for future in gate.together(store, [completing(store, push) for push in pushes]):
        future.result(PATIENCE)
    assert_same_bits(value(store, "a"), np.add.reduce(numbers))
    wait_for_folds(store, 1)
    assert store.generation() == before + 1 + 3
    assert_same_bits(value(store, "a"), np.add.reduce(numbers))


def test_values_of_closed_steps_are_folded(reopen: Reopen) -> None:
    store = reopen()
    create(store, "a", shape=(LARGE,), quorum=2)
    for number in range(2):
        whole(store, ones(LARGE), push=str(number))
    wait_for_folds(store, 1)
    assert value(store, "a", 0).tolist() == [2] * LARGE


CHANGES = [Zero(name="a"), Take(name="a"), Delete(name="a"), Add(name="a", gradient=ones(LARGE), overwrite=True)]


@pytest.mark.parametrize("change", CHANGES)
def test_a_fold_of_what_has_changed_does_nothing(
    reopen: Reopen, path: Path, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    store, gate = reopen(), Gate(monkeypatch)
    create(store, "a", shape=(LARGE,), keep=1)
    add(store, "a", 1.0)
    part(store, 1, {"a": ones(LARGE)}, request="one")
    with gate.holding(store):
        futures = [store.submit(completing(store, "p")), store.submit(Request([change]))]
    for future in futures:
        future.result(PATIENCE)
    store.submit(Request([])).result(PATIENCE)  # behind the fold
    assert values_in(store) == isinstance(change, Take | Add)
    if not isinstance(change, Delete):
        assert value(store, "a").tolist() == [isinstance(change, Add)] * LARGE
    store.close()
    assert wrong(path) == []


def test_others_have_their_turns_between_folds(reopen: Reopen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MOST_SHARED_BYTES", 1 << 20)
    store = reopen()
    one, other = store.within("one"), store.within("other")
    create(one, *MANY, shape=(LARGE,))
    create(other, "small")
    do(one, *[Add(name=name, gradient=ones(1)) for name in MANY])
    part(one, 1, {name: ones(LARGE) for name in MANY}, request="one")
    left = Future[int]()

    def add_now(_: Future[Outcome]) -> None:
        done = other.submit(Request([Add(name="small", gradient=ones(2))]))
        done.add_done_callback(lambda _: left.set_result(values_in(store)))

    one.submit(completing(one, "p")).add_done_callback(add_now)
    assert left.result(PATIENCE) >= 6 + 4
    wait_for_folds(store, 6)


def test_a_store_that_closes_leaves_what_waits(reopen: Reopen, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, gate = reopen(), Gate(monkeypatch)
    create(store, "a", shape=(LARGE,))
    add(store, "a", 1.0)
    part(store, 1, {"a": ones(LARGE)}, request="one")
    with gate.holding(store):
        store.submit(completing(store, "p"))
        store._writer._closing = True
    store.close()
    assert (entries_of(path)["values"], wrong(path)) == (2, [])
    store = reopen()
    assert value(store, "a").tolist() == [2] * LARGE
    add(store, "a", 1.0)
    assert values_in(store) == 1
    assert value(store, "a").tolist() == [3] * LARGE


# ----- crashes -----


def test_copies_at_every_step_of_a_push_are_whole(
    reopen: Reopen, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each copy is the store that a crash at this step of staging, completing or folding would leave.

    The client repeats all parts. Each sum is the one before, or has the whole push; in the end it has it once.
    """
    store, gradients = reopen(), {"a": ones(LARGE), "b": ones(LARGE), "small": ones(2)}
    create(store, "a", "b", shape=(LARGE,))
    create(store, "small")
    do(store, *[Add(name=name, gradient=ones(1)) for name in gradients])
    copies, step, hits = list[tuple[Path, str]](), "first", Counter[str]()

    def copy(point: str) -> None:
        hits[f"{step} {point}"] += 1
        if point == "chunk" and hits[f"{step} {point}"] % 2:
            return
        directory = tmp_path / f"{step} {point} {hits[f'{step} {point}']}"
        directory.mkdir()
        for file in ("data.mdb", "values"):
            shutil.copy(tmp_path / "store" / file, directory)
        copies.append((directory, step))

    parts: list[Callable[[LmdbStore], Outcome]] = [
        lambda store: part(store, 1, {"a": gradients["a"], "small": gradients["small"]}, request="one"),
        lambda store: part(store, 2, {"b": gradients["b"]}, request="two"),
    ]
    monkeypatch.setattr(failpoints, "action", copy)
    parts[0](store)
    step = "last"
    parts[1](store)
    wait_for_folds(store, 3)
    store.close()  # the thread is past its last point
    monkeypatch.setattr(failpoints, "action", None)
    assert {point for _, point in copies} == {"first", "last"}
    assert hits["first chunk"] >= 2
    assert hits["last committed"] >= 2  # folds, too
    assert len(copies) > 10
    for directory, _ in copies:
        copied = open_lmdb(directory, clock)
        staged = {name: push.numbers for name, push in copied.pushes()}
        counts = {copied.record(name).count for name in gradients}
        assert staged in ({}, {"p": [1]})
        assert counts in ({1}, {2})
        assert counts == {1} or not staged
        for name in gradients:
            assert set(value(copied, name).tolist()) == counts
        outcomes = [each(copied) for each in (*parts, *parts)]
        assert [outcome.replayed for outcome in outcomes[2:]] == [True, True]
        assert outcomes[2].receipts == outcomes[3].receipts
        assert {receipt["count"] for receipt in outcomes[3].receipts.values()} == {2}
        for name in gradients:
            assert set(value(copied, name).tolist()) == {2}
        do(copied, *[Add(name=name, gradient=ones(1)) for name in gradients])
        assert values_in(copied) == 3
        for name in gradients:
            assert set(value(copied, name).tolist()) == {3}
        copied.close()
        assert wrong(directory) == []


# ----- expiry and damage -----


@pytest.mark.usefixtures("at_once")
def test_pushes_are_forgotten_when_idle(reopen: Reopen, clock: Clock, path: Path) -> None:
    store = reopen()
    create(store, *MANY, shape=(LARGE,))
    for number, name in enumerate(MANY):
        part(store, 1, {name: ones(LARGE)}, push=str(number), request="one")
        clock.advance(PUSH_SECONDS / 5)
    wait_for_entries(path, 4 + 4 + 4, "pushes", "values", "deadlines")
    assert [name for name, _ in store.pushes()] == ["1", "2", "3", "4"]
    with pytest.raises(GradserveError):
        part(store, 2, {"none": 1}, push="4")
    clock.advance(PUSH_SECONDS)
    wait_for_entries(path, 0, "pushes", "values", "deadlines")
    store.close()
    assert wrong(path) == []


@pytest.mark.usefixtures("untidied")
def test_a_transaction_frees_few_gradients(reopen: Reopen, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MOST_EXPIRED", 3)
    store = reopen()
    create(store, "a", "b")
    for number in range(4):
        part(store, 1, {"a": 1, "b": 1}, push=str(number), request="one")
    clock.advance(PUSH_SECONDS + 2)
    for left in ({"+pushes+": 2}, {}):
        add(store, "a", 0.0)
        with reading(store._env) as reader:
            assert reader.counts("+pushes+") == left


@pytest.mark.usefixtures("untidied")
def test_pushes_are_forgotten_during_adds(reopen: Reopen, clock: Clock, path: Path) -> None:
    store = reopen()
    create(store, "a", *MANY, shape=(LARGE,))
    part(store, 1, {name: ones(LARGE) for name in MANY}, request="one")
    part(store, 1, {}, push="q")
    clock.advance(PUSH_SECONDS)
    assert store.pushes() == []
    clock.advance(2)
    add(store, "a", 0.0)
    store.close()
    entries = entries_of(path)
    assert [entries[name] for name in ("pushes", "values", "deadlines")] == [0, 0, 0]


@pytest.fixture
def hurt(reopen: Reopen, path: Path) -> LmdbStore:
    """Return a store whose push "damaged" cannot be read."""
    store = reopen()
    create(store, "a", "b")
    for push in ("damaged", "well"):
        part(store, 1, {"a": [1, 2]}, push=push, contributor=f"who {push}")
    store.close()
    flip(path, b"who damaged")
    return reopen()


def test_a_damaged_push_is_named(hurt: LmdbStore, path: Path) -> None:
    assert [name for name, _ in hurt.pushes()] == ["well"]
    for number in (1, 2):
        with pytest.raises(BufferCorrupt, match="parts of the push 'damaged' are damaged on the disk"):
            part(hurt, number, {}, push="damaged", contributor="who damaged")
    part(hurt, 2, {}, push="well", contributor="who well")
    assert value(hurt, "a").tolist() == [1, 2]
    hurt.close()
    said = wrong(path)
    assert "WRONG: the push 'damaged' is damaged" in said
    assert len(said) == 2  # and the value that it has staged


def test_a_damaged_push_is_forgotten(hurt: LmdbStore, path: Path, clock: Clock) -> None:
    clock.advance(PUSH_SECONDS + 2)
    add(hurt, "a", 0.0)
    part(hurt, 1, {"a": [3, 4]}, push="damaged", parts=1)
    assert value(hurt, "a").tolist() == [3, 4]
    hurt.close()
    assert entries_of(path)["pushes"] == 0


def test_a_damaged_count_of_bytes_stops_no_other_push(hurt: LmdbStore, reopen: Reopen, path: Path) -> None:
    hurt.close()
    with lmdb.open(str(path), max_dbs=8) as env, env.begin(write=True) as txn:
        buffers = env.open_db(b"buffers", txn=txn)
        for key, sealed in [*txn.cursor(db=buffers)]:
            if key.startswith(b"~+pushes+"):
                assert sealed.startswith(b'[{"shape":[')
                txn.put(key, b'[{"shape":[' + b"9" * 30 + sealed[11:], db=buffers)
    store = reopen()
    assert part(store, 1, {"a": [1, 2]}, push="new").staged == [1]
    part(store, 2, {}, push="new")
    assert value(store, "a").tolist() == [1, 2]


@pytest.mark.parametrize("elements", [2000, LARGE])
def test_a_damaged_staged_gradient_is_reported(reopen: Reopen, path: Path, elements: int) -> None:
    """A small one before the push counts, a large one, which is not read before, by its buffer."""
    store = reopen()
    create(store, "a", "b", shape=(elements,))
    add(store, "a", 1.0)
    numbers = np.random.default_rng(1).normal(size=elements).astype(np.float32)
    part(store, 1, {"a": numbers, "b": 1}, request="one")
    store.close()
    flip(path, numbers[elements // 2 : elements // 2 + 100].tobytes())
    assert wrong(path) == ["WRONG: the gradient of 'a' in the push 'p' is damaged"]
    store = reopen()
    if elements < LARGE:
        with pytest.raises(BufferCorrupt):
            part(store, 2, {}, request="two")
        assert value(store, "b").tolist() == [0] * elements
        assert [push.numbers for _, push in store.pushes()] == [[1]]
        return
    part(store, 2, {}, request="two")
    for use in (lambda: value(store, "a"), lambda: add(store, "a", 1.0)):
        with pytest.raises(BufferCorrupt, match="is damaged on the disk"):
            use()
    do(store, Delete(name="a"))
    assert value(store, "b").tolist() == [1] * elements


def test_a_push_that_is_not_scheduled_is_reported(reopen: Reopen, path: Path) -> None:
    store = reopen()
    create(store, "a")
    part(store, 1, {"a": [1, 2]})
    with store._env.writing() as txn:
        txn.drop(store._env.deadlines, delete=False)
    store.close()
    assert [line for line in wrong(path) if "the push 'p' is not scheduled" in line]
