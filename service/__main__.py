"""The `gradserve` command. It can be stopped from the first moment on, though to import the rest takes a second."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns its exit status, as `cli.main` has it; 130 after Ctrl-C.

    SIGTERM ends it as Ctrl-C does, so that nothing half done is left, until a server has begun, which does it better.
    The first process of a container, which would ignore the signal otherwise, ends, too.
    """
    terminated = signal.signal(signal.SIGTERM, _stop_at_once)
    interrupted = signal.getsignal(signal.SIGINT)
    if interrupted is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop_at_once)
    try:
        from service import cli  # what takes the second

        signal.signal(signal.SIGTERM, _stop)
        signal.signal(signal.SIGINT, interrupted)
        return cli.main(arguments)
    except KeyboardInterrupt:
        return 130
    finally:
        if signal.getsignal(signal.SIGTERM) is _stop:  # a server that has ended ignores it
            signal.signal(signal.SIGTERM, terminated)


def _stop_at_once(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)  # an exception could be lost in an import, or break it; and nothing is begun


def _stop(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one must not keep the first from tidying up
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
