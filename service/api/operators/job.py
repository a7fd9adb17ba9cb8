"""A job: the data of a request that runs an operator. A decoder makes it, and the pipeline runs it."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from service.api.operators.onnx_names import IN_GRAPHS, NOT_SERVED, ONNX
from service.buffers.names import NAME, check_name
from service.buffers.steps import check_contributor
from service.codecs.json import Encoding
from service.codecs.parts import Part
from service.dtypes import FLOATS, Array
from service.errors import DtypeMismatch, InvalidParameter, UnknownOperator, shown
from service.kernels import OPERATORS, Operator, Tensor

MIN_SIMILARITY = 0.85
"""The part that two names must share, at least, for one to be a slip for the other. Most names share Grad."""

MAX_STEP_DIGITS = 15
"""Digits of a step's number: more changes than any buffer sees."""


class Use(NamedTuple):
    """A tensor and its buffer; or a group and the prefix of its buffers: the rest of a name is that of the tensor."""

    tensor: str
    buffer: str
    is_prefix: bool = False
    step: int | None = None
    """The closed step that is read; None: the buffer as it runs."""
    overwrites: bool = False
    """Whether the output replaces the buffer's sum, rather than being added."""


@dataclass(frozen=True)
class BufferUse:
    """The buffers of a request: the sources of inputs, and the targets of outputs."""

    sources: Sequence[Use] = ()
    targets: Sequence[Use] = ()
    weight: float = 1.0
    step: int | None = None
    contributor: str | None = None
    life: str | None = None
    """The life of the run that the targets belong to, and those that are created."""
    mean: bool = False
    """Whether closed steps are read as means."""
    timeout: float = 0.0
    """Seconds to wait until the steps have closed."""

    @cached_property
    def by_prefix(self) -> bool:
        """Whether any target is a prefix."""
        return any(one.is_prefix for one in self.targets)

    @cached_property
    def overwrites(self) -> bool:
        """Whether any target is written over. Then no source may have changed meanwhile."""
        return any(one.overwrites for one in self.targets)

    @cached_property
    def _by_output(self) -> Mapping[str, Use]:
        return {one.tensor: one for one in self.targets}

    def target_of(self, output: str) -> Use | None:
        """Return the target of an output, of a group, or of a tensor in one; None if it is answered."""
        target = self._by_output.get(output)
        if target is None and self.by_prefix:
            group, _, member = output.partition(".")
            whole = self._by_output.get(group)
            if whole is not None and whole.is_prefix:
                return Use(output, check_name(whole.buffer + member), overwrites=whole.overwrites)
        return target

    def output_of(self, buffer: str) -> str:
        """Return the output whose target this buffer is."""
        return self._exact.get(buffer) or next(
            f"{one.tensor}.{buffer.removeprefix(one.buffer)}"
            for one in self.targets
            if one.is_prefix and buffer.startswith(one.buffer)
        )

    @cached_property
    def _exact(self) -> Mapping[str, str]:
        return {one.buffer: one.tensor for one in self.targets if not one.is_prefix}


NO_BUFFERS = BufferUse()


class Job(NamedTuple):
    """An operator with its inputs."""

    operator: Operator
    body: memoryview
    """The bytes of the tensors; most tensors are views of them."""
    size: int
    """The bytes that the request has brought, in its body and in shared memory."""
    tensors: Mapping[str, Array]
    attributes: Mapping[str, Any]
    wanted: Sequence[str] | None
    """The outputs to compute; None means all."""
    buffers: BufferUse = NO_BUFFERS
    encoding: Encoding | None = None
    """How the answer writes outputs in JSON; None: all of them are bytes."""
    binary: Collection[str] = ()
    """The outputs that are bytes behind the JSON of the answer."""
    shared: memoryview = memoryview(b"")
    """The bytes of the inputs that were in shared memory."""
    parts: Mapping[str, Part] = {}
    """Where outputs go in shared memory."""


def unknown_operator(name: str) -> UnknownOperator:
    """Return the error of a name that no operator has. It suggests a name that is almost the same, or goes on."""
    first, given = name[:1].lower(), name.lower()
    names = {operator.lower(): operator for operator in OPERATORS if operator[:1].lower() == first}
    near = difflib.get_close_matches(given, names, 1, MIN_SIMILARITY)
    near += [other for other in names if other.startswith(given) and len(given) > 2]
    hint = f" Did you mean {names[near[0]]}?" if near else ""
    owner = "ONNX" if name in ONNX else "ONNX Runtime" if name in NOT_SERVED else None
    place = "which runs in graphs: PUT /v1/graphs/{name}" if name in IN_GRAPHS else "but not served here"
    fault = f"{name} is an operator of {owner}, {place}" if owner else f"This server has no operator {shown(name)}"
    return UnknownOperator(f"{fault}.{hint} GET /v1/ops lists all", op=name)


def buffers_of(
    operator: Operator,
    sources: Sequence[str],
    into: Sequence[str],
    sets: Sequence[str],
    query: Any,
    timeout: float | None = None,
) -> BufferUse:
    """Parse the buffers of a request from `tensor:buffer`. Raises `InvalidParameter` and `DtypeMismatch`.

    `query` is the model with weight, step, contributor, life and reduce.
    """
    for name in () if into else ("weight", "step", "contributor"):
        if getattr(query, name) is not None:
            raise InvalidParameter(f"{name} is only for outputs that into= adds to a buffer", parameter=name)
    inputs = uses_of([("from", text) for text in sources], operator.inputs) if sources else ()
    for name, given in (("reduce", query.reduce), ("timeout", timeout)):
        if given is not None and all(one.step is None for one in inputs):
            problem = f"{name} is only for inputs that from= takes from a closed step, as X:acts@3"
            raise InvalidParameter(problem, parameter=name)
    if not (sources or into or sets):
        return NO_BUFFERS
    targets = uses_of([*(("into", text) for text in into), *(("set", text) for text in sets)], operator.outputs)
    for name in [target.tensor for target in targets]:
        output = next(one for one in operator.outputs if one.name in (name, name.partition(".")[0]))
        if not fits_a_buffer(output):
            raise DtypeMismatch(f"{name} is {' or '.join(output.kind.dtypes)}, but a buffer holds floats", tensor=name)
    _check_apart("set" if sets else "into", targets)
    if query.contributor is not None:
        check_contributor(query.contributor)
    weight = 1.0 if query.weight is None else query.weight
    mean = query.reduce == "mean"
    return BufferUse(inputs, targets, weight, query.step, query.contributor, query.life, mean, timeout or 0.0)


def _check_apart(parameter: str, targets: Sequence[Use]) -> None:
    """Raise `InvalidParameter` if two targets name one buffer, or if buffers may have the prefixes of two."""
    if len({(one.buffer, one.is_prefix) for one in targets}) < len(targets):
        raise InvalidParameter(
            f"{parameter} names a buffer twice, but a request may change each once", parameter=parameter
        )
    prefixes = sorted(one.buffer for one in targets if one.is_prefix)
    for shorter, longer in itertools.pairwise(prefixes):
        if longer.startswith(shorter):
            problem = f"{parameter} has {shorter}* and {longer}*, but a buffer may be in one of them only"
            raise InvalidParameter(problem, parameter=parameter)


def fits_a_buffer(output: Tensor) -> bool:
    """Whether the output can be a float, which a buffer holds."""
    return not set(FLOATS.dtypes).isdisjoint(output.kind.dtypes)


def is_known(name: str, tensors: Iterable[Tensor]) -> bool:
    """Whether this is the name of a tensor that is no group, or of a member of a group."""
    group, _, member = name.partition(".")
    return any(
        (bool(member) and group == one.name and (one.members is None or member in one.members))
        if one.group
        else name == one.name
        for one in tensors
    )


def is_output(operator: Operator, name: str) -> bool:
    """Whether this is the name of an output, of a group of outputs, or of a member of such a group."""
    return name in operator.output_names or is_known(name, operator.outputs)


def listed(tensors: Iterable[Tensor]) -> str:
    """Return the names of tensors for readers."""
    return ", ".join(one.name + ".NAME" * one.group for one in tensors)


def chosen(names: Iterable[str], wanted: Collection[str]) -> list[str]:
    """Return the names that are in `wanted`, or whose group is."""
    given = [*names]
    groups = {*wanted}.difference(given)  # a plain name may have a dot, too
    return [name for name in given if name in wanted or name.partition(".")[0] in groups]


def uses_of(texts: Sequence[tuple[str, str]], tensors: Sequence[Tensor]) -> list[Use]:
    """Return the uses in texts like `dW:gru.W`, `weights:m.p.*` or `X:acts@3`, each with the name of its parameter.

    Each tensor occurs once.
    """
    uses = [_use(parameter, text, *_cut(text, tensors), tensors) for parameter, text in texts]
    seen, groups, names = set[str](), dict[str, bool](), {one.name for one in tensors}
    for (parameter, _), use in zip(texts, uses, strict=True):
        if use.tensor in seen:
            raise InvalidParameter(f"{parameter} has {use.tensor} twice", parameter=parameter)
        seen.add(use.tensor)
        group = use.tensor if use.tensor in names else use.tensor.partition(".")[0]
        if groups.setdefault(group, use.is_prefix) != use.is_prefix:
            problem = f"{parameter} has {group} both as a group and as single tensors"
            raise InvalidParameter(problem, parameter=parameter)
    return uses


def _cut(text: str, tensors: Sequence[Tensor]) -> tuple[str, str]:
    """Return the tensor and the buffer. A tensor's name may have colons, so the longest name counts."""
    tensor, colon, buffer = text.rpartition(":")
    while colon:
        if any(tensor == one.name or (one.members and is_known(tensor, [one])) for one in tensors):
            return tensor, text[len(tensor) + 1 :]
        tensor, colon, _ = tensor.rpartition(":")
    tensor, _, buffer = text.partition(":")
    return (tensor, buffer) if is_known(tensor, tensors) else ("", "")


def _use(parameter: str, text: str, tensor: str, buffer: str, tensors: Sequence[Tensor]) -> Use:
    step = None
    if parameter == "from" and "@" in buffer:
        buffer, _, number = buffer.rpartition("@")
        if not (number.isascii() and number.isdecimal() and len(number) <= MAX_STEP_DIGITS):
            problem = f"from is {shown(text)}, but behind the @ must be the number of a step"
            raise InvalidParameter(problem, parameter=parameter)
        step = int(number)
    is_group = any(one.group and one.name == tensor for one in tensors)
    if not (tensor and buffer) or is_group != buffer.endswith("*"):
        groups = [one.name for one in tensors if one.group]
        raise InvalidParameter(
            f"{parameter} is {shown(text)}, but must be one of {listed(tensors)}, followed by a colon"
            " and a buffer's name" + f", or {' or '.join(groups)}, a colon, a prefix of names and *" * bool(groups),
            parameter=parameter,
        )
    if is_group and not NAME.fullmatch(buffer[:-1] or "-"):
        raise InvalidParameter(f"{parameter} is {shown(text)}, but no buffer has such a prefix", parameter=parameter)
    return Use(tensor, buffer[:-1] if is_group else check_name(buffer), is_group, step, parameter == "set")
