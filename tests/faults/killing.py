"""A server that kills itself within a commit: python -m tests.faults.killing serve.

GRADSERVE_TEST_KILL names a file. Once the file exists, it holds a point of `service.buffers.failpoints` and the
number of hits from then until the kill. The process that dies renames the file, so that no other process dies. With
`:stop` behind the number it stops, until a test lets it go on.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from pathlib import Path

from service import __main__
from service.buffers import failpoints

ORDER = "GRADSERVE_TEST_KILL"
times: Counter[str] = Counter()


def kill(point: str) -> None:
    order = Path(os.environ[ORDER])
    try:
        wanted, number, *how = [*order.read_text().split(":"), ""][:3]
    except FileNotFoundError:
        times.clear()
        return
    if number:  # the test has written all of it
        times[point] += 1
        if point == wanted and times[point] >= int(number):
            try:
                order.rename(order.with_suffix(".done"))
            except FileNotFoundError:
                return
            os.kill(os.getpid(), signal.SIGSTOP if how == ["stop"] else signal.SIGKILL)


if ORDER in os.environ:  # in the worker processes, too, which import this module; not where pytest collects it
    failpoints.action = kill

if __name__ == "__main__":
    sys.exit(__main__.main())
