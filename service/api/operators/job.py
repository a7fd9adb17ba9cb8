"""A job: the data of a request that runs an operator. A decoder makes it, and the pipeline runs it."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from service.api.operators.onnx_names import ONNX, ONNX_RUNTIME
from service.buffers.epochs import check_contributor
from service.buffers.names import check_name
from service.codecs.parts import Part
from service.dtypes import FLOATS, Array
from service.errors import DtypeMismatch, InvalidParameter, UnknownOperator, shown
from service.kernels import OPERATORS, Operator, Tensor

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
    owner = "ONNX" if name in ONNX else "ONNX Runtime" if name in ONNX_RUNTIME else None
    fault = (
        f"{name} is an operator of {owner}, but not served here"
        if owner
        else f"This server has no operator {shown(name)}"
    )
    return UnknownOperator(f"{fault}.{hint} GET /v1/ops lists all", op=name)


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
    sources_by_input = _pairs("from", sources, operator.inputs)
    targets = _pairs("into", into, operator.outputs)
    for name in targets:
        output = next(one for one in operator.outputs if one.name == name.partition(".")[0])
        if not fits_a_buffer(output):
            raise DtypeMismatch(f"{name} is {' or '.join(output.kind.dtypes)}, but a buffer holds floats", tensor=name)
    if len(set(targets.values())) < len(targets):
        raise InvalidParameter("into names a buffer twice, but a request may change each once", parameter="into")
    if contributor is not None:
        check_contributor(contributor)
    return BufferUse(sources_by_input, targets, 1.0 if weight is None else weight, epoch, contributor)


def fits_a_buffer(output: Tensor) -> bool:
    """Whether the output can be a float, which a buffer holds."""
    return not set(FLOATS.dtypes).isdisjoint(output.kind.dtypes)


def is_known(name: str, tensors: Iterable[Tensor]) -> bool:
    """Whether this is the name of a tensor that is no group, or of a member of a group."""
    group, _, member = name.partition(".")
    return any(bool(member) and group == one.name if one.group else name == one.name for one in tensors)


def is_output(operator: Operator, name: str) -> bool:
    """Whether this is the name of an output, of a group of outputs, or of a member of such a group."""
    return name in operator.output_names or is_known(name, operator.outputs)


def listed(tensors: Iterable[Tensor]) -> str:
    """Return the names of tensors for readers."""
    return ", ".join(one.name + ".NAME" * one.group for one in tensors)


def chosen(names: Iterable[str], wanted: Collection[str]) -> list[str]:
    """Return the names that are in `wanted`, or whose group is."""
    return [name for name in names if name in wanted or name.partition(".")[0] in wanted]


def _pairs(parameter: str, texts: Sequence[str], tensors: Sequence[Tensor]) -> dict[str, str]:
    """Return the buffer of each tensor, from texts like `dW:gru.W`. Each tensor may occur once."""
    pairs: dict[str, str] = {}
    for text in texts:
        tensor, _, buffer = text.partition(":")
        if not (buffer and is_known(tensor, tensors)):
            raise InvalidParameter(
                f"{parameter} is {shown(text)}, but must be one of {listed(tensors)}, followed by a colon"
                " and a buffer's name",
                parameter=parameter,
            )
        if tensor in pairs:
            raise InvalidParameter(f"{parameter} has {tensor} twice", parameter=parameter)
        pairs[tensor] = check_name(buffer)
    return pairs
