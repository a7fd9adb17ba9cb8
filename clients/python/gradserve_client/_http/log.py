"""What the client says in the log `gradserve_client`: when a server fails, and what a call waits for."""

from __future__ import annotations

import logging
import math
import time

from gradserve_client._http.words import place_of, waiting
from gradserve_client.errors import GradserveError, StepOpen

logger = logging.getLogger("gradserve_client")

SAID_SECONDS = 60.0
"""Seconds until the log says again that a server fails, or what a call waits for."""


class Log:
    """The log of a client about the server at `url`. It says once a minute that the server fails."""

    def __init__(self, url: str) -> None:
        self._url, self._said = url, -math.inf

    def answered(self) -> None:
        """Note that the server has answered."""
        self._said = -math.inf

    def retries(self, what: str, error: GradserveError, seconds: float) -> None:
        """Warn that `what` failed and is sent again, for up to `seconds`, unless a line has just said this."""
        if (now := time.monotonic()) >= self._said + SAID_SECONDS:
            self._said = now
            logger.warning("%s at %s: %s; trying again for up to %.0f s", what, self._url, error.detail, seconds)

    def waits(self, error: StepOpen, seconds: float) -> None:
        """Say what a call waits for, after `seconds`: `waiting for rank3 for 31 s: step 7 has 3 of 4 (exp1 at a)`."""
        known = error.context
        count, wanted = known.get("count", 0), known.get("min_count", known.get("quorum"))
        has = f"step {known.get('step')} has {count}{'' if wanted is None else f' of {wanted}'}"
        place = " at ".join(filter(None, [place_of(known.get("buffer", "")), self._url]))
        words = waiting(error.missing, count, wanted, seconds)
        logger.warning("%s: %s (%s)", words, has if "count" in known else error.detail, place)
