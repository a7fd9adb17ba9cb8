"""A UNIX socket to listen on: a file that the processes of this machine connect to."""

from __future__ import annotations

import fcntl
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import AF_UNIX, socket

from service.host.files import open_regular
from service.host.tcp import AddressInvalid

MAX_PATH_BYTES = 107 if sys.platform == "linux" else 103
"""Bytes of a path that the system takes: the size of `sun_path`, less a zero byte."""

BACKLOG = 2048
"""Connections that may wait for the server. TCP has the same number, uvicorn's."""

_OTHERS = 0o077
"""The permission bits of the group and of everybody."""


def is_private(mode: str) -> bool:
    """Return whether only its owner can open a socket of this octal mode."""
    return not int(mode, 8) & _OTHERS


@contextmanager
def listening(path: Path, mode: str) -> Iterator[socket]:
    """Yield a listening socket whose file has this octal mode. Replace a socket that no process listens on.

    At the end remove the file, unless another server has put its own there. Raises `AddressInvalid` if no socket can
    be made at this path, OSError if a server listens there.
    """
    with socket(AF_UNIX) as listener:
        try:
            made = _listen(listener, path, int(mode, 8))
        except OSError as error:
            raise OSError(f"Cannot listen on {path} (GRADSERVE_SOCKET): {_reason(error)}") from None
        try:
            yield listener
        finally:
            with suppress(OSError), _alone(path):
                if _identity(path) == made:
                    path.unlink()


def _listen(listener: socket, path: Path, mode: int) -> tuple[int, ...]:
    """Let the socket listen at the path, and return the identity of its file."""
    _check_place(path)
    with _alone(path):  # of two servers that start at once, one finds the other's socket
        if _is_stale(path):
            path.unlink()
        usual = os.umask(~mode & 0o777)
        try:
            listener.bind(str(path))
        finally:
            os.umask(usual)
        listener.listen(BACKLOG)  # before the next server may look whether somebody listens
        return _identity(path)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep out the other servers with this path, and wait as long as one of them is inside. Raises OSError.

    They lock a file that no other user can open: anyone who may read a directory could lock that.
    """
    lock = path.with_name(f"{path.name}.lock")
    descriptor = _locked(lock)
    while not _is_at(lock, descriptor):  # the server before has removed it
        os.close(descriptor)
        descriptor = _locked(lock)
    try:
        yield
    finally:
        lock.unlink()
        os.close(descriptor)


def _locked(lock: Path) -> int:
    """Open and lock the file, and return its descriptor. Raises OSError, for a file of another user too."""
    descriptor = open_regular(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    try:
        os.fchmod(descriptor, 0o600)  # only its owner may do that
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        os.close(descriptor)
        raise OSError(error.errno, error.strerror, str(lock)) from None
    return descriptor


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether the open file is still at the path."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _check_place(path: Path) -> None:
    """Raise `AddressInvalid` for a path that is too long, or in no directory."""
    if (size := len(os.fsencode(path))) > MAX_PATH_BYTES:
        raise AddressInvalid(
            f"GRADSERVE_SOCKET is {path}, which has {size} bytes; a socket's path has {MAX_PATH_BYTES} at most"
        )
    if not path.parent.is_dir():
        raise AddressInvalid(f"GRADSERVE_SOCKET is {path}, but {path.parent} is not a directory")


def _is_stale(path: Path) -> bool:
    """Return whether a socket that no process listens on is at the path. Raises `AddressInvalid` and OSError."""
    try:
        kind = stat.S_IFMT(path.lstat().st_mode)
    except FileNotFoundError:
        return False
    if kind != stat.S_IFSOCK:
        found = _KINDS.get(kind, "a device")
        raise AddressInvalid(f"GRADSERVE_SOCKET is {path}, which is {found}; name a file that does not exist")
    with socket(AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except FileNotFoundError:  # its server has just removed it
            return False
        except BlockingIOError:  # its queue is full
            pass
    raise OSError(None, "another server listens there")


def _reason(error: OSError) -> str:
    """Return what the system says, with the file that it says it about."""
    return f"{error.strerror}" if error.filename is None else f"{error.strerror}: {error.filename}"


_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFREG: "a regular file",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
}
"""The kinds of files by their bits of `st_mode`."""


def _identity(path: Path) -> tuple[int, ...]:
    """Return what tells a file from a later one at its path. The inode does not: the file system reuses inodes."""
    found = path.lstat()
    return found.st_dev, found.st_ino, found.st_mtime_ns
