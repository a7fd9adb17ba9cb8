"""A server that waits for an hour instead of seconds, and ignores SIGHUP: python -m tests.api.patient serve."""

from __future__ import annotations

import signal
import sys

from service import __main__
from service.api import server
from service.api.http.wire import Ending

if "pytest" not in sys.modules:  # in the worker processes, too, which import this module
    Ending.max_seconds = server.SAME_SECONDS = 3600

if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup starts programs so
    sys.exit(__main__.main())
