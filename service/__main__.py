"""The `gradserve` command. A signal stops it at any time, even during its imports, which take most of a second."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

NOT_ON_WINDOWS = (
    "gradserve: the server does not run on Windows. Start it in WSL or in its container;"
    " gradserve-client runs here, too\n"
)
"""What the command says on a system without fcntl."""

SIGNALLED = 128
"""The exit status of a process that a signal ended is this plus the signal's number, as shells report it."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status: that of `cli.main`, or 130 after Ctrl-C.

    SIGTERM ends the command as Ctrl-C does, so that it removes unfinished files. The server installs handlers of its
    own. In a container the command is the first process, for which the kernel ignores a signal without a handler.
    """
    if sys.platform == "win32":  # it lacks fcntl and much else
        sys.stderr.write(NOT_ON_WINDOWS)
        return 1
    terminated = signal.signal(signal.SIGTERM, _stop_at_once)
    interrupted = signal.getsignal(signal.SIGINT)
    if interrupted is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop_at_once)
    try:
        try:
            from service.commands import cli

            options = cli.parse(arguments)  # imports the server, which takes most of a second
        finally:
            signal.signal(signal.SIGTERM, _stop)
            signal.signal(signal.SIGINT, interrupted)
        return cli.main(options)
    except KeyboardInterrupt:
        return SIGNALLED + signal.SIGINT
    finally:
        if signal.getsignal(signal.SIGTERM) is _stop:  # a server that has ended must keep ignoring SIGTERM
            signal.signal(signal.SIGTERM, terminated)


def _stop_at_once(number: int, frame: FrameType | None) -> None:
    os._exit(SIGNALLED + number)  # an exception could be swallowed by an import, and no work has begun


def _stop(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt the clean-up after the first
    raise SystemExit(SIGNALLED + number)


if __name__ == "__main__":
    sys.exit(main())
