"""Files that another user may have prepared: no link leads a write elsewhere, no FIFO or device makes a reader wait."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from service.host.system import sync, sync_path

_PRIVATE = 0o600
"""The mode of a new file: only its user may read and write it."""


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file, and return its descriptor. Raises OSError for a directory, a FIFO, a socket or a device."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY, _PRIVATE)  # else a FIFO waits for its other end
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_regular(path)
    return descriptor


def open_new(path: Path) -> int:
    """Create a file to write, and return its descriptor. Raises OSError if there is one, or a link."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE)


@contextmanager
def named(path: Path | str) -> Iterator[None]:
    """Add the file at `path` to an error of the system that names no file: to one of a write, for example."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def put_in_place(new: Path, path: Path) -> None:
    """Let a new file replace the file at `path`, durably. Raises OSError."""
    new.replace(path)
    with suppress(OSError):  # some file systems cannot sync a directory
        sync_path(path.parent)


def check_regular(path: Path) -> None:
    """Raise OSError if there is anything but a regular file at `path`: a link, too."""
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise _not_regular(path)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock the directory meanwhile. Wait as long as another process has locked it. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path | None) -> Iterator[Any]:
    """Yield a file that replaces the file at `path`, through a link too, once it is complete.

    After an error the old file is unchanged. A device, a pipe and stdout (None) are written directly.
    """
    if path is None:
        if sys.stdout is None:
            raise OSError("stdout is closed")
        yield sys.stdout.buffer
        sys.stdout.flush()
        return
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield file
        return
    target = Path(os.path.realpath(path))
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.unfinished")
    try:
        file = open(open_new(unfinished), "wb")  # only its user may read it, like the store
    except OSError as error:
        error.filename = str(path)
        raise
    try:
        with file:
            with suppress(FileNotFoundError):
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            yield file
            file.flush()
            sync(file.fileno())
        put_in_place(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


def _not_regular(path: Path) -> OSError:
    return OSError(errno.EINVAL, "Not a regular file", str(path))
