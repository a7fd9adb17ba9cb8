"""Tables of doubles in files of one directory: each process writes its own, and any process reads all."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from service.host.system import reserve


def new_table(directory: Path, size: int) -> Any:
    """Return a table of this process, `size` zeros, that all processes of `directory` can read. Raises OSError."""
    directory.mkdir(mode=0o700, exist_ok=True)  # a clean-up of old files may have removed it
    with NamedTemporaryFile(dir=directory, prefix=f"{os.getpid()}-", suffix=".metrics", delete=False) as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # for as long as the file is mapped
        try:
            reserve(file.fileno(), 0, size * 8)  # else a full disk would kill the process when it counts
        except OSError:
            os.unlink(file.name)
            raise
        return memoryview(mmap.mmap(file.fileno(), size * 8)).cast("d")


def read_tables(directory: Path, size: int) -> Iterator[tuple[Sequence[float], int | None]]:
    """Yield the table of each process, and the id of the process if it lives. Raises OSError."""
    for file in directory.glob("*.metrics"):
        data = file.read_bytes()
        if len(data) == size * 8:
            yield memoryview(data).cast("d"), int(file.name.partition("-")[0]) if is_locked(file) else None


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
