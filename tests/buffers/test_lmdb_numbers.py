"""The numbers of an LMDB store on which all buffers depend: one wrong bit of them harms no other buffer in silence."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import lmdb
import pytest

from service.buffers.changes import Add, Create, Delete, Take
from service.buffers.doctor import examine
from service.buffers.lmdb.format import NUMBER, keep
from service.buffers.lmdb.store import LmdbStore
from service.buffers.packed import FORMAT, pack_record
from service.errors import StoreFailed
from tests.buffers.calls import LARGE, add, create, do, ones, spec, value
from tests.buffers.stores import MAX_BYTES, Clock, Reopen, open_lmdb, wrong
from tests.buffers.test_formats import unpacked
from tests.serving import assert_problem, serving


def changed(path: Path, database: bytes, change: Callable[[Any, Any], object]) -> None:
    """Call `change` with a transaction of a closed store, and a database."""
    with lmdb.open(str(path), max_dbs=9) as env, env.begin(write=True) as txn:
        change(txn, env.open_db(database, txn=txn, create=False))


def filled(store: LmdbStore) -> dict[str, float]:
    """Fill a store with small and large buffers, and free some slots. Return what each buffer has in each element."""
    sums = {}
    for number, name in enumerate(("small", "other", "large", "huge")):
        size = 3 if number < 2 else LARGE
        create(store, name, shape=(size,))
        for _ in range(3):
            add(store, name, ones(size) * (number + 1))
        sums[name] = 3.0 * (number + 1)
    create(store, "gone", shape=(4 * LARGE,))
    add(store, "gone", ones(4 * LARGE))
    do(store, Delete(name="gone"))
    return sums


def flipped(name: bytes, place: int, bit: int) -> Callable[[Any, Any], object]:
    def change(txn: Any, meta: Any) -> None:
        stored = bytearray(txn.get(name, db=meta))
        stored[place] ^= 1 << bit
        txn.put(name, bytes(stored), db=meta)

    return change


DAMAGES: dict[str, Callable[[bytes], Callable[[Any, Any], object]]] = {
    "lower": lambda name: lambda txn, meta: txn.put(name, NUMBER.pack(2) + txn.get(name, db=meta)[8:], db=meta),
    **{f"bit {bit}": lambda name, bit=bit: flipped(name, 7, bit) for bit in range(5)},  # type: ignore[misc]
    "high bit": lambda name: flipped(name, 0, 6),
    "its checksum": lambda name: flipped(name, -1, 0),
    "missing": lambda name: lambda txn, meta: txn.delete(name, db=meta),
    "another name": lambda name: lambda txn, meta: txn.put(b"_" + name, txn.pop(name, db=meta), db=meta),
    "without a checksum": lambda name: lambda txn, meta: txn.put(name, txn.get(name, db=meta)[:8], db=meta),
    "of another": lambda name: (
        lambda txn, meta: txn.put(name, txn.get(b"slots" if name == b"last_id" else b"last_id", db=meta), db=meta)
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [b"last_id", b"slots"])
def test_a_damaged_number_is_an_error_and_harms_no_buffer(
    reopen: Reopen, tmp_path: Path, name: bytes, damage: str
) -> None:
    store = reopen()
    sums = filled(store)
    store.close()
    changed(tmp_path / "store", b"meta", DAMAGES[damage](name))
    lines = [*examine(f"lmdb:{tmp_path}/store", MAX_BYTES)]
    assert f"WRONG: The store is damaged: its number '{name.decode()}' is lost" in "\n".join(lines)
    store = reopen()
    change = Create(name="new", spec=spec((3,))) if name == b"last_id" else Add(name="large", gradient=ones(LARGE))
    for _ in range(2):
        with pytest.raises(StoreFailed, match=f"its number '{name.decode()}' is lost"):
            do(store, change)
    for buffer, number in sums.items():
        assert set(value(store, buffer).tolist()) == {number}


def test_a_number_in_use_is_given_to_nobody(reopen: Reopen, tmp_path: Path) -> None:
    """Its checksum is right: an older page of the disk, perhaps."""
    store = reopen()
    sums = filled(store)
    store.close()
    changed(tmp_path / "store", b"meta", lambda txn, meta: keep(txn, meta, b"last_id", NUMBER.pack(3)))
    assert "but 3 should be the last" in wrong(tmp_path / "store")[0]
    store = reopen()
    with pytest.raises(StoreFailed, match="it has a value 4, but 3 should be the last"):
        create(store, "new")
    assert {name: value(store, name)[0] for name in sums} == sums


@pytest.mark.parametrize("other", ["small", "closed"])
def test_the_doctor_sees_two_buffers_with_one_value(reopen: Reopen, tmp_path: Path, other: str) -> None:
    store = reopen()
    create(store, "a", "small", "closed", keep=2)
    for name in ("a", "small", "closed"):
        add(store, name, ones(2))
    do(store, Take(name="closed"))
    record, shared = store.record("a"), store.record(other).values[0]
    store.close()
    changed(
        tmp_path / "store",
        b"buffers",
        lambda txn, buffers: txn.put(b"a", pack_record(replace(record, value=shared)), db=buffers),
    )
    said = [line for line in wrong(tmp_path / "store") if "is a value of another buffer, too" in line]
    assert len(said) == 1


@pytest.mark.parametrize("place", [0, 1, 8, -9, -8, -1])
def test_a_damaged_list_of_free_slots_loses_them_alone(reopen: Reopen, tmp_path: Path, place: int) -> None:
    store = reopen()
    sums = filled(store)
    store.close()

    def change(txn: Any, free: Any) -> None:
        for key, slots in [*txn.cursor(db=free)]:
            hurt = bytearray(slots)
            hurt[place] ^= 1
            txn.put(key, bytes(hurt), db=free)

    changed(tmp_path / "store", b"free", change)
    assert "WRONG: the slots in use or free are damaged: -1 is none of the " in "\n".join(
        examine(f"lmdb:{tmp_path}/store", MAX_BYTES)
    )
    store = reopen()
    for _ in range(4):
        add(store, "large", ones(LARGE))
        add(store, "huge", ones(LARGE))
    assert {name: value(store, name)[0] for name in sums} == sums | {
        "large": sums["large"] + 4,
        "huge": sums["huge"] + 4,
    }


@pytest.mark.parametrize("database", [b"buffers", b"meta", b"keys", b"values"])
def test_a_store_that_lacks_a_database_is_not_taken_for_new(reopen: Reopen, tmp_path: Path, database: bytes) -> None:
    """One wrong bit of its name hides it."""
    store = reopen()
    filled(store)
    store.close()
    data = tmp_path / "store" / "data.mdb"
    sound = data.read_bytes()
    data.write_bytes(sound.replace(database + bytes(2), database[:-1] + bytes([database[-1] ^ 1]) + bytes(2)))
    assert data.read_bytes() != sound
    with pytest.raises(StoreFailed, match="cannot be read: .*MDB_NOTFOUND"):
        reopen()


# ----- the format -----


def reformatted(store: LmdbStore, number: str) -> None:
    """Write another format as a newer version does, while the store is in use."""
    env: Any = store._env  # a process may open LMDB only once
    with env._env.begin(write=True) as txn:
        txn.put(b"format", number.encode(), db=env.meta)


@pytest.mark.parametrize("number", [str(FORMAT + 1), "99", str(FORMAT - 1)])
def test_a_running_store_notices_another_format(reopen: Reopen, number: str) -> None:
    store = reopen()
    sums = filled(store)
    reformatted(store, number)
    message = rf"^The store has format {number}, but this version of gradserve knows format {FORMAT}\."
    for work in (
        lambda: add(store, "small", ones(3)),
        lambda: do(store, Take(name="small")),
        lambda: create(store, "new"),
        lambda: store.record("small"),
        lambda: store.read(["large"]),
        store.records,
        store.check,
        store.size,
    ):
        with pytest.raises(StoreFailed, match=message):
            work()
    reformatted(store, str(FORMAT))
    assert {name: value(store, name)[0] for name in sums} == sums
    assert add(store, "small", ones(3))["count"] == 4


def test_a_server_of_an_older_version_is_not_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[LmdbStore] = []
    monkeypatch.setattr(LmdbStore, "submit", noted(LmdbStore.submit, opened))
    with serving(store=f"lmdb:{tmp_path}/store") as url, httpx.Client(base_url=url) as client:
        client.put("/v1/buffers/a", json={"shape": [1]}).raise_for_status()
        assert client.get("/v2/health/ready").status_code == 200
        reformatted(opened[0], str(FORMAT + 1))
        for method, path in (
            ("GET", "/v2/health/ready"),
            ("GET", "/v1/buffers/a/value"),
            ("GET", "/v1/buffers"),
            ("POST", "/v1/buffers/a/accumulate"),
        ):
            answer = client.request(method, path, json={"gradient": [1]} if method == "POST" else None)
            if "health" in path:
                assert answer.status_code == 503
                continue
            assert_problem(answer, 503, "store_failed", f"format {FORMAT + 1}, ", f"format {FORMAT}.")
        assert client.get("/v2/health/live").status_code == 200


def noted(submit: Callable[..., Any], opened: list[LmdbStore]) -> Callable[..., Any]:
    def noting(store: LmdbStore, *arguments: Any) -> Any:
        opened.append(store)
        return submit(store, *arguments)

    return noting


KILLED = """
import os, signal, sys
from pathlib import Path
from service.buffers.lmdb import environment
from service.buffers.lmdb.store import LmdbStore

whole, calls = getattr(environment, sys.argv[2]), 0

def dying(*arguments):
    global calls
    calls += 1
    if calls == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(*arguments)

setattr(environment, sys.argv[2], dying)
LmdbStore(Path(sys.argv[1]), max_bytes=1 << 26)
"""


@pytest.mark.parametrize("number", [7, 8])
@pytest.mark.parametrize(("function", "call"), [("keep", 1), ("keep", 3), ("index", 1)])
def test_a_kill_while_a_store_is_brought_over_harms_nothing(
    tmp_path: Path, clock: Clock, number: int, function: str, call: int
) -> None:
    path = unpacked(f"{number}.tar.xz", tmp_path) / "store"
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", KILLED, str(path), function, str(call)], check=False)
        assert done.returncode == -9
        assert f", format {number}" in next(iter(examine(f"lmdb:{path}", MAX_BYTES)))
    with closing(open_lmdb(path, clock)) as store:
        assert value(store, "table")[1:-1].tolist() == [[1, 1]] * 39_998
    assert wrong(path) == []
    assert f", format {FORMAT}" in next(iter(examine(f"lmdb:{path}", MAX_BYTES)))


def test_a_flipped_format_is_no_older_store(reopen: Reopen, tmp_path: Path) -> None:
    """One bit makes 8 of 9, and the store has checksums already."""
    store = reopen()
    sums = filled(store)
    store.close()
    changed(tmp_path / "store", b"meta", lambda txn, meta: txn.put(b"format", b"8", db=meta))
    before = (tmp_path / "store" / "data.mdb").read_bytes()
    with pytest.raises(StoreFailed, match="cannot be read: format 8 is not its format"):
        reopen()
    assert (tmp_path / "store" / "data.mdb").read_bytes() == before
    changed(tmp_path / "store", b"meta", lambda txn, meta: txn.put(b"format", b"9", db=meta))
    store = reopen()
    assert {name: value(store, name)[0] for name in sums} == sums
