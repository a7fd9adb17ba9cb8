"""The service on a system without Linux's own calls, as macOS is: commands run, workers start, and adds are durable."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file

from service.buffers.changes import Create
from service.buffers.lmdb import LmdbStore
from service.buffers.perform import Request
from service.buffers.record import Spec
from service.dtypes import FLOAT32
from service.host import system
from tests.faults.servers import Server

LIKE_MACOS = """
import ctypes, fcntl, os, select, signal

for name in (
    "sched_getaffinity", "sched_setaffinity", "fdatasync", "posix_fallocate", "posix_fadvise", "preadv", "pwritev",
    "copy_file_range", "memfd_create", "eventfd", "pipe2", "splice", "setns", "unshare", "pidfd_open", "getrandom",
    "getresuid", "O_DIRECT", "O_TMPFILE", "O_NOATIME", "O_PATH", "O_RSYNC",
):
    if hasattr(os, name):
        delattr(os, name)
del select.epoll
for name in ("SIGRTMIN", "SIGRTMAX", "SIGPOLL", "SIGPWR", "sigtimedwait", "sigwaitinfo"):
    delattr(signal, name)

found = ctypes.CDLL.__getattr__

def find(library, name):
    if name in ("sync_file_range", "fallocate", "mallopt", "malloc_trim", "prctl"):
        raise AttributeError(name)
    return found(library, name)

ctypes.CDLL.__getattr__ = find

fcntl.F_FULLFSYNC = 51
call = fcntl.fcntl

def fcntl_of_macos(descriptor, command, argument=0):
    if command != fcntl.F_FULLFSYNC:
        return call(descriptor, command, argument)
    os.fsync(descriptor)
    with open(os.environ["SYNCED"], "a") as file:
        print(os.readlink(f"/proc/self/fd/{descriptor}"), file=file)
    return 0

fcntl.fcntl = fcntl_of_macos
"""
"""A `sitecustomize` that takes away what macOS lacks, and gives F_FULLFSYNC. It notes which files were synced by it."""

SIZE = 4 << 20
"""Elements of a float32 buffer of 16 MB."""


@pytest.fixture
def synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let new processes run as on macOS. Return the file that names the files that were synced."""
    (tmp_path / "like macos").mkdir()
    (tmp_path / "like macos" / "sitecustomize.py").write_text(LIKE_MACOS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/like macos{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("SYNCED", str(tmp_path / "synced"))
    (tmp_path / "synced").touch()
    return tmp_path / "synced"


def test_the_server_serves_without_linux(synced: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Server(store, workers=2, fork=False) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        assert client.put("/v1/buffers/a", json={"shape": [SIZE]}).status_code == 201
        before = synced.read_text()
        assert client.post("/v1/buffers/a/accumulate", json={"gradient": 1.5}).status_code == 200
        made = synced.read_text().removeprefix(before).splitlines()
        assert [Path(path).name for path in made[:2]] == ["values", "data.mdb"]
        assert client.post("/v1/buffers/a/accumulate", json={"gradient": 1}).json()["count"] == 2
        ones = np.full(SIZE, 2.5, np.float32).tobytes()
        value = client.get("/v1/buffers/a/value", headers={"Accept": "application/vnd.safetensors"}).content
        assert value.endswith(ones)
        assert "gradserve_workers" in client.get("/metrics").text
        assert client.delete("/v1/buffers/a").status_code == 204
        assert client.put("/v1/buffers/b", json={"shape": [SIZE]}).status_code == 201


COMMANDS = """
import sys
from service.__main__ import main

for command in sys.argv[1:]:
    print(main(command.split()), flush=True)
"""


def test_the_commands_run_without_linux(synced: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, saved, other = tmp_path / "store", tmp_path / "saved", tmp_path / "other"
    with closing(LmdbStore(store, max_bytes=1 << 24)) as opened:
        opened.submit(Request([Create(name="a", spec=Spec((2,), FLOAT32))])).result(60)
    monkeypatch.setenv("GRADSERVE_STORE", f"lmdb:{store}")
    monkeypatch.setenv("GRADSERVE_KEYS", f"{tmp_path}/keys")
    commands = ["ops", "settings", "keys add ann", "doctor", f"export {saved}", f"import {saved} --store lmdb:{other}"]
    done = subprocess.run([sys.executable, "-c", COMMANDS, *commands], capture_output=True, text=True, timeout=60)
    assert [line for line in done.stdout.splitlines() if line.isdigit()] == ["0"] * len(commands), done.stderr
    assert f"GRADSERVE_THREADS={os.cpu_count()}\n" in done.stdout
    assert load_file(saved)["a"].tolist() == [0, 0]
    files = synced.read_text()
    for durable in (f"{tmp_path}/keys.new\n", f"{tmp_path}\n", f"{saved}.", f"{other}/data.mdb\n"):
        assert durable in files


def test_a_file_system_without_a_full_sync_is_synced_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = errno.ENOTSUP
    synced: list[int] = []

    def failing(*args: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", failing)
    monkeypatch.delattr(os, "fdatasync")
    monkeypatch.setattr(os, "fsync", synced.append)
    with open(tmp_path / "file", "w") as file:
        system.sync(file.fileno())
        assert synced == [file.fileno()]
        code = errno.EIO  # the data is lost, whatever a second attempt would say
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            system.sync(file.fileno())


def test_a_full_disk_is_noticed_without_posix_fallocate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    with open(tmp_path / "file", "wb") as file:
        system.reserve(file.fileno(), 0, 5000)
        assert (tmp_path / "file").read_bytes() == bytes(5000)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)), open("/dev/full", "wb") as file:
        system.reserve(file.fileno(), 0, 5000)


TAKE_MANY = """
import gc, sys
from pathlib import Path
from service.buffers.changes import Create, Take
from service.buffers.lmdb import LmdbStore
from service.buffers.perform import Request
from service.buffers.record import Spec
from service.dtypes import FLOAT32
from service.host.system import collect_rarely

store, names = LmdbStore(Path(sys.argv[1]), max_bytes=1 << 30), [f"{number}" for number in range(1 << 14)]
store.submit(Request([Create(name=name, spec=Spec((1,), FLOAT32)) for name in names])).result()
collect_rarely()
searches = []
gc.callbacks.append(lambda phase, about: phase == "start" and searches.append(about["generation"]))
for _ in range(5):
    store.submit(Request([Take(name=name) for name in names])).result()
print(len(searches) / 5, len(searches) - searches.count(0))
store.close()
"""
"""Five takes of as many buffers as a request may change. It prints how often Python looked for cycles in each, and how
often in all among older objects.
"""


def test_a_change_of_many_buffers_is_seldom_interrupted(tmp_path: Path) -> None:
    """By default the search for cycles takes half of its time, and others wait for it."""
    done = subprocess.run(
        [sys.executable, "-c", TAKE_MANY, str(tmp_path / "store")], capture_output=True, text=True, timeout=60
    )
    searches, older = done.stdout.split()
    assert 0 < float(searches) < 50, done.stderr
    assert int(older) < 3
