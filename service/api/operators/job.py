"""What a request asks of an operator, as plain data: a decoder makes it, the pipeline runs it."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from service.buffers.names import check_name
from service.dtypes import FLOATS, Array
from service.errors import DtypeMismatch, InvalidParameter, UnknownOperator, shown
from service.kernels import OPERATORS, Operator


class BufferUse(NamedTuple):
    """The buffers of a request: input -> the buffer to take it from, output -> the buffer to add it to."""

    sources: Mapping[str, str] = {}
    targets: Mapping[str, str] = {}
    weight: float = 1.0
    epoch: int | None = None


NO_BUFFERS = BufferUse()


class Job(NamedTuple):
    """An operator with its inputs: what `run` computes."""

    operator: Operator
    body: memoryview
    """The bytes that the tensors were read from, and most of them are views of."""
    tensors: Mapping[str, Array]
    attributes: Mapping[str, Any]
    wanted: Sequence[str] | None
    """The outputs to compute; None: all."""
    buffers: BufferUse = NO_BUFFERS


def find(name: str) -> Operator:
    """The operator called `name`. Raises `UnknownOperator`."""
    if name not in OPERATORS:
        raise unknown_operator(name)
    return OPERATORS[name]


def unknown_operator(name: str) -> UnknownOperator:
    """The error of a name that no operator has. It suggests the nearest name."""
    near = difflib.get_close_matches(name, OPERATORS, 1, 0.5)
    hint = f" Did you mean {near[0]}?" if near else ""
    return UnknownOperator(f"There is no operator {shown(name)}.{hint} GET /v1/ops lists all", op=name)


def buffers_of(
    operator: Operator, sources: Sequence[str], into: Sequence[str], weight: float | None, epoch: int | None
) -> BufferUse:
    """The buffers of a request, given as `tensor:buffer`. Raises `InvalidParameter` and `DtypeMismatch`."""
    if not into and not (weight is None and epoch is None):
        name = "epoch" if weight is None else "weight"
        raise InvalidParameter(f"{name} is only for outputs that into= adds to a buffer", parameter=name)
    if not (sources or into):
        return NO_BUFFERS
    taken = _pairs("from", sources, [one.name for one in operator.inputs])
    added = _pairs("into", into, operator.output_names)
    for output in operator.outputs:
        if output.name in added and output.kind.dtypes != FLOATS.dtypes:
            raise DtypeMismatch(
                f"{output.name} is {' or '.join(output.kind.dtypes)}, but a buffer holds floats", tensor=output.name
            )
    if len(set(added.values())) < len(added):
        raise InvalidParameter("into names a buffer twice, but a request may change each once", parameter="into")
    return BufferUse(taken, added, 1.0 if weight is None else weight, epoch)


def _pairs(parameter: str, texts: Sequence[str], tensors: Collection[str]) -> dict[str, str]:
    """Tensor -> buffer, from texts like `dW:gru.W`; each is one of `tensors`, at most once."""
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
