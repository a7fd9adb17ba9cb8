"""Worker processes: they count how many of them serve, and stop when their parent ends."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from service.errors import NotReady

STARTED_AT = "GRADSERVE_STARTED_AT"
"""The environment variable with the time when the server of these processes started, in seconds since 1970."""


class Workers:
    """The `count` worker processes that share `directory`; without a directory, this process alone.

    Each process locks a file while it serves. The kernel drops the lock however the process ends, so the other
    processes know at once.
    """

    def __init__(self, count: int, directory: Path | None) -> None:
        self._count, self._directory = count, directory

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Mark this process as serving meanwhile."""
        if self._directory is None:
            yield
            return
        self._directory.mkdir(mode=0o700, exist_ok=True)  # a clean-up of old files may have removed it
        path = self._directory / f"{os.getpid()}.serving"
        with open(path.with_suffix(".starting"), "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            os.rename(file.name, path)  # so that no process ever sees the file without its lock
            yield

    def check(self) -> None:
        """Raise `NotReady` unless all workers serve."""
        if self._directory is None:
            return
        missing = self._count
        for path in self._directory.glob("*.serving"):
            if is_locked(path):
                missing -= 1
            else:
                path.unlink(missing_ok=True)  # its process is gone
        if missing > 0:
            verb = "is" if missing == 1 else "are"
            raise NotReady(f"{missing} of {self._count} worker processes {verb} starting, or being replaced")


def is_locked(path: Path) -> bool:
    """Return whether the process that locked this file lives. A process id would not tell: the kernel reuses ids."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False


def stop_without_parent() -> None:
    """Send SIGTERM to this worker process when its parent ends: a killed parent cannot."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="parent", daemon=True).start()
