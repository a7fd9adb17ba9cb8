"""A server that kills itself within a commit: python -m tests.faults.killing serve.

GRADSERVE_TEST_KILL names a file. Once the file exists, it holds a point of `service.buffers.failpoints` and the
number of hits from then until the kill.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from pathlib import Path

from service import __main__
from service.buffers import failpoints


def main() -> int:
    order = Path(os.environ["GRADSERVE_TEST_KILL"])
    times: Counter[str] = Counter()

    def kill(point: str) -> None:
        if order.exists() and (text := order.read_text()):  # it is empty for a moment
            times[point] += 1
            wanted, number = text.split(":")
            if point == wanted and times[point] == int(number):
                os.kill(os.getpid(), signal.SIGKILL)

    failpoints.action = kill
    return __main__.main()


if __name__ == "__main__":
    sys.exit(main())
