"""The command `gradserve-client`: its start, and its exit codes.

Exit codes: 0 success; 1 another failure; 2 bad arguments; 3 no such buffer or operator; 4 the state of the buffer does
not allow it; 5 invalid input, or unauthorized; 6 the server cannot be reached, is busy, or took too long;
130 interrupted.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Sequence

from gradserve_client.errors import (
    INTERRUPTED,
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

_EXIT_CODES: dict[tuple[type[GradserveError], ...], int] = {
    (NotFound,): 3,
    (Conflict,): 4,
    (InvalidInput, Unauthorized, TooLarge): 5,
    (Busy, Unavailable, TimedOut, ConnectionFailed): 6,
}

_OPTIONS = {
    "contributors": "--contributor",
    "deadline_seconds": "--deadline",
    "ttl_seconds": "--ttl",
    "idempotency_key": "--key",
    "Idempotency-Key": "--key",
    **{
        name: f"--{name}"
        for name in ("contributor", "dtype", "step", "from", "into", "keep", "loss", "nonfinite", "outputs")
    },
    **{name: f"--{name}" for name in ("loss", "prefix", "quorum", "reduce", "set", "timeout", "train", "weight")},
    **{name: f"--{name.replace('_', '-')}" for name in ("max_norm", "min_count", "per_contributor", "quorum_weight")},
}
"""The options of parameters that errors name."""

_INTERRUPTED_EXIT_CODE = 130
"""128 plus the number of SIGINT, as shells have it."""


def main() -> None:
    """Run the command, and exit."""
    try:
        from gradserve_client._cli.commands import command
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("typer", "rich"):
            raise
        sys.exit(f"error: the command line needs {missing}: pip install 'gradserve-client[cli]'")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up partial files, as after Ctrl-C
    anywhere, arguments = _sorted(sys.argv[1:])
    as_json = "--json" in anywhere
    try:
        command()([*anywhere, *arguments], prog_name="gradserve-client")
    except GradserveError as error:
        sys.exit(_report(error, as_json))
    except OSError as error:
        _drop_output()
        file = f"{error.filename}: " if error.filename else ""
        sys.exit(_report(GradserveError(f"{file}{error.strerror or error}", code="file_error"), as_json))
    except Exception as error:
        sys.exit(_report(GradserveError(f"{type(error).__name__}: {error}", code="client_error"), as_json))


def _sorted(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the options that may stand anywhere, and the other arguments."""
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
    """Print the error, and return the exit code."""
    create = f"gradserve-client buffers create {error.context.get('buffer')} SHAPE"
    error.detail = _in_options(error).replace("PUT /v1/buffers/{name} creates", f"{create} creates")
    code = error.code or re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).lower()
    sys.stderr.write((_as_json if as_json else _as_line)(error, code) + "\n")
    if code == INTERRUPTED:
        return _INTERRUPTED_EXIT_CODE
    return next((number for kinds, number in _EXIT_CODES.items() if isinstance(error, kinds)), 1)


def _in_options(error: GradserveError) -> str:
    """Return the error's detail, which begins with the option that it is about."""
    name = str(error.context.get("parameter", ""))
    option = _OPTIONS.get(name) or (f"--set {name}" if name and "op" in error.context else "")
    rest = error.detail.removeprefix(name) if option else error.detail
    return f"{option}: {rest}" if option and rest == error.detail else option + rest


def _as_json(error: GradserveError, code: str) -> str:
    names = ("status", "request_id", "idempotency_key", "maybe_done", "attempts", "retry_after", "context")
    values = {name: value for name in names if (value := getattr(error, name))}
    return json.dumps({"error": {"code": code, "detail": error.detail, **values}}, default=str)


def _as_line(error: GradserveError, code: str) -> str:
    hint = (
        f"; it may have been done: to be sure, repeat it with --key {error.idempotency_key}" if error.maybe_done else ""
    )
    detail = "".join(character if character.isprintable() else " " for character in error.detail)
    return f"error: {detail} ({code}){hint}"


def _drop_output() -> None:
    """Drop the output that could not be written, so that Python does not fail once more at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
