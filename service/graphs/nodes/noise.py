"""Operators that give random numbers. A run of the same seed gives the same numbers, whatever their dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from service.dtypes import FLOATS, Array
from service.errors import InvalidParameter
from service.graphs.nodes.table import Function, dtype_of, maker
from service.graphs.plan import Node
from service.kernels import claim


@maker("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", random=True)
def noise(node: Node) -> Function:
    """A seed of the node's own, which ONNX keeps from other nodes' and not from other runs', changes nothing."""
    given: dict[str, Any] = {"mean": 0.0, "scale": 1.0, "low": 0.0, "high": 1.0, "dtype": None, **node.attributes}
    dtype = None if given["dtype"] is None else dtype_of(given["dtype"])
    if dtype is not None and dtype.name not in FLOATS.dtypes:
        raise InvalidParameter(f"dtype is {dtype}, but must be a float", parameter="dtype")

    def draw(like: Array | None = None, *, generator: np.random.Generator) -> Array:
        shape: Sequence[int] = given["shape"] if like is None else like.shape
        claim(16 * math.prod(shape))
        if "Normal" in node.op:
            numbers = generator.normal(given["mean"], given["scale"], shape)
        else:
            numbers = generator.uniform(given["low"], given["high"], shape)
        return numbers.astype(dtype or (np.dtype(np.float32) if like is None else like.dtype))

    return draw
