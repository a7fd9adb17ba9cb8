from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from service import errors
from service.dtypes import Array
from service.kernels.gather import gather_grad
from tests.kernels.calls import FLOAT_DTYPES, peak_bytes
from tests.kernels.equality import assert_same_bits

INF, NAN = np.inf, np.nan
INDEX_DTYPES = ["int32", "int64"]


def sequential(shape: tuple[int, ...], indices: Array, grad: Array, axis: int) -> Array:
    """The definition: one index after the other."""
    output = np.zeros(shape, grad.dtype)
    rows, axis = np.moveaxis(output, axis, 0), axis % len(shape)
    sources = grad.reshape(*shape[:axis], indices.size, *shape[axis + 1 :])
    for place, index in enumerate(indices.ravel()):
        rows[index] += np.take(sources, place, axis)
    return output


def random_call(
    shape: tuple[int, ...], index_shape: tuple[int, ...], axis: int, dtype: npt.DTypeLike = "float32"
) -> tuple[Array, Array, Array]:
    random = np.random.default_rng(0)
    place = axis % len(shape)
    indices = np.asarray(random.integers(-shape[axis], shape[axis], index_shape))
    grad = random.normal(size=(*shape[:place], *index_shape, *shape[place + 1 :]))
    return np.array(shape, np.int64), indices, np.asarray(grad, dtype)


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@pytest.mark.parametrize("shape_dtype", INDEX_DTYPES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("index_shape", [(), (1,), (6,), (2, 3), (2, 1, 2)])
def test_every_axis(index_dtype: str, shape_dtype: str, dtype: str, index_shape: tuple[int, ...]) -> None:
    for shape in [(4,), (3, 4), (2, 3, 4), (2, 1, 3, 2)]:
        for axis in range(-len(shape), len(shape)):
            dims, indices, grad = random_call(shape, index_shape, axis, dtype)
            got = gather_grad(dims.astype(shape_dtype), indices.astype(index_dtype), grad, axis=axis)
            assert_same_bits(got, sequential(shape, indices, grad, axis))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("shape", "count", "axis"),
    [((3,), 20_000, 0), ((7, 3), 5_000, 0), ((5, 2, 300), 2_000, 1), ((400, 3), 1_000, -1), ((2, 100_000), 3, 0)],
)
def test_duplicates_are_added_in_their_order(dtype: str, shape: tuple[int, ...], count: int, axis: int) -> None:
    dims, indices, grad = random_call(shape, (count,), axis, dtype)
    assert_same_bits(gather_grad(dims, indices, grad, axis=axis), sequential(shape, indices, grad, axis))


def test_default_axis_is_the_first() -> None:
    dims, indices, grad = random_call((3, 3), (3,), 0)
    assert_same_bits(gather_grad(dims, indices, grad), gather_grad(dims, indices, grad, axis=0))


@pytest.mark.parametrize(
    ("shape", "expected"), [([[3, 2]], (3, 2)), ([[3], [2]], (3, 2)), ([[[3, 2]]], (3, 2)), (3, (3,)), ([[3]], (3,))]
)
def test_shape_is_read_flat(shape: object, expected: tuple[int, ...]) -> None:
    grad = np.ones((1, *expected[1:]), np.float32)
    assert gather_grad(np.array(shape), np.array([1]), grad).shape == expected


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "index_shape", "axis"),
    [
        ((3, 2), (0,), 0),
        ((3, 2), (2, 0), 1),
        ((0, 3), (0,), 0),
        ((0,), (0,), 0),
        ((3, 0), (2,), 0),
        ((0, 3), (4,), 1),
        ((2, 0, 3), (2,), -1),
        ((2, 0, 3), (0, 2), 1),
    ],
)
def test_without_gradients_the_output_is_zero(
    dtype: Any, shape: tuple[int, ...], index_shape: tuple[int, ...], axis: int
) -> None:
    place = axis % len(shape)
    grad = np.empty((*shape[:place], *index_shape, *shape[place + 1 :]), dtype)
    result = gather_grad(np.array(shape), np.zeros(index_shape, np.int64), grad, axis=axis)
    assert_same_bits(result, np.zeros(shape, dtype))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_special_values_are_added(dtype: Any) -> None:
    grad = np.array([INF, -INF, NAN, INF, -0.0, INF], dtype)
    result = gather_grad(np.array([5]), np.array([0, 1, 2, 3, 4, 3]), grad)
    assert_same_bits(result, np.array([INF, -INF, NAN, INF, 0.0], dtype))
    assert np.isnan(gather_grad(np.array([1]), np.array([0, 0]), np.array([INF, -INF], dtype))).all()


@pytest.mark.parametrize("dtype", INDEX_DTYPES)
@pytest.mark.parametrize(
    ("shape", "indices", "axis", "message"),
    [
        ((3, 2), [0, 3], 0, "indices[1] is 3, but must be in [-3, 2]"),
        ((3, 2), [0, -4, 9], 0, "indices[1] is -4, but must be in [-3, 2]"),
        ((2, 3), [[0, 1], [5, 1]], 1, "indices[1][0] is 5, but must be in [-3, 2]"),
        ((3, 2), 7, 0, "indices is 7, but must be in [-3, 2]"),
        ((3, 0), [3], 0, "indices[0] is 3, but must be in [-3, 2]"),
        ((0, 3), [0], 0, "indices[0] is 0, but the dimension that it indexes is empty"),
        ((3,), [np.iinfo(np.int32).min], 0, "indices[0] is -2147483648, but must be in [-3, 2]"),
    ],
)
def test_index_out_of_range(shape: tuple[int, ...], indices: object, axis: int, message: str, dtype: str) -> None:
    places = np.array(indices, dtype)
    grad = np.ones((*shape[:axis], *places.shape, *shape[axis + 1 :]), np.float32)
    out = np.full(shape, 7, np.float32)
    with pytest.raises(errors.IndexOutOfRange) as caught:
        gather_grad(np.array(shape), places, grad, axis=axis, out=out)
    assert caught.value.detail == message
    assert caught.value.context["tensor"] == "indices"
    assert (out == 7).all()


@pytest.mark.parametrize(
    ("shape", "index_shape", "axis", "grad_shape", "expected"),
    [
        ((3, 2), (4,), 0, (3, 2), [4, 2]),
        ((3, 2), (4,), 1, (4, 2), [3, 4]),
        ((3, 2), (2, 2), 0, (4, 2), [2, 2, 2]),
        ((3, 2), (), 0, (1, 2), [2]),
        ((3, 2), (0,), 0, (1, 2), [0, 2]),
        ((3, 0), (2,), 0, (2, 1), [2, 0]),
        ((3, 2), (4,), 0, (100_000,), [4, 2]),
        ((3,), (1,), 0, (), [1]),
    ],
)
def test_grad_must_have_the_shape_of_what_was_gathered(
    shape: tuple[int, ...], index_shape: tuple[int, ...], axis: int, grad_shape: tuple[int, ...], expected: list[int]
) -> None:
    with pytest.raises(errors.ShapeMismatch) as caught:
        gather_grad(np.array(shape), np.zeros(index_shape, np.int64), np.ones(grad_shape, np.float32), axis=axis)
    assert caught.value.detail.startswith(f"grad has shape {list(grad_shape)}, but must have {expected}:")
    assert f"shape {list(shape)} " in caught.value.detail
    assert f"indices, {list(index_shape)}" in caught.value.detail
    assert caught.value.context == {"tensor": "grad"}


@pytest.mark.parametrize(("shape", "axis"), [((3, 2), 2), ((3, 2), -3), ((3,), 1 << 40)])
def test_axis_out_of_range(shape: tuple[int, ...], axis: int) -> None:
    words = rf"^axis {axis} is not in \[{-len(shape)}, {len(shape) - 1}\], the axes of the tensor that shape describes"
    with pytest.raises(errors.AxisOutOfRange, match=words) as caught:
        gather_grad(np.array(shape), np.array([0]), np.ones((1, 2), np.float32), axis=axis)
    assert caught.value.context == {"tensor": "shape", "axis": axis}


def test_a_scalar_has_no_axis() -> None:
    with pytest.raises(errors.AxisOutOfRange, match="^axis 0: .* is a scalar"):
        gather_grad(np.empty(0, np.int64), np.array([0]), np.ones(1, np.float32))


@pytest.mark.parametrize(("shape", "place"), [([3, -2], 1), ([-1, 2], 0), ([[4, 3], [-5, 1]], 2)])
def test_negative_dimension(shape: object, place: int) -> None:
    dims = np.array(shape)
    with pytest.raises(errors.InvalidTensor, match=rf"^shape\[{place}\] is {dims.ravel()[place]}, but"):
        gather_grad(dims, np.array([0]), np.ones((1, 2), np.float32))


def test_too_many_dimensions() -> None:
    with pytest.raises(errors.TooManyDimensions, match="65 dimensions; the limit is 64"):
        gather_grad(np.ones(65, np.int64), np.array([0]), np.ones(1, np.float32))
    ones = np.ones((1,) * 64, np.float32)
    assert_same_bits(gather_grad(np.ones(64, np.int64), np.array([0]), ones), ones)


def test_output_that_no_memory_holds() -> None:
    with pytest.raises(errors.TensorTooLarge, match="does not fit in memory"):
        gather_grad(np.array([1 << 62, 8]), np.array([0]), np.ones((1, 8), np.float32))


@pytest.mark.parametrize("start", [0, 2, 7])
def test_out_may_overlap_grad(start: int) -> None:
    memory = np.arange(20, dtype=np.float32)
    grad, out = memory[:8].reshape(4, 2), memory[start : start + 6].reshape(3, 2)
    expected = gather_grad(np.array([3, 2]), np.array([0, 1, 1, 2]), grad.copy())
    assert_same_bits(gather_grad(np.array([3, 2]), np.array([0, 1, 1, 2]), grad, out=out), expected)


def test_out_may_lie_between_the_rows_of_grad() -> None:
    memory = np.ones((3, 4), np.float32)
    grad, out = memory[::2], memory[1:2]
    assert gather_grad(np.array([1, 4]), np.array([0, 0]), grad, out=out) is out
    assert memory.tolist() == [[1] * 4, [2] * 4, [1] * 4]


def test_out_may_share_memory_with_indices_and_shape() -> None:
    memory = np.array([4, 3, 1, 1, 0, 2], np.int32)
    expected = gather_grad(np.array([4]), np.array([3, 1, 1, 0]), np.arange(4, dtype=np.float32))
    out = memory[:4].view(np.float32)
    assert_same_bits(gather_grad(memory[:1], memory[1:5], np.arange(4, dtype=np.float32), out=out), expected)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("size", [10, 100, 1 << 12])
@pytest.mark.parametrize("width", [1, 3])
def test_many_duplicates_of_few(dtype: Any, size: int, width: int) -> None:
    """More indices than a block has room for, and more of them than rows, or, for the 16-bit floats, fewer."""
    random = np.random.default_rng(0)
    for count in (300_000, 70):
        indices = random.integers(-size, size, count)
        grad = random.integers(-8, 9, (count, width)).astype(dtype)
        exact = np.zeros((size, width))
        np.add.at(exact, indices, grad.astype(np.float64))
        assert_same_bits(gather_grad(np.array([size, width]), indices, grad), exact.astype(dtype) + np.zeros((), dtype))


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("width", [1, 2])
def test_it_takes_little_memory(dtype: str, index_dtype: str, width: int) -> None:
    count = 1 << 21
    indices, grad = np.zeros(count, index_dtype), np.ones((count, width), dtype)
    indices[::2] = 9
    out = np.empty((10, width), dtype)
    assert peak_bytes(lambda: gather_grad(np.array([10, width]), indices, grad, out=out)) < 8 << 20
