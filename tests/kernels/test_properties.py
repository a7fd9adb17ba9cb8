"""Every operator on random shapes, dtypes, axes and indices, against plain NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.special import expit, log_softmax

from service.dtypes import Array
from service.errors import Invalid, ShapeMismatch
from service.kernels import OPERATORS, activations
from service.kernels.accumulate import in_place_accumulator, in_place_accumulator_v2, zero_gradient
from service.kernels.activations import leaky_relu_grad, quick_gelu_grad, relu_grad, sigmoid_grad, tanh_grad
from service.kernels.broadcast import broadcast_gradient_args
from service.kernels.gather import gather_grad
from service.kernels.losses import softmax_cross_entropy_loss, softmax_cross_entropy_loss_grad
from service.kernels.softmax import log_softmax_grad, log_softmax_grad_13, softmax_grad, softmax_grad_13
from tests.kernels.calls import FLOAT_DTYPES
from tests.kernels.equality import assert_close, assert_like, assert_same_bits

# The same examples in every run: a failure is never a matter of luck.
examples = settings(max_examples=100, database=None, derandomize=True)

SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
DTYPES = st.sampled_from(FLOAT_DTYPES)
ANY_FLOAT = st.floats(width=16)
COMMON = st.floats(-100, 100, width=16)
Kernel = Callable[..., Array]


def arrays(shape: tuple[int, ...], dtype: Any, elements: st.SearchStrategy[float]) -> st.SearchStrategy[Array]:
    """Arrays of a dtype that Hypothesis may not know."""
    return hnp.arrays(np.float64, shape, elements=elements).map(lambda array: np.asarray(array, dtype))


@st.composite
def alike(draw: st.DrawFn, shapes: st.SearchStrategy[Any], elements: st.SearchStrategy[float]) -> tuple[Array, Array]:
    """Two arrays of one shape and dtype."""
    shape, dtype = draw(shapes), draw(DTYPES)
    return draw(arrays(shape, dtype, elements)), draw(arrays(shape, dtype, elements))


def wide(*arrays: Array) -> list[Array]:
    return [array.astype(np.float64) for array in arrays]


finfo: Any = ml_dtypes.finfo  # NumPy's knows no bfloat16


def eps(dtype: Any) -> float:
    return float(finfo(dtype).eps)


def compute_eps(dtype: Any) -> float:
    return min(eps(dtype), eps(np.float32))


def tiny(dtype: Any) -> float:
    """Below the normal numbers, rounding is not relative."""
    return 4 * float(finfo(dtype).smallest_subnormal)


def assert_near(got: Array, expected: Array, rounding: Array | float) -> None:
    """Within `rounding` on the way and one rounding to the dtype of `got`."""
    dtype = got.dtype
    with np.errstate(over="ignore"):
        assert_close(got, expected.astype(dtype), rtol=2 * eps(dtype), atol=rounding + tiny(dtype))


@examples
@given(alike(SHAPES, ANY_FLOAT))
def test_relu(pair: tuple[Array, Array]) -> None:
    dY, X = pair
    assert_same_bits(relu_grad(dY, X), np.where(X.astype(np.float64) > 0, dY, np.zeros_like(dY)))


@examples
@given(alike(SHAPES, ANY_FLOAT), st.sampled_from([0.01, 0.5, 0.0, -0.25, 3.0]))
def test_leaky_relu(pair: tuple[Array, Array], alpha: float) -> None:
    dY, Y = pair
    compute = np.float64 if dY.dtype == np.float64 else np.float32
    with np.errstate(all="ignore"):
        expected = np.where(Y > 0, dY.astype(compute), dY.astype(compute) * np.array(alpha, compute)).astype(dY.dtype)
    assert_same_bits(leaky_relu_grad(dY, Y, alpha=alpha), expected)


@examples
@given(alike(SHAPES, COMMON))
def test_sigmoid_and_tanh(pair: tuple[Array, Array]) -> None:
    (dY, Y), unit = wide(*pair), compute_eps(pair[0].dtype)
    assert_near(sigmoid_grad(*pair), dY * Y * (1 - Y), 4 * unit * np.abs(dY * Y) * (1 + np.abs(Y)))
    assert_near(tanh_grad(*pair), dY * (1 - Y * Y), 4 * unit * np.abs(dY) * (1 + Y * Y))


@examples
@given(alike(SHAPES, COMMON), st.sampled_from([1.702, 1.0, -1.702, 0.0, 0.1]))
def test_quick_gelu(pair: tuple[Array, Array], alpha: float) -> None:
    (dY, X), unit = wide(*pair), compute_eps(pair[0].dtype)
    v = X * (alpha if pair[0].dtype == np.float64 else float(np.float32(alpha)))
    # Both the rounding of v and that of 1 - s are multiplied by up to v * s, and s by its own.
    rounding = 8 * unit * np.abs(dY) * (1 + np.abs(v) * (1 + np.abs(v)) * expit(v))
    assert_near(quick_gelu_grad(*pair, alpha=alpha), dY * expit(v) * (1 + v * expit(-v)), rounding)


@pytest.mark.parametrize("kernel", [softmax_grad, softmax_grad_13, log_softmax_grad, log_softmax_grad_13])
@examples
@given(
    alike(hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=5), st.floats(-8, 8, width=16)),
    st.integers(-4, 3),
)
def test_softmax(kernel: Kernel, pair: tuple[Array, Array], axis: int) -> None:
    (dY, Y), rank, unit = wide(*pair), pair[0].ndim, compute_eps(pair[0].dtype)
    axis = axis % (2 * rank) - rank
    over = axis if kernel in (softmax_grad_13, log_softmax_grad_13) else tuple(range(axis % rank, rank))
    terms, weight = (dY, np.exp(Y)) if kernel in (log_softmax_grad, log_softmax_grad_13) else (dY * Y, Y)
    total, bound = (numbers.sum(over, keepdims=True) for numbers in (terms, np.abs(terms)))
    expected = dY - weight * total if weight is not Y else Y * (dY - total)
    rounding = unit * (np.abs(weight) * (Y.size + 8) * bound + 4 * np.abs(weight * dY))
    assert_near(kernel(*pair, axis=axis), expected, rounding)


@examples
@given(
    alike(hnp.array_shapes(min_dims=2, max_dims=4, min_side=0, max_side=5), st.floats(-8, 8, width=16)),
    st.sampled_from(["mean", "sum", "none"]),
    st.booleans(),
    st.integers(0, 1000),
)
def test_cross_entropy(pair: tuple[Array, Array], reduction: Any, weighted: bool, seed: int) -> None:
    """Some labels are -1, which is ignored; all are, where there are no classes."""
    scores, classes, random = pair[0], pair[0].shape[1], np.random.default_rng(seed)
    labels = random.integers(-1, classes, (scores.shape[0], *scores.shape[2:]))
    weights = random.uniform(0.5, 2, classes).astype(scores.dtype) if weighted else None
    given: Any = (labels, weights), {"reduction": reduction, "ignore_index": -1}
    loss, log_prob = softmax_cross_entropy_loss(scores, *given[0], **given[1])
    exact = log_softmax(wide(scores)[0], axis=1) if scores.size else wide(scores)[0]
    hot = np.moveaxis(np.eye(classes + 1)[labels][..., :classes], -1, 1)
    share = np.append(np.ones(classes) if weights is None else wide(weights)[0], 0)[labels]
    total = (share.sum() or 1) if reduction == "mean" else 1
    losses = -share * (np.where(hot, exact, 0)).sum(1) / total
    unit = compute_eps(scores.dtype)
    assert_near(log_prob, exact, 40 * unit)
    expected = losses if reduction == "none" else losses.sum()
    assert_near(loss, np.asarray(expected), 40 * unit * (share.sum() / total if reduction != "none" else 2))
    dY = np.ones_like(loss)
    d_logits = softmax_cross_entropy_loss_grad(dY, log_prob, *given[0], **given[1])
    slope = np.expand_dims(share / total, 1)
    assert_near(d_logits, (np.exp(wide(log_prob)[0]) - hot) * slope, 8 * unit * slope)


PAIRED: list[Kernel] = [
    operator.kernel for operator in OPERATORS.values() if operator.kernel.__module__ == activations.__name__
]
SOFTMAX: list[Kernel] = [softmax_grad, softmax_grad_13, log_softmax_grad, log_softmax_grad_13]


@pytest.mark.parametrize("kernel", [*PAIRED, *SOFTMAX])
@examples
@given(SHAPES, SHAPES)
def test_shapes_that_differ_are_refused(kernel: Kernel, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    arguments = {"axis": 0} if kernel in SOFTMAX else {}
    tensors = np.ones(left, np.float32), np.ones(right, np.float32)
    if left == right and (left or not arguments):
        assert_like(kernel(*tensors, **arguments), tensors[0])
    else:
        with pytest.raises(ShapeMismatch if right or not arguments else Invalid):
            kernel(*tensors, **arguments)


@st.composite
def gathers(draw: st.DrawFn) -> tuple[tuple[int, ...], Array, Array, int]:
    """A shape, indices into its axis, and a gradient that fits."""
    shape = draw(hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=5))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    size, place = shape[axis], axis % len(shape)
    index_shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    if not size:
        index_shape = (0, *index_shape)
    index_dtype = draw(st.sampled_from([np.int32, np.int64]))
    indices = draw(hnp.arrays(index_dtype, index_shape, elements=st.integers(-size, max(size - 1, -size))))
    grad_shape = (*shape[:place], *index_shape, *shape[place + 1 :])
    return shape, indices, draw(arrays(grad_shape, draw(DTYPES), COMMON)), axis


def gathered_back(shape: tuple[int, ...], indices: Array, grad: Array, axis: int) -> Array:
    output, place = np.zeros(shape), axis % len(shape)
    leading = np.moveaxis(grad.reshape(*shape[:place], indices.size, *shape[place + 1 :]), place, 0)
    np.add.at(np.moveaxis(output, place, 0), indices.ravel(), leading)
    return output


@examples
@given(gathers())
def test_gather(call: tuple[tuple[int, ...], Array, Array, int]) -> None:
    shape, indices, grad, axis = call
    (exact,) = wide(grad)
    expected, bound = (gathered_back(shape, indices, numbers, axis) for numbers in (exact, np.abs(exact)))
    got = gather_grad(np.array(shape), indices, grad, axis=axis)
    assert_near(got, expected, compute_eps(grad.dtype) * indices.size * bound)


SMALL = st.integers(-2, 3)


@examples
@given(
    st.lists(st.integers(-1, 3), max_size=3),
    hnp.arrays(np.int64, hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3), elements=SMALL),
    hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3),
    SMALL,
)
def test_gather_of_anything_is_right_or_refused(
    shape: list[int], indices: Array, grad_shape: tuple[int, ...], axis: int
) -> None:
    grad = np.ones(grad_shape)
    try:
        got = gather_grad(np.array(shape, np.int64), indices, grad, axis=axis)
    except Invalid:
        dims = [max(dim, 0) for dim in shape]
        place = axis % max(len(dims), 1)
        expected = (*dims[:place], *indices.shape, *dims[place + 1 :])
        fits = -len(dims) <= axis < len(dims) and dims == shape and grad_shape == expected
        assert not (fits and ((-dims[axis] <= indices) & (indices < dims[axis])).all())
    else:
        assert_same_bits(got, gathered_back(tuple(shape), indices, grad, axis))


@examples
@given(hnp.mutually_broadcastable_shapes(num_shapes=2, min_side=0, max_side=4, max_dims=5))
def test_broadcast(shapes: hnp.BroadcastableShapes) -> None:
    both = shapes.input_shapes
    result = np.ones(shapes.result_shape)
    for shape, axes in zip(both, broadcast_gradient_args(*(np.array(s, np.int64) for s in both)), strict=True):
        assert axes.tolist() == sorted(set(axes.tolist()), reverse=True)
        assert result.sum(tuple(axes)).size == math.prod(shape)
        padded = (None,) * (result.ndim - len(shape)) + shape
        assert all(padded[axis] in (None, 1) and padded[axis] != result.shape[axis] for axis in axes)


@examples
@given(st.lists(st.integers(-1, 3), max_size=4), st.lists(st.integers(-1, 3), max_size=4))
def test_broadcast_refuses_what_does_not(a: list[int], b: list[int]) -> None:
    fits = all(m == n or 1 in (m, n) for m, n in zip(reversed(a), reversed(b), strict=False))
    if fits:
        broadcast_gradient_args(np.array(a, np.int64), np.array(b, np.int64))
    else:
        with pytest.raises(ShapeMismatch):
            broadcast_gradient_args(np.array(a, np.int64), np.array(b, np.int64))


@st.composite
def accumulations(draw: st.DrawFn) -> tuple[Array, Array]:
    """A buffer, and a gradient whose shape broadcasts into the buffer's."""
    shape = draw(SHAPES)
    kept = shape[draw(st.integers(0, len(shape))) :]
    gradient_shape = tuple(draw(st.sampled_from([1, dim])) for dim in kept)
    return draw(arrays(shape, draw(DTYPES), ANY_FLOAT)), draw(arrays(gradient_shape, draw(DTYPES), ANY_FLOAT))


@examples
@given(accumulations(), st.sampled_from([None, True, False]))
def test_accumulators(pair: tuple[Array, Array], given_flag: bool | None) -> None:
    buffer, gradient = pair
    compute = np.float64 if buffer.dtype == np.float64 else np.float32
    with np.errstate(all="ignore"):
        total = (buffer.astype(compute) + gradient.astype(compute)).astype(buffer.dtype)
        replaced = np.broadcast_to(gradient, buffer.shape).astype(buffer.dtype)
    flag = None if given_flag is None else np.array(given_flag)
    assert_same_bits(in_place_accumulator(buffer, gradient, flag), buffer if given_flag is False else total)
    assert_same_bits(in_place_accumulator_v2(buffer, gradient, flag)[1], replaced if given_flag else total)
    assert_same_bits(zero_gradient(buffer, gradient), np.zeros_like(buffer))


@examples
@given(SHAPES, SHAPES)
def test_accumulators_refuse_what_does_not_broadcast_into_the_buffer(
    shape: tuple[int, ...], gradient_shape: tuple[int, ...]
) -> None:
    buffer, gradient = np.ones(shape, np.float32), np.ones(gradient_shape, np.float32)
    fits = len(gradient_shape) <= len(shape) and all(
        n in (1, m) for m, n in zip(reversed(shape), reversed(gradient_shape), strict=False)
    )
    for flag in (np.array(True), np.array(False)):
        if fits:
            assert_like(in_place_accumulator_v2(buffer, gradient, flag)[1], buffer)
        else:
            with pytest.raises(ShapeMismatch):
                in_place_accumulator_v2(buffer, gradient, flag)
