"""A command of a machine whose time is wrong: python -m tests.faults.jumping serve.

GRADSERVE_TEST_JUMP names a file with the seconds that the machine's time is ahead.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

_AHEAD = Path(os.environ["GRADSERVE_TEST_JUMP"])
_right = time.time
time.time = lambda: _right() + float(_AHEAD.read_text())

from service import __main__  # noqa: E402 - after the jump, for the worker processes too

if __name__ == "__main__":
    sys.exit(__main__.main())
