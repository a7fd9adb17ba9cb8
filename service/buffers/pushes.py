"""Pushes in parts: gradients that several requests stage, and that the last of them adds together, or none.

A staged gradient is durable, and in no sum. The push that completes adds all its gradients in one transaction. A part
that is refused drops the push: what it staged is free, and its later parts get the same error.

An incomplete push is a buffer that no client names. Its values are the staged gradients; the store forgets it in time.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import orjson

from service.buffers.names import BufferName, pushes_of
from service.buffers.packed import present
from service.buffers.record import Key, Record, Spec
from service.dtypes import BOOL
from service.errors import BufferCorrupt, GradserveError, InvalidParameter, KeyReused, TooManyTensors, shown, tree

MAX_PARTS = 1000
"""Parts of a push: 64 GB in the largest requests that a server takes by default."""

MAX_STORED_BYTES = 1 << 50
"""Bytes of a gradient or of a push, at most. No store is as large: a count of more is damaged."""

DRAFT = "\n"
"""What the name of a push begins with that no client has sent: a store writes a large part under it."""

Place: TypeAlias = Sequence[Any]
"""Where a store has a staged gradient: the ids of its values, then what JSON can hold."""


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
    step: int | None = None
    contributor: str | None = None
    most: int = 1 << 14
    """How many gradients the push may have: it changes all their buffers at once."""

    @property
    def name(self) -> BufferName:
        """The buffer that the push is."""
        return BufferName(pushes_of(self.caller), self.push)

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
    gradients: Mapping[str, Sequence[Any]]
    """The members of each `Staged`."""
    norms: Mapping[str, float]


Refusal: TypeAlias = Sequence[Any]
"""The code, the detail and the context of an error."""


@dataclass(frozen=True)
class Push:
    """A push that is not complete, or that was refused. The store forgets it `seconds` after it `began`."""

    parts: int
    weight: float
    step: int | None
    contributor: str | None
    began: float
    seconds: float
    staged: Mapping[int, StagedPart] = field(default_factory=dict)
    refusal: Refusal | None = None

    @classmethod
    def begun(cls, part: Part, now: float) -> Push:
        """Return the push that begins with this part."""
        return cls(part.parts, part.weight, part.step, part.contributor, now, part.seconds)

    @classmethod
    def of(cls, record: Record) -> Push:
        """Return the push that a buffer is."""
        parts, weight, step, contributor = record.about["push"]
        staged = {number: StagedPart(*part) for number, *part in record.about["staged"]}
        seconds, refusal = record.spec.ttl_seconds or 0.0, record.about["refusal"]
        return cls(parts, weight, step, contributor, record.created, seconds, staged, refusal)

    def record(self, name: BufferName) -> Record:
        """Return the buffer that is this push. Its shape says how many bytes are staged."""
        spec = Spec((self.nbytes,), BOOL, ttl_seconds=self.seconds)
        common = (self.parts, self.weight, self.step, self.contributor)
        staged = [(number, *part) for number, part in self.staged.items()]
        about = {"push": common, "staged": staged, "refusal": self.refusal}
        return Record(name, spec, 0, self.began, self.began, about=about)

    @property
    def until(self) -> float:
        """When the store forgets the push."""
        return self.began + self.seconds

    def check_same(self, part: Part) -> None:
        """Raise `InvalidParameter` if the part says something else about the push than the first part did."""
        for name in ("parts", "weight", "step", "contributor"):
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
        found = ((number, *each) for number in self.numbers for each in self.staged[number].gradients.items())
        return [(number, buffer, Staged(*members)) for number, buffer, members in found]

    @property
    def nbytes(self) -> int:
        """The bytes of the staged gradients."""
        return sum(nbytes for part in self.staged.values() for _, _, nbytes in part.gradients.values())

    def as_json(self, name: str) -> dict[str, Any]:
        return {
            "push": name,
            "parts": self.parts,
            "staged": self.numbers,
            "bytes": self.nbytes,
            "buffers": [buffer for _, buffer, _ in self.gradients],
            "weight": self.weight,
            "step": self.step,
            "contributor": self.contributor,
            "began_at": self.began,
            "expires_at": self.until,
            "refused": None if self.refusal is None else self.refusal[0],
        }


_OLDER_NUMBERS = struct.Struct("<QQddd")
"""The numbers of a push: parts, step, weight, and the times of its beginning and its end."""


def unpack_older(push: BufferName, packed: bytes | memoryview) -> Record:
    """Return the push as formats before 9 have stored it, apart. Raises `BufferCorrupt` for what none has packed."""
    try:
        count, weight, step, contributor, began, until, parts, refusal = orjson.loads(packed)
        _OLDER_NUMBERS.pack(count, step or 0, weight, began, until)
        if not isinstance(contributor, str | None) or (refusal and [*map(type, refusal)] != [str, str, dict]):
            raise ValueError
        if refusal:
            code, detail, context = refusal
            refusal = [present(code), detail, {present(name): value for name, value in context.items()}]
        staged = {
            _whole(number): StagedPart(
                mark, {buffer: _older_staged(*each) for buffer, each in gradients.items()}, norms
            )
            for number, mark, gradients, norms in parts
        }
        return Push(count, weight, step, contributor, began, until - began, staged, refusal).record(push)
    except (AttributeError, LookupError, TypeError, ValueError, struct.error):
        raise damaged(push) from None


def _older_staged(buffer: int, place: Place | None, nbytes: int) -> Sequence[Any]:
    """Return a staged gradient. PostgreSQL had the id of its value without a list."""
    if place is not None:
        ids, *more = place
        place = [[*map(_whole, ids if isinstance(ids, list) else [ids])], *more]
    return _whole(buffer), place, _whole(nbytes)


def _whole(number: Any) -> int:
    """Return the number. Raises `ValueError` for what is none."""
    if type(number) is not int:
        raise ValueError
    return number


def damaged(name: BufferName) -> BufferCorrupt:
    """Return the error of a push that cannot be read."""
    return BufferCorrupt(f"The stored parts of the push {shown(name.name)} are damaged on the disk")


def _error_of(code: str, detail: str, context: Mapping[str, Any]) -> GradserveError:
    """Return an error again from what was stored of it."""
    error = GradserveError.__new__(next((each for each in tree() if each.code == code), GradserveError))
    GradserveError.__init__(error, detail, **context)
    return error
