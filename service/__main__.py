"""The `gradserve` command. It can be stopped from the first moment on, though to import the rest takes a second."""

from __future__ import annotations

import signal
import sys
from types import FrameType


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns its exit status, as `cli.main` has it; 130 after Ctrl-C.

    SIGTERM ends it as Ctrl-C does, so that nothing half done is left, until a server has begun, which does it better.
    The first process of a container, which would ignore the signal otherwise, ends, too.
    """
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        from service import cli  # what takes the second

        return cli.main(arguments)
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
