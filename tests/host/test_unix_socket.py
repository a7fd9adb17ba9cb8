"""The UNIX socket of the server: its file, the faults of its path, and its end. `tests/api/http` has its requests."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from service.host import unix_socket
from service.host.unix_socket import MAX_PATH_BYTES
from tests.commands import called
from tests.faults.servers import PATIENCE, Server
from tests.serving import open_files, serving, wait_until


@pytest.fixture
def place() -> Iterator[Path]:
    """Make a directory with a short path: a socket's path has about a hundred bytes at most."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


def asked(path: Path, target: str = "/v2/health/ready") -> httpx.Response:
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=30) as client:
        return client.get(f"http://localhost{target}")


def is_ready(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(PATIENCE)
        try:
            client.connect(str(path))
            client.sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n")
            return client.recv(100).startswith(b"HTTP/1.1 200 ")
        except OSError:
            return False


def left(path: Path) -> None:
    """Leave a socket as a killed server does."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()


def mode(path: Path) -> str:
    return f"{stat.S_IMODE(path.lstat().st_mode):04o}"


# ----- the path -----


def directory(path: Path) -> None:
    path.mkdir()


def regular(path: Path) -> None:
    path.write_text("mine")


def link(path: Path) -> None:
    left(path.with_name("other"))
    path.symlink_to(path.with_name("other"))


def broken_link(path: Path) -> None:
    path.symlink_to("nothing")


def fifo(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (directory, "a directory"),
        (regular, "a regular file"),
        (link, "a symbolic link"),
        (broken_link, "a symbolic link"),
        (fifo, "a FIFO"),
    ],
)
def test_what_is_no_socket_is_named_and_stays(make: object, found: str, place: Path) -> None:
    path, store = place / "s", place / "store"
    make(path)  # type: ignore[operator]
    before = path.lstat()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADSERVE_STORE", f"lmdb:{store}")
        status, _, said = called("serve", "--socket", str(path))
    assert (status, said) == (
        2,
        f"gradserve: GRADSERVE_SOCKET is {path}, which is {found}; name a file that does not exist\n",
    )
    assert path.lstat() == before
    assert not store.exists()


def test_a_path_without_its_directory_is_named(place: Path) -> None:
    for name in ("missing", "file"):
        regular(place / "file")
        status, _, said = called("serve", "--socket", f"{place}/{name}/s")
        assert (status, said) == (
            2,
            f"gradserve: GRADSERVE_SOCKET is {place}/{name}/s, but {place}/{name} is not a directory\n",
        )


def test_the_longest_path_is_taken_and_a_longer_one_is_named(place: Path) -> None:
    longest = f"{place}/{'a' * (MAX_PATH_BYTES - len(str(place)) - 1)}"
    with serving(socket=Path(longest)):
        assert is_ready(Path(longest))
    status, _, said = called("serve", "--socket", f"{longest}a")
    assert status == 2
    assert f"{longest}a, which has {MAX_PATH_BYTES + 1} bytes; a socket's path has {MAX_PATH_BYTES} at most\n" in said


def test_the_socket_of_a_live_server_is_named_and_stays(place: Path) -> None:
    path = place / "s"
    said = f"gradserve: Cannot listen on {path} (GRADSERVE_SOCKET): another server listens there\n"
    with serving(socket=path):
        assert called("serve", "--socket", str(path)) == (1, "", said)
        assert is_ready(path)


def test_the_socket_of_a_server_whose_queue_is_full_is_in_use(place: Path) -> None:
    path = place / "s"
    with ExitStack() as stack:
        busy = stack.enter_context(socket.socket(socket.AF_UNIX))
        busy.bind(str(path))
        busy.listen(0)
        for _ in range(3):
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            client.connect_ex(str(path))
        status, _, said = called("serve", "--socket", str(path))
    assert (status, "another server listens there" in said) == (1, True)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc, where not even root may make a file")
def test_a_directory_that_takes_no_file_is_named() -> None:
    status, _, said = called("serve", "--socket", "/proc/s")
    assert (status, "gradserve: Cannot listen on /proc/s (GRADSERVE_SOCKET): " in said) == (1, True)


# ----- the file -----


@pytest.mark.parametrize("is_stale", [False, True])
@pytest.mark.parametrize("given", [None, "0600", "660", "0777"])
def test_the_socket_has_its_mode_and_is_removed(is_stale: bool, given: str | None, place: Path) -> None:
    path = place / "s"
    if is_stale:
        left(path)
    usual = os.umask(0o077)
    try:
        more = {} if given is None else {"socket_mode": given}
        with serving(socket=path, **more):
            assert mode(path) == (given or "0600").zfill(4)
            assert is_ready(path)
            assert os.umask(0o077) == 0o077
    finally:
        os.umask(usual)
    assert not path.exists()


def test_a_mode_is_octal(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("0o600", "0800", "rw", "00600", "60"):
        monkeypatch.setenv("GRADSERVE_SOCKET_MODE", wrong)
        status, _, said = called("ops")
        assert (status, f"GRADSERVE_SOCKET_MODE is '{wrong}': Permissions are three octal digits" in said) == (2, True)


def test_the_socket_of_a_later_server_stays(place: Path) -> None:
    """Its inode may be the same: the file system reuses the inodes of removed files."""
    path = place / "s"
    with unix_socket.listening(path, "0600"):
        path.unlink()
        with unix_socket.listening(path, "0600"):
            pass
        left(path)
    assert path.is_socket()


def test_one_of_two_servers_gets_the_socket_of_a_dead_one(place: Path) -> None:
    path, end = place / "s", threading.Event()
    for _ in range(20):
        left(path)
        end.clear()
        refused: list[str] = []
        barrier = threading.Barrier(2)

        def listen(refused: list[str] = refused, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            try:
                with unix_socket.listening(path, "0600"):
                    end.wait()
            except OSError as error:
                refused.append(str(error))
                end.set()

        with ThreadPoolExecutor(2) as threads:
            for done in [threads.submit(listen) for _ in range(2)]:
                done.result(PATIENCE)
        assert len(refused) == 1
        assert not path.exists()


# ----- other users -----


def test_a_lock_on_the_directory_stops_neither_start_nor_stop(place: Path) -> None:
    """Anyone who can read a directory can lock it, and so can anyone lock a file that he can open."""
    path = place / "s"
    descriptor = os.open(place, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        for before in (left, regular_lock):
            before(path)
            with ThreadPoolExecutor(1) as thread:
                thread.submit(served, path).result(10)
            assert os.listdir(place) == []
    finally:
        os.close(descriptor)


def served(path: Path) -> None:
    with unix_socket.listening(path, "0600"):
        assert path.is_socket()


def regular_lock(path: Path) -> None:
    """Leave a lock as a killed server does."""
    path.with_name("s.lock").touch(0o600)


def linked_lock(path: Path) -> None:
    path.with_name("s.lock").symlink_to("victim")


def fifo_lock(path: Path) -> None:
    os.mkfifo(path.with_name("s.lock"))


@pytest.mark.parametrize("make", [linked_lock, fifo_lock])
def test_a_planted_lock_is_named(make: object, place: Path) -> None:
    make(place / "s")  # type: ignore[operator]
    status, _, said = called("serve", "--socket", f"{place}/s")
    assert (status, said.startswith(f"gradserve: Cannot listen on {place}/s (GRADSERVE_SOCKET): ")) == (1, True)
    assert f"{place}/s.lock" in said
    assert os.listdir(place) == ["s.lock"]


def test_the_lock_of_another_user_is_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "fchmod", refused)
    with pytest.raises(OSError, match=f"Operation not permitted: {place}/s.lock"):
        served(place / "s")
    assert not (place / "s").exists()


# ----- who may connect -----


@pytest.mark.parametrize("given", ["0660", "0601", "0777"])
def test_a_socket_that_others_may_open_needs_keys(given: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSERVE_SOCKET_MODE", given)
    status, _, said = called("serve", "--socket", f"{place}/s")
    assert status == 2
    for word in (f"GRADSERVE_SOCKET_MODE is {given}", "GRADSERVE_KEYS", "GRADSERVE_ALLOW_ANONYMOUS"):
        assert word in said
    assert not os.listdir(place)


def test_a_host_beyond_loopback_needs_keys_beside_a_socket(place: Path) -> None:
    status, _, said = called("serve", "--socket", f"{place}/s", "--host", "0.0.0.0")
    assert (status, "GRADSERVE_HOST" in said) == (2, True)


# ----- processes -----


@pytest.mark.parametrize("workers", [1, 2])
def test_a_server_without_a_port_listens_on_its_socket_alone(workers: int, place: Path) -> None:
    """It takes over the socket that a killed server left, and removes it when it ends."""
    path = place / "s"
    server = Server(place / "store", workers=workers, port="", socket=path)
    try:
        server.launch()
        wait_until(lambda: is_ready(path))
        inode = path.stat().st_ino
        server.kill()
        assert path.stat().st_ino == inode
        assert not is_ready(path)
        server.launch()
        wait_until(lambda: is_ready(path))
        wait_until(lambda: f" at unix:{path}, page at /" in server.log.read_text())
        assert " at http" not in server.log.read_text()
        for pid in (server.process.pid, *server.workers()):
            assert not listens_on_tcp(pid)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0
        assert not path.exists()
    finally:
        server.kill()


def listens_on_tcp(pid: int) -> bool:
    """Return whether one of the process's descriptors is a TCP socket that listens."""
    files = set(open_files(pid))
    lines = [line for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    rows = [line.split() for line in lines]
    return any(row[3] == "0A" and f"socket:[{row[9]}]" in files for row in rows)  # 0A: it listens; 9: the inode


@pytest.mark.parametrize("workers", [1, 2])
def test_a_server_listens_on_its_port_and_its_socket(workers: int, place: Path) -> None:
    path = place / "s"
    with Server(place / "store", workers=workers, socket=path, access_log=True, log_format="json") as server:
        assert is_ready(path)
        wait_until(lambda: f" at {server.url} and unix:{path}, page at /" in server.log.read_text())
        for worker in server.workers()[:1]:
            os.kill(worker, signal.SIGTERM)
            wait_until(lambda worker=worker: worker not in server.workers())  # type: ignore[misc]
            wait_until(lambda: is_ready(path) and server.is_ready())
        assert asked(path, "/v1/ops").status_code == 200
        assert httpx.get(f"{server.url}/v1/ops").status_code == 200
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            client.put("http://localhost/v1/buffers/a", json={"shape": [2]}).raise_for_status()
        assert httpx.get(f"{server.url}/v1/buffers/a").json()["shape"] == [2]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0
        log = server.log.read_text()
    assert '"path":"/v1/buffers/a","status":201,' in log
    assert f'"client":"unix:{path}"' in log
    assert '"client":"127.0.0.1"' in log
    assert not path.exists()
