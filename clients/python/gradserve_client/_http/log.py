"""What the client says in the log `gradserve_client`: when a server fails, and what a call waits for."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from gradserve_client.errors import EpochOpen, GradserveError

logger = logging.getLogger("gradserve_client")
logger.addHandler(logging.NullHandler())  # else Python would print to stderr in a program without logging

WAITING_SECONDS = 30.0
"""Seconds of waiting between two lines: a person who wonders about a silent program looks for about as long."""

_MOST_NAMED = 3
"""Missing contributors that a line names: the error has all."""


class Log:
    """The log of a client about the server at `url`. It says once that the server fails, until the server answers."""

    def __init__(self, url: str) -> None:
        self._url, self._is_failing = url, False

    def answered(self) -> None:
        """Note that the server has answered."""
        self._is_failing = False

    def retries(self, what: str, error: GradserveError, seconds: float) -> None:
        """Warn that `what` failed and is sent again, for up to `seconds`, unless the server failed before."""
        if not self._is_failing:
            self._is_failing = True
            logger.warning("%s at %s: %s; trying again for up to %.0f s", what, self._url, error.detail, seconds)

    def waits(self, error: EpochOpen, seconds: float) -> None:
        """Say what the server still waits for, after `seconds`."""
        place = " at ".join([*filter(None, [error.context.get("buffer")]), self._url])
        logger.warning("%s (%s, for %.0f s now)", _state(error), place, seconds)


def _state(error: EpochOpen) -> str:
    """Return the state of the epoch: `epoch 7: 3 of 4 in, rank3 is missing`."""
    known = error.context
    if "count" not in known:
        return error.detail
    wanted = known.get("min_count", known.get("quorum"))
    state = f"epoch {known.get('epoch')}: {known['count']}{'' if wanted is None else f' of {wanted}'} in"
    return f"{state}, {_named(error.missing)} missing" if error.missing else state


def _named(missing: Sequence[Any]) -> str:
    names = [*missing[:_MOST_NAMED], *([f"{len(missing) - _MOST_NAMED} more"] if len(missing) > _MOST_NAMED else [])]
    return f"{' and '.join(filter(None, [', '.join(names[:-1]), names[-1]]))} {'is' if len(missing) == 1 else 'are'}"
