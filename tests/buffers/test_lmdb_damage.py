"""Damage on the disk: the store reports the damage, and other buffers stay whole."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path

import lmdb
import numpy as np
import pytest

from service.buffers import failpoints
from service.buffers.changes import Add, Delete, Take, Zero
from service.buffers.lmdb.store import LmdbStore
from service.buffers.lmdb.writer import Writer
from service.buffers.packed import FORMAT
from service.errors import BufferCorrupt, StoreFailed
from tests.buffers.calls import LARGE, add, create, do, ones, request, value
from tests.buffers.stores import PATIENCE, Clock, Reopen, flip


def prepared(reopen: Reopen) -> None:
    store = reopen()
    create(store, "a", shape=(LARGE,))
    add(store, "a", ones(1))
    store.close()


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (b"3", f"has format 3, but .* knows format {FORMAT}"),
        (str(FORMAT + 1).encode(), f"has format {FORMAT + 1}"),
        (b"10", "has format 10"),
        (b"", "has format ,"),
    ],
)
def test_another_format_is_refused(reopen: Reopen, tmp_path: Path, found: bytes, message: str) -> None:
    prepared(reopen)
    with lmdb.open(str(tmp_path / "store"), max_dbs=8) as env, env.begin(write=True) as txn:
        txn.put(b"format", found, db=env.open_db(b"meta", txn=txn))
    before = (tmp_path / "store" / "data.mdb").read_bytes()
    with pytest.raises(StoreFailed, match=message):
        reopen()
    assert (tmp_path / "store" / "data.mdb").read_bytes() == before


@pytest.mark.parametrize("locks_stay", [True, False])
@pytest.mark.parametrize("emptied", [True, False])
def test_a_store_without_its_data_file_is_not_recreated(
    reopen: Reopen, tmp_path: Path, emptied: bool, locks_stay: bool
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
def test_a_truncated_store_is_refused_or_whole(reopen: Reopen, tmp_path: Path, left: int) -> None:
    prepared(reopen)
    data = tmp_path / "store" / "data.mdb"
    whole = data.read_bytes()
    data.write_bytes(whole[:left])
    if 0 < left <= 3 * 4096:
        with pytest.raises(StoreFailed, match=r"^The store in .*/store (is truncated|cannot be opened|cannot be read)"):
            reopen()
        assert data.read_bytes() == whole[:left]
        data.write_bytes(whole)
    with suppress(StoreFailed):  # raised unless only unused pages were lost
        assert value(reopen(), "a").tolist() == [1] * LARGE
    data.write_bytes(whole)
    store = reopen()
    assert value(store, "a").tolist() == [1] * LARGE


@pytest.mark.parametrize("left", [0, 1, 4096, -4096, -1])
def test_truncated_values_damage_their_buffer_only(reopen: Reopen, tmp_path: Path, left: int) -> None:
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


@pytest.mark.parametrize("place", ["store", "store/data.mdb"])
def test_a_foreign_file_is_refused(reopen: Reopen, tmp_path: Path, place: str) -> None:
    """In place of the directory, or of the data file in it."""
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_bytes(b"notes to myself\n" * 5000)
    with pytest.raises(StoreFailed, match="cannot be opened"):
        reopen()


def test_an_add_to_a_damaged_value_says_so(reopen: Reopen, tmp_path: Path) -> None:
    """Other stores never read the sum to add to it."""
    store = reopen()
    create(store, "hurt", shape=(LARGE,))
    numbers = np.random.default_rng(1).normal(size=LARGE).astype(np.float32)
    add(store, "hurt", numbers)
    store.close()
    flip(tmp_path / "store", numbers[LARGE // 2 : LARGE // 2 + 100].tobytes())
    store = reopen()
    for change in [Take(name="hurt"), Add(name="hurt", gradient=ones(1))]:
        with pytest.raises(BufferCorrupt, match="is damaged on the disk"):
            do(store, change)


def test_an_unreadable_value_harms_one_buffer(reopen: Reopen, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad sector of the disk raises EIO."""
    store = reopen()
    create(store, "hurt", shape=(LARGE,))
    create(store, "well")
    add(store, "hurt", ones(1))
    store = reopen()

    def failing(*args: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(BufferCorrupt, match="hurt"):
        store.read(["hurt"])
    with pytest.raises(BufferCorrupt):
        add(store, "hurt", ones(1))
    assert add(store, "well", [1, 2])["count"] == 1


def test_the_writer_survives_a_failing_disk(reopen: Reopen, monkeypatch: pytest.MonkeyPatch) -> None:
    store = reopen()
    create(store, "a")
    with monkeypatch.context() as patch:

        def failing(*args: object) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        def transact(*args: object) -> None:
            raise lmdb.Error(f"mdb_txn_commit: {os.strerror(errno.EIO)}")

        patch.setattr(os, "statvfs", failing)
        patch.setattr(Writer, "_transact", transact)
        for _ in range(2):
            with pytest.raises(StoreFailed, match="failed: mdb_txn_commit"):
                store.submit(request(Add(name="a", gradient=ones(2)))).result(PATIENCE)
    assert add(store, "a", ones(2))["count"] == 1


@pytest.fixture
def hurt(reopen: Reopen, tmp_path: Path) -> LmdbStore:
    """Return a store with the buffers "hurt", whose record is damaged and expires, and "well"."""
    store = reopen()
    create(store, "hurt", ttl_seconds=12345.678)
    create(store, "well")
    add(store, "hurt", [1, 2])
    add(store, "well", [1, 2])
    store.close()
    flip(tmp_path / "store", b"12345.678")
    return reopen()


@pytest.mark.usefixtures("at_once")
def test_an_expired_damaged_record_does_not_stop_the_writer(
    hurt: LmdbStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    tidied = threading.Event()
    monkeypatch.setattr(failpoints, "action", lambda point: tidied.set() if point == "committed" else None)
    clock.advance(20_000)
    assert tidied.wait(PATIENCE)
    for _ in range(2):  # the transaction that removes expired buffers may include the first add
        future = hurt.submit(request(Add(name="well", gradient=ones(2))))
        future.exception(PATIENCE)
    assert future.result().receipts["well"]["updated"]


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("name", ["data.mdb", "lock.mdb", "values"])
def test_a_removed_or_replaced_file_is_reported(reopen: Reopen, tmp_path: Path, name: str, replaced: bool) -> None:
    prepared(reopen)
    store, file, aside = reopen(), tmp_path / "store" / name, tmp_path / "aside"
    file.rename(aside)
    if replaced:
        shutil.copy(aside, file)
    message = rf"^{name} of the store was removed or replaced while the server was running; restart the server to use"
    for change in (Add(name="a", gradient=ones(1)), Zero(name="a"), Delete(name="a")):
        with pytest.raises(StoreFailed, match=message):
            do(store, change)
    with pytest.raises(StoreFailed, match=message):
        store.generation()
    with pytest.raises(StoreFailed, match=message):
        store.read(["a"])
    aside.rename(file)
    add(store, "a", ones(1))
    assert value(reopen(), "a").tolist() == [2] * LARGE
