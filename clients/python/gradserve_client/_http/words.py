"""The words about a step that waits: the log, the command line and the page at `/` have the same."""

from __future__ import annotations

import re
from collections.abc import Sequence

DEFAULT_URL = "http://127.0.0.1:8000"
"""Where a server is that was started without options."""

WAITING_SECONDS = 30.0
"""Seconds of waiting that are worth a word: a person who wonders about a silent program looks for about as long."""

_MOST_NAMED = 3
"""Missing contributors that are named: more names would leave no room for others."""

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))

_OWN = re.compile(r"(^|\.|::)::|::tally$")
"""What the names of a run's bookkeeping have, as `exp1.::start` and `exp1.layer::tally`."""

_WITHIN = re.compile(r"(tally|\d+|[0-9a-f]{32})(::|$)")
"""What follows `::` in a piece of a tensor, in a tally, and in a name that was too long."""


def waiting(missing: Sequence[str], count: int, quorum: float | None, seconds: float, otherwise: str = "") -> str:
    """Return for whom a step waits, and how long: `waiting for rank2 and rank5 for 40 s`.

    If nobody knows who is missing, it waits for `1 of 3`, or without a quorum for what `otherwise` says.
    """
    number = otherwise if quorum is None else f"{quorum - count} of {quorum}"
    return " for ".join(filter(None, ["waiting", named(missing) or number, span(seconds)]))


def named(names: Sequence[str]) -> str:
    """Return the names, at most three of them: `rank1, rank2, rank3 and 2 more`."""
    some = [*names[:_MOST_NAMED], *([f"{len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else [])]
    return " and ".join(filter(None, [", ".join(some[:-1]), *some[-1:]]))


def span(seconds: float) -> str:
    """Return a length of time in its largest unit: 12 s, 3 min, 5 h, 2 d."""
    size, unit = next((one for one in _UNITS if seconds >= one[0]), _UNITS[-1])
    return f"{int(seconds // size)} {unit}"


def place_of(buffer: str) -> str:
    """Return the name of a buffer, or of its run if the buffer is a run's bookkeeping: exp1 for exp1.layer::tally."""
    if not _OWN.search(buffer):
        return buffer
    if found := re.match(r"(.+?)(\.|::)::", buffer):
        return found[1]
    before, _, after = buffer.partition("::")
    return before.partition(".")[0] if _WITHIN.match(after) else before
