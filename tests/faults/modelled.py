"""A server whose store is like those of the state machine: python -m tests.faults.modelled serve.

It cuts values of a few elements into chunks, and folds often. GRADSERVE_TEST_CLOCK may name a file with the time of its
store.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from service import __main__
from service.buffers import postgres, url
from service.buffers.store import Store
from tests.buffers.postgres import shrink
from tests.buffers.stores import KEY_SECONDS, shrink_lmdb


def main() -> int:
    file, patch = os.environ.get("GRADSERVE_TEST_CLOCK"), pytest.MonkeyPatch()
    clock = file and (lambda: float(Path(file).read_text()))

    def opening(store: Callable[..., Store]) -> Callable[..., Store]:
        return lambda *place, **options: store(*place, **{**options, "key_seconds": KEY_SECONDS, "clock": clock})

    for module, name in ((postgres, "PostgresStore"), (url, "LmdbStore"), (url, "MemoryStore")):
        patch.setattr(module, name, opening(getattr(module, name)))
    shrink_lmdb(patch)
    shrink(patch)
    return __main__.main()


if __name__ == "__main__":
    sys.exit(main())
