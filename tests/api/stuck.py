"""A server whose reads of values never end, and that ends a second after its drain: python -m tests.api.stuck serve."""

from __future__ import annotations

import sys
import threading
from typing import Any, NoReturn

from service import __main__
from service.api import server
from service.buffers.lmdb.store import LmdbStore


def stuck(*_: Any) -> NoReturn:
    sys.stderr.write("stuck\n")
    sys.stderr.flush()
    threading.Event().wait()
    raise AssertionError


if "pytest" not in sys.modules:  # in the worker processes, too, which import this module
    server.LAST_SECONDS = 1
    LmdbStore.read = stuck  # type: ignore[assignment, method-assign]

if __name__ == "__main__":
    sys.exit(__main__.main())
