"""Gradients of indexing: as adjoints of NumPy's forward operators, at their edges, and with every mistake refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from service.dtypes import BFLOAT16, FLOAT16, Array
from service.errors import (
    AxisOutOfRange,
    GradserveError,
    IndexOutOfRange,
    InvalidParameter,
    InvalidTensor,
    ShapeMismatch,
    TooManyDimensions,
)
from service.kernels import OPERATORS
from tests.kernels.equality import assert_same_bits
from tests.kernels.threads import threads


def run(operator: str, given: dict[str, Any], **attributes: Any) -> Array:
    tensors = {name: np.asarray(value) for name, value in given.items()}
    (result,) = OPERATORS[operator](tensors, attributes).values()
    return result


def assert_adjoint(dX: Array, X: Array, dY: Array, Y: Array) -> None:
    """The sums of products are equal: <dX, X> = <dY, f(X)>."""
    np.testing.assert_allclose(np.vdot(dX, X), np.vdot(dY, Y), rtol=1e-12, atol=1e-12)


def test_gather_elements_is_an_adjoint() -> None:
    random = np.random.default_rng(0)
    for shape, within in (((5,), (9,)), ((3, 4, 2), (2, 7, 1)), ((3, 4), (0, 4)), ((3, 0), (2, 0))):
        for axis in range(len(shape)):
            kept = [slice(n) for n in within]
            kept[axis] = slice(None)
            if any(one > most for k, (one, most) in enumerate(zip(within, shape, strict=True)) if k != axis):
                continue
            X, dY = random.normal(size=shape), random.normal(size=within)
            indices = (
                random.integers(-shape[axis], max(shape[axis], 1), within) if shape[axis] else np.zeros(within, int)
            )
            dX = run("GatherElementsGrad", {"dY": dY, "shape": shape, "indices": indices}, axis=axis)
            assert_adjoint(dX, X, dY, np.take_along_axis(X[tuple(kept)], indices, axis))


def test_gather_nd_is_an_adjoint() -> None:
    random = np.random.default_rng(0)
    for depth in (1, 2, 3):
        X, dims = random.normal(size=(3, 4, 2)), np.array([3, 4, 2])[:depth]
        indices = random.integers(-dims, dims, (2, 50, depth))
        Y = X[tuple(np.moveaxis(indices, -1, 0))]
        update = random.normal(size=Y.shape)
        assert_adjoint(run("GatherNDGrad", {"shape": X.shape, "indices": indices, "update": update}), X, update, Y)


def test_slices_with_any_step_are_adjoints() -> None:
    random = np.random.default_rng(0)
    X = random.normal(size=(5, 6))
    for start, end, step in ((0, 5, 1), (-1, -7, -1), (4, 0, -2), (-9, 9, 3), (9, -9, -3), (2, 2, 1), (3, 1, 1)):
        for axis, size in enumerate(X.shape):
            first, last = start + size * (start < 0), end + size * (end < 0)
            bounds = (max(first, 0), max(last, 0)) if step > 0 else (min(first, size - 1), max(last, -1))
            places = [k for k in range(*bounds, step) if 0 <= k < size]
            Y = np.take(X, places, axis)
            dY = random.normal(size=Y.shape)
            given = {"dY": dY, "shape": X.shape, "starts": [start], "ends": [end], "axes": [axis], "steps": [step]}
            assert_adjoint(run("SliceGrad", given), X, dY, Y)


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
def test_16_bits_are_added_in_float32(dtype: Any) -> None:
    """1 + 300 times 1/4096: alone, none of them would change the sum."""
    dY = np.full(301, 2.0**-12, dtype)
    dY[0] = 1
    zero = np.zeros(301, int)
    expected = np.array([1 + 300 * 2.0**-12], np.float32).astype(dtype)
    assert_same_bits(run("GatherElementsGrad", {"dY": dY, "shape": [1], "indices": zero}), expected)
    assert_same_bits(run("GatherNDGrad", {"update": dY, "shape": [1], "indices": zero[:, None]}), expected)


def test_the_bits_do_not_depend_on_threads() -> None:
    random = np.random.default_rng(0)
    dY, indices = random.normal(size=(700, 1000)).astype(np.float32), random.integers(-30, 30, (700, 1000))
    cases: list[tuple[str, dict[str, Any]]] = [
        ("GatherElementsGrad", {"dY": dY, "shape": [30, 1000], "indices": indices}),
        ("GatherNDGrad", {"update": dY, "shape": [30, 1000], "indices": indices[:, :1]}),
        ("SliceGrad", {"dY": dY, "shape": [700, 2000], "starts": [-1], "ends": [-2001], "axes": [1], "steps": [-2]}),
        ("FakeQuantGrad", {"dY": dY, "gradient_mask": indices > 0}),
    ]
    for operator, given in cases:
        alone = run(operator, given)
        with threads(2):
            assert_same_bits(run(operator, given), alone)


def test_a_mask_selects() -> None:
    dY = np.array([np.inf, np.nan, -1.0, -2.0])
    given = {"dY": dY, "gradient_mask": [False, False, False, True]}
    assert_same_bits(run("FakeQuantGrad", given), np.array([0.0, 0.0, 0.0, -2.0]))


def test_fake_quantization_at_its_edges() -> None:
    tensors = {
        "input": np.array([np.nan, np.inf, -np.inf, 1e300]),
        "scale": np.array(0.5),
        "zero_point": np.array(-2.7),
    }
    results = OPERATORS["FakeQuant"](tensors, {"quant_min": -4, "quant_max": 4})
    np.testing.assert_array_equal(results["output"], [np.nan, 3.0, -1.0, 3.0])
    assert results["mask"].tolist() == [False] * 4


ELEMENTS = {"dY": np.ones((2, 3)), "shape": [4, 3], "indices": np.zeros((2, 3), int)}
ND = {"shape": [2, 3, 4], "indices": np.zeros((2, 5, 1), int), "update": np.ones((2, 5, 3, 4))}
SLICE = {"dY": np.ones(2), "shape": [4], "starts": [0], "ends": [2]}
TWO = {"shape": [4, 4], "starts": [0, 0], "ends": [1, 1]}
QUANT = {"input": np.ones(2), "scale": 1.0, "zero_point": 0.0}
MASK = {"dY": np.ones((2, 3)), "gradient_mask": np.ones((2, 3), bool)}
ROWS = {"data": np.ones((2, 3)), "indices": [0]}

WRONG: list[tuple[str, dict[str, Any], dict[str, Any], type[GradserveError], str]] = [
    ("GatherElementsGrad", {**ELEMENTS, "dY": np.ones((3, 3))}, {}, ShapeMismatch, "dY has shape"),
    ("GatherElementsGrad", {**ELEMENTS, "shape": [4, 2]}, {}, ShapeMismatch, "indices has shape"),
    ("GatherElementsGrad", {**ELEMENTS, "shape": [4]}, {}, ShapeMismatch, "indices has shape"),
    ("GatherElementsGrad", {**ELEMENTS, "shape": [4, -3]}, {}, InvalidTensor, r"shape\[1\] is -3"),
    ("GatherElementsGrad", {**ELEMENTS, "shape": [1] * 65}, {}, TooManyDimensions, "65 dimensions"),
    ("GatherElementsGrad", ELEMENTS, {"axis": 2}, AxisOutOfRange, "axis 2"),
    ("GatherElementsGrad", {**ELEMENTS, "indices": np.full((2, 3), 4)}, {}, IndexOutOfRange, r"indices\[0\]\[0\] is 4"),
    ("GatherElementsGrad", {**ELEMENTS, "shape": [0, 3]}, {}, IndexOutOfRange, "empty"),
    ("GatherNDGrad", {**ND, "update": np.ones((2, 5, 3, 5))}, {}, ShapeMismatch, "update has shape"),
    ("GatherNDGrad", {**ND, "indices": np.zeros((), int)}, {}, InvalidParameter, "batch_dims is 0"),
    ("GatherNDGrad", {**ND, "indices": np.zeros((2, 5, 4), int)}, {}, ShapeMismatch, "at most 3"),
    ("GatherNDGrad", {**ND, "indices": np.zeros((3, 5, 1), int)}, {"batch_dims": 1}, ShapeMismatch, "must begin with"),
    ("GatherNDGrad", {**ND, "indices": np.full((2, 5, 1), -3)}, {}, IndexOutOfRange, "last dimension of indices at 0"),
    ("GatherNDGrad", ND, {"batch_dims": 3}, InvalidParameter, "batch_dims is 3"),
    ("SliceGrad", {**SLICE, "dY": np.ones(3)}, {}, ShapeMismatch, r"but the slice has \[2\]"),
    ("SliceGrad", {**SLICE, "steps": [0]}, {}, InvalidTensor, "must not be 0"),
    ("SliceGrad", {**SLICE, "axes": [1]}, {}, AxisOutOfRange, "axis 1"),
    ("SliceGrad", {**SLICE, "shape": []}, {}, ShapeMismatch, "0 axes"),
    (
        "SliceGrad",
        {**SLICE, "starts": [0, 0], "ends": [1, 1], "axes": [0, -1], "shape": [4, 4]},
        {},
        ShapeMismatch,
        "slice",
    ),
    (
        "SliceGrad",
        {**SLICE, "starts": [0, 0], "ends": [1, 1], "axes": [0, -2], "shape": [4, 4]},
        {},
        AxisOutOfRange,
        "twice",
    ),
    ("ShrunkenGather", {**ROWS, "indices": [0, 0, 0]}, {}, ShapeMismatch, "at most 2"),
    ("ShrunkenGather", {**ROWS, "indices": [2]}, {}, IndexOutOfRange, r"indices\[0\] is 2"),
    ("ShrunkenGather", {**ROWS, "data": 1.0}, {}, AxisOutOfRange, "scalar"),
    ("FakeQuant", {**QUANT, "scale": -1.0}, {}, InvalidTensor, "scale is -1.0"),
    ("FakeQuant", {**QUANT, "scale": np.nan}, {}, InvalidTensor, "scale is nan"),
    ("FakeQuant", {**QUANT, "zero_point": np.inf}, {}, InvalidTensor, "zero_point is inf"),
    ("FakeQuant", {**QUANT, "scale": np.ones(2)}, {}, InvalidTensor, "one element"),
    ("FakeQuant", QUANT, {"quant_min": 3, "quant_max": 2}, InvalidParameter, "quant_min is 3"),
    ("FakeQuantGrad", {**MASK, "gradient_mask": np.ones((2, 2), bool)}, {}, ShapeMismatch, "gradient_mask has shape"),
]


def test_mistakes() -> None:
    for operator, given, attributes, error, reason in WRONG:
        with pytest.raises(error, match=reason):
            run(operator, given, **attributes)
