"""Questions to the gradients of Softmax and LogSoftmax. Both inputs always have one shape: it is not checked.

An empty tensor is asked of the `_13` operators only for the last axis and for one that is not next to it: for other
axes the process is killed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from service.dtypes import Array
from tests.golden.store import Case
from tests.golden.values import FLOAT16_ULP, generator, special

OPERATORS = ["SoftmaxGrad", "SoftmaxGrad_13", "LogSoftmaxGrad", "LogSoftmaxGrad_13"]
SHAPES = [(5,), (3, 4), (2, 3, 4), (2, 3, 2, 2), (2, 2, 1, 3, 2)]
INF, NAN = np.inf, np.nan

# Rows of dY, and of Y for the two families.
SPECIAL_DY = [[1, 2, 3], [1, NAN, 3], [1, 2, 3], [INF, 1, 1], [INF, 1, -INF], [-0.0, 0, -0.0], [1, 2, 3], [INF, 2, 3]]
SPECIAL_Y = {
    "SoftmaxGrad": [
        [0.2, 0.3, 0.5],
        [0.2, 0.3, 0.5],
        [0.2, NAN, 0.5],
        [0.2, 0.3, 0.5],
        [0.2, 0.3, 0.5],
        [0.2, 0.3, 0.5],
        [0, 100, -1],
        [0, 0.5, 0.5],
    ],
    "LogSoftmaxGrad": [
        [-1, -2, -3],
        [-1, -2, -3],
        [-1, NAN, -3],
        [-1, -2, -3],
        [-1, -2, -3],
        [0.0, -0.0, -1],
        [-INF, 100, -1],
        [-INF, -1, -2],
    ],
}


def ask() -> Iterator[Case]:
    """All questions of this module."""
    for operator in OPERATORS:
        yield from _axes(operator, "float32", SHAPES)
        yield from _axes(operator, "float16", SHAPES[1:3])
        if operator == "SoftmaxGrad":  # the only one with a float64 body in its schema
            yield from _axes(operator, "float64", SHAPES)
        yield from _special(operator)
        yield from _empty(operator)
        yield from _refused(operator)
        yield from _peer(operator)


def tolerance(case: Case, output: str) -> Mapping[str, Any]:
    """The order of the sum is not the same, nor is the exponential, and the difference may cancel."""
    return {
        "float16": {"rtol": FLOAT16_ULP, "atol": 1e-6},
        "float32": {"rtol": 1e-6, "atol": 1e-6},
        "float64": {"rtol": 1e-14, "atol": 1e-15},
    }[case.inputs["dY"].dtype.name]


def _case(operator: str, name: str, dY: Array, Y: Array, axis: int | None) -> Case:
    attributes = {} if axis is None else {"axis": axis}
    return Case(operator, name, {"dY": dY, "Y": Y}, ("dX",), attributes)


def _forward(operator: str, X: Array, axis: int) -> Array:
    """The forward output: Softmax or its logarithm over the dimensions that `operator` takes together."""
    axis %= X.ndim
    over = (axis,) if operator.endswith("_13") else tuple(range(axis, X.ndim))
    shifted = X - X.max(over, keepdims=True)
    logarithm = shifted - np.log(np.exp(shifted).sum(over, keepdims=True))
    return np.asarray(logarithm if operator.startswith("Log") else np.exp(logarithm))


def _random(operator: str, name: str, shape: tuple[int, ...], dtype: str, axis: int | None) -> Case:
    random = generator(operator, name)
    dY, X = random.normal(size=shape), random.normal(0, 2, shape)
    default = -1 if operator.endswith("_13") else 1
    Y = _forward(operator, X, default if axis is None else axis)
    return _case(operator, name, dY.astype(dtype), Y.astype(dtype), axis)


def _axes(operator: str, dtype: str, shapes: list[tuple[int, ...]]) -> Iterator[Case]:
    for shape in shapes:
        for axis in range(-len(shape), len(shape)):
            yield _random(operator, f"{dtype}-{list(shape)}-axis={axis}", shape, dtype, axis)


def _special(operator: str) -> Iterator[Case]:
    family = operator.removesuffix("_13")
    for dtype in ("float32", "float16"):
        dY, Y = np.array(SPECIAL_DY, dtype), np.array(SPECIAL_Y[family], dtype)
        yield _case(operator, f"{dtype}-special-rows", dY, Y, 1)
    if operator.endswith("_13"):
        yield _case(operator, "float32-special-columns", dY.T.astype(np.float32), Y.T.astype(np.float32), 0)
    certain = np.full((3, 1), family == "SoftmaxGrad", np.float32)
    yield _case(operator, "float32-one-class", np.array([[1], [-2], [0]], np.float32), certain, 1)
    values = special(np.float32)
    columns, rows = np.meshgrid(values, values)
    for name, dY, Y in (
        ("dY", rows, np.full_like(rows, 0.5)),
        ("Y", np.ones_like(rows), rows),
        ("both", rows, columns),
    ):
        yield _case(operator, f"float32-one-special-{name}", dY.reshape(-1, 1), Y.reshape(-1, 1), 1)


def _empty(operator: str) -> Iterator[Case]:
    if operator.endswith("_13"):
        asked = [((0,), 0), ((0, 3), 1), ((2, 0), -1), ((2, 3, 0), 2), ((0, 2, 3), -1), ((2, 3, 0), 0)]
    else:
        shapes: list[tuple[int, ...]] = [(0,), (0, 3), (2, 0), (2, 3, 0), (2, 0, 3)]
        asked = [(shape, axis) for shape in shapes for axis in range(-len(shape), len(shape))]
    for shape, axis in asked:
        empty = np.empty(shape, np.float32)
        yield _case(operator, f"float32-{list(shape)}-axis={axis}", empty, empty, axis)


def _refused(operator: str) -> Iterator[Case]:
    for shape, axis in [((), None), ((), 0), ((2, 3), 2), ((2, 3), -3), ((2, 3), 1 << 40), ((4,), 1)]:
        ones = np.ones(shape, np.float32)
        yield _case(operator, f"refused-{list(shape)}-axis={axis}", ones, ones, axis)
    if not operator.endswith("_13"):
        yield _case(operator, "refused-[4]-axis=None", np.ones(4, np.float32), np.ones(4, np.float32), None)


def _peer(operator: str) -> Iterator[Case]:
    for axis in (None, 0, 1, 2):
        yield _random(operator, f"peer-GradientChecker-[3, 4, 5]-axis={axis}", (3, 4, 5), "float32", axis)
        if axis is not None:
            yield _random(operator, f"peer-SmallTensor-[4, 2, 128]-axis={axis}", (4, 2, 128), "float32", axis)
    if operator.endswith("_13"):
        yield _large(operator, (8, 16, 2048), 2)
        yield _large(operator, (8, 16, 512), 0)
        yield _large(operator, (8, 16, 512), 1)


def _large(operator: str, shape: tuple[int, ...], axis: int) -> Case:
    """Rows that are rotations of one row, so that the file stays small; of the answer a sample is stored."""
    name = f"peer-LargeTensor-{list(shape)}-axis={axis}"
    random = generator(operator, name)
    rows, length = shape[0] * shape[1], shape[2]
    dY, Y = random.normal(size=length), _forward(operator, random.normal(size=length), 0)
    turned = [
        np.stack([np.roll(row, step * k) for k in range(rows)]).reshape(shape) for row, step in ((dY, 7), (Y, 11))
    ]
    inputs = dict(zip(("dY", "Y"), (tensor.astype(np.float32) for tensor in turned), strict=True))
    return Case(operator, name, inputs, ("dX",), {"axis": axis}, sample=53)
