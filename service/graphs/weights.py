"""The parameters of a model: which of its tensors a request may replace, and training changes."""

from __future__ import annotations

from fnmatch import fnmatchcase

import ml_dtypes

from service.dtypes import FLOATS, Array
from service.errors import InvalidGraph, shown
from service.graphs.exported import MADE, NORMALIZATIONS, is_constant
from service.graphs.model import Model, Value
from service.graphs.plan import paced
from service.graphs.protobuf import MAX_CHARACTERS

FIXED = (
    "BatchNormInternal 3 4, BatchNormalization 3 4, Clip 1 2, GRU 5, LSTM 5 6, NegativeLogLikelihoodLoss 2, OneHot 2,"
    " Pad 2, Pow 1, RNN 5, Resize 1 2, ScatterElements 0, ScatterND 0, SoftmaxCrossEntropyLoss 2"
)
"""Inputs of operators that are no weights, though they may be floats with a dimension."""


def parameters_of(model: Model, train: str | None = None) -> dict[str, Value]:
    """Return the tensors that are parameters, in the order of the model.

    `train` has patterns of names with commas between; those after a ! are left out. It chooses among the weights: the
    initializers of floats that have a dimension and no other purpose, or, if there are none, the constants. Other
    patterns than * choose among the inputs, too, and a name chooses any tensor of floats. By default these are the
    weights, if there are any. Raises `InvalidGraph` for a pattern that chooses nothing.
    """
    tensors = {**model.initializers, **model.constants}
    values = [*model.inputs, *map(value_of, tensors.items())]
    floats = {one.name: one for one in values if one.dtype.name in FLOATS.dtypes}
    weights = _weights(model)
    weights = weights or [one for one in floats if one in model.constants and tensors[one].size > 1]
    others = tensors.keys() - {*weights}
    named = [one for one in floats if one not in others]
    patterns = [one.strip() for one in train.split(",")] if train else ["*"] * bool(weights)
    chosen = {*weights} if patterns and patterns[0].startswith("!") else set()
    for pattern in patterns:
        bare = pattern.removeprefix("!")
        among = [bare] if bare in floats else weights if bare == "*" else named
        model.budget.take(0, len(among))
        matches = {one for one in among if one == bare or (len(bare) <= MAX_CHARACTERS and fnmatchcase(one, bare))}
        if not matches:
            names = shown(", ".join(weights))
            raise InvalidGraph(f"train= has {shown(pattern)}, which is no weight and no input: the weights are {names}")
        (chosen.difference_update if pattern.startswith("!") else chosen.update)(matches)
    return {name: value for name, value in floats.items() if name in chosen}


def _weights(model: Model) -> list[str]:
    """Return the initializers that are weights, in the order of the model."""
    fixed = {(op, int(place)) for op, *places in map(str.split, FIXED.split(",")) for place in places}
    readers: dict[str, set[tuple[str, int]]] = {}
    for node in paced(model.nodes):
        for place, name in enumerate(node.inputs):
            if (node.op, place) not in fixed or model.module.get(name) == "PARAMETER":
                readers.setdefault(name, set()).add((node.op, place))
    return [
        name
        for name, one in paced(model.initializers.items())
        if name in readers and one.dtype.name in FLOATS.dtypes and one.size and _is_weight(model, name, readers[name])
    ]


def _is_weight(model: Model, name: str, readers: set[tuple[str, int]]) -> bool:
    """Whether floats are a parameter of the module, as the file says, or else no mask, no number and no table."""
    if name in model.module:
        return model.module[name] == "PARAMETER"
    array, is_made = model.initializers[name], MADE.fullmatch(name)
    if not array.ndim and (is_made or model.producer != "pytorch"):
        return False
    if is_made:
        is_number = array.size == 1 and {op for op, _ in readers} <= {"Div", "Mul"}
        if is_number or is_constant(array) or all(op in NORMALIZATIONS and place for op, place in readers):
            return False
    largest = ml_dtypes.finfo(array.dtype).max  # type: ignore[no-untyped-call]
    return bool(-largest < array.min() and array.max() < largest)


def value_of(pair: tuple[str, Array]) -> Value:
    """Return the input that a named tensor can replace."""
    name, array = pair
    return Value(name, array.dtype, array.shape)
