from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from scipy.special import expit

from service.dtypes import Array
from service.errors import DtypeMismatch, ShapeMismatch
from service.kernels import OPERATORS, activations
from service.kernels.activations import leaky_relu_grad, quick_gelu_grad, relu_grad, sigmoid_grad, tanh_grad
from tests.kernels.calls import FLOAT_DTYPES
from tests.kernels.equality import assert_close, assert_same_bits, bits

INF, NAN = np.inf, np.nan
DENORMAL = float(np.finfo(np.float32).smallest_subnormal)

SECOND: dict[Callable[..., Array], str] = {
    operator.kernel: operator.inputs[1].name
    for operator in OPERATORS.values()
    if operator.kernel.__module__ == activations.__name__
}
"""The kernels of the module, and the name of the second input of each."""

every_kernel = pytest.mark.parametrize("kernel", SECOND, ids=lambda kernel: kernel.__name__)
every_dtype = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)


def f32(*numbers: float) -> Array:
    return np.array(numbers, np.float32)


@every_kernel
@pytest.mark.parametrize(
    ("left", "right"),
    [((2, 3), (3, 2)), ((2, 3), (6,)), ((2, 3), (1, 3)), ((3,), ()), ((), (1,)), ((0,), (0, 1)), ((4,), (5,))],
)
def test_shapes_must_be_equal(kernel: Callable[..., Array], left: tuple[int, ...], right: tuple[int, ...]) -> None:
    with pytest.raises(ShapeMismatch) as caught:
        kernel(np.ones(left, np.float32), np.ones(right, np.float32))
    second = SECOND[kernel]
    assert caught.value.detail.startswith(f"{second} has shape {list(right)},")
    assert f"dY, {list(left)}" in caught.value.detail
    assert caught.value.context == {"tensor": second}


@every_kernel
@pytest.mark.parametrize("dtypes", [("float32", "float64"), ("float16", ml_dtypes.bfloat16), ("float64", "float16")])
def test_dtypes_must_be_equal(kernel: Callable[..., Array], dtypes: tuple[Any, Any]) -> None:
    left, right = (np.ones(2, dtype) for dtype in dtypes)
    with pytest.raises(DtypeMismatch) as caught:
        kernel(left, right)
    assert caught.value.detail == f"{SECOND[kernel]} is {right.dtype}, but must have the dtype of dY, {left.dtype}"


@every_kernel
@every_dtype
@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0, 3), (0, 0), (1, 1, 1, 1, 1, 1)])
def test_scalars_and_empty_tensors(kernel: Callable[..., Array], dtype: Any, shape: tuple[int, ...]) -> None:
    result = kernel(np.ones(shape, dtype), np.full(shape, 0.5, dtype))
    assert (result.shape, result.dtype) == (shape, dtype)
    alone = kernel(np.ones(1, dtype), np.full(1, 0.5, dtype))
    assert_same_bits(result, np.full(shape, alone[0], dtype))


@pytest.mark.parametrize("X", [0.0, -0.0, -1.0, -DENORMAL, -INF, NAN])
def test_relu_gives_plus_zero_whatever_dY_is(X: float) -> None:
    dY = f32(1, -1, -0.0, INF, -INF, NAN)
    assert_same_bits(relu_grad(dY, np.full_like(dY, X)), np.zeros_like(dY))


@pytest.mark.parametrize("X", [DENORMAL, 1.0, INF])
def test_relu_passes_dY_bit_by_bit(X: float) -> None:
    dY = np.array([0x00000000, 0x80000000, 0x7F800000, 0xFFC12345, 0x7FA00001, 1, 0xBF800000], np.uint32)
    np.testing.assert_array_equal(bits(relu_grad(dY.view(np.float32), np.full(7, X, np.float32))), dY)


@pytest.mark.parametrize("Y", [0.0, -0.0, -2.0, -DENORMAL, -INF, NAN])
@pytest.mark.parametrize("alpha", [0.01, 0.0, -0.5, 2.0, NAN, INF])
def test_leaky_relu_slopes_where_Y_is_not_positive(alpha: float, Y: float) -> None:
    dY = f32(1, -3, 0.0, -0.0, INF, NAN)
    with np.errstate(invalid="ignore"):
        expected = dY * np.float32(alpha)
    assert_same_bits(leaky_relu_grad(dY, np.full_like(dY, Y), alpha=alpha), expected)


@pytest.mark.parametrize("Y", [DENORMAL, 3.0, INF])
@pytest.mark.parametrize("alpha", [0.01, 0.0, -0.5, NAN, INF])
def test_leaky_relu_passes_dY_where_Y_is_positive(alpha: float, Y: float) -> None:
    dY = f32(1, -3, -0.0, DENORMAL, INF, -INF, NAN)
    assert_same_bits(leaky_relu_grad(dY, np.full_like(dY, Y), alpha=alpha), dY)


def test_leaky_relu_default_alpha() -> None:
    assert_same_bits(leaky_relu_grad(f32(1, 1), f32(-1, 1)), f32(0.01, 1))


def test_sigmoid_follows_the_formula_in_this_order() -> None:
    dY, Y = np.random.default_rng(0).normal(0, 2, (2, 1000)).astype(np.float32)
    assert_same_bits(sigmoid_grad(dY, Y), (dY * Y) * (np.float32(1) - Y))
    assert_same_bits(sigmoid_grad(f32(1, 1, 1, INF, 2), f32(100, INF, NAN, 0, -INF)), f32(-9900, -INF, NAN, NAN, -INF))


def test_tanh_follows_the_formula() -> None:
    dY, Y = np.random.default_rng(0).normal(0, 2, (2, 1000)).astype(np.float32)
    assert_same_bits(tanh_grad(dY, Y), dY * (np.float32(1) - Y * Y))
    assert_same_bits(tanh_grad(f32(1, 1, 1, INF, 2), f32(100, INF, NAN, 1, -INF)), f32(-9999, -INF, NAN, NAN, -INF))


@pytest.mark.parametrize("kernel", [sigmoid_grad, tanh_grad], ids=lambda kernel: kernel.__name__)
def test_float64_follows_the_formula(kernel: Callable[..., Array]) -> None:
    dY, Y = np.random.default_rng(0).normal(0, 2, (2, 1000))
    expected = dY * Y * (1 - Y) if kernel is sigmoid_grad else dY * (1 - Y * Y)
    assert_same_bits(kernel(dY, Y), expected)


def exact_quick_gelu_grad(dY: Array, X: Array, alpha: float) -> Array:
    v = alpha * X.astype(np.float64)
    return np.asarray(dY * expit(v) * (1 + v * expit(-v)))


@pytest.mark.parametrize("alpha", [1.702, 1.0, -1.702, 0.0, 25.0])
def test_quick_gelu_is_exact_to_rounding(alpha: float) -> None:
    X = np.linspace(-30, 30, 4001)
    dY = np.random.default_rng(0).normal(size=4001)
    assert_close(quick_gelu_grad(dY, X, alpha=alpha), exact_quick_gelu_grad(dY, X, alpha), rtol=1e-14, atol=1e-14)
    # Rounding 1 - s, which is then multiplied by v up to about 17, is the largest error: 17 / 2 ulp of 1.
    got = quick_gelu_grad(dY.astype(np.float32), X.astype(np.float32), alpha=alpha)
    expected = exact_quick_gelu_grad(dY.astype(np.float32), X.astype(np.float32), float(np.float32(alpha)))
    with np.errstate(under="ignore"):
        assert_close(got, expected.astype(np.float32), rtol=1e-6, atol=1.2e-6 * np.abs(dY))


def test_quick_gelu_does_not_saturate_early() -> None:
    """The left tail is small but right, where ONNX Runtime gives 0."""
    X = np.linspace(-40, -2, 500, dtype=np.float32)
    expected = exact_quick_gelu_grad(np.ones_like(X), X, float(np.float32(1.702))).astype(np.float32)
    assert_close(quick_gelu_grad(np.ones_like(X), X), expected, rtol=1e-5)


@pytest.mark.parametrize(("X", "expected"), [(-100.0, 0.0), (-1e38, 0.0), (100.0, 3.0), (1e38, 3.0)])
def test_quick_gelu_far_out(X: float, expected: float) -> None:
    assert quick_gelu_grad(f32(3), f32(X)).tolist() == [expected]


@pytest.mark.parametrize("X", [NAN, INF, -INF])
@pytest.mark.parametrize("alpha", [1.702, 1.0, -1.702, 0.0])
def test_quick_gelu_of_infinity_is_nan(alpha: float, X: float) -> None:
    assert_same_bits(quick_gelu_grad(f32(1, -2), f32(X, X), alpha=alpha), f32(NAN, NAN))


def test_quick_gelu_without_slope_halves_dY() -> None:
    assert_same_bits(quick_gelu_grad(f32(1, -3, INF), f32(-7, 0, 5), alpha=0.0), f32(0.5, -1.5, INF))


def test_quick_gelu_default_alpha() -> None:
    X = np.linspace(-3, 3, 7, dtype=np.float32)
    assert_same_bits(quick_gelu_grad(np.ones_like(X), X), quick_gelu_grad(np.ones_like(X), X, alpha=1.702))


@pytest.mark.parametrize(("kernel", "alpha"), [(leaky_relu_grad, 1e300), (quick_gelu_grad, 1e300)])
def test_alpha_beyond_float32_is_infinite(kernel: Callable[..., Array], alpha: float) -> None:
    assert_same_bits(kernel(f32(2), f32(-1), alpha=alpha), kernel(f32(2), f32(-1), alpha=INF))
