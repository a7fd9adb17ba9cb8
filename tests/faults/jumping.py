"""A command of a machine whose time is wrong: python -m tests.faults.jumping serve.

GRADSERVE_TEST_JUMP names a file with the seconds that the machine's time is ahead.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

if ahead := os.environ.get("GRADSERVE_TEST_JUMP"):  # for the worker processes, too, which import this module
    file, right = Path(ahead), time.time
    time.time = lambda: right() + float(file.read_text())

from service import __main__

if __name__ == "__main__":
    sys.exit(__main__.main())
