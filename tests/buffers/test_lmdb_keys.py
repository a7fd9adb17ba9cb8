"""What a store on the disk keeps with an idempotency key: exactly what a replay answers, in little room."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import orjson
import pytest

from service.buffers.changes import Add, Change, Create, Delete, Take, Zero
from service.buffers.doctor import examine
from service.buffers.lmdb import LmdbStore
from service.buffers.names import BufferName
from service.buffers.perform import Outcome, Request, Wide
from service.buffers.record import Record
from service.buffers.restore import Restore
from service.errors import BufferCorrupt, StepGone
from tests.buffers.calls import create, do, key, ones, spec
from tests.buffers.damaging import HEAD, PAGE
from tests.buffers.flipping import used
from tests.buffers.stores import KEY_SECONDS, MAX_BYTES, PATIENCE, Clock, Reopen, wrong

NAMES = [f"layer.{number}.weight" for number in range(200)]


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
        "step": chance.integers(0, most, len(NAMES)).tolist(),
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


@pytest.mark.parametrize("count", [1, 2, 4, 200])
def test_a_replay_answers_the_same_bytes(reopen: Reopen, count: int) -> None:
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
        known = store.recall(key(what), [change.name for change in changes])
        assert known is not None
        assert [*known.receipts] == [*known.ids] == [change.name for change in changes]
        if what == "delete":
            create(store, *names)
        assert all(known.ids[name] == store.record(name).id for name in names if what not in ("create", "delete"))
    assert store.record(names[0]).version == 0


def test_a_replay_of_mixed_changes_answers_the_same_bytes(reopen: Reopen) -> None:
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
        *[(field, (1 << 63) - 1) for field in ("version", "count", "step")],
    ],
)
def test_a_replay_answers_the_same_bytes_for_buffers_that_were_imported(
    reopen: Reopen, field: str, number: Any
) -> None:
    store = reopen()
    restore(store, **{field: [*[1.0 if field == "weight" else 1] * (len(NAMES) - 1), number]})
    for changes in (adds(do_update=False), adds(), [Take(name=name) for name in NAMES]):
        made = do(store, *changes, key=key(repr(changes[0])))
        assert text(do(reopen(), *changes, key=key(repr(changes[0])))) == text(made)
        store = reopen()


def test_a_buffer_that_was_replaced_since_is_found(reopen: Reopen) -> None:
    store = reopen()
    create(store, *NAMES)
    made = do(store, *adds(), key=key())
    do(store, Delete(name=NAMES[7]))
    create(store, NAMES[7])
    with pytest.raises(StepGone, match=f"in a buffer '{NAMES[7]}' that no longer exists") as caught:
        do(store, *adds(), key=key())
    assert caught.value.context["receipts"] == made.receipts


# ----- room -----


def bytes_per_buffer(store: LmdbStore, requests: int = 100) -> float:
    """What a keyed add to all buffers takes of the store."""
    before = store.size()[1]
    for number in range(requests):
        do(store, *adds(), key=key(f"{number}"))
    return (store.size()[1] - before) / requests / len(NAMES)


@pytest.mark.parametrize(("alike", "most"), [(True, 3.2), (False, 8)])
def test_a_keyed_add_takes_few_bytes(reopen: Reopen, alike: bool, most: int) -> None:
    """It takes more if no two buffers are alike."""
    store = reopen()
    if alike:
        create(store, *NAMES)
    else:
        restore(store, version=random_states()["version"])
    assert bytes_per_buffer(store) < most


def test_a_request_by_prefix_keeps_the_names_of_its_buffers(reopen: Reopen) -> None:
    store = reopen()
    create(store, *NAMES[:8])
    take = Request([], key(), wide=Wide("layer.", lambda name: Take(name=name)))
    made = store.submit(take).result(PATIENCE)
    create(store, "layer.new")
    store = reopen()
    again = store.submit(take).result(PATIENCE)
    assert (again.receipts, again.replayed, [*again.receipts]) == (made.receipts, True, NAMES[:8])


# ----- damage -----


DAMAGED = ["WRONG: 1 idempotency keys are damaged: a retry with one is found all the same, or fails"]


def test_a_damaged_outcome_harms_no_other_key(reopen: Reopen, clock: Clock, tmp_path: Path) -> None:
    store = reopen()
    create(store, "a", "b")
    do(store, *adds(["a"]), key=key("hurt"))
    store.close()
    with lmdb.open(str(tmp_path / "store"), max_dbs=9) as env, env.begin(write=True) as txn:
        cursor = txn.cursor(env.open_db(b"outcomes", txn=txn))
        assert cursor.first()
        cursor.put(cursor.key(), cursor.value()[:-1] + bytes([cursor.value()[-1] ^ 1]))
    store = reopen()
    do(store, *adds(["b"]), key=key("well"))
    with pytest.raises(BufferCorrupt, match="outcome of this Idempotency-Key is damaged on the disk"):
        do(store, *adds(["a"]), key=key("hurt"))
    assert do(store, *adds(["b"]), key=key("well")).replayed
    assert [record.count for record in store.records()] == [1, 1]
    store.close()
    assert wrong(tmp_path / "store") == DAMAGED
    store = reopen()
    clock.advance(KEY_SECONDS)
    do(store, *adds(["b"]))
    assert not do(store, *adds(["a"]), key=key("hurt")).replayed


@pytest.mark.parametrize("place", [0, 7, 15, 16, 23, 31])
@pytest.mark.parametrize("bit", [0, 7])
def test_a_retry_is_found_although_its_digest_is_damaged(reopen: Reopen, tmp_path: Path, place: int, bit: int) -> None:
    """The digest of a key, its time or their checksum: each retry counts once, and new keys are new."""
    store, texts = reopen(), [f"{number}" for number in range(9)]
    create(store, "a")
    for text in texts:
        do(store, *adds(["a"]), key=key(text))
    store.close()
    with lmdb.open(str(tmp_path / "store"), max_dbs=9, readonly=True) as env, env.begin() as txn:
        entries = [b"".join(entry) for entry in txn.cursor(env.open_db(b"keys", txn=txn, create=False))]
    sound = (tmp_path / "store" / "data.mdb").read_bytes()
    for hurt in entries[:: len(entries) // 2]:  # the first, the last, and one between
        data = bytearray(sound)
        for start in (match.start() for match in re.finditer(re.escape(hurt), sound)):
            data[start + place] ^= 1 << bit
        (tmp_path / "store" / "data.mdb").write_bytes(data)
        found = [line for line in examine(f"lmdb:{tmp_path}/store", MAX_BYTES) if line.startswith("WRONG")]
        assert found == DAMAGED or "its keys are not in order" in found[0]
        store = reopen()
        assert not do(store, *adds(["a"]), key=key("new")).replayed
        assert [do(store, *adds(["a"]), key=key(text)).replayed for text in [*texts, "new"]] == [True] * 10
        assert store.record("a").count == 10
        store.close()
        assert wrong(tmp_path / "store") == []


@pytest.mark.parametrize("bit", [0, 3, 7])
def test_a_retry_is_found_although_the_way_to_its_digest_is_damaged(reopen: Reopen, tmp_path: Path, bit: int) -> None:
    """A digest in a branch of LMDB's tree leads to a page of digests."""
    store, texts, data = reopen(), [f"{number}" for number in range(200)], tmp_path / "store" / "data.mdb"
    create(store, "a")
    for text in texts:
        do(store, *adds(["a"]), key=key(text))
    store.close()
    root, *leaves = used(tmp_path / "store")["keys"]
    sound = data.read_bytes()
    assert len(leaves) > 2
    for node in range(1, len(leaves)):
        for place in range(0, 16, 3):
            hurt = bytearray(sound)
            start = root * PAGE + int.from_bytes(sound[(at := root * PAGE + HEAD + 2 * node) : at + 2], "little")
            hurt[start + 8 + place] ^= 1 << bit
            data.write_bytes(hurt)
            store = reopen()
            assert all(do(store, *adds(["a"]), key=key(text)).replayed for text in texts)
            store.close()
