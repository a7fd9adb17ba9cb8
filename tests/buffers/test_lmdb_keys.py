"""What a store on the disk keeps with an idempotency key: exactly what a replay answers, in little room."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import orjson
import pytest

from service.buffers.changes import Add, Change, Create, Delete, Restore, Take, Zero
from service.buffers.lmdb import LmdbStore
from service.buffers.lmdb.receipts import LIST_MICROSECONDS, MANY
from service.buffers.names import BufferName
from service.buffers.perform import Outcome, Request
from service.buffers.record import Record
from service.errors import BufferCorrupt, EpochGone
from tests.buffers.calls import (
    KEY_SECONDS,
    PATIENCE,
    Clock,
    create,
    do,
    entries_of,
    key,
    ones,
    spec,
    wrong,
)
from tests.buffers.test_lmdb import wait_for_entries
from tests.buffers.test_lmdb_damage import flip

NAMES = [f"layer.{number}.weight" for number in range(200)]
LIST_SECONDS = LIST_MICROSECONDS / 1e6


def adds(names: Sequence[str] = NAMES, **rest: Any) -> list[Add]:
    return [Add(name=name, gradient=ones(2), **rest) for name in names]


def restore(store: LmdbStore, **states: Sequence[Any]) -> None:
    """Create the buffers, each in its own state: a column of values for each field."""
    changes = []
    for number, name in enumerate(NAMES):
        state = {field: column[number] for field, column in states.items()}
        record = Record(BufferName("", name), spec(), 0, 1e9, 1e9, **state)
        changes.append(Restore(name=name, record=record, value=ones(2)))
    do(store, *changes)


def random_states(most: int = 10**6) -> dict[str, list[Any]]:
    chance = np.random.default_rng(5)
    counts = chance.integers(0, most, len(NAMES))
    return {
        "epoch": chance.integers(0, most, len(NAMES)).tolist(),
        "version": chance.integers(0, most, len(NAMES)).tolist(),
        "count": counts.tolist(),
        "weight": (counts * chance.random(len(NAMES))).tolist(),
    }


def text(outcome: Outcome) -> bytes:
    """The receipts as a client reads them."""
    return orjson.dumps(outcome.receipts)


CHANGES: dict[str, Callable[[str], Change]] = {
    "add": lambda name: Add(name=name, gradient=ones(2), weight=0.1),
    "add nothing": lambda name: Add(name=name, gradient=ones(2), do_update=False),
    "overwrite by minus zero": lambda name: Add(name=name, gradient=ones(2), weight=-0.0, overwrite=True),
    "zero": lambda name: Zero(name=name),
    "take": lambda name: Take(name=name),
    "delete": lambda name: Delete(name=name),
    "create": lambda name: Create(name=f"new.{name}", spec=spec(ttl_seconds=12.5)),
    "create what is there": lambda name: Create(name=name, spec=spec()),
}


@pytest.mark.parametrize("count", [1, 2, MANY - 1, MANY, 200])
def test_a_replay_answers_the_same_bytes(reopen: Callable[[], LmdbStore], count: int) -> None:
    store = reopen()
    restore(store, **random_states())
    names, chance = NAMES[:count], np.random.default_rng(count)
    for what, change in CHANGES.items():
        changes = [change(name) for name in chance.permutation(names).tolist()]
        request = Request(changes, key(what), sources=("1-2-3", "4-5-6"))
        made = store.submit(request).result(PATIENCE)
        store = reopen()
        again = store.submit(request).result(PATIENCE)
        assert (again.replayed, again.sources) == (True, ("1-2-3", "4-5-6"))
        assert text(again) == text(made)
        known = store.recall(key(what))
        assert known is not None
        assert [*known.receipts] == [*known.ids] == [change.name for change in changes]
        if what == "delete":
            create(store, *names)
        assert all(known.ids[name] == store.record(name).id for name in names if what not in ("create", "delete"))
    assert store.record(names[0]).version == 0


def test_a_replay_of_mixed_changes_answers_the_same_bytes(reopen: Callable[[], LmdbStore]) -> None:
    store = reopen()
    create(store, *NAMES[::2], quorum=1)
    create(store, *NAMES[1::2])
    kinds = [*CHANGES.values()]
    for number, some in enumerate((kinds[:6], kinds)):
        changes = [some[place % len(some)](name) for place, name in enumerate(NAMES)]
        made = do(store, *changes, key=key(f"{number}"))
        assert text(do(reopen(), *changes, key=key(f"{number}"))) == text(made)
        store = reopen()
        create(store, *{*NAMES} - {record.name for record in store.records()})


@pytest.mark.parametrize(
    ("field", "number"),
    [
        *[("weight", number) for number in (1, -0.0, 5e-324, 1e308)],
        *[(field, (1 << 63) - 1) for field in ("version", "count", "epoch")],
    ],
)
def test_a_replay_answers_the_same_bytes_for_buffers_that_were_imported(
    reopen: Callable[[], LmdbStore], field: str, number: Any
) -> None:
    store = reopen()
    restore(store, **{field: [*[1.0 if field == "weight" else 1] * (len(NAMES) - 1), number]})
    for changes in (adds(do_update=False), adds(), [Take(name=name) for name in NAMES]):
        made = do(store, *changes, key=key(repr(changes[0])))
        assert text(do(reopen(), *changes, key=key(repr(changes[0])))) == text(made)
        store = reopen()


def test_a_buffer_that_was_replaced_since_is_found(reopen: Callable[[], LmdbStore]) -> None:
    store = reopen()
    create(store, *NAMES)
    made = do(store, *adds(), key=key())
    do(store, Delete(name=NAMES[7]))
    create(store, NAMES[7])
    with pytest.raises(EpochGone, match=f"in a buffer '{NAMES[7]}' that no longer exists") as caught:
        do(store, *adds(), key=key())
    assert caught.value.context["receipts"] == made.receipts


# ----- room -----


def bytes_per_buffer(store: LmdbStore, requests: int = 100) -> float:
    """What a keyed add to all buffers takes of the store, beyond the list of their names."""
    do(store, *adds(), key=key("the first"))
    before = store.size()[1]
    for number in range(requests):
        do(store, *adds(), key=key(f"{number}"))
    return (store.size()[1] - before) / requests / len(NAMES)


def test_a_keyed_add_takes_few_bytes(reopen: Callable[[], LmdbStore]) -> None:
    store = reopen()
    create(store, *NAMES)
    assert bytes_per_buffer(store) < 3


def test_a_keyed_add_takes_few_bytes_if_no_two_buffers_are_alike(reopen: Callable[[], LmdbStore]) -> None:
    store, states = reopen(), random_states()
    restore(store, version=states["version"])
    assert bytes_per_buffer(store) < 8


def lists_in(path: Path) -> dict[bytes, bytes]:
    """The lists of names in a store that is closed."""
    with lmdb.open(str(path), max_dbs=8, readonly=True) as env, env.begin() as txn:
        return {
            bytes(place): bytes(sealed) for place, sealed in txn.cursor(env.open_db(b"lists", txn=txn, create=False))
        }


def test_requests_for_the_same_buffers_share_a_list(
    reopen: Callable[[], LmdbStore], clock: Clock, tmp_path: Path
) -> None:
    store = reopen()
    create(store, *NAMES)
    steps: list[tuple[Sequence[Change], float, int]] = [
        (adds(), 0, 1),
        ([Zero(name=name) for name in NAMES], 1, 1),
        (adds(NAMES[::-1]), 1, 2),
        (adds(NAMES[: MANY - 1]), 1, 2),
        ([Delete(name=name) for name in NAMES[:MANY]], 1, 3),
        ([Create(name=name, spec=spec()) for name in NAMES[:MANY]], 1, 3),
        (adds(), 1, 4),  # some have other ids now
        (adds(), LIST_SECONDS, 5),
    ]
    for number, (changes, later, expected) in enumerate(steps):
        clock.advance(later)
        made = do(store, *changes, key=key(f"{number}"))
        assert text(do(store, *changes, key=key(f"{number}"))) == text(made)
        store.close()
        assert len(lists_in(tmp_path / "store")) == expected
        store = reopen()
    store.close()
    assert wrong(tmp_path / "store") == []


def test_a_list_that_no_key_needs_is_removed(reopen: Callable[[], LmdbStore], clock: Clock, tmp_path: Path) -> None:
    """However many different requests come over time."""
    store = reopen()
    create(store, *NAMES)
    most = 0
    for number in range(300):
        do(store, *adds(NAMES[number % 100 :][:MANY]), key=key(f"{number}"))
        clock.advance(LIST_SECONDS / 20)
        if number % 20 == 0:
            store.close()
            most = max(most, len(lists_in(tmp_path / "store")))
            store = reopen()
    assert most <= 45  # of an hour, of the hour before, and of the last `KEY_SECONDS`
    clock.advance(LIST_SECONDS + KEY_SECONDS)
    for _ in range(10):
        do(store, *adds(NAMES[:1]))
    store.close()
    entries = entries_of(tmp_path / "store")
    assert (entries["keys"], entries["lists"], entries["outcomes"]) == (0, 0, 0)


@pytest.mark.usefixtures("at_once")
def test_a_list_that_no_key_needs_is_removed_when_idle(
    reopen: Callable[[], LmdbStore], clock: Clock, tmp_path: Path
) -> None:
    store = reopen()
    create(store, *NAMES)
    for start in range(30):
        do(store, *adds(NAMES[start:]), key=key(f"{start}"))
    clock.advance(LIST_SECONDS + KEY_SECONDS)
    wait_for_entries(tmp_path / "store", 0, "keys", "lists", "outcomes")


def test_a_list_stays_while_one_key_needs_it(reopen: Callable[[], LmdbStore], clock: Clock) -> None:
    store = reopen()
    create(store, *NAMES)
    clock.now = (clock.now // LIST_SECONDS + 1) * LIST_SECONDS
    do(store, *adds(), key=key("early"))
    clock.advance(LIST_SECONDS - 1)
    made = do(store, *adds(), key=key("late"))
    clock.advance(KEY_SECONDS - 1)
    for _ in range(10):
        do(store, *adds(NAMES[:1]))
    assert store.recall(key("early")) is None
    assert text(do(store, *adds(), key=key("late"))) == text(made)


@pytest.mark.usefixtures("untidied")
def test_a_clock_that_was_set_back_loses_no_list(reopen: Callable[[], LmdbStore], clock: Clock) -> None:
    """As long as a key is there, its list is, whatever the clock said meanwhile."""
    store = reopen()
    create(store, *NAMES)
    for number in range(100):
        made = do(store, *adds(), key=key(f"{number}"))
        clock.advance(0.01)
    clock.advance(KEY_SECONDS + 2 * LIST_SECONDS)
    do(store, *adds(NAMES[:1]))
    clock.advance(-KEY_SECONDS - 2 * LIST_SECONDS)
    assert store.recall(key("0")) is None
    assert text(do(store, *adds(), key=key("99"))) == text(made)


OTHER = """
import sys
from pathlib import Path
import orjson
from service.buffers.lmdb import LmdbStore
from tests.buffers.calls import KEY_SECONDS, MAX_BYTES, do, key
from tests.buffers.test_lmdb_keys import adds, text

now = float(sys.argv[2])
store = LmdbStore(Path(sys.argv[1]), max_bytes=MAX_BYTES, key_seconds=KEY_SECONDS, clock=lambda: now)
sys.stdout.buffer.write(text(do(store, *adds(), key=key("of the other process"))))
store.close()
"""


def test_processes_share_lists(reopen: Callable[[], LmdbStore], clock: Clock, tmp_path: Path) -> None:
    """Another process, whose clock is fast, removes the list that this process stored last."""
    store = reopen()
    create(store, *NAMES)
    do(store, *adds(), key=key("expires"))
    arguments = [str(tmp_path / "store"), str(clock.now + KEY_SECONDS + LIST_SECONDS)]
    command = [sys.executable, "-c", OTHER, *arguments]
    other = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, timeout=PATIENCE, check=True)
    assert store.recall(key("expires")) is None
    made = do(store, *adds(), key=key("stays"))
    assert text(do(store, *adds(), key=key("stays"))) == text(made)
    assert text(do(store, *adds(), key=key("of the other process"))) == other.stdout
    store.close()
    assert len(lists_in(tmp_path / "store")) == 2
    assert wrong(tmp_path / "store") == []


# ----- damage -----


@pytest.fixture
def hurt(reopen: Callable[[], LmdbStore], tmp_path: Path) -> LmdbStore:
    """A store with the keys "one" and "two", whose list of names is damaged, and "well" and "few"."""
    store = reopen()
    create(store, *NAMES)
    do(store, *adds(), key=key("one"))
    do(store, *adds(), key=key("two"))
    store.close()
    (sealed,) = lists_in(tmp_path / "store").values()
    store = reopen()
    do(store, *adds(NAMES[::-1]), key=key("well"))
    do(store, *adds(NAMES[:2]), key=key("few"))
    store.close()
    flip(tmp_path / "store", sealed[:100])
    return reopen()


def test_a_damaged_list_harms_its_keys_only(
    hurt: LmdbStore, reopen: Callable[[], LmdbStore], clock: Clock, tmp_path: Path
) -> None:
    assert do(hurt, *adds(NAMES[::-1]), key=key("well")).replayed
    assert do(hurt, *adds(NAMES[:2]), key=key("few")).replayed
    for text in ("one", "two"):
        with pytest.raises(BufferCorrupt, match="outcome of this Idempotency-Key is damaged on the disk"):
            do(hurt, *adds(), key=key(text))
        with pytest.raises(BufferCorrupt):
            hurt.recall(key(text))
    hurt.close()
    expected = "WRONG: 2 idempotency keys are damaged: a retry with one of them fails"
    assert wrong(tmp_path / "store") == [expected]
    store = reopen()
    clock.advance(LIST_SECONDS + KEY_SECONDS)
    for _ in range(10):
        do(store, *adds(NAMES[:1]))
    store.close()
    entries = entries_of(tmp_path / "store")
    assert (entries["keys"], entries["lists"]) == (0, 0)


def test_the_next_request_mends_a_damaged_list(hurt: LmdbStore, tmp_path: Path) -> None:
    assert not do(hurt, *adds(), key=key("three")).replayed
    for text in ("one", "two", "three"):
        assert do(hurt, *adds(), key=key(text)).receipts[NAMES[0]]["updated"]
    hurt.close()
    assert wrong(tmp_path / "store") == []


@pytest.mark.parametrize("database", ["keys", "outcomes"])
def test_a_damaged_key_harms_no_other(
    reopen: Callable[[], LmdbStore], clock: Clock, tmp_path: Path, database: str
) -> None:
    store = reopen()
    create(store, "a", "b")
    do(store, *adds(["a"]), key=key("hurt"))
    store.close()
    with lmdb.open(str(tmp_path / "store"), max_dbs=8) as env, env.begin(write=True) as txn:
        cursor = txn.cursor(env.open_db(database.encode(), txn=txn))
        assert cursor.first()
        cursor.put(cursor.key(), cursor.value()[:-1] + bytes([cursor.value()[-1] ^ 1]))
    store = reopen()
    do(store, *adds(["b"]), key=key("well"))
    with pytest.raises(BufferCorrupt, match="outcome of this Idempotency-Key is damaged on the disk"):
        do(store, *adds(["a"]), key=key("hurt"))
    assert do(store, *adds(["b"]), key=key("well")).replayed
    assert [record.count for record in store.records()] == [1, 1]
    store.close()
    assert wrong(tmp_path / "store") == ["WRONG: 1 idempotency keys are damaged: a retry with one of them fails"]
    if database == "outcomes":
        store = reopen()
        clock.advance(KEY_SECONDS)
        do(store, *adds(["b"]))
        assert not do(store, *adds(["a"]), key=key("hurt")).replayed
