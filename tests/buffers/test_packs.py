"""Values of middle size that change together share slots: all of them are right, and a slot that is left is free."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import lmdb
import numpy as np
import pytest

from service.buffers.changes import Add, Change, Create, Delete, Take, Zero
from service.buffers.doctor import examine
from service.buffers.lmdb import store as module
from service.buffers.lmdb import value_writer as _value_writer
from service.buffers.lmdb.environment import Environment
from service.buffers.lmdb.packs import PACK
from service.buffers.lmdb.reader import Reader
from service.buffers.lmdb.slots import CHUNK, SlotFile
from service.buffers.lmdb.store import LmdbStore
from service.dtypes import Array
from service.errors import BufferCorrupt, StoreFull, UnknownBuffer
from tests.buffers.calls import (
    MAX_BYTES,
    PATIENCE,
    Clock,
    Gate,
    add,
    create,
    do,
    ones,
    open_lmdb,
    request,
    spec,
    state,
    value,
    wrong,
)
from tests.kernels.equality import assert_same_bits

SIZE = 12_800
"""Elements of a value of 50 KB; five share a slot."""
NAMES = [f"n{number:02}" for number in range(40)]
INLINE = 20
"""Of these values so many stay in LMDB, and the others share four slots."""


def numbers(which: int) -> Array:
    return np.random.default_rng(which).normal(size=SIZE).astype(np.float32)


def adds(*, names: list[str] = NAMES, turn: int = 0) -> list[Change]:
    return [Add(name=name, gradient=numbers(100 * turn + number)) for number, name in enumerate(names)]


def shared(path: Path) -> list[int]:
    """How many values are in each of the slots that several share; of a store that is closed."""
    env = Environment(path, max_bytes=MAX_BYTES, readonly=True)
    with env.reading() as txn:
        lists = Reader(env, txn).packs()
    env.close()
    return sorted(-1 if listed is None else len(listed) for listed in lists.values())


def set_meta(path: Path, name: bytes, entry: bytes | None) -> None:
    with lmdb.open(str(path), max_dbs=8) as env, env.begin(write=True) as txn:
        meta = env.open_db(b"meta", txn=txn)
        if entry is None:
            txn.delete(name, db=meta)
        else:
            txn.put(name, entry, db=meta)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where `reopen` has its store."""
    return tmp_path / "store"


@pytest.fixture
def filled(reopen: Callable[[], LmdbStore]) -> LmdbStore:
    """A store of which some values share slots."""
    store = reopen()
    create(store, *NAMES, shape=(SIZE,))
    do(store, *adds())
    return store


def test_values_that_change_together_share_slots(
    filled: LmdbStore, reopen: Callable[[], LmdbStore], path: Path
) -> None:
    filled.close()
    assert (wrong(path), shared(path)) == ([], [5] * 4)
    assert (path / "data.mdb").stat().st_size < 3 << 19
    assert (path / "values").stat().st_size <= 4 * CHUNK
    store = reopen()
    for turn in range(1, 4):
        do(store, *adds(turn=turn))
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
    assert (wrong(path), shared(path)) == ([], [5] * 4)
    assert (path / "values").stat().st_size <= 12 * CHUNK


def test_a_slot_is_free_as_soon_as_no_value_is_in_it(
    filled: LmdbStore, reopen: Callable[[], LmdbStore], path: Path
) -> None:
    ways: list[Callable[[str], Change]] = [
        lambda name: Add(name=name, gradient=ones(SIZE)),
        lambda name: Zero(name=name),
        lambda name: Delete(name=name),
        lambda name: Take(name=name),
        lambda name: Add(name=name, gradient=ones(SIZE), overwrite=True),
    ]
    for number, name in enumerate(NAMES):
        do(filled, ways[number % 5](name))
    for number, name in enumerate(NAMES):
        kind = number % 5
        if kind != 2:
            expected = {0: numbers(number) + 1, 4: ones(SIZE)}.get(kind, np.zeros(SIZE, np.float32))
            assert_same_bits(value(filled, name), expected)
    filled.close()
    assert (wrong(path), shared(path)) == ([], [])
    store = reopen()
    for name in NAMES[3::5]:
        do(store, Delete(name=name))
    store.close()
    assert (wrong(path), shared(path)) == ([], [])


@pytest.mark.parametrize("remembered", [False, True])
def test_what_is_left_in_a_slot_that_is_half_empty_goes_to_lmdb(
    filled: LmdbStore, reopen: Callable[[], LmdbStore], path: Path, remembered: bool
) -> None:
    store = filled if remembered else reopen()
    for turn in range(3):  # five are in each slot, and three are more than half
        do(store, *[Zero(name=name) for name in NAMES[INLINE + turn :: 5]])
    names = [name for number, name in enumerate(NAMES) if number < INLINE or number % 5 > 2]
    for name in names:
        assert_same_bits(value(store, name), numbers(NAMES.index(name)))
    do(store, *[Add(name=name, gradient=ones(SIZE)) for name in names[INLINE:]])
    create(store, "large", shape=(CHUNK,))
    for _ in range(3):
        add(store, "large", 1.0)  # takes what is free
    for again in (False, True):
        store = reopen() if again else store
        for number, name in enumerate(names):
            assert_same_bits(value(store, name), numbers(NAMES.index(name)) + (number >= INLINE))
    store.close()
    assert (wrong(path), shared(path)) == ([], [])


def test_what_a_transaction_has_put_into_a_slot_stays(reopen: Callable[[], LmdbStore], path: Path) -> None:
    store, names = reopen(), NAMES[: INLINE + 7]
    create(store, *names, shape=(SIZE,))
    for turn in range(3):
        do(store, *adds(names=names, turn=turn))
    store.close()
    assert (wrong(path), shared(path)) == ([], [2, 5])


def test_what_is_more_than_half_of_a_slot_stays(filled: LmdbStore, reopen: Callable[[], LmdbStore], path: Path) -> None:
    for turn in range(2):
        do(filled, *[Zero(name=name) for name in NAMES[INLINE + turn :: 5]])
    filled.close()
    assert (wrong(path), shared(path)) == ([], [3] * 4)


def test_no_more_is_moved_than_has_left(
    reopen: Callable[[], LmdbStore], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_value_writer, "MOST_INLINE", 0)
    store, names = reopen(), [f"n{number:03}" for number in range(64)]  # eight are in each slot
    create(store, *names, shape=(8192,))
    do(store, *[Add(name=name, gradient=ones(8192)) for name in names])
    do(store, *[Zero(name=name) for number, name in enumerate(names) if number % 8 < 3])
    # 256, 192 and 128 KB leave, and so two slots each time may, which have 128, 96 and 64 KB left.
    for turn, left in ((3, [4] * 6), (4, [3] * 4), (5, [2] * 2)):
        do(store, *[Zero(name=name) for name in names[turn::8]])
        store.close()
        assert (wrong(path), shared(path)) == ([], left)
        store = reopen()
    do(store, *[Zero(name=name) for number, name in enumerate(names) if number % 8 == 6])
    for name in names[7::8]:
        assert_same_bits(value(store, name), ones(8192))
    store.close()
    assert (wrong(path), shared(path)) == ([], [])


def test_values_that_never_change_hold_no_slots(
    reopen: Callable[[], LmdbStore], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each comes together with many that do."""
    monkeypatch.setattr(_value_writer, "MOST_INLINE", 0)
    store, hot = reopen(), [f"hot{number}" for number in range(40)]
    create(store, *hot, *[f"cold{number}" for number in range(100)], shape=(8192,))
    for turn in range(100):
        names = [*hot, f"cold{turn}"]
        random.Random(turn).shuffle(names)
        do(store, *[Add(name=name, gradient=ones(8192)) for name in names])
    for turn in range(100):
        assert_same_bits(value(store, f"cold{turn}"), ones(8192))
    store.close()
    assert wrong(path) == []
    assert (path / "values").stat().st_size <= 30 * CHUNK  # six are filled each time, and there are three states


def test_where_there_is_no_room_nothing_is_moved(
    filled: LmdbStore, reopen: Callable[[], LmdbStore], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stays = NAMES[INLINE::5]
    with monkeypatch.context() as patch:
        patch.setattr(SlotFile, "has_room", lambda file, size=0: False)
        do(filled, *[Delete(name=name) for name in NAMES[INLINE:] if name not in stays])
    filled.close()
    assert (wrong(path), shared(path)) == ([], [1] * 4)
    store = reopen()
    for name in stays:
        assert_same_bits(value(store, name), numbers(NAMES.index(name)))


def test_deleting_makes_room(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a store full of small values, of which one in eight is left."""
    monkeypatch.setattr(_value_writer, "MOST_INLINE", 0)
    store, names = open_lmdb(tmp_path, clock, max_bytes=40 * CHUNK), [f"n{number:03}" for number in range(280)]
    create(store, *names, shape=(8192,))
    create(store, "new", shape=(1 << 21,))
    do(store, *[Add(name=name, gradient=ones(8192)) for name in names])
    with pytest.raises(StoreFull):
        add(store, "new", 1.0)
    for number, name in enumerate(names):
        if number % 8:
            do(store, Delete(name=name))
    add(store, "new", 1.0)
    for name in names[::8]:
        assert_same_bits(value(store, name), ones(8192))
    store.close()
    assert wrong(tmp_path) == []


def test_the_same_values_again_in_one_transaction(
    filled: LmdbStore, reopen: Callable[[], LmdbStore], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was changed is looked at, taken, deleted and changed again before it is written."""
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
    filled.close()
    assert (wrong(path), sum(shared(path))) == ([], len(NAMES))  # of the last take; LMDB had its share before
    store = reopen()
    do(store, *[Delete(name=name) for name in NAMES])
    store.close()
    assert (wrong(path), shared(path)) == ([], [])


def test_what_is_made_and_deleted_in_one_transaction_leaves_nothing(
    filled: LmdbStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    futures = Gate(monkeypatch).together(
        filled, [request(*adds(turn=1)), request(*[Delete(name=name) for name in NAMES])]
    )
    assert [one.exception(PATIENCE) for one in futures] == [None, None]
    filled.close()
    assert (wrong(path), shared(path)) == ([], [])


def test_values_below_32_kb_stay_in_lmdb(reopen: Callable[[], LmdbStore], path: Path) -> None:
    store, names = reopen(), [f"n{number}" for number in range(60)]
    create(store, *names, shape=(8191,))
    do(store, *[Add(name=name, gradient=ones(8191)) for name in names])
    store.close()
    assert (wrong(path), shared(path), (path / "values").stat().st_size) == ([], [], 0)


def test_a_disk_that_takes_little_at_a_time(
    filled: LmdbStore, reopen: Callable[[], LmdbStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwrite
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", lambda fd, pieces, offset: write(fd, pieces[0][:100], offset))
        patch.setattr(os, "pwrite", lambda fd, data, offset: write(fd, data[:1000], offset))
        do(filled, *adds(turn=1))
    store = reopen()
    for number, name in enumerate(NAMES):
        assert_same_bits(value(store, name), numbers(number) + numbers(100 + number))


def test_a_request_that_fails_changes_nothing(
    filled: LmdbStore, reopen: Callable[[], LmdbStore], path: Path, monkeypatch: pytest.MonkeyPatch
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


@pytest.mark.parametrize("kept", [0, 3 * 51_200])
def test_random_changes(
    reopen: Callable[[], LmdbStore], path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """Some at once, some alone, of all sizes, of which the writer remembers few or none."""
    monkeypatch.setattr(_value_writer, "KEPT_BYTES", kept)
    monkeypatch.setattr(_value_writer, "MOST_INLINE", 1 << 16)
    monkeypatch.setattr(_value_writer, "PACKED", 1 << 13)
    store, draw = reopen(), random.Random(kept)
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
    """Each is what a crash at that moment would leave."""
    copies: list[tuple[Path, bool]] = []

    def copy(point: str) -> None:
        directory = tmp_path / str(len(copies))
        directory.mkdir()
        for file in ("data.mdb", "values"):
            shutil.copy(tmp_path / "store" / file, directory)
        copies.append((directory, point == "committed"))

    monkeypatch.setattr(module, "reached", copy)
    before, _ = state(filled), do(filled, *adds(turn=1))
    monkeypatch.setattr(module, "reached", lambda point: None)
    after = state(filled)
    assert len(copies) == 7  # four slots, and the three steps of the commit
    for directory, done in copies:
        copied = open_lmdb(directory, clock)
        assert state(copied) == (after if done else before)
        do(copied, *adds(turn=2))
        copied.close()
        assert wrong(directory) == []


# ----- damage -----


def flip(path: Path, name: str) -> None:
    """Change a bit of a buffer's value, as it was first, in the file of the slots."""
    data = bytearray(path.read_bytes())
    place = data.find(numbers(NAMES.index(name))[100:200].tobytes())
    assert place >= 0
    data[place] ^= 1
    path.write_bytes(data)


def test_a_damaged_value_harms_one_buffer(filled: LmdbStore, reopen: Callable[[], LmdbStore], path: Path) -> None:
    hurt = NAMES[INLINE + 2]
    filled.close()
    flip(path / "values", hurt)
    assert wrong(path) == [f"WRONG: the running value of the buffer {hurt!r} is damaged"]
    store = reopen()
    for use in (lambda: value(store, hurt), lambda: add(store, hurt, ones(SIZE)), lambda: do(store, *adds(turn=1))):
        with pytest.raises(BufferCorrupt, match="is damaged on the disk"):
            use()
    for number, name in enumerate(NAMES):
        if name != hurt:
            assert_same_bits(value(store, name), numbers(number))
            add(store, name, ones(SIZE))
    add(store, hurt, numbers(7), overwrite=True)
    assert_same_bits(value(reopen(), hurt), numbers(7))
    reopen().close()
    assert (wrong(path), shared(path)) == ([], [])


@pytest.mark.parametrize("entry", [b"", bytes(16), b"\2" * 20, None])
def test_a_slot_whose_list_is_damaged_is_never_free(
    filled: LmdbStore, reopen: Callable[[], LmdbStore], path: Path, entry: bytes | None
) -> None:
    filled.close()
    set_meta(path, PACK + (1).to_bytes(8, "big"), entry)
    assert wrong(path) == ["WRONG: the list of slot 1, which 5 values share, is damaged"]
    store = reopen()
    for turn in range(1, 4):
        do(store, *adds(turn=turn))
        for number, name in enumerate(NAMES):
            assert value(store, name)[0] == sum(
                (numbers(100 * one + number)[0] for one in range(1, turn + 1)), numbers(number)[0]
            )
    store.close()
    leak = "WRONG: of 13 slots 4 are used and 8 free"
    lost = "1 slots of 262144 bytes are lost to damage; to regain them, export to a new store"
    if entry is None:
        assert (wrong(path), lost in examine(path, MAX_BYTES)) == ([leak], True)
    else:
        told = "WRONG: the list of slot 1, which 0 values share, is damaged"
        assert (wrong(path), lost in examine(path, MAX_BYTES)) == ([told, leak], False)


@pytest.mark.parametrize(
    "mend",
    [
        lambda name: Delete(name=name),
        lambda name: Zero(name=name),
        lambda name: Add(name=name, gradient=ones(SIZE), overwrite=True),
    ],
)
def test_what_is_mended_leaves_its_slot(
    filled: LmdbStore, reopen: Callable[[], LmdbStore], path: Path, mend: Callable[[str], Change]
) -> None:
    """Of the value, it is damaged where it is."""
    hurt = NAMES[INLINE]
    number = filled.record(hurt).value
    assert number is not None
    filled.close()
    with lmdb.open(str(path), max_dbs=8) as env, env.begin(write=True) as txn:
        values = env.open_db(b"values", txn=txn)
        entry = bytearray(txn.get(number.to_bytes(8, "big"), db=values) or b"")
        entry[3] ^= 1
        txn.put(number.to_bytes(8, "big"), bytes(entry), db=values)
    assert f"WRONG: the running value of the buffer {hurt!r} is damaged" in wrong(path)
    do(reopen(), mend(hurt))
    reopen().close()
    assert (wrong(path), shared(path)) == ([], [4, 5, 5, 5])


def test_what_is_damaged_is_not_moved(filled: LmdbStore, reopen: Callable[[], LmdbStore], path: Path) -> None:
    hurt, other, *more = NAMES[INLINE : INLINE + 5]
    filled.close()
    flip(path / "values", hurt)
    store = reopen()
    do(store, *[Delete(name=name) for name in more])
    assert_same_bits(value(store, other), numbers(NAMES.index(other)))
    with pytest.raises(BufferCorrupt, match="is damaged on the disk"):
        value(store, hurt)
    store.close()
    assert wrong(path) == [f"WRONG: the running value of the buffer {hurt!r} is damaged"]
    assert shared(path) == [1, 5, 5, 5]


# ----- formats -----


def test_a_store_of_format_1_stays_one_until_values_share_a_slot(reopen: Callable[[], LmdbStore], path: Path) -> None:
    store = reopen()
    create(store, *NAMES, shape=(SIZE,))
    store.close()
    set_meta(path, b"format", b"1")
    store = reopen()
    do(store, *adds(names=NAMES[:INLINE]))
    for name in NAMES:
        add(store, name, ones(SIZE))
    store.close()
    assert "format 1" in next(examine(path, MAX_BYTES))
    do(reopen(), *adds(turn=1))
    reopen().close()
    assert "format 2" in next(examine(path, MAX_BYTES))
    assert (wrong(path), shared(path)) == ([], [5] * 4)


# ----- room -----


def test_a_full_store_changes_nothing(tmp_path: Path, clock: Clock) -> None:
    store = open_lmdb(tmp_path, clock, max_bytes=10 * CHUNK)
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
