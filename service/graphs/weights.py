"""The parameters of a model: which of its tensors a request may replace, and training changes."""

from __future__ import annotations

from fnmatch import fnmatchcase

from service.dtypes import FLOATS, Array
from service.errors import InvalidGraph, shown
from service.graphs.model import Model, Value

FIXED = {"BatchNormalization": slice(3, 5), "BatchNormInternal": slice(3, 5), "Pow": slice(1, 2), "Resize": slice(1, 3)}
"""Inputs that are no weights, though they may be floats with a dimension: statistics, exponents, regions and scales."""


def parameters_of(model: Model, train: str | None = None) -> dict[str, Value]:
    """Return the tensors that are parameters, in the order of the model.

    `train` has patterns of names with commas between; those after a ! are left out. It chooses among the weights: the
    initializers of floats that have a dimension, or, if there are none, the constants. Other patterns than * choose
    among the inputs, too, and a name chooses any tensor of floats. By default these are the weights, if there are any.
    Raises `InvalidGraph` for a pattern that chooses nothing.
    """
    tensors = {**model.initializers, **model.constants}
    values = [*model.inputs, *map(value_of, tensors.items())]
    floats = {one.name: one for one in values if one.dtype.name in FLOATS.dtypes}
    fixed = {name for node in model.nodes for name in node.inputs[FIXED.get(node.op, slice(0))]}
    weights = [one for one in floats if one in model.initializers and tensors[one].ndim and one not in fixed]
    weights = weights or [one for one in floats if one in model.constants and tensors[one].size > 1]
    named = [one for one in floats if one in weights or one not in tensors]
    patterns = [one.strip() for one in train.split(",")] if train else ["*"] * bool(weights)
    chosen = {*weights} if patterns and patterns[0].startswith("!") else set()
    for pattern in patterns:
        bare = pattern.removeprefix("!")
        among = weights if bare == "*" else named
        matches = {bare} if bare in floats else {one for one in among if fnmatchcase(one, bare)}
        if not matches:
            names = shown(", ".join(weights))
            raise InvalidGraph(f"train= has {shown(pattern)}, which is no weight and no input: the weights are {names}")
        chosen = chosen - matches if pattern.startswith("!") else chosen | matches
    return {name: value for name, value in floats.items() if name in chosen}


def value_of(pair: tuple[str, Array]) -> Value:
    """Return the input that a named tensor can replace."""
    name, array = pair
    return Value(name, array.dtype, array.shape)
