"""Pushes that failed in a thread: the log says so at once, and Python's exit if no call of the program asked for it."""

from __future__ import annotations

import atexit
import io
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from gradserve_client._http.log import logger

_unheard: dict[object, str] = {}
"""What to say at the exit, by tickets."""

T = TypeVar("T")


def made(push: Callable[[], T], ticket: object, name: str) -> T:
    """Make a push. If it fails, log its error, and keep what to say of it under the ticket."""
    try:
        return push()
    except BaseException as error:
        _unheard[ticket] = f"{name} failed in its thread: {type(error).__name__}: {error}"
        logger.error("%s", _unheard[ticket])
        raise


def heard(ticket: object) -> None:
    """Forget the error of this ticket: the program gets it."""
    _unheard.pop(ticket, None)


class _Failing:
    """stderr, but its last flush fails, which makes Python exit with status 120 after all handlers of `atexit`."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        self._stream.flush()
        if sys.is_finalizing():
            raise OSError("A push failed, and no call asked for its error")


@atexit.register
def _say() -> None:
    if _unheard:
        sys.stderr = _Failing(sys.stderr or io.StringIO())  # a program without a terminal may have none
    for text in _unheard.values():
        sys.stderr.write(f"gradserve_client: {text}. No later call of the accumulator asked for it\n")
