"""GatheredRows is gather_grad's output in pieces."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.dtypes import Array
from service.errors import AxisOutOfRange, GradserveError, IndexOutOfRange, InvalidTensor, ShapeMismatch
from service.kernels.gather import GatheredRows, gather_grad
from tests.kernels.calls import FLOAT_DTYPES, peak_bytes
from tests.kernels.equality import assert_same_bits

INF, NAN = np.inf, np.nan


def assembled(rows: GatheredRows, cuts: list[int]) -> Array:
    """The output from its pieces between the cuts. Each piece is None or an array of the right form."""
    size = math.prod(rows.shape)
    output = np.zeros(size, rows.dtype)
    bounds = sorted({0, size, *cuts})
    for start, stop in zip(bounds, bounds[1:], strict=False):
        piece = rows.piece(start, stop)
        if piece is not None:
            assert (piece.shape, piece.dtype) == ((stop - start,), rows.dtype)
            output[start:stop] = piece
    return output.reshape(rows.shape)


@st.composite
def calls(draw: st.DrawFn) -> tuple[Array, Array, Array, int, list[int]]:
    """What both take, and where to cut."""
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    place = axis % len(shape)
    index_shape = draw(st.lists(st.integers(0, 4), max_size=2))
    count, size = math.prod(index_shape), shape[place]
    few = draw(st.lists(st.integers(-size, size - 1), min_size=1, max_size=3))
    picked = draw(st.lists(st.sampled_from(few), min_size=count, max_size=count))
    indices = np.array(picked, draw(st.sampled_from(["int32", "int64"]))).reshape(index_shape)
    grad_shape = (*shape[:place], *index_shape, *shape[place + 1 :])
    random = np.random.default_rng(draw(st.integers(0, 99)))
    grad = random.choice([-0.0, 0.0, 1.0, 1e-4, 0.1, 2049.0, -300.7, INF, -INF, NAN], grad_shape)
    special = draw(st.booleans())
    numbers = grad if special else random.normal(size=grad_shape)
    cuts = draw(st.lists(st.integers(0, math.prod(shape)), max_size=6))
    return np.array(shape), indices, np.asarray(numbers, draw(st.sampled_from(FLOAT_DTYPES))), axis, cuts


@settings(max_examples=300)
@given(calls())
def test_pieces_are_the_output(call: tuple[Array, Array, Array, int, list[int]]) -> None:
    shape, indices, grad, axis, cuts = call
    before = grad.copy()
    rows = GatheredRows(shape, indices, grad, axis=axis)
    assert_same_bits(assembled(rows, cuts), gather_grad(shape, indices, grad, axis=axis))
    assert_same_bits(grad, before)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("step", [1, 7, 64, 65_512 // 4, 1_000_000])
@pytest.mark.parametrize(
    ("shape", "count", "axis"), [((3,), 500, 0), ((401, 3), 900, 0), ((5, 2, 31), 70, 1), ((40, 11), 30, -1)]
)
def test_duplicates_are_added_in_their_order(
    dtype: Any, step: int, shape: tuple[int, ...], count: int, axis: int
) -> None:
    random = np.random.default_rng(step)
    place = axis % len(shape)
    indices = random.integers(-shape[axis], shape[axis], count)
    grad = np.asarray(random.normal(size=(*shape[:place], count, *shape[place + 1 :])), dtype)
    rows = GatheredRows(np.array(shape), indices, grad, axis=axis)
    got = assembled(rows, list(range(0, math.prod(shape), step)))
    assert_same_bits(got, gather_grad(np.array(shape), indices, grad, axis=axis))


def test_pieces_can_be_had_in_any_order_and_again() -> None:
    indices, grad = np.array([4, -1, 1]), np.arange(9, dtype=np.float32).reshape(3, 3)
    rows = GatheredRows(np.array([5, 3]), indices, grad)
    expected = gather_grad(np.array([5, 3]), indices, grad).reshape(-1)
    for start, stop in [(13, 15), (2, 4), (3, 6), (13, 15), (0, 15), (5, 13)]:
        piece = rows.piece(start, stop)
        assert piece is not None
        assert_same_bits(piece, expected[start:stop])
        piece[:] = 7


def test_there_is_no_piece_where_no_index_leads() -> None:
    rows = GatheredRows(np.array([1000, 3]), np.array([500, -1]), np.ones((2, 3), np.float32))
    assert rows.piece(0, 1500) is None
    assert rows.piece(1503, 2997) is None
    assert rows.piece(1502, 1503) is not None
    assert rows.piece(2999, 3000) is not None


def test_a_piece_of_a_wide_row_takes_what_the_piece_has() -> None:
    width, size = 1 << 20, 1 << 16
    grad = np.random.default_rng(0).normal(size=(3, width)).astype(np.float32)
    rows, output = GatheredRows(np.array([2, width]), np.array([1, 0, 1]), grad), np.empty((2, width), np.float32)
    gather_grad(np.array([2, width]), np.array([1, 0, 1]), grad, out=output)
    for start in (0, 5, width - size // 2, 2 * width - size):
        piece = rows.piece(start, start + size)
        assert piece is not None
        assert_same_bits(piece, output.reshape(-1)[start : start + size])
        assert peak_bytes(partial(rows.piece, start, start + size)) < 2 << 20


def test_grad_may_lie_in_memory_anyhow() -> None:
    whole = np.random.default_rng(1).normal(size=(8, 12)).astype(np.float32)
    grad = whole[::2, ::-1].T
    rows = GatheredRows(np.array([3, 4]), np.arange(12) % 3, grad)
    assert_same_bits(assembled(rows, [5]), gather_grad(np.array([3, 4]), np.arange(12) % 3, grad.copy()))


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), FLOAT_DTYPES[-1]], ids=str)
def test_sums_that_overflow_are_infinite(dtype: Any) -> None:
    grad = np.full(4, 3e38 if str(dtype) == "bfloat16" else 6e4, dtype)
    shape, indices = np.array([3]), np.array([1, 1, 1, 0])
    expected = gather_grad(shape, indices, grad)
    assert np.isinf(expected[1])
    assert_same_bits(assembled(GatheredRows(shape, indices, grad), []), expected)


@pytest.mark.parametrize(
    ("shape", "index_shape", "axis"),
    [((0, 3), (0,), 0), ((3, 0), (2,), 0), ((0, 3), (4,), 1), ((2, 0, 3), (2,), -1), ((0,), (0,), 0)],
)
def test_empty_outputs(shape: tuple[int, ...], index_shape: tuple[int, ...], axis: int) -> None:
    place = axis % len(shape)
    grad = np.empty((*shape[:place], *index_shape, *shape[place + 1 :]), np.float16)
    rows = GatheredRows(np.array(shape), np.zeros(index_shape, np.int64), grad, axis=axis)
    assert (rows.shape, rows.dtype) == (shape, grad.dtype)


@pytest.mark.parametrize(("shape", "indices"), [((1 << 58, 2, 0), [0, 1]), ((1 << 58, 0), [])])
def test_huge_empty_outputs_need_no_memory(shape: tuple[int, ...], indices: list[int]) -> None:
    places, grad = np.array(indices, np.int64), np.empty(shape, np.float32)
    expected = gather_grad(np.array(shape), places, grad, axis=1)
    assert GatheredRows(np.array(shape), places, grad, axis=1).shape == expected.shape


@pytest.mark.parametrize(
    ("error", "shape", "indices", "grad_shape", "axis"),
    [
        (IndexOutOfRange, [3, 2], [0, 3], (2, 2), 0),
        (IndexOutOfRange, [3, 2], [0, -4], (2, 2), 0),
        (IndexOutOfRange, [0, 2], [0], (1, 2), 0),
        (ShapeMismatch, [3, 2], [0, 1], (3, 2), 0),
        (ShapeMismatch, [3, 2], [[0, 1]], (2, 2), 0),
        (AxisOutOfRange, [3, 2], [0], (1, 2), 2),
        (AxisOutOfRange, [3, 2], [0], (1, 2), -3),
        (AxisOutOfRange, [], [0], (1,), 0),
        (InvalidTensor, [3, -2], [0], (1, 2), 0),
        (GradserveError, [1] * 65, [0], (1,), 0),
    ],
)
def test_errors_are_those_of_the_kernel(
    error: type[GradserveError], shape: list[int], indices: Any, grad_shape: tuple[int, ...], axis: int
) -> None:
    inputs = np.array(shape, np.int64), np.array(indices), np.ones(grad_shape, np.float32)
    with pytest.raises(error) as expected:
        gather_grad(*inputs, axis=axis)
    with pytest.raises(error) as caught:
        GatheredRows(*inputs, axis=axis)
    assert type(caught.value) is type(expected.value)
    assert (caught.value.detail, caught.value.context) == (expected.value.detail, expected.value.context)
