"""The limit of the store holds for every request, and no namespace fills the store for all with its keys."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import lmdb
import numpy as np
import pytest

from service.buffers.changes import Add, Change, Create, Delete, Take, Zero
from service.buffers.lmdb import LmdbStore
from service.buffers.lmdb.forget import forget
from service.buffers.lmdb.format import KEYS, USE, keep
from service.buffers.perform import Request
from service.buffers.store import Store
from service.errors import GradserveError, KeysFull, StoreFull
from tests.buffers.calls import add, create, do, key, ones, spec
from tests.buffers.stores import KEY_SECONDS, PATIENCE, Clock, Reopen, entries_of, open_lmdb, reopening, wrong
from tests.buffers.test_counts import meta

MOST = 1 << 20
SHARE = MOST // 4
NAMES = [f"b{number}" for number in range(60)]
_numbers = itertools.count()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[Store]:
    """Yield a store of a megabyte, with some buffers."""
    store = open_small(tmp_path, clock)
    create(store, *NAMES)
    yield store
    store.close()


def open_small(path: Path, clock: Clock) -> LmdbStore:
    return open_lmdb(path, clock, max_bytes=MOST)


def fails(store: Store, changes: list[Change], *, caller: str = "ann", most: int = 10_000) -> GradserveError:
    """Repeat the changes, each time with a new key, until they fail. Return the error."""
    for _ in range(most // 100):
        keys = [key(f"{next(_numbers)}", caller=caller) for _ in range(100)]
        errors = [store.submit(Request(changes, one)) for one in keys]
        if error := next((one for future in errors if (one := future.exception(PATIENCE))), None):
            assert isinstance(error, GradserveError)
            return error
    raise AssertionError("no limit")


ADDING_NOTHING: dict[str, list[Change]] = {
    "zero": [Zero(name=name) for name in NAMES],
    "add nothing": [Add(name="b0", gradient=ones(2), do_update=False)],
    "take": [Take(name="b0")],
    "create what is there": [Create(name="b0", spec=spec())],
    "no buffers": [],
}


@pytest.mark.parametrize("what", ADDING_NOTHING)
def test_keys_have_a_share_for_each_namespace(store: Store, clock: Clock, what: str) -> None:
    changes = ADDING_NOTHING[what]
    made = do(store, Zero(name="b0"), key=key("the first"))
    error = fails(store, changes)
    assert type(error) is KeysFull
    assert (error.status, error.context) == (507, {"limit": SHARE})
    for words in ("GRADSERVE_STORE_BYTES", "nothing was changed", "gradserve keys-forget"):
        assert words in error.detail
    assert store.size()[1] < MOST / 2
    do(store, *changes)
    assert do(store, Zero(name="b0"), key=key("the first")).receipts == made.receipts
    do(store, *changes, key=key("of another namespace", caller="bob"))
    add(store, "b1", [1, 2])
    with pytest.raises(KeysFull):
        do(store, *changes, key=key("still too many"))
    clock.advance(KEY_SECONDS)
    assert not do(store, *changes, key=key("they have expired")).replayed


def test_a_refused_key_changes_nothing_and_harms_no_other_request(store: Store) -> None:
    fails(store, ADDING_NOTHING["zero"])
    record, generation = store.record("b0"), store.generation()
    with pytest.raises(KeysFull):
        do(store, Add(name="b0", gradient=ones(2)), key=key("refused"))
    assert (store.record("b0"), store.generation()) == (record, generation)
    assert store.recall(key("refused")) is None


def test_an_expired_key_frees_its_bytes(store: Store, clock: Clock) -> None:
    for _ in range(3):
        assert type(fails(store, ADDING_NOTHING["zero"])) is KeysFull
        clock.advance(KEY_SECONDS)
    do(store, Zero(name="b0"), key=key("frees the others"))
    assert store.size()[1] < MOST / 2


def test_the_limit_holds_for_the_keys_of_all_namespaces(store: Store) -> None:
    errors = [fails(store, ADDING_NOTHING["zero"], caller=f"ann{number}") for number in range(8)]
    assert {type(error) for error in errors} == {KeysFull, StoreFull}
    assert store.size()[1] <= MOST
    for name in NAMES[:30]:
        do(store, Delete(name=name), key=key(name, caller="bob"))
        assert do(store, Delete(name=name), key=key(name, caller="bob")).replayed
    assert len(store.records()) == len(NAMES) - 30


def test_a_store_full_of_values_takes_keys_of_requests_that_add_nothing(store: Store) -> None:
    full = 0
    with suppress(StoreFull):
        while full < 1000:
            create(store, f"full{full}", shape=(1000,))
            add(store, f"full{full}", np.ones(1000, np.float32))
            full += 1
    for name in ("b0", "b1"):
        do(store, Take(name=name), key=key(name))
        do(store, Add(name=name, gradient=ones(2), do_update=False), key=key(f"nothing {name}"))
    with pytest.raises(StoreFull):
        add(store, f"full{full}", ones(1000))
    assert store.size()[1] <= MOST
    assert type(fails(store, ADDING_NOTHING["zero"])) is StoreFull
    assert store.size()[1] <= MOST
    for number in range(10):
        do(store, Delete(name=f"full{number}"), key=key(f"delete {number}"))
    add(store, "b0", [1, 2])


# ----- on a disk -----


@pytest.fixture
def opened(tmp_path: Path, clock: Clock) -> Iterator[Reopen]:
    """Yield a function that opens the store once more."""
    yield from reopening(partial(open_small, tmp_path, clock))


def used(path: Path) -> dict[str, int]:
    """Return the entries that the keys of each namespace use, as the store counts them."""
    stored = {name.removeprefix(KEYS).decode(): value for name, value in meta(path).items() if name.startswith(KEYS)}
    return {name: USE.unpack(value[:-8])[0] for name, value in stored.items()}


def test_the_store_counts_keys(opened: Reopen, tmp_path: Path, clock: Clock) -> None:
    store = opened()
    create(store, *NAMES)
    for number in range(5):
        do(store, *ADDING_NOTHING["zero"], key=key(f"{number}", caller=""))
        do(store, *ADDING_NOTHING["zero"], key=key(f"{number}"))
        do(store, Zero(name="b0"), key=key(f"{number}, one buffer"))
    store.close()
    assert used(tmp_path) == {"": 5, "ann": 10}
    assert wrong(tmp_path) == []
    store = opened()
    clock.advance(KEY_SECONDS)
    for _ in range(9):
        do(store, Zero(name="b0"))
    store.close()
    assert used(tmp_path) == {}
    assert wrong(tmp_path) == []


@pytest.mark.parametrize("damage", ["no counts", "a wrong count"])
def test_the_next_start_counts_again(opened: Reopen, tmp_path: Path, damage: str) -> None:
    store = opened()
    create(store, *NAMES)
    for number in range(5):
        do(store, *ADDING_NOTHING["zero"], key=key(f"{number}"))
    store.close()
    sound = meta(tmp_path)
    with lmdb.open(str(tmp_path), max_dbs=8) as env, env.begin(write=True) as txn:
        database = env.open_db(b"meta", txn=txn)
        if damage == "a wrong count":
            keep(txn, database, KEYS + b"ann", USE.pack(77, 78))
        else:
            txn.delete(KEYS + b"ann", db=database)
    assert len(wrong(tmp_path)) == 1
    store = opened()
    do(store, Zero(name="b0"))
    store.close()
    assert meta(tmp_path)[KEYS + b"ann"] == sound[KEYS + b"ann"]


# ----- gradserve keys-forget -----


def remembered(store: LmdbStore, texts: str, caller: str) -> str:
    return "".join(text for text in texts if store.recall(key(text, caller=caller)) is not None)


def test_keys_are_forgotten_by_age_and_namespace(
    opened: Reopen, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.buffers.lmdb.forget.clock_of", lambda env: clock)
    monkeypatch.setattr("service.buffers.lmdb.forget.MOST_AT_ONCE", 2)
    store = opened()
    create(store, *NAMES)
    made = {}
    for text in "abcdef":
        for caller in ("", "ann"):
            made[caller, text] = do(store, *ADDING_NOTHING["zero"], key=key(text, caller=caller)).receipts
        clock.advance(100)

    def left(seconds: float, namespace: str | None) -> tuple[int, str, str]:
        nonlocal store
        store.close()
        count = forget(tmp_path, MOST, seconds, namespace)
        assert wrong(tmp_path) == []
        store = opened()
        for caller, text in made:
            known = store.recall(key(text, caller=caller), NAMES)
            assert known is None or known.receipts == made[caller, text]
        return count, remembered(store, "abcdef", ""), remembered(store, "abcdef", "ann")

    assert left(700, None) == (0, "abcdef", "abcdef")
    assert left(501, "ann") == (1, "abcdef", "bcdef")
    assert left(301, None) == (5, "def", "def")
    assert left(0, "") == (3, "", "def")
    assert left(0, None) == (3, "", "")
    store.close()
    entries = entries_of(tmp_path)
    assert (entries["keys"], entries["outcomes"]) == (0, 0)


def test_a_full_store_has_room_once_keys_are_forgotten(
    opened: Reopen, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.buffers.lmdb.forget.clock_of", lambda env: clock)
    store = opened()
    create(store, *NAMES)
    while type(fails(store, ADDING_NOTHING["zero"], caller=f"ann{next(_numbers)}")) is KeysFull:
        pass
    with pytest.raises(StoreFull):
        add(store, "b0", [1, 2])
    store.close()
    assert forget(tmp_path, MOST, 0, None) > 1000
    store = opened()
    add(store, "b0", [1, 2])
    assert store.size()[1] < MOST / 4
