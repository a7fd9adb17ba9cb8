"""The signs that an exporter has changed the parameters of a model."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

import numpy as np

from service.dtypes import FLOATS, Array
from service.errors import cut, shown
from service.graphs.exported import MADE, NORMALIZATIONS, is_constant
from service.graphs.model import Model
from service.graphs.plan import Node, paced

MAX_DOUBTS = 20
"""Doubts that an answer has at most: a model with one often has one for each layer."""


def doubts_of(model: Model, parameters: Collection[str]) -> list[str]:
    """Return the signs that an exporter has changed the set of the parameters. Training changes another model then."""
    weights = {name: model.initializers[name] for name in parameters if name in model.initializers}
    doubts = [*_shared(model, weights), *_transposed(weights), *_made(model, weights)]
    traces = {rule for node in model.nodes for rule in node.rules.split(", ") if rule}
    lost = [name for name, kind in model.module.items() if kind == "PARAMETER" and name not in model.initializers]
    if lost and (doubts or traces):
        by = f" by {cut(', '.join(sorted(traces)))}" * bool(traces)
        doubts.insert(0, f"the file lacks {shown(', '.join(lost))} of the module: merged with others, or folded{by}")
    more = [f"and {len(doubts) - MAX_DOUBTS} more"] * (len(doubts) > MAX_DOUBTS)
    return doubts[:MAX_DOUBTS] + more


def _shared(model: Model, weights: Mapping[str, Array]) -> Iterator[str]:
    """Yield a doubt for each weight of one dimension that several modules read in the same place."""
    readers: dict[tuple[str, str, int], dict[str, None]] = {}
    for node in paced(model.nodes):
        for place, name in enumerate(node.inputs):
            if name in weights and weights[name].ndim == 1 and (module := _module(node, name)):
                readers.setdefault((name, node.op, place), {})[module] = None
    for (name, op, _), modules in readers.items():
        if len(modules) > 1:
            where = shown(", ".join(modules))
            yield f"{shown(name)} is read by {op} in {len(modules)} modules, {where}: were they equal at the start?"


def _module(node: Node, weight: str) -> str:
    """Return the module of a node; for a normalization without a name, itself. A second call is the same."""
    if node.module:
        return node.module
    path = node.name.rpartition("/")[0]
    parts = [re.sub(r"_\d+$", "", one) for one in path.split("/")]
    known = [short if f".{short}." in f".{weight}." else one for one, short in zip(path.split("/"), parts, strict=True)]
    own = node.outputs[0] if node.op in NORMALIZATIONS else ""
    return "/".join(known) or own


def _transposed(weights: Mapping[str, Array]) -> Iterator[str]:
    """Yield a doubt for each weight that is an earlier one transposed."""
    earlier: dict[tuple[object, ...], str] = {}
    for name, one in paced(weights.items()):
        if one.ndim == 2 and one.min() < one.max():
            other = earlier.setdefault((*sorted(one.shape), one[0, 0], one[-1, -1]), name)
            if one.shape == weights[other].shape[::-1] and _is_transpose(one, weights[other]):
                yield f"{shown(name)} is {shown(other)} transposed: were they one weight?"


def _is_transpose(a: Array, b: Array) -> bool:
    return np.array_equal(a, b.T) and not np.array_equal(a, b)


def _made(model: Model, weights: Collection[str]) -> Iterator[str]:
    """Yield a doubt for each tensor of floats that the exporter has made: a table, or a weight in another form.

    Numbers that it has made are in every model: they are no doubt, unless they are trained.
    """
    for name, one in paced(model.initializers.items()):
        is_made = name not in model.module if model.module else MADE.fullmatch(name)
        is_number = one.size == 1 and MADE.fullmatch(name) and name not in weights
        if one.dtype.name in FLOATS.dtypes and is_made and not is_number:
            kind = "all ones or zeros" if is_constant(one) else "a table, or a weight in another form"
            yield f"{shown(name)}, of shape {shown([*one.shape])}, is made by the exporter: {kind}"
