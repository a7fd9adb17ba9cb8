"""Questions to the gradients of layer normalization.

ONNX Runtime reads shapes that do not fit out of bounds, refuses M = 1, and float64 with float64 statistics: PyTorch is
asked for those. The statistics fit X, as PyTorch computes them by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tests.golden.store import Case
from tests.golden.values import generator

OUTPUTS = {
    "LayerNormalizationGrad": ("X_grad", "scale_grad", "bias_grad"),
    "SimplifiedLayerNormalizationGrad": ("X_grad", "scale_grad"),
    "InvertibleLayerNormalizationGrad": ("X_grad", "scale_grad", "bias_grad"),
}
SHAPES = [((7,), -1), ((4, 6), 1), ((2, 3, 4), -1), ((2, 3, 4), 1), ((2, 3, 4), -3), ((3, 2, 1, 5), 2), ((9, 33), -1)]
EMPTY = [((0, 3), -1), ((2, 0, 3), 2), ((3, 0), -1)]
ONE = [((5, 1), -1), ((1,), 0), ((2, 1, 1), 1)]
EPSILON = 1e-5
DTYPES = {
    "float32": ("float32", "float32", "float32"),
    "float64": ("float64", "float64", "float32"),
    "float16": ("float16", "float16", "float32"),
    "mixed": ("float16", "float32", "float32"),
}
"""The dtypes of X, of Y_grad and scale, and of the statistics."""


def ask() -> Iterator[Case]:
    """All questions of this module."""
    for operator in OUTPUTS:
        for dtypes in DTYPES:
            if operator.startswith("Layer") or dtypes in ("float32", "float16"):
                for shape, axis in [*SHAPES, *EMPTY] if dtypes == "float32" else SHAPES[1:4]:
                    yield _case(operator, shape, axis, dtypes, DTYPES[dtypes])
        for axis in (2, -3):
            yield _case(operator, (2, 3), axis, "axis", DTYPES["float32"])
        for shape, axis in [*SHAPES, *ONE]:
            yield _case(operator, shape, axis, "float64", ("float64",) * 3, source="torch")


def tolerance(case: Case, output: str) -> Mapping[str, Any]:
    """How far the kernel may be from the answer: the terms of a sum are as large as its largest result."""
    expected = np.abs(case.outputs[output].astype(np.float64))
    largest = float(expected.max(initial=0))
    if case.source.startswith("torch"):
        return {"rtol": 0.0, "atol": 1e-12 * max(1.0, largest)}
    narrow = case.outputs[output].dtype == np.float16
    # From Y, which is rounded, x is up to 1.4e-5 off; ONNX Runtime rounds 16-bit floats once, as the kernel does.
    return {"rtol": 2.0**-10 if narrow else 0.0, "atol": 2e-6 * largest}


def _case(
    operator: str, shape: tuple[int, ...], axis: int, name: str, dtypes: tuple[str, ...], source: str = "onnxruntime"
) -> Case:
    random = generator(operator, str(shape), str(axis), name)
    place = axis % len(shape)
    kept, over = shape[:place] + (1,) * (len(shape) - place), tuple(range(place, len(shape)))
    X, dY = random.normal(1, 2, shape), random.normal(size=shape)
    scale, bias = random.uniform(0.5, 2, shape[place:]), random.normal(size=shape[place:])
    mean, square = np.zeros(kept), np.zeros(kept)
    if math.prod(shape[place:]):
        mean = X.mean(over).reshape(kept)
        square = ((X - (0 if operator.startswith("Simplified") else mean)) ** 2).mean(over).reshape(kept)
    inverse = 1 / np.sqrt(square + EPSILON)
    of_X, of_scale, of_mean = dtypes
    given = {"Y_grad": dY.astype(of_scale), "X": X.astype(of_X), "scale": scale.astype(of_scale)}
    if operator.startswith("Layer"):
        given |= {"mean": mean.astype(of_mean), "inv_std_dev": inverse.astype(of_mean)}
    elif operator.startswith("Invertible"):
        Y = ((X - mean) * inverse * scale + bias).astype(of_scale)
        given = {"Y_grad": given["Y_grad"], "Y": Y, "scale": given["scale"], "bias": bias.astype(of_scale)}
    if not operator.startswith("Layer"):
        given["inv_std_var"] = inverse.astype(of_mean)
    return Case(operator, f"{name}-{list(shape)}-{axis}", given, OUTPUTS[operator], {"axis": axis}, source=source)
