"""A server over PostgreSQL whose store is like those of the state machine: python -m tests.faults.modelled serve.

It stages gradients of a few elements, and folds often. GRADSERVE_TEST_CLOCK may name a file with the time of its store.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from service import __main__
from service.buffers import postgres
from tests.buffers.calls import KEY_SECONDS
from tests.buffers.postgres import shrink


def main() -> int:
    file, store, patch = os.environ.get("GRADSERVE_TEST_CLOCK"), postgres.PostgresStore, pytest.MonkeyPatch()
    clock = file and (lambda: float(Path(file).read_text()))

    def open_store(url: str, **options: Any) -> postgres.PostgresStore:
        return store(url, **{**options, "key_seconds": KEY_SECONDS, "clock": clock})

    patch.setattr(postgres, "PostgresStore", open_store)
    shrink(patch)
    return __main__.main()


if __name__ == "__main__":
    sys.exit(main())
