"""The server, which kills itself within a commit: python -m tests.faults.killing serve.

The file named by GRADSERVE_TEST_KILL, while it is there, says where: a point of `reached` in the LMDB store, and
how often it must be reached since.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from pathlib import Path

from service import __main__
from service.buffers.lmdb import store as lmdb


def main() -> int:
    order = Path(os.environ["GRADSERVE_TEST_KILL"])
    times: Counter[str] = Counter()

    def reached(point: str) -> None:
        if order.exists():
            times[point] += 1
            wanted, number = order.read_text().split(":")
            if point == wanted and times[point] == int(number):
                os.kill(os.getpid(), signal.SIGKILL)

    assert callable(lmdb.reached)
    for name, module in sys.modules.items():
        if name.startswith("service.buffers.") and hasattr(module, "reached"):
            setattr(module, "reached", reached)  # noqa: B010 - the type of a module does not tell
    return __main__.main()


if __name__ == "__main__":
    sys.exit(main())
