"""A store for tests and throw-away runs: LMDB's, in files without names. It ends with the process."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from service.buffers.lmdb import LmdbStore
from service.buffers.room import UNLIMITED

MEMORY = Path("/dev/shm")
"""Where Linux has files in memory. Elsewhere the store has temporary files, and waits for their disk."""

ROOM_BYTES = 1 << 30
"""The least free bytes there: containers may have few."""


class MemoryStore(LmdbStore):
    """A store whose files this process alone has. They are gone once the process ends, also if it is killed."""

    def __init__(self, *, max_bytes: int = UNLIMITED, **options: Any) -> None:
        has_room = os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= ROOM_BYTES
        with tempfile.TemporaryDirectory(prefix="gradserve-", dir=MEMORY if has_room else None) as path:
            super().__init__(Path(path), max_bytes=max_bytes, **options)
            self._env.forget_files()
