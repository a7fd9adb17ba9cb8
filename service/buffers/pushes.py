"""Pushes in parts: gradients that several requests stage, and that the last of them adds together, or none.

A staged gradient is durable, and in no sum. The push that completes adds all its gradients in one transaction. A part
that is refused drops the push: what it staged is free, and its later parts get the same error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

from service.buffers.record import Key
from service.errors import GradserveError, InvalidParameter, KeyReused, TooManyTensors, shown, tree

MAX_PARTS = 1000
"""Parts of a push: 64 GB in the largest requests that a server takes by default."""

MAX_STORED_BYTES = 1 << 50
"""Bytes of a gradient or of a push, at most. No store is as large: a count of more is damaged."""

DRAFT = "\n"
"""What the name of a push begins with that no client has sent: a store writes a large part under it."""

PushName: TypeAlias = tuple[str, str]
"""The namespace of a push, and its id."""

Place: TypeAlias = Sequence[Any]
"""Where a store has a staged gradient: numbers and texts that JSON can hold."""


class Part(NamedTuple):
    """The place of a request in a push, and what all parts of the push have in common."""

    push: str
    number: int
    parts: int
    caller: str
    """The namespace of the caller: another caller's push of the same name is another push."""
    fingerprint: bytes
    seconds: float
    """How long after its first part the push is forgotten unless it is complete."""
    weight: float = 1.0
    epoch: int | None = None
    contributor: str | None = None
    most: int = 1 << 14
    """How many gradients the push may have: it changes all their buffers at once."""

    @property
    def name(self) -> PushName:
        return self.caller, self.push

    @property
    def key(self) -> Key:
        """The key of the complete push. No client can send this text as an Idempotency-Key."""
        return Key(self.caller, f"\npush {self.push}", bytes(16))

    @property
    def mark(self) -> str:
        """The part in what is stored with the key."""
        return f"{self.number}:{self.fingerprint.hex()}"

    def check_same(self, marks: Sequence[str], staged: Sequence[int] | None = None) -> None:
        """Raise `KeyReused` unless this part, with the same bytes, is among those of the push.

        The error has the numbers of the `staged` parts if the push is not complete.
        """
        if self.mark not in marks:
            raise KeyReused(
                f"Part {self.number} of the push {shown(self.push)} has come before with another path, query,"
                " Content-Type or body, or the push was complete without it. A new push needs a new id",
                **({} if staged is None else {"staged": staged}),
            )


class Staged(NamedTuple):
    """A staged gradient: the id of its buffer, the place of its numbers, their bytes. No place: it adds nothing."""

    buffer: int
    place: Place | None
    nbytes: int


class StagedPart(NamedTuple):
    """The gradients of a part by their buffers, and the 2-norms of those whose buffers had a `max_norm`."""

    mark: str
    gradients: Mapping[str, Staged]
    norms: Mapping[str, float]


Refusal: TypeAlias = Sequence[Any]
"""The code, the detail and the context of an error."""


@dataclass(frozen=True)
class Push:
    """A push that is not complete, or that was refused. `until` is when the store forgets it."""

    parts: int
    weight: float
    epoch: int | None
    contributor: str | None
    began: float
    until: float
    staged: Mapping[int, StagedPart] = field(default_factory=dict)
    refusal: Refusal | None = None

    @classmethod
    def of(cls, part: Part, now: float) -> Push:
        """Return the push that begins with this part."""
        return cls(part.parts, part.weight, part.epoch, part.contributor, now, now + part.seconds)

    def check_same(self, part: Part) -> None:
        """Raise `InvalidParameter` if the part says something else about the push than the first part did."""
        for name in ("parts", "weight", "epoch", "contributor"):
            first, now = getattr(self, name), getattr(part, name)
            if first != now:
                problem = f"{name} is {shown(now)} in part {part.number}, but {shown(first)} in the push's first part"
                raise InvalidParameter(problem, parameter=name)

    def check_count(self, part: Part, count: int) -> None:
        """Raise `TooManyTensors` if the push may not have this part with its `count` gradients."""
        count += sum(len(each.gradients) for each in self.staged.values())
        if count > part.most:
            problem = f"With part {part.number} the push has {count} gradients; the limit is {part.most}"
            raise TooManyTensors(f"{problem} (GRADSERVE_MAX_TENSORS)", limit=part.most)

    def with_part(self, number: int, part: StagedPart) -> Push:
        return replace(self, staged={**self.staged, number: part})

    def refused(self, error: GradserveError) -> Push:
        return replace(self, staged={}, refusal=[error.code, error.detail, error.context])

    def check_not_refused(self) -> None:
        """Raise the error of the part that was refused, if one was."""
        if self.refusal is not None:
            raise _error_of(*self.refusal)

    @property
    def numbers(self) -> list[int]:
        """The numbers of the staged parts, in order."""
        return sorted(self.staged)

    @property
    def gradients(self) -> list[tuple[int, str, Staged]]:
        """The number of the part, the buffer and the gradient, for each staged gradient, in the order of parts."""
        return [(number, *each) for number in self.numbers for each in self.staged[number].gradients.items()]

    @property
    def nbytes(self) -> int:
        """The bytes of the staged gradients."""
        return sum(staged.nbytes for _, _, staged in self.gradients)

    def as_json(self, name: str) -> dict[str, Any]:
        return {
            "push": name,
            "parts": self.parts,
            "staged": self.numbers,
            "bytes": self.nbytes,
            "buffers": [buffer for _, buffer, _ in self.gradients],
            "weight": self.weight,
            "epoch": self.epoch,
            "contributor": self.contributor,
            "began_at": self.began,
            "expires_at": self.until,
            "refused": None if self.refusal is None else self.refusal[0],
        }


def _error_of(code: str, detail: str, context: Mapping[str, Any]) -> GradserveError:
    """Return an error again from what was stored of it."""
    error = GradserveError.__new__(next((each for each in tree() if each.code == code), GradserveError))
    GradserveError.__init__(error, detail, **context)
    return error
