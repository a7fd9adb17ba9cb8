"""Files that another user has put in the way of the server: no link, FIFO or device among them harms anyone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from service.buffers.lmdb import LmdbStore
from service.errors import StoreFailed
from tests.commands import called

PLANTED = ("data.mdb", "lock.mdb", "values")


def open_store(path: Path) -> None:
    LmdbStore(path, max_bytes=1 << 24).close()


@pytest.mark.parametrize("name", PLANTED)
def test_the_store_follows_no_planted_link(tmp_path: Path, name: str) -> None:
    store, victim = tmp_path / "store", tmp_path / "victim"
    store.mkdir()
    victim.write_bytes(b"")
    (store / name).symlink_to(victim)
    with pytest.raises(StoreFailed, match=f"cannot be (opened|read): .*Not a regular file: '.*/{name}'"):
        open_store(store)
    assert victim.read_bytes() == b""


@pytest.mark.parametrize("name", PLANTED)
def test_a_fifo_among_the_files_of_a_store_is_refused_at_once(tmp_path: Path, name: str) -> None:
    store = tmp_path / "store"
    open_store(store)
    (store / name).unlink()
    os.mkfifo(store / name)
    for command in (["doctor"], ["export", str(tmp_path / "saved")]):
        status, out, complaint = called(*command, "--store", f"lmdb:{store}")
        assert (status, out, f"{name}'" in complaint or "data.mdb is missing" in complaint) == (1, "", True)


def test_the_mark_of_a_store_is_not_written_through_a_link(tmp_path: Path) -> None:
    store, victim = tmp_path / "store", tmp_path / "victim"
    store.mkdir()
    (store / "format").symlink_to(victim)
    open_store(store)
    assert not victim.exists()


def test_a_fifo_or_a_device_is_no_certificate(
    tmp_path: Path, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for made, key in ((fifo, certificate[1]), (certificate[0], fifo), (Path("/dev/zero"), certificate[1])):
        monkeypatch.setenv("GRADSERVE_TLS_CERTIFICATE", str(made))
        monkeypatch.setenv("GRADSERVE_TLS_KEY", str(key))
        status, _, complaint = called("serve", "--port", "0")
        assert (status, "Not a regular file" in complaint) == (2, True)
