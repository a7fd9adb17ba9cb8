"""The specification of a buffer, and the table of its rules: requests to the API and files of `import` keep to it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, get_args, get_origin, get_type_hints

import orjson

from service.buffers.names import LIFE
from service.buffers.steps import MAX_CONTRIBUTORS, MAX_KEEP, MAX_QUORUM, MAX_TTL_SECONDS
from service.dtypes import NAMES, DType
from service.errors import InvalidParameter
from service.host.documents import is_number

Nonfinite: TypeAlias = Literal["allow", "reject"]


class Rule(NamedTuple):
    """What a rule means, and which values it allows: in words, as a check, and as bounds in the terms of pydantic.

    A rule whose default is None may be null, too.
    """

    meaning: str
    words: str
    allows: Callable[[Any], bool]
    bounds: Mapping[str, Any]
    type: Any = None
    default: Any = None

    def permits(self, value: Any) -> bool:
        """Return whether a buffer may have this value, which may be null."""
        return (value is None and self.default is None) or self.allows(value)


def _whole(meaning: str, most: int) -> Rule:
    bounds = {"strict": True, "ge": 1, "le": most}
    return Rule(meaning, f"an integer from 1 to {most}", lambda one: type(one) is int and 1 <= one <= most, bounds)


def _positive(meaning: str, most: float = sys.float_info.max) -> Rule:
    bounds = {"strict": True, "gt": 0, "allow_inf_nan": False, **({"le": most} if most < sys.float_info.max else {})}
    return Rule(meaning, f"a number above 0, up to {most}", lambda one: is_number(one, 0, most) and one > 0, bounds)


def _names(meaning: str, most: int) -> Rule:
    def allows(value: Any) -> bool:
        return isinstance(value, list) and 1 <= len(value) <= most and all(isinstance(name, str) for name in value)

    return Rule(
        meaning, f"a list of 1 to {most} names", allows, {"min_length": 1, "max_length": most, "fail_fast": True}
    )


def _life(meaning: str) -> Rule:
    def allows(value: Any) -> bool:
        return isinstance(value, str) and LIFE.fullmatch(value) is not None

    words = "the name of a run, @, and 16 hexadecimal digits"
    return Rule(meaning, words, allows, {"strict": True, "pattern": f"^{LIFE.pattern}$"})


def _choice(meaning: str, choices: Any) -> Rule:
    return Rule(meaning, " or ".join(get_args(choices)), lambda one: one in get_args(choices), {})


@dataclass(frozen=True)
class Spec:
    """The specification of a buffer: the shape and the dtype of its sum, and its rules.

    `nonfinite="reject"` refuses an add that would make the sum infinite or NaN. The add that makes the count reach the
    `quorum`, or the weight the `quorum_weight`, closes the step. So does its deadline, `deadline_seconds` after its
    first add, once `min_count` gradients are in. The last `keep` closed steps stay readable. The buffer expires
    `ttl_seconds` after its last change. `contributors` are expected in each step, which takes `per_contributor`
    gradients of each contributor. An add is refused unless the 2-norm of its gradient is at most `max_norm`. A buffer
    may belong to a `life` of a run.
    """

    shape: tuple[int, ...]
    dtype: DType
    nonfinite: Annotated[Nonfinite, _choice("Whether the value may become infinite or NaN.", Nonfinite)] = "allow"
    quorum: Annotated[int | None, _whole("Gradients after which a step closes by itself.", MAX_QUORUM)] = None
    keep: Annotated[int, _whole("Closed steps that stay readable.", MAX_KEEP)] = 1
    ttl_seconds: Annotated[
        float | None, _positive("Seconds from its last change until it is deleted.", MAX_TTL_SECONDS)
    ] = None
    deadline_seconds: Annotated[
        float | None,
        _positive(
            "Seconds from its first gradient until a step closes by itself, if min_count gradients are in;"
            " if not, the gradient that brings them closes it.",
            MAX_TTL_SECONDS,
        ),
    ] = None
    min_count: Annotated[int, _whole("Gradients without which the deadline closes no step.", MAX_QUORUM)] = 1
    quorum_weight: Annotated[
        float | None, _positive("Sum of the weights with which a step closes by itself, up to rounding.")
    ] = None
    contributors: Annotated[
        tuple[str, ...] | None,
        _names(
            "Contributors that each step expects: while it is open, the server says who is missing.", MAX_CONTRIBUTORS
        ),
    ] = None
    per_contributor: Annotated[int, _whole("Gradients that a step takes of each contributor.", MAX_QUORUM)] = 1
    max_norm: Annotated[float | None, _positive("The largest 2-norm of a gradient that is added.")] = None
    life: Annotated[str | None, _life("The life of the run that the buffer belongs to, as its join answers it.")] = None

    @cached_property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def run(self) -> str | None:
        """The run that the buffer belongs to."""
        return None if self.life is None else self.life.partition("@")[0]

    @cached_property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def as_json(self) -> dict[str, Any]:
        contributors = None if self.contributors is None else list(self.contributors)
        members = {"shape": list(self.shape), "dtype": NAMES[self.dtype], "contributors": contributors}
        return {each.name: members.get(each.name, getattr(self, each.name)) for each in fields(self)}

    def stored(self) -> dict[str, Any]:
        """Return `as_json` without defaults of rules that few buffers have: a record takes 159 bytes, not 274."""
        return {name: value for name, value in self.as_json().items() if name in _ALWAYS or value != _DEFAULTS[name]}

    @cached_property
    def text(self) -> bytes:
        """The specification as the store writes it."""
        return orjson.dumps(self.stored())

    @property
    def closes_itself(self) -> bool:
        """Whether steps close without a take: then every client may read them."""
        return (self.quorum, self.quorum_weight, self.deadline_seconds) != (None, None, None)


def contradiction(spec: Spec) -> InvalidParameter | None:
    """Return why the rules cannot mean what they say, None if they can. An older version has allowed such rules."""
    quorum, least, names = spec.quorum, spec.min_count, spec.contributors
    if least > 1 and spec.deadline_seconds is None:
        problem = f"min_count is {least}, but only a deadline asks for it: set deadline_seconds, or min_count 1"
        return InvalidParameter(problem, parameter="min_count")
    if quorum is not None and least > quorum:
        problem = f"min_count is {least}, but the quorum of {quorum} closes a step before: set {quorum} or less"
        return InvalidParameter(problem, parameter="min_count")
    for rule, count in (("quorum", quorum or 0), ("min_count", least)):
        if names is not None and count > (adds := len(names) * spec.per_contributor):
            problem = (
                f"{rule} is {count}, but the expected contributors add {adds} gradients to a step at most:"
                f" {len(names)} of them, {spec.per_contributor} each (per_contributor)"
            )
            return InvalidParameter(problem, parameter=rule)
    return None


_ALWAYS = {"shape", "dtype", "nonfinite", "quorum", "keep", "ttl_seconds"}
"""The members that are stored even with their defaults."""


_HINTS, _DEFAULTS = get_type_hints(Spec, include_extras=True), {each.name: each.default for each in fields(Spec)}

RULES: dict[str, Rule] = {
    name: hint.__metadata__[0]._replace(type=hint.__origin__, default=_DEFAULTS[name])
    for name, hint in _HINTS.items()
    if get_origin(hint) is Annotated
}
"""The rules by name: what no rule allows, neither a request nor a file may have."""
