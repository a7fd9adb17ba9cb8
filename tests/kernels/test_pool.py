"""MaxPoolGrad and AveragePoolGrad: finite differences, windows without elements, and calls that end ONNX Runtime."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, Literal

import numpy as np
import pytest

from service.dtypes import BFLOAT16, FLOAT16, Array, cast
from service.errors import GradserveError, IndexOutOfRange, InvalidParameter, InvalidTensor, ShapeMismatch
from service.kernels import OPERATORS
from service.kernels.pool import average_pool_grad, max_pool_grad
from tests.kernels.calls import peak_bytes
from tests.kernels.equality import assert_same_bits
from tests.kernels.gradcheck import check_gradient
from tests.kernels.threads import threads


def drawn(shape: tuple[int, ...], dtype: Any = np.float64) -> Array:
    return np.asarray(np.random.default_rng(5).normal(size=shape), dtype)


def pool(
    X: Array, counts: tuple[int, ...], *, strides: list[int], dilations: list[int], pads: list[int], include: int
) -> Array:
    """AveragePool of one plane with two spatial axes, number by number, with a kernel of 3 x 2."""
    Y = np.zeros((1, 1, *counts))
    for place in np.ndindex(*counts):
        seen = []
        for tap in itertools.product(range(3), range(2)):
            at = [w * s + t * d - b for w, s, t, d, b in zip(place, strides, tap, dilations, pads[:2], strict=True)]
            if all(0 <= one < size for one, size in zip(at, X.shape[2:], strict=True)):
                seen.append(X[0, 0, at[0], at[1]])
        Y[(0, 0, *place)] = sum(seen) / (6 if include else max(1, len(seen)))
    return Y


@pytest.mark.parametrize("include", [0, 1])
def test_averages_are_finite_differences(include: Literal[0, 1]) -> None:
    """Also with windows that stick out, or that have no element of X."""
    X = drawn((1, 1, 5, 6))
    calls: list[tuple[tuple[int, int], dict[str, Any]]] = [
        ((3, 5), {"strides": [1, 1], "dilations": [1, 1], "pads": [0, 0, 0, 0]}),
        ((3, 2), {"strides": [2, 3], "dilations": [1, 2], "pads": [1, 1, 1, 1]}),
        ((3, 3), {"strides": [2, 2], "dilations": [1, 1], "pads": [1, 0, 0, 0], "ceil_mode": 1}),
        ((3, 3), {"strides": [3, 3], "dilations": [1, 1], "pads": [1, 0, 1, 1], "ceil_mode": 1}),
        ((2, 3), {"strides": [3, 3], "dilations": [1, 1], "pads": [1, 0, 1, 1], "ceil_mode": 1}),
        ((9, 10), {"strides": [1, 1], "dilations": [2, 4], "pads": [4, 4, 4, 4]}),
    ]
    for counts, attributes in calls:
        given = {key: value for key, value in attributes.items() if key != "ceil_mode"}
        run = partial(pool, counts=counts, include=include, **given)
        grad = partial(average_pool_grad, kernel_shape=[3, 2], count_include_pad=include, **attributes)
        check_gradient(run, partial(lambda grad, dY, X: grad(dY, np.array(X.shape)), grad), X)


def test_same_padding_is_that_of_the_forward_operator() -> None:
    """The windows begin before X with SAME_LOWER, and end behind X with SAME_UPPER."""
    dY = np.array([[[1.0, 10.0, 100.0]]])
    upper = average_pool_grad(dY, np.array([1, 1, 6]), kernel_shape=[3], strides=[2], auto_pad="SAME_UPPER")
    np.testing.assert_allclose(upper, [[[1 / 3, 1 / 3, 1 / 3 + 10 / 3, 10 / 3, 10 / 3 + 50, 50]]])
    lower = average_pool_grad(dY, np.array([1, 1, 6]), kernel_shape=[3], strides=[2], auto_pad="SAME_LOWER")
    np.testing.assert_allclose(lower, [[[0.5, 0.5 + 10 / 3, 10 / 3, 10 / 3 + 100 / 3, 100 / 3, 100 / 3]]])


def test_no_element_is_skipped() -> None:
    """-1, and what MaxPool gives for a window without numbers, which is a place of another plane."""
    dY = np.array([[[[1.0, 2.0]], [[4.0, 8.0]]]])
    shape = np.array([1, 2, 2, 3])
    skipped = max_pool_grad(dY, np.array([[[[-1, 5]], [[6, -1]]]]), shape)
    np.testing.assert_array_equal(skipped.ravel(), [0, 0, 0, 0, 0, 2, 4, 0, 0, 0, 0, 0])
    of_max_pool = max_pool_grad(dY, np.array([[[[-4, 5]], [[6, 2]]]]), shape)
    np.testing.assert_array_equal(of_max_pool.ravel(), [0, 0, 0, 0, 0, 2, 4, 0, 0, 0, 0, 0])
    elsewhere = max_pool_grad(dY, np.array([[[[9, 5]], [[6, 2]]]]), shape)
    np.testing.assert_array_equal(elsewhere.ravel(), [0, 0, 8, 0, 0, 2, 4, 0, 0, 1, 0, 0])


def test_gradients_of_one_element_are_added_in_order() -> None:
    dY = np.array([[[1e8, 1.0, -1e8, 1.0]]], np.float32)
    got = max_pool_grad(dY, np.full((1, 1, 4), 2, np.int32), np.array([1, 1, 3]))
    np.testing.assert_array_equal(got, [[[0, 0, 1]]])


LARGE: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "MaxPoolGrad": ({}, (16, 24, 24, 24)),
    "AveragePoolGrad": ({"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4}, (16, 24, 24, 24)),
}


@pytest.mark.parametrize("operator", LARGE)
def test_bits_do_not_depend_on_threads_and_16_bit_floats_are_rounded_once(operator: str) -> None:
    attributes, shape = LARGE[operator]
    planes = np.arange(16 * 24).reshape(16, 24, 1, 1) * 48 * 48
    indices = np.random.default_rng(1).integers(0, 48 * 48, shape) + planes
    inputs = {"dY": drawn(shape, np.float32), "shape": np.array([16, 24, 48, 48])}
    inputs |= {"Indices": indices} if operator == "MaxPoolGrad" else {}
    whole = OPERATORS[operator](inputs, attributes)["dX"]
    with threads(2):
        assert_same_bits(OPERATORS[operator](inputs, attributes)["dX"], whole)
    for dtype in (FLOAT16, BFLOAT16):
        dY = cast(inputs["dY"], dtype)
        expected = OPERATORS[operator]({**inputs, "dY": dY.astype(np.float32)}, attributes)["dX"]
        assert_same_bits(OPERATORS[operator]({**inputs, "dY": dY}, attributes)["dX"], cast(expected, dtype))


def test_nothing_gives_zeros() -> None:
    for shape, dims in (((0, 2, 3), [0, 2, 5]), ((2, 0, 3), [2, 0, 5])):
        dY = drawn(shape)
        assert average_pool_grad(dY, np.array(dims), kernel_shape=[3]).shape == tuple(dims)
        assert max_pool_grad(dY, np.zeros(shape, np.int64), np.array(dims)).shape == tuple(dims)
    none = max_pool_grad(drawn((1, 2, 0)), np.zeros((1, 2, 0), np.int64), np.array([1, 2, 5]))
    np.testing.assert_array_equal(none, np.zeros((1, 2, 5)))


def test_a_nan_reaches_its_window_only() -> None:
    dY = np.array([[[1.0, np.nan, 2.0]]])
    got = average_pool_grad(dY, np.array([1, 1, 6]), kernel_shape=[2], strides=[2])
    np.testing.assert_array_equal(got, [[[0.5, 0.5, np.nan, np.nan, 1, 1]]])


@pytest.mark.parametrize("index", [6, 10**9, 1 << 62, -2, -(10**9)])
def test_an_index_outside_is_refused(index: int) -> None:
    with pytest.raises(IndexOutOfRange, match=rf"Indices\[0\]\[0\]\[1\] is {index}, but must be in \[-1, 5\]"):
        max_pool_grad(np.ones((1, 2, 2)), np.array([[[1, index], [3, 4]]]), np.array([1, 2, 3]))


WRONG: dict[str, tuple[type[GradserveError], dict[str, Any], str]] = {
    "strides 0": (InvalidParameter, {"strides": [0, 1]}, r"strides\[0\] is 0"),
    "dilations negative": (InvalidParameter, {"dilations": [1, -1]}, r"dilations\[1\] is -1"),
    "pads short": (InvalidParameter, {"pads": [0]}, "pads has the length 1, but must have 4"),
    "kernel_shape": (InvalidParameter, {"kernel_shape": [2]}, "kernel_shape has the length 1, but must have 2"),
    "kernel too large": (ShapeMismatch, {"kernel_shape": [2, 5]}, "along axis 3, but a window takes 5"),
    "dY": (ShapeMismatch, {"dY": (1, 2, 3, 3)}, "dY has shape"),
    "dY's channels": (ShapeMismatch, {"dY": (1, 3, 2, 2)}, "dY has shape"),
    "rank": (InvalidTensor, {"shape": (3, 3)}, r"shape is \[3, 3\], but must have 3 dimensions or more"),
    "negative": (InvalidTensor, {"shape": (1, 2, -3, 3)}, r"shape\[2\] is -3"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_refused(name: str) -> None:
    error, given, message = WRONG[name]
    attributes: dict[str, Any] = {key: value for key, value in given.items() if isinstance(value, list)}
    shape = np.array(given.get("shape", (1, 2, 3, 3)))
    with pytest.raises(error, match=message):
        average_pool_grad(drawn(given.get("dY", (1, 2, 2, 2))), shape, **{"kernel_shape": [2, 2], **attributes})


def test_large_kernels_and_pads_take_little_memory() -> None:
    attributes: dict[str, Any] = {"kernel_shape": [1 << 31], "pads": [1 << 31, 1 << 31], "strides": [1 << 31]}
    work = partial(average_pool_grad, np.array([[[2.0, 4.0]]]), np.array([1, 1, 4]), **attributes)
    assert peak_bytes(work) < 1 << 16
    np.testing.assert_array_equal(work(), [[[1, 1, 1, 1]]])
