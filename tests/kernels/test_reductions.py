from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from service.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, Array
from service.errors import AxisOutOfRange, ShapeMismatch
from service.kernels import OPERATORS
from service.kernels.reductions import div_grad, reduce_sum_training
from tests.kernels.equality import assert_close, assert_same_bits
from tests.kernels.gradcheck import check_gradient
from tests.kernels.threads import threads

SHAPES = [(), (5,), (2, 3, 4, 5), (1, 3, 1), (700, 3, 300), (300_000, 3), (3, 300_000), (70, 2, 60, 2, 20)]


def axes(*numbers: int) -> Array:
    return np.array(numbers, np.int64)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_along_all_sets_of_axes(shape: tuple[int, ...]) -> None:
    """Also where threads share the summed axes, or the kept ones, or both."""
    data = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    for count in range(1, len(shape) + 1):
        for summed in itertools.combinations(range(len(shape)), count):
            exact = data.sum(summed, dtype=np.float64, keepdims=True)
            got = reduce_sum_training(data, axes(*summed))
            assert_close(got, np.asarray(exact, np.float32), rtol=2e-7, atol=1e-9)
            flat = reduce_sum_training(data, axes(*(axis - len(shape) for axis in summed)), keepdims=0)
            assert_same_bits(flat, got.reshape([size for k, size in enumerate(shape) if k not in summed]))
            if data.size > 100_000:
                with threads(2):
                    assert_same_bits(reduce_sum_training(data, axes(*summed)), got)


def test_axes_may_repeat_or_be_left_out() -> None:
    data = np.arange(6.0).reshape(2, 3)
    assert reduce_sum_training(data, axes(0, -2, 0)).tolist() == [[3, 5, 7]]
    assert reduce_sum_training(data, axes()).tolist() == [[15]]
    assert reduce_sum_training(data, axes(), keepdims=0) == 15
    assert_same_bits(reduce_sum_training(data, axes(), noop_with_empty_axes=1, keepdims=0), data)
    assert reduce_sum_training(np.array(3.0), axes()) == 3


def test_a_sum_of_nothing_is_zero() -> None:
    assert reduce_sum_training(np.ones((2, 0, 3)), axes(1)).tolist() == [[[0, 0, 0]]] * 2
    assert not reduce_sum_training(np.ones((2, 0)), axes(0), keepdims=0).size
    work = OPERATORS["ReduceSumTraining"].work
    assert work({"data": np.ones((0, 7, 5)), "axes": axes(0)}, {}) == 35
    assert work({"data": np.ones((4, 7)), "axes": axes(0)}, {}) == 0


def test_sums_are_rounded_once() -> None:
    """ONNX Runtime adds float32 in float32."""
    data = np.full(1_000_000, 0.1, np.float32)
    assert reduce_sum_training(data, axes(0)).tolist() == [float(np.float32(1_000_000 * float(np.float32(0.1))))]
    for dtype in (FLOAT16, BFLOAT16):
        narrow = np.random.default_rng(0).normal(size=(3000, 2)).astype(dtype)
        exact = narrow.astype(np.float64).sum(0).astype(np.float32).astype(dtype)
        assert_same_bits(reduce_sum_training(narrow, axes(0), keepdims=0), exact)


def test_integers_wrap_around() -> None:
    data = np.array([2**31 - 1, 1, 5], np.int32)
    assert reduce_sum_training(data, axes(0)).tolist() == [-(2**31) + 5]
    large = np.array([2**63 - 1, 2], np.int64)
    assert reduce_sum_training(large, axes(0)).tolist() == [-(2**63) + 1]


def test_nan_and_infinities() -> None:
    data = np.array([[1, np.nan], [np.inf, 1], [np.inf, -np.inf]], np.float32)
    got = reduce_sum_training(data, axes(1), keepdims=0)
    assert np.isnan(got).tolist() == [True, False, True]
    assert got[1] == np.inf


def test_wrong_axes_are_refused() -> None:
    for axis in (2, -3, 1 << 40):
        with pytest.raises(AxisOutOfRange, match=r"is not in \[-2, 1\], the axes of data"):
            reduce_sum_training(np.ones((2, 3)), axes(0, axis))
    with pytest.raises(AxisOutOfRange, match="data is a scalar"):
        reduce_sum_training(np.array(1.0), axes(0))
    for wrong in (np.array(0), np.zeros((1, 1), np.int64)):
        with pytest.raises(ShapeMismatch, match="axes has shape"):
            reduce_sum_training(np.ones(3), wrong)


BROADCASTS: list[tuple[Any, Any]] = [
    ((2, 3), (2, 3)),
    ((2, 3, 4), ()),
    ((), (2, 3)),
    ((2, 3, 4), (4,)),
    ((3, 1), (2, 1, 4)),
    ((1, 1), (1, 3)),
    ((2, 1), (1, 3)),
]


@pytest.mark.parametrize(("a", "b"), BROADCASTS)
def test_gradients_of_a_division(a: Any, b: Any) -> None:
    random = np.random.default_rng(0)
    A, B = np.asarray(random.normal(size=a)), np.asarray(random.uniform(0.5, 2, b))
    check_gradient(lambda A: A / B, lambda dY, A: div_grad(dY, A, B)[0], A)
    check_gradient(lambda B: A / B, lambda dY, B: div_grad(dY, A, B)[1], B)


@pytest.mark.parametrize(
    ("a", "b"), [((500, 1000), (1000,)), ((500, 1000), (500, 1)), ((1000,), (500, 1)), ((500_000,), ())]
)
def test_large_divisions(a: Any, b: Any) -> None:
    random = np.random.default_rng(0)
    A, B = (np.asarray(random.uniform(0.5, 2, shape), np.float32) for shape in (a, b))
    dY = random.normal(size=np.broadcast_shapes(a, b)).astype(np.float32)
    alone = div_grad(dY, A, B)
    with threads(2):
        shared = div_grad(dY, A, B)
    quotient = dY.astype(np.float64) / B
    for got, other, terms in zip(alone, shared, (quotient, -quotient * (A / B.astype(np.float64))), strict=True):
        assert_same_bits(other, got)
        lead = terms.ndim - got.ndim
        over = tuple(k for k in range(terms.ndim) if k < lead or got.shape[k - lead] != terms.shape[k])
        exact = terms.sum(over).reshape(got.shape)
        assert_close(got.astype(np.float64), exact, rtol=3e-7, atol=2e-4)
    assert_same_bits(div_grad(dY, A, B, wanted=["dA"])[0], alone[0])
    assert_same_bits(div_grad(dY, A, B, wanted=["dB"])[1], alone[1])
    assert div_grad(dY, A, B, wanted=["dB"])[0] is div_grad(dY, A, B, wanted=["dA"])[1] is None


def test_nothing_over_or_underflows_on_the_way() -> None:
    """B * B does in ONNX Runtime."""
    A, B = np.array([1e-25, 1e30, 3.0], np.float32), np.array([1e-25, 1e25, 2.0], np.float32)
    dA, dB = div_grad(np.ones(3, np.float32), A, B)
    assert_close(dA, np.array([1e25, 1e-25, 0.5], np.float32), rtol=3e-7)
    assert_close(dB, np.array([-1e25, -1e-20, -0.75], np.float32), rtol=3e-7)


def test_division_by_zero_follows_ieee() -> None:
    dA, dB = div_grad(np.array([1.0, -1, 0, 1]), np.array([1.0, 1, 1, 0]), np.zeros(4))
    np.testing.assert_array_equal(dA, [np.inf, -np.inf, np.nan, np.inf])
    np.testing.assert_array_equal(dB, [-np.inf, np.inf, np.nan, np.nan])


def test_16_bit_quotients_are_rounded_once() -> None:
    random = np.random.default_rng(0)
    for dtype in (FLOAT16, BFLOAT16):
        A, B, dY = (random.uniform(0.5, 2, (50, 7)).astype(dtype) for _ in range(3))
        wide = div_grad(*(one.astype(np.float32) for one in (dY, A, B)))
        for got, exact in zip(div_grad(dY, A, B), wide, strict=True):
            assert_same_bits(got, exact.astype(dtype))
        assert div_grad(dY, A, B[0])[1].dtype == dtype


def test_empty_divisions() -> None:
    dA, dB = div_grad(np.ones((0, 3)), np.ones((0, 3)), np.ones(3))
    assert dA.shape == (0, 3)
    assert dB.tolist() == [0, 0, 0]
    dA, dB = div_grad(np.ones((0, 3)), np.ones((1, 3)), np.ones((0, 1)))
    assert dA.tolist() == [[0, 0, 0]]
    assert dB.shape == (0, 1)
    assert FLOAT64 == dA.dtype != FLOAT32


@pytest.mark.parametrize(
    ("dY", "a", "b", "tensor"),
    [
        ((2, 3), (2, 3), (2,), "B"),
        ((3,), (2, 3), (3,), "dY"),
        ((1, 3), (2, 3), (3,), "dY"),
        ((), (2, 3), (3,), "dY"),
        ((2, 3), (3,), (3,), "dY"),
        ((2, 3, 1), (2, 3), (3,), "dY"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(dY: Any, a: Any, b: Any, tensor: str) -> None:
    """ONNX Runtime broadcasts dY."""
    with pytest.raises(ShapeMismatch) as caught:
        div_grad(np.ones(dY), np.ones(a), np.ones(b))
    assert caught.value.context == {"tensor": tensor}


@pytest.mark.parametrize("dtype", [np.float32, np.float64, FLOAT16, BFLOAT16], ids=str)
@pytest.mark.parametrize("shapes", [((), ()), ((1,), ()), ((), (1,)), ((), (2, 2))], ids=str)
def test_div_grad_takes_scalars(shapes: tuple[tuple[int, ...], tuple[int, ...]], dtype: Any) -> None:
    A, B = np.full(shapes[0], 6, dtype), np.full(shapes[1], 2, dtype)
    dY = np.ones(np.broadcast_shapes(*shapes), dtype)
    dA, dB = OPERATORS["DivGrad"]({"dY": dY, "A": A, "B": B}, {}).values()
    assert (dA.shape, dB.shape, dA.dtype, dB.dtype) == (A.shape, B.shape, A.dtype, B.dtype)
    assert dA.astype(float).sum() == dY.size * 0.5
    assert dB.astype(float).sum() == dY.size * -1.5
