"""The command `gradserve-client`: where it starts, and how it ends.

Exit codes: 0 done; 1 another failure; 2 usage; 3 no such buffer or operator; 4 the state of the buffer does not allow
it; 5 invalid input, or unauthorized; 6 the server cannot be reached, is busy or took too long; 130 interrupted.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Sequence

from gradserve_client.errors import (
    Busy,
    Conflict,
    ConnectionFailed,
    GradserveError,
    InvalidInput,
    NotFound,
    TimedOut,
    TooLarge,
    Unauthorized,
    Unavailable,
)

INTERRUPTED = "interrupted"
"""The code of what the user ended while it changed something."""

_EXIT_CODES: dict[tuple[type[GradserveError], ...], int] = {
    (NotFound,): 3,
    (Conflict,): 4,
    (InvalidInput, Unauthorized, TooLarge): 5,
    (Busy, Unavailable, TimedOut, ConnectionFailed): 6,
}


def main() -> None:
    """Run the command, and exit."""
    try:
        from gradserve_client._commands import app
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("typer", "rich"):
            raise
        sys.exit(f"error: the command line needs {missing}: pip install 'gradserve-client[cli]'")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends as by Ctrl-C, and leaves nothing behind
    anywhere, arguments = _sorted(sys.argv[1:])
    as_json = "--json" in anywhere
    try:
        app([*anywhere, *arguments], prog_name="gradserve-client")
    except GradserveError as error:
        sys.exit(_report(error, as_json))
    except OSError as error:
        _drop_output()
        where = f"{error.filename}: " if error.filename else ""
        sys.exit(_report(GradserveError(f"{where}{error.strerror or error}", code="file_error"), as_json))
    except Exception as error:
        sys.exit(_report(GradserveError(f"{type(error).__name__}: {error}", code="client_error"), as_json))


def _sorted(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options that may stand anywhere, and the other arguments."""
    anywhere: list[str] = []
    others: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            others += [argument, *rest]
        elif argument == "--json" or argument.startswith(("--url=", "--api-key=")):
            anywhere.append(argument)
        elif argument in ("--url", "--api-key"):
            anywhere += [argument, *(value for value in [next(rest, None)] if value is not None)]
        else:
            others.append(argument)
    return anywhere, others


def _report(error: GradserveError, as_json: bool) -> int:
    """Say what went wrong. Returns the exit code."""
    code = error.code or re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).lower()
    if as_json:
        known = ("status", "request_id", "idempotency_key", "maybe_done", "attempts", "retry_after", "context")
        given = {name: value for name in known if (value := getattr(error, name))}
        line = json.dumps({"error": {"code": code, "detail": error.detail, **given}}, default=str)
    else:
        hint = ""
        if error.maybe_done:
            hint = f"; in case it was done, repeat it with --key {error.idempotency_key}"
        text = "".join(one if one.isprintable() else " " for one in error.detail)
        line = f"error: {text} ({code}){hint}"
    sys.stderr.write(line + "\n")
    if code == INTERRUPTED:
        return 130
    return next((number for kinds, number in _EXIT_CODES.items() if isinstance(error, kinds)), 1)


def _drop_output() -> None:
    """What could not be written is not tried again, and not complained of again, when the process ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
