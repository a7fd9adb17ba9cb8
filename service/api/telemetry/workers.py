"""Worker processes: how many of them serve, and that none of them outlives its parent."""

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


class Workers:
    """The `count` processes that share `directory`, or, without one, this process alone.

    Each locks a file while it serves. The kernel drops the lock however the process ends, so the others know at once.
    """

    def __init__(self, count: int, directory: Path | None) -> None:
        self._count, self._directory = count, directory

    @contextmanager
    def serving(self) -> Iterator[None]:
        """This process serves meanwhile."""
        if self._directory is None:
            yield
            return
        self._directory.mkdir(mode=0o700, exist_ok=True)  # whoever tidies up may have removed it
        path = self._directory / f"{os.getpid()}.serving"
        with open(path.with_suffix(".starting"), "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            os.rename(file.name, path)  # so that it is never seen without its lock
            yield

    def check(self) -> None:
        """Raise `NotReady` unless all of them serve."""
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
    """Whether the process that locked this file lives: a number that it had may be another's by now."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False


def stop_without_parent() -> None:
    """Stop this worker process, as SIGTERM does, when its parent is gone, which would have told it to."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="parent", daemon=True).start()
