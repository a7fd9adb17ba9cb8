"""Many small values changed by one request: LMDB itself holds the values, and all are exact."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from service.buffers import failpoints
from service.buffers.changes import Add, Change, Create, Delete, Take, Zero
from service.buffers.lmdb import caches
from service.buffers.lmdb.store import LmdbStore
from service.dtypes import Array
from service.errors import StoreFull, UnknownBuffer
from tests.buffers.calls import create, do, ones, request, spec, state, value
from tests.buffers.stores import PATIENCE, Clock, Gate, Reopen, open_lmdb, wrong
from tests.kernels.equality import assert_same_bits

SIZE = 12_800
"""Elements of a value of 50 KB."""
NAMES = [f"n{number:02}" for number in range(40)]


def numbers(which: int) -> Array:
    return np.random.default_rng(which).normal(size=SIZE).astype(np.float32)


def adds(*, names: list[str] = NAMES, turn: int = 0) -> list[Change]:
    return [Add(name=name, gradient=numbers(100 * turn + number)) for number, name in enumerate(names)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the directory of the store of `reopen`."""
    return tmp_path / "store"


@pytest.fixture
def filled(reopen: Reopen) -> LmdbStore:
    """Return a store of forty buffers, each with one add."""
    store = reopen()
    create(store, *NAMES, shape=(SIZE,))
    do(store, *adds())
    return store


@pytest.mark.parametrize("elements", [1 << 14, (1 << 14) + 1])
def test_values_up_to_64_kb_are_stored_in_lmdb(reopen: Reopen, path: Path, elements: int) -> None:
    store = reopen()
    create(store, *NAMES, shape=(elements,))
    do(store, *[Add(name=name, gradient=ones(elements)) for name in NAMES])
    store.close()
    assert wrong(path) == []
    assert bool((path / "values").stat().st_size) == (4 * elements > 1 << 16)


def test_many_small_buffers_change_together(filled: LmdbStore, reopen: Reopen, path: Path) -> None:
    for turn in range(1, 4):
        do(filled, *adds(turn=turn))
    store = reopen()
    do(store, *adds(turn=4))
    for again in (False, True):
        store = reopen() if again else store
        for number, name in enumerate(NAMES):
            expected = np.zeros(SIZE, np.float32)
            for turn in range(5):
                expected += numbers(100 * turn + number)
            assert_same_bits(value(store, name), expected)
    store.close()
    assert wrong(path) == []
    assert (path / "data.mdb").stat().st_size < 4 * 40 * 4 * SIZE  # LMDB reuses the pages of earlier states


def test_one_transaction_may_change_a_value_again(
    filled: LmdbStore, reopen: Reopen, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads, takes, deletes and adds of the same values come before the commit."""
    gate, reverse = Gate(monkeypatch), NAMES[::-1]
    futures = gate.together(
        filled,
        [
            request(*adds(turn=1)),
            request(*[Add(name=name, gradient=ones(SIZE), want_value=True) for name in reverse]),
            request(*[Take(name=name) for name in NAMES[::2]]),
            request(*[Delete(name=name) for name in NAMES[:8]], *adds(turn=2, names=NAMES[8:])),
            request(*[Create(name=name, spec=spec((SIZE,))) for name in NAMES[:8]]),
            request(*adds(turn=3)),
            request(*[Take(name=name) for name in reverse]),
        ],
    )
    outcomes = [one.result(PATIENCE) for one in futures]
    for number, name in enumerate(NAMES):
        first = numbers(number) + numbers(100 + number) + 1
        assert_same_bits(outcomes[1].values[name], first)
        if number % 2 == 0:
            assert_same_bits(outcomes[2].values[name], first)
        total = np.zeros(SIZE, np.float32) if number % 2 == 0 or number < 8 else first
        if number >= 8:
            total = total + numbers(200 + number - 8)
        assert_same_bits(outcomes[6].values[name], total + numbers(300 + number))
        assert not value(filled, name).any()
    do(reopen(), *[Delete(name=name) for name in NAMES])
    reopen().close()
    assert wrong(path) == []


def test_a_failed_request_changes_nothing(
    filled: LmdbStore, reopen: Reopen, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, gate = state(filled), Gate(monkeypatch)
    with pytest.raises(UnknownBuffer):
        do(filled, *adds(turn=1), Zero(name="none"))
    assert state(filled) == before
    futures = gate.together(
        filled, [request(*adds(turn=1)), request(*adds(turn=2), Zero(name="none")), request(*adds(turn=3))]
    )
    assert [type(one.exception(PATIENCE)) for one in futures] == [type(None), UnknownBuffer, type(None)]
    filled.close()
    assert wrong(path) == []
    store = reopen()
    for number, name in enumerate(NAMES):
        assert_same_bits(value(store, name), numbers(number) + numbers(100 + number) + numbers(300 + number))


@pytest.mark.parametrize("cached", [0, 3 * 51_200])
def test_random_changes_keep_the_right_values(
    reopen: Reopen, path: Path, monkeypatch: pytest.MonkeyPatch, cached: int
) -> None:
    """Batches and single requests change small and large values; the writer caches few or none."""
    monkeypatch.setattr(caches, "MOST_BYTES_OF_VALUES", cached)
    store, draw = reopen(), random.Random(cached)
    sizes = {f"n{number:02}": draw.choice([1, 2047, 2048, 5000, 16_384, 16_385, 70_000]) for number in range(30)}
    for name, size in sizes.items():
        create(store, name, shape=(size,))
    expected = {name: np.zeros(size, np.float32) for name, size in sizes.items()}
    for turn in range(60):
        changes: list[Change] = []
        for name in draw.sample(sorted(sizes), draw.choice([1, 3, 30])):
            match draw.randrange(6):
                case 0:
                    changes.append(Take(name=name))
                    expected[name] = np.zeros_like(expected[name])
                case 1:
                    changes.append(Add(name=name, gradient=np.full(sizes[name], turn, np.float32), overwrite=True))
                    expected[name] = np.full(sizes[name], turn, np.float32)
                case _:
                    changes.append(Add(name=name, gradient=np.full(sizes[name], turn, np.float32)))
                    expected[name] = expected[name] + np.float32(turn)
        do(store, *changes)
        if turn % 20 == 19:
            store.close()
            assert wrong(path) == []
            store = reopen()
        for name in draw.sample(sorted(sizes), 3):
            assert_same_bits(value(store, name), expected[name])
    for name, array in expected.items():
        assert_same_bits(value(store, name), array)


def test_copies_at_every_step_of_the_writer_are_whole(
    filled: LmdbStore, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each copy is the store that a crash at this step would leave."""
    copies: list[tuple[Path, str]] = []

    def copy(point: str) -> None:
        directory = tmp_path / point
        directory.mkdir()
        for file in ("data.mdb", "values"):
            shutil.copy(tmp_path / "store" / file, directory)
        copies.append((directory, point))

    monkeypatch.setattr(failpoints, "action", copy)
    before, _ = state(filled), do(filled, *adds(turn=1))
    monkeypatch.setattr(failpoints, "action", None)
    after = state(filled)
    assert [point for _, point in copies] == ["made", "before commit", "committed"]
    for directory, point in copies:
        copied = open_lmdb(directory, clock)
        assert state(copied) == (after if point == "committed" else before)
        do(copied, *adds(turn=2))
        copied.close()
        assert wrong(directory) == []


def test_a_full_store_changes_nothing(tmp_path: Path, clock: Clock) -> None:
    store = open_lmdb(tmp_path, clock, max_bytes=10 << 18)
    create(store, *NAMES, shape=(SIZE,))
    do(store, *adds(names=NAMES[:30]))
    before = state(store)
    create(store, *[f"more{number}" for number in range(60)], shape=(SIZE,))
    with pytest.raises(StoreFull, match="nothing was changed"):
        do(store, *[Add(name=f"more{number}", gradient=ones(SIZE)) for number in range(60)])
    assert {name: found for name, found in state(store).items() if name in NAMES} == before
    do(store, *[Delete(name=name) for name in NAMES])
    do(store, *[Add(name=f"more{number}", gradient=ones(SIZE)) for number in range(30)])
    store.close()
    assert wrong(tmp_path) == []
