"""The clock of a store: setting the machine's time moves no age while the machine runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import lmdb
import pytest

from service.buffers import clock
from service.buffers.changes import Add
from service.buffers.lmdb import LmdbStore
from service.buffers.lmdb.format import CLOCK
from service.buffers.packed import seal, seed_of
from service.buffers.store import Store
from tests.buffers.calls import create, do, key, ones
from tests.buffers.stores import MAX_BYTES, Reopen, reopening

DAY = 24 * 3600.0
TIME = 1_700_000_000.0


class Machine:
    """A machine whose time tests set, and which they start again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time, self.boot = TIME, b"one"
        monkeypatch.setattr(clock, "machine_time", lambda: self.time)
        monkeypatch.setattr(clock, "boot", lambda: self.boot)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.fixture
def opened(tmp_path: Path, machine: Machine) -> Iterator[Reopen]:
    """Yield a function that opens the store once more."""
    yield from reopening(partial(LmdbStore, tmp_path, max_bytes=MAX_BYTES))


def replayed(store: Store, text: str = "k") -> bool:
    return do(store, Add(name="a", gradient=ones(2)), key=key(text)).replayed


def updated(store: Store, text: str) -> float:
    """Return the time of a change, in days since the start."""
    replayed(store, text)
    return round((store.record("a").updated - TIME) / DAY, 2)


@pytest.mark.parametrize("days", [-400, -1, 1, 400])
def test_ages_do_not_depend_on_the_time_of_the_machine(opened: Reopen, machine: Machine, days: int) -> None:
    store = opened()
    create(store, "a", ttl_seconds=3600.0)
    assert not replayed(store)
    machine.time += days * DAY
    store = opened()
    assert replayed(store)
    assert updated(store, "later") == 0


def test_the_clock_goes_on_with_the_monotonic_clock(opened: Reopen, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened()
    create(store, "a")
    assert not replayed(store)
    seconds = time.clock_gettime
    for days, remembered in ((0.9, True), (1.1, False)):
        monkeypatch.setattr(time, "clock_gettime", lambda number, days=days: seconds(number) + days * DAY)
        assert updated(store, f"{days}") == days
        store = opened()
        assert updated(store, f"{days}, reopened") == days
        assert replayed(store) == remembered


def test_the_machine_starts_again(opened: Reopen, machine: Machine) -> None:
    """Its time is taken, unless it lies before the newest key."""
    store = opened()
    create(store, "a")
    assert updated(store, "first") == 0
    for boot, days, expected in (("two", 0.5, 0.5), ("three", -400, 0.5), ("four", 0.7, 0.7), ("four", 5, 0.7)):
        machine.boot, machine.time = boot.encode(), TIME + days * DAY
        store = opened()
        assert updated(store, f"{boot} {days}") == expected
        assert replayed(store, "first")


def test_a_system_without_boots_starts_with_each_process(opened: Reopen, machine: Machine) -> None:
    machine.boot = b""
    store = opened()
    create(store, "a")
    assert updated(store, "first") == 0
    machine.time -= DAY
    assert updated(opened(), "second") == 0
    machine.time += 1.5 * DAY
    assert updated(opened(), "third") == 0.5


@pytest.mark.parametrize("place", [None, 0, 6, 8, -1])
def test_a_damaged_clock_is_started_again(opened: Reopen, tmp_path: Path, place: int | None) -> None:
    store = opened()
    create(store, "a")
    assert not replayed(store)
    store.close()
    with lmdb.open(str(tmp_path), max_dbs=8) as env, env.begin(write=True) as txn:
        meta = env.open_db(b"meta", txn=txn)
        stored = bytearray(txn.get(CLOCK, b"", db=meta))
        if place is not None:
            stored[place] ^= 64
        txn.put(CLOCK, b"short" if place is None else bytes(stored), db=meta)
    store = opened()
    assert replayed(store)
    assert updated(store, "later") == 0


def test_another_machine_with_the_same_name_starts_again(opened: Reopen, tmp_path: Path) -> None:
    """Its monotonic clock is not the one that the store knows."""
    store = opened()
    create(store, "a")
    assert not replayed(store)
    store.close()
    with lmdb.open(str(tmp_path), max_dbs=8) as env, env.begin(write=True) as txn:
        txn.put(CLOCK, seal(bytes(8) + b"one", seed_of(CLOCK)), db=env.open_db(b"meta", txn=txn))
    store = opened()
    assert replayed(store)
    assert updated(store, "later") == 0
