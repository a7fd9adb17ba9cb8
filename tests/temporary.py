"""A temporary directory in memory, for stores that wait for no disk."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

MEMORY = Path("/dev/shm")
ROOM_BYTES = 2 << 30
"""The least free memory: the stores of four processes take less."""


def use_memory() -> None:
    """Let this process and its children have their temporary files in memory, if it has room, and remove them.

    The directory is locked while its process lives. What killed processes have left is removed, too.
    """
    if not MEMORY.is_dir() or not os.access(MEMORY, os.W_OK):
        return
    prefix = f"gradserve-tests-{os.getuid()}-"
    all_of_them = os.open(MEMORY, os.O_RDONLY)
    try:
        fcntl.flock(all_of_them, fcntl.LOCK_EX)  # a new directory is not locked yet
        for old in MEMORY.glob(f"{prefix}*"):
            if (lock := _locked(old)) is not None:
                shutil.rmtree(old, ignore_errors=True)
                os.close(lock)
        if shutil.disk_usage(MEMORY).free < ROOM_BYTES:
            return
        made = Path(tempfile.mkdtemp(prefix=prefix, dir=MEMORY))
        _locked(made)
    finally:
        os.close(all_of_them)
    made.chmod(0o755)  # PostgreSQL may run as another user
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    os.environ["TMPDIR"] = str(made)
    tempfile.tempdir = None


def _locked(path: Path) -> int | None:
    """Lock the directory until its descriptor is closed. Return None if another process has locked it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
