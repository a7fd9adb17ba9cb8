from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.special import expit, ndtr

from service.dtypes import BFLOAT16, Array
from service.errors import DtypeMismatch, ShapeMismatch
from service.kernels.gelu import (
    CUBIC,
    ROOT,
    bias_fast_gelu_grad_dx,
    bias_gelu_grad_dx,
    fast_gelu_grad,
    gelu_grad,
    quick_gelu,
)
from tests.kernels.calls import FLOAT_DTYPES
from tests.kernels.equality import assert_close, assert_same_bits
from tests.kernels.gradcheck import check_gradient
from tests.kernels.threads import threads

INF, NAN = np.inf, np.nan
BIASED: dict[Callable[..., Array], Callable[..., Array]] = {
    gelu_grad: bias_gelu_grad_dx,
    fast_gelu_grad: bias_fast_gelu_grad_dx,
}

every_kernel = pytest.mark.parametrize("kernel", BIASED, ids=lambda kernel: kernel.__name__)
every_biased = pytest.mark.parametrize("kernel", BIASED.values(), ids=lambda kernel: kernel.__name__)


def gelu(X: Array) -> Array:
    return np.asarray(X * ndtr(X))


def fast_gelu(X: Array) -> Array:
    return np.asarray(X * (1 + np.tanh(ROOT * (X + CUBIC * X**3))) / 2)


def slope(kernel: Callable[..., Array], X: Array) -> Array:
    """The slope at X, with small relative errors in its tail, too."""
    if kernel is gelu_grad:
        return np.asarray(ndtr(X) + X * np.exp(-X * X / 2) / np.sqrt(2 * np.pi))
    twice_u, twice_slope = 2 * ROOT * (X + CUBIC * X**3), 2 * ROOT * (1 + 3 * CUBIC * X * X)
    return np.asarray(expit(twice_u) * (1 + X * twice_slope * expit(-twice_u)))


@pytest.mark.parametrize(("kernel", "forward"), [(gelu_grad, gelu), (fast_gelu_grad, fast_gelu)])
def test_gradients_are_those_of_the_functions(kernel: Callable[..., Array], forward: Callable[..., Array]) -> None:
    X, B = np.random.default_rng(0).normal(0, 2, (5, 7)), np.linspace(-1, 1, 7)
    check_gradient(forward, kernel, X)
    check_gradient(lambda X: forward(X + B), lambda dY, X: BIASED[kernel](dY, X, B), X)


@every_kernel
@pytest.mark.parametrize(
    ("dtype", "atol", "tail"), [("float32", 2.4e-7, 1e-5), ("float64", 2e-15, 1e-12), ("float16", 6e-4, None)]
)
def test_no_dtype_is_far_off_anywhere(
    kernel: Callable[..., Array], dtype: str, atol: float, tail: float | None
) -> None:
    """Far below zero, where ONNX Runtime's numbers are differences of large ones, the relative error is small, too."""
    X = np.concatenate([np.linspace(-9, 9, 20_001), np.linspace(-39, 39, 79)]).astype(dtype)
    got, expected = kernel(np.ones_like(X), X).astype(np.float64), slope(kernel, X.astype(np.float64))
    assert_close(got, expected, atol=atol)
    if tail is not None:
        far = (X > -8.5) & (X < -2)
        assert_close(got[far], expected[far], rtol=tail)


@every_kernel
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_infinities_give_the_limits_and_only_nan_gives_nan(kernel: Callable[..., Array], dtype: Any) -> None:
    largest = 3e38 if dtype in (np.float32, BFLOAT16) else 6e4
    X = np.array([INF, -INF, largest, -largest, NAN, 0.0, -0.0, 1e-7, -1e-7], dtype)
    expected = np.array([2, 0, 2, 0, NAN, 1, 1, 1, 1], dtype)
    for got in (kernel(np.full_like(X, 2), X), BIASED[kernel](np.full_like(X, 2), X, np.zeros_like(X))):
        assert_close(np.abs(got), expected, atol=1e-6)
    assert np.isnan(kernel(np.array([NAN, INF], dtype), np.array([1, NAN], dtype))).all()


@every_kernel
def test_the_slope_at_zero_is_exactly_one_half(kernel: Callable[..., Array]) -> None:
    for dtype in FLOAT_DTYPES:
        X = np.array([0.0, -0.0, 1e-30, -1e-30], dtype)
        assert kernel(np.full(4, 2, dtype), X).astype(float).tolist() == [1] * 4


def test_the_tail_is_exactly_zero_or_dY_far_out() -> None:
    X = np.array([15, 20, 40, 1e20, -15, -20, -40, -1e20], np.float32)
    for kernel in BIASED:
        assert np.abs(kernel(np.full_like(X, 3), X)).tolist() == [3, 3, 3, 3, 0, 0, 0, 0]


@every_biased
@pytest.mark.parametrize("columns", [1, 3, 300_000])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_the_bias_belongs_to_the_last_dimension(kernel: Callable[..., Array], columns: int, dtype: Any) -> None:
    """Also where a block has no whole number of rows, or a row no whole number of blocks."""
    (plain,) = (key for key, value in BIASED.items() if value is kernel)
    dY, X = np.random.default_rng(1).normal(0, 2, (2, 600_000 // columns, columns)).astype(dtype)
    B = np.random.default_rng(2).normal(0, 1, columns).astype(dtype)
    compute = np.float32 if dtype.itemsize == 2 else dtype
    Z = X.astype(compute) + B.astype(compute)
    assert_same_bits(kernel(dY, X, B), plain(dY.astype(compute), Z).astype(dtype))


@every_biased
def test_bits_do_not_depend_on_threads(kernel: Callable[..., Array]) -> None:
    dY, X = np.random.default_rng(1).normal(0, 2, (2, 3000, 301)).astype(np.float32)
    with threads(2):
        shared = kernel(dY, X, X[0])
    assert_same_bits(shared, kernel(dY, X, X[0]))


@every_biased
def test_out_may_share_memory_with_the_bias(kernel: Callable[..., Array]) -> None:
    dY, X = np.random.default_rng(1).normal(0, 2, (2, 400, 1000)).astype(np.float32)
    out = X.copy()
    assert_same_bits(kernel(dY, X, out[7], out=out), kernel(dY, X, X[7]))


@every_biased
@pytest.mark.parametrize(
    ("X", "B"), [((2, 3), ()), ((2, 3), (2,)), ((2, 3), (1, 3)), ((2, 3), (0,)), ((), ()), ((), (1,)), ((2, 0), (1,))]
)
def test_a_bias_of_another_shape_is_refused(kernel: Callable[..., Array], X: Any, B: Any) -> None:
    with pytest.raises(ShapeMismatch, match=r"B has shape \[.*the last of X, whose shape is") as caught:
        kernel(np.ones(X), np.ones(X), np.ones(B))
    assert caught.value.context == {"tensor": "B"}


@every_biased
@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0), (2, 0, 3)])
def test_empty_tensors(kernel: Callable[..., Array], shape: tuple[int, ...]) -> None:
    """A last dimension of 0 ends ONNX Runtime's process."""
    assert kernel(np.ones(shape), np.ones(shape), np.ones(shape[-1])).shape == shape


@pytest.mark.parametrize("kernel", [*BIASED, *BIASED.values()], ids=lambda kernel: kernel.__name__)
def test_dY_must_be_like_X(kernel: Callable[..., Array]) -> None:
    B = [np.ones(3)] * (kernel in BIASED.values())
    with pytest.raises(ShapeMismatch, match=r"X has shape \[2, 3\], but must have the shape of dY, \[3\]"):
        kernel(np.ones(3), np.ones((2, 3)), *B)
    with pytest.raises(DtypeMismatch, match="X is float32, but must have the dtype of dY, float64"):
        kernel(np.ones(3), np.ones(3, np.float32), *B)


def test_quick_gelu() -> None:
    X = np.linspace(-30, 30, 601)
    for alpha in (1.702, 1.0, -0.5, 0.0):
        assert_close(quick_gelu(X, alpha=alpha), X * expit(alpha * X), rtol=1e-14)
        got = quick_gelu(X.astype(np.float32), alpha=alpha)
        single = X.astype(np.float32).astype(np.float64)
        assert_close(got, (single * expit(np.float32(alpha) * single)).astype(np.float32), rtol=4e-6)
    assert_same_bits(quick_gelu(X), quick_gelu(X, alpha=1.702))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_quick_gelu_of_infinities_is_the_limit(dtype: Any) -> None:
    X = np.array([INF, -INF, NAN, 0.0, -1e4, 1e4], dtype)
    big = float(X[-1])
    for alpha, expected in {1.702: [INF, 0, NAN, 0, 0, big], -1.0: [0, -INF, NAN, 0, -big, 0]}.items():
        got = quick_gelu(X, alpha=alpha).astype(np.float64)
        np.testing.assert_array_equal(got, expected)
    assert_close(quick_gelu(X, alpha=0.0).astype(np.float64), np.array([INF, -INF, NAN, 0, -big / 2, big / 2]))
