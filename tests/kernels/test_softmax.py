from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from service.dtypes import Array
from service.errors import AxisOutOfRange, DtypeMismatch, ShapeMismatch
from service.kernels.softmax import log_softmax_grad, log_softmax_grad_13, softmax_grad, softmax_grad_13
from tests.kernels.calls import FLOAT_DTYPES
from tests.kernels.equality import assert_close, assert_same_bits

Kernel = Callable[..., Array]

INF, NAN = np.inf, np.nan
FIRST: list[Kernel] = [softmax_grad, log_softmax_grad]
THIRTEEN: list[Kernel] = [softmax_grad_13, log_softmax_grad_13]
SOFTMAX: list[Kernel] = [softmax_grad, softmax_grad_13]
LOG_SOFTMAX: list[Kernel] = [log_softmax_grad, log_softmax_grad_13]
EMPTY = [(0,), (0, 3), (2, 0), (2, 3, 0), (2, 0, 3), (0, 2, 3), (0, 0, 2), (2, 0, 1, 3)]


def kernels(*groups: list[Kernel]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kernel", sum(groups, []), ids=lambda kernel: kernel.__name__)


every_kernel = kernels(FIRST, THIRTEEN)


def f32(*rows: Any) -> Array:
    return np.array(rows, np.float32)


def exact(kernel: Kernel, dY: Array, Y: Array, axis: int) -> Array:
    """The formula in float64, for every dimension from `axis` on or for it alone."""
    axis %= Y.ndim
    over = axis if kernel in THIRTEEN else tuple(range(axis, Y.ndim))
    dY, Y = dY.astype(np.float64), Y.astype(np.float64)
    if kernel in LOG_SOFTMAX:
        return np.asarray(dY - np.exp(Y) * dY.sum(over, keepdims=True))
    return np.asarray(Y * (dY - (Y * dY).sum(over, keepdims=True)))


@every_kernel
@pytest.mark.parametrize("dtype", FLOAT_DTYPES[:2], ids=str)
@pytest.mark.parametrize(
    "shape", [(7,), (3, 4), (2, 3, 4), (2, 1, 3, 2), (2, 3, 1, 2, 2), (300, 41), (2, 70, 130), (2, 60, 5000)]
)
def test_every_axis(kernel: Kernel, dtype: Any, shape: tuple[int, ...]) -> None:
    dY, Y = np.random.default_rng(0).uniform(-1, 1, (2, *shape)).astype(dtype)
    for axis in range(-len(shape), len(shape)):
        expected = exact(kernel, dY, Y, axis).astype(dtype)
        # Rounding of a sum of `size` numbers that cancel.
        allowed = np.finfo(dtype).eps * max(4, Y.size**0.5)
        assert_close(kernel(dY, Y, axis=axis), expected, rtol=allowed, atol=3 * allowed)


@every_kernel
def test_default_axis_is_1_or_in_the_second_generation_the_last(kernel: Kernel) -> None:
    dY, Y = np.random.default_rng(0).normal(size=(2, 2, 3, 4))
    assert_same_bits(kernel(dY, Y), kernel(dY, Y, axis=1 if kernel in FIRST else 2))


@kernels(SOFTMAX)
def test_gradients_of_probabilities_sum_to_zero(kernel: Kernel) -> None:
    random = np.random.default_rng(0)
    Y = random.dirichlet(np.ones(50), 20)
    np.testing.assert_allclose(kernel(random.normal(size=Y.shape), Y, axis=1).sum(1), 0, atol=1e-14)


@every_kernel
@pytest.mark.parametrize("shape", EMPTY)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_empty_tensor_on_every_axis(kernel: Kernel, shape: tuple[int, ...], dtype: Any) -> None:
    for axis in range(-len(shape), len(shape)):
        result = kernel(np.empty(shape, dtype), np.empty(shape, dtype), axis=axis)
        assert (result.shape, result.dtype) == (shape, dtype)


@every_kernel
@pytest.mark.parametrize(
    ("shape", "axis"), [((4,), 1), ((4,), -2), ((2, 3), 2), ((2, 3), -3), ((2, 3, 4), 1 << 70), ((0, 3), 2)]
)
def test_axis_out_of_range(kernel: Kernel, shape: tuple[int, ...], axis: int) -> None:
    ones, rank = np.ones(shape, np.float32), len(shape)
    with pytest.raises(AxisOutOfRange) as caught:
        kernel(ones, ones, axis=axis)
    assert caught.value.detail == f"axis {axis} is not in [{-rank}, {rank - 1}], the axes of Y, which has rank {rank}"
    assert caught.value.context == {"tensor": "Y", "axis": axis}


@every_kernel
@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_a_scalar_has_no_axis(kernel: Kernel, axis: int) -> None:
    with pytest.raises(AxisOutOfRange, match=f"^axis {axis}: Y is a scalar"):
        kernel(np.array(1.0), np.array(1.0), axis=axis)


@kernels(FIRST)
def test_default_axis_needs_two_dimensions(kernel: Kernel) -> None:
    with pytest.raises(AxisOutOfRange, match="^axis 1 is not in"):
        kernel(np.ones(4), np.ones(4))
    assert kernel(np.ones(4), np.ones(4), axis=0).shape == (4,)


@every_kernel
@pytest.mark.parametrize(
    ("left", "right"), [((2, 3), (3, 2)), ((6,), (2, 3)), ((1, 3), (2, 3)), ((), (2, 3)), ((0, 3), (2, 3))]
)
def test_shapes_must_be_equal(kernel: Kernel, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    with pytest.raises(ShapeMismatch) as caught:
        kernel(np.ones(left, np.float32), np.ones(right, np.float32), axis=0)
    assert caught.value.detail == f"dY has shape {list(left)}, but must have the shape of Y, {list(right)}"
    assert caught.value.context == {"tensor": "dY"}


@every_kernel
def test_dtypes_must_be_equal(kernel: Kernel) -> None:
    with pytest.raises(DtypeMismatch, match="^dY is float64, but must have the dtype of Y, float32$"):
        kernel(np.ones((2, 3)), np.ones((2, 3), np.float32))


# dY, Y and dX of one row each.
SOFTMAX_ROWS: dict[str, tuple[list[float], list[float], list[float]]] = {
    "NaN in dY": ([1, NAN, 3], [0.25, 0.25, 0.5], [NAN, NAN, NAN]),
    "NaN in Y": ([1, 2, 3], [0.25, NAN, 0.5], [NAN, NAN, NAN]),
    "infinite dY": ([1, INF, 3], [0.25, 0.25, 0.5], [-INF, NAN, -INF]),
    "infinite dY where Y is 0": ([1, INF, 3], [0.5, 0, 0.5], [NAN, NAN, NAN]),
    "infinities of both signs": ([INF, -INF, 3], [0.25, 0.25, 0.5], [NAN, NAN, NAN]),
    "zeros": ([1, 2, 3], [0, -0.0, 0], [0, -0.0, 0]),
    "Y beyond 1": ([1, 2, 1], [2, 0, 0], [-2, 0, -0.0]),
}
LOG_SOFTMAX_ROWS: dict[str, tuple[list[float], list[float], list[float]]] = {
    "NaN in dY": ([1, NAN, 3], [0, 0, 0], [NAN, NAN, NAN]),
    "NaN in Y": ([1, 2, 3], [0, NAN, 0], [-5, NAN, -3]),
    "infinite dY": ([1, INF, 3], [0, 0, 0], [-INF, NAN, -INF]),
    "masked": ([1, 2, 3], [-INF, 0, -INF], [1, -4, 3]),
    "masked and infinite dY": ([1, INF, 3], [-INF, 0, 0], [NAN, NAN, -INF]),
    "fully masked": ([1, 2, 3], [-INF, -INF, -INF], [1, 2, 3]),
    "exponential overflows": ([1, 2, 3], [100, 0, 0], [-INF, -4, -3]),
    "sum is zero": ([1, -1, 0], [100, 0, -1], [NAN, -1, 0]),
}


@kernels(SOFTMAX)
@pytest.mark.parametrize(("dY", "Y", "dX"), SOFTMAX_ROWS.values(), ids=SOFTMAX_ROWS)
def test_softmax_rows(kernel: Kernel, dY: list[float], Y: list[float], dX: list[float]) -> None:
    assert_same_bits(kernel(f32(dY), f32(Y), axis=1), f32(dX))


@kernels(LOG_SOFTMAX)
@pytest.mark.parametrize(("dY", "Y", "dX"), LOG_SOFTMAX_ROWS.values(), ids=LOG_SOFTMAX_ROWS)
def test_log_softmax_rows(kernel: Kernel, dY: list[float], Y: list[float], dX: list[float]) -> None:
    assert_same_bits(kernel(f32(dY), f32(Y), axis=1), f32(dX))


@kernels(THIRTEEN)
@pytest.mark.parametrize("axis", [0, 1])
def test_a_bad_row_leaves_the_others_alone(kernel: Kernel, axis: int) -> None:
    dY, Y = np.random.default_rng(0).uniform(-1, 1, (2, 6, 6)).astype(np.float32)
    expected = kernel(dY, Y, axis=axis)
    bad = dY.copy()
    np.moveaxis(bad, axis, 1)[2, 3] = NAN
    result = np.moveaxis(kernel(bad, Y, axis=axis), axis, 1)
    assert np.isnan(result[2]).all()
    assert_same_bits(np.delete(result, 2, 0), np.delete(np.moveaxis(expected, axis, 1), 2, 0))


@pytest.mark.parametrize(("kernel", "certain"), [(k, 1.0) for k in SOFTMAX] + [(k, 0.0) for k in LOG_SOFTMAX])
def test_one_class_has_no_gradient(kernel: Kernel, certain: float) -> None:
    dY = f32([1], [-2], [0])
    assert_same_bits(kernel(dY, np.full_like(dY, certain), axis=1), np.zeros_like(dY))


@every_kernel
@pytest.mark.parametrize("dtype", FLOAT_DTYPES[:3], ids=str)
def test_infinities_in_an_axis_longer_than_a_block(kernel: Kernel, dtype: Any) -> None:
    dY, Y = np.full(400_000, 0.5, dtype), np.full(400_000, kernel in SOFTMAX, dtype)
    dY[0], dY[-1] = INF, -INF
    assert np.isnan(kernel(dY, Y, axis=0)).all()
    dY[-1] = INF
    result = kernel(dY, Y, axis=0)
    assert np.isnan(result[[0, -1]]).all()
    assert (result[1:-1] == -INF).all()
