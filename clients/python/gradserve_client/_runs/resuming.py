"""How a worker goes on without a checkpoint of its own: from the state of its run that the server keeps."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gradserve_client._http.log import logger
from gradserve_client._runs.joining import Joining
from gradserve_client._runs.kept import Kept, Source
from gradserve_client._runs.member import Member
from gradserve_client._runs.outcomes import Pushed
from gradserve_client._runs.parts import Part
from gradserve_client._runs.pushes import Pushes
from gradserve_client._runs.sums import Sums
from gradserve_client._wire.arguments import as_whole
from gradserve_client.errors import KeyReused, StaleStep, mistaken

SPARE_STEPS = 3
"""Closed steps that are kept beyond those between two states: a worker that writes may die, and another takes over."""

_SHARE = 0.1
"""The bytes of states, as a part of those of pushes and pulls."""


def every(given: int | None, parts: Mapping[str, Part], source: Source, rules: Mapping[str, Any]) -> int:
    """Return the steps between two states. Raises `InvalidInput`."""
    if given is not None:
        if as_whole("state_every", given) < 1:
            raise mistaken("state_every", f"is {given}, but must be at least 1")
        return given
    workers = rules.get("quorum") or len(rules.get("contributors") or ()) or 1
    gradients = 2 * workers * sum(part.nbytes for part in parts.values())
    return max(1, math.ceil(source.nbytes / (_SHARE * gradients or 1)))


class Resuming:
    """The states that this worker writes, and the steps that it makes up for from one of them.

    The worker gets such a step's mean from its pull, as all others did. So the program's own loop, with all that it
    does between pull and the optimizer's step, brings it to the bits of the others.
    """

    def __init__(
        self,
        kept: Kept,
        source: Source,
        sums: Sums,
        member: Member,
        state_every: int,
        worker: str | None,
        contributors: Sequence[str],
    ) -> None:
        self._kept, self._source, self._sums, self._member = kept, source, sums, member
        self._every, self._worker = state_every, worker
        self.contributors = [*contributors]
        """Those of the last step: the first of them by name writes the state."""
        self._running = 0
        """The running step of the run, as far as this worker knows."""
        self._written = -math.inf
        """The step of the newest state, as far as this worker knows."""

    def goes_on(self, pushes: Pushes, joining: Joining, *, later: bool = False) -> bool:
        """Take the newest state of the server, if there is one; with `later`, only if it is of a later step."""
        self._running, _ = self._sums.position()
        found = self._kept.read()
        if found is None or (later and found[0][0] <= pushes.step):
            return False
        (step, _), numbers = found
        self._source.restore(numbers)
        self._written = step
        joining.shares()
        pushes.begin(step)
        name, made_up = self._member.run, f" after those up to {self._running}" if step < self._running else ""
        logger.warning("run %s goes on at step %s, from the state on the server%s", name, step, made_up)
        return True

    def is_over(self, step: int) -> bool:
        """Return whether a step has closed without this worker."""
        return step < self._running

    def keep(self, step: int) -> None:
        """Write the state that this step begins with, if it is time and this worker's turn."""
        if step - self._written < self._every or (self.contributors and min(self.contributors) != self._worker):
            return
        newest = self._kept.newest()
        if newest is None or step - newest[0] >= self._every:
            newest = step, 0
            key = hashlib.sha256(f"{self._member.life} state {step}".encode()).hexdigest()[:40]
            self._kept.write(newest, *self._source.content(), key)
        self._written = newest[0]

    def pushed(self, step: int, push: Callable[[], Pushed]) -> Pushed:
        """Make a push. One that comes too late does not count, and one that a restart repeats counts once."""
        try:
            return push()
        except StaleStep:
            self._running, _ = self._sums.position()
            if self._running <= step:
                raise
            name = self._member.run
            logger.warning(
                "step %s of run %s closed without this worker: the run is in step %s", step, name, self._running
            )
            return Pushed.late(step)
        except KeyReused:
            logger.warning("This worker's push of step %s of run %s had counted before", step, self._member.run)
            return Pushed(step=step, count=0, weight=0.0, closed=False, replayed=True)
