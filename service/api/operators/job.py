"""A job: the data of a request that runs an operator. A decoder makes it, and the pipeline runs it."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from service.buffers.epochs import check_contributor
from service.buffers.names import check_name
from service.codecs.parts import Part
from service.dtypes import FLOATS, Array
from service.errors import DtypeMismatch, InvalidParameter, UnknownOperator, shown
from service.kernels import OPERATORS, Operator

MIN_SIMILARITY = 0.85
"""The part that two names must share, at least, for one to be a slip for the other. Most names share Grad."""


class BufferUse(NamedTuple):
    """The buffers of a request: the source of each input, and the target of each output."""

    sources: Mapping[str, str] = {}
    targets: Mapping[str, str] = {}
    weight: float = 1.0
    epoch: int | None = None
    contributor: str | None = None


NO_BUFFERS = BufferUse()


class Job(NamedTuple):
    """An operator with its inputs."""

    operator: Operator
    body: memoryview
    """The bytes of the tensors; most tensors are views of them."""
    tensors: Mapping[str, Array]
    attributes: Mapping[str, Any]
    wanted: Sequence[str] | None
    """The outputs to compute; None means all."""
    buffers: BufferUse = NO_BUFFERS
    shared: memoryview = memoryview(b"")
    """The bytes of the inputs that were in shared memory."""
    parts: Mapping[str, Part] = {}
    """Where outputs go in shared memory."""


def find(name: str) -> Operator:
    """Return the operator with this name. Raises `UnknownOperator`."""
    if name not in OPERATORS:
        raise unknown_operator(name)
    return OPERATORS[name]


def unknown_operator(name: str) -> UnknownOperator:
    """Return the error of a name that no operator has. It suggests a name that is almost the same, or goes on."""
    first, given = name[:1].lower(), name.lower()
    names = {operator.lower(): operator for operator in OPERATORS if operator[:1].lower() == first}
    near = difflib.get_close_matches(given, names, 1, MIN_SIMILARITY)
    near += [other for other in names if other.startswith(given) and len(given) > 2]
    hint = f" Did you mean {names[near[0]]}?" if near else ""
    return UnknownOperator(f"This server has no operator {shown(name)}.{hint} GET /v1/ops lists all", op=name)


def buffers_of(
    operator: Operator,
    sources: Sequence[str],
    into: Sequence[str],
    weight: float | None,
    epoch: int | None,
    contributor: str | None,
) -> BufferUse:
    """Parse the buffers of a request from `tensor:buffer`. Raises `InvalidParameter` and `DtypeMismatch`."""
    if not into and not (weight is None and epoch is None and contributor is None):
        name = "weight" if weight is not None else "epoch" if epoch is not None else "contributor"
        raise InvalidParameter(f"{name} is only for outputs that into= adds to a buffer", parameter=name)
    if not (sources or into):
        return NO_BUFFERS
    sources_by_input = _pairs("from", sources, [tensor.name for tensor in operator.inputs])
    targets = _pairs("into", into, operator.output_names)
    for output in operator.outputs:
        if output.name in targets and output.kind.dtypes != FLOATS.dtypes:
            problem = f"{output.name} is {' or '.join(output.kind.dtypes)}, but a buffer holds floats"
            raise DtypeMismatch(problem, tensor=output.name)
    if len(set(targets.values())) < len(targets):
        raise InvalidParameter("into names a buffer twice, but a request may change each once", parameter="into")
    if contributor is not None:
        check_contributor(contributor)
    return BufferUse(sources_by_input, targets, 1.0 if weight is None else weight, epoch, contributor)


def _pairs(parameter: str, texts: Sequence[str], tensors: Collection[str]) -> dict[str, str]:
    """Return the buffer of each tensor, from texts like `dW:gru.W`. Each of `tensors` may occur once."""
    pairs: dict[str, str] = {}
    for text in texts:
        tensor, _, buffer = text.partition(":")
        if tensor not in tensors or not buffer:
            raise InvalidParameter(
                f"{parameter} is {shown(text)}, but must be one of {', '.join(tensors)}, followed by a colon"
                " and a buffer's name",
                parameter=parameter,
            )
        if tensor in pairs:
            raise InvalidParameter(f"{parameter} has {tensor} twice", parameter=parameter)
        pairs[tensor] = check_name(buffer)
    return pairs
