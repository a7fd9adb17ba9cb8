"""Steps of a buffer: what has closed a step, and who has added to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from service.errors import InvalidParameter, shown

ClosedBy: TypeAlias = Literal["quorum", "deadline", "take", "members"]
"""What closes a step: its quorum of gradients or of weight, its deadline, a client, or the last that a run awaits."""

MAX_QUORUM = 10**9
"""Gradients of a quorum: more than any step can gather."""

MAX_KEEP = 2000
"""Closed steps that a buffer keeps: every record holds their list, and every change writes it."""

MAX_TTL_SECONDS = 10**9
"""The longest time to live, and the longest deadline: 31 years, in effect for ever."""

MAX_CONTRIBUTORS = 1000
"""Contributors to a step: every change of the buffer writes their names."""

MAX_KEPT_CONTRIBUTORS = 20_000
"""Contributors to closed steps that a buffer keeps, beyond which the oldest lose them: every change writes them."""

MAX_CONTRIBUTORS_BYTES = 1 << 14
"""Bytes of the names of contributors that a buffer expects, or that a step has: 16 for each of a thousand."""

MAX_KEPT_CONTRIBUTORS_BYTES = 1 << 18
"""Bytes of the names that a buffer keeps of contributors to closed steps."""

MAX_CONTRIBUTOR_CHARACTERS = 100
"""Characters of a contributor's name: a host, a rank and the name of a run."""

MOST_MISSING_NAMED = 3
"""Missing contributors that an error names: the metadata lists all."""


class Closed(NamedTuple):
    """A closed step. Its sum has the id `value`, or None if nothing was added."""

    step: int
    version: int
    count: int  # type: ignore[assignment]  # tuples count otherwise
    weight: float
    value: int | None
    closed_by: ClosedBy = "take"
    contributors: Mapping[str, int] = {}
    """How many gradients each contributor has added."""

    @property
    def etag(self) -> str:
        """The tag of the step's last state, in quotation marks."""
        return f'"{self.step}-{self.version}"'


def is_contributor(name: object) -> bool:
    """Return whether a contributor may have this name."""
    return isinstance(name, str) and 0 < len(name) <= MAX_CONTRIBUTOR_CHARACTERS and name.isprintable()


def names_bytes(names: Iterable[str]) -> int:
    """Return how many bytes of UTF-8 these names of contributors have together."""
    return len("".join(names).encode())


def check_contributor(name: str, parameter: str = "contributor") -> str:
    """Return the name of a contributor. Raises `InvalidParameter`."""
    if not is_contributor(name):
        raise InvalidParameter(
            f"{parameter} has {shown(name)}, but a name must be 1 to {MAX_CONTRIBUTOR_CHARACTERS} printable characters",
            parameter=parameter,
        )
    return name


def described(missing: Sequence[str] | None) -> str:
    """Return which expected contributors are missing, as the end of a sentence. None: nobody knows them.

    >>> described(["rank3", "rank7"]), described(["a", "b", "c", "d", "e"])
    ('; rank3 and rank7 are missing', '; a, b, c and 2 more are missing')
    >>> described(None), described([])
    ('', '; all expected contributors are in')
    """
    if not missing:
        return "" if missing is None else "; all expected contributors are in"
    more = len(missing) - MOST_MISSING_NAMED
    *first, last = [*missing[:MOST_MISSING_NAMED], *([f"{more} more"] if more > 0 else [])]
    return f"; {', '.join(first)}{' and ' if first else ''}{last} {'is' if len(missing) == 1 else 'are'} missing"


def no_mean(name: str, count: int) -> str:
    """Return why a buffer with this count, whose weight is zero, has no mean."""
    return f"{'The weights in' if count else 'Nothing was added to'} {name!r} {'sum to zero' if count else 'yet'}"
