"""A UNIX socket to listen on: a file that the processes of this machine connect to."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import AF_UNIX, socket

from service.host.files import locked
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
            raise OSError(f"Cannot listen on {path} (GRADSERVE_SOCKET): {error.strerror}") from None
        try:
            yield listener
        finally:
            with suppress(OSError), locked(path.parent):
                if _identity(path) == made:
                    path.unlink()


def _listen(listener: socket, path: Path, mode: int) -> tuple[int, ...]:
    """Let the socket listen at the path, and return the identity of its file."""
    _check_place(path)
    with locked(path.parent):  # of two servers that start at once, one finds the other's socket
        if _is_stale(path):
            path.unlink()
        usual = os.umask(~mode & 0o777)
        try:
            listener.bind(str(path))
        finally:
            os.umask(usual)
        listener.listen(BACKLOG)  # before the next server may look whether somebody listens
        return _identity(path)


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
