from __future__ import annotations

import numpy as np
import pytest

from service.errors import ShapeMismatch, TooManyDimensions
from service.kernels.broadcast import broadcast_gradient_args

CASES: list[tuple[list[int], list[int], list[int], list[int]]] = [
    ([], [], [], []),
    ([2, 3], [2, 3], [], []),
    ([1, 1], [1, 1], [], []),
    ([2, 3, 4, 5], [], [], [3, 2, 1, 0]),
    ([], [2, 3], [1, 0], []),
    ([2, 3, 4, 5], [5], [], [2, 1, 0]),
    ([1, 4, 5], [2, 3, 1, 1], [1, 0], [3, 2]),
    ([1, 2, 1, 4], [3, 1, 5, 1], [2, 0], [3, 1]),
    # A dimension that is missing is listed, even where the other's is 1.
    ([1, 1], [1], [], [0]),
    ([1], [], [], [0]),
    ([5], [1, 1, 5], [1, 0], []),
    # 0 and negative dimensions obey the same rule.
    ([0], [1], [], [0]),
    ([0], [0], [], []),
    ([-1, 3], [1, 3], [], [0]),
    ([-1], [-1], [], []),
]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize(("a", "b", "a_axes", "b_axes"), CASES)
def test_axes(a: list[int], b: list[int], a_axes: list[int], b_axes: list[int], dtype: str) -> None:
    for left, right, expected in ((a, b, (a_axes, b_axes)), (b, a, (b_axes, a_axes))):
        results = broadcast_gradient_args(np.array(left, dtype), np.array(right, dtype))
        assert tuple(axes.tolist() for axes in results) == expected
        assert all(axes.dtype == dtype and axes.ndim == 1 for axes in results)


@pytest.mark.parametrize(
    ("a", "b", "dims", "axis"),
    [
        ([2, 3], [3, 2], (3, 2), 1),
        ([2, 3], [3, 3], (2, 3), 0),
        ([3, 4, 5], [2, 1, 6, 1], (4, 6), 2),
        ([2], [0], (2, 0), 0),
        ([-1], [2], (-1, 2), 0),
    ],
)
def test_shapes_that_do_not_broadcast(a: list[int], b: list[int], dims: tuple[int, int], axis: int) -> None:
    with pytest.raises(ShapeMismatch) as caught:
        broadcast_gradient_args(np.array(a), np.array(b))
    assert caught.value.detail.startswith(f"A_shape {a} and B_shape {b} do not broadcast:")
    assert f"dimensions {dims[0]} and {dims[1]} at axis {axis} " in caught.value.detail


@pytest.mark.parametrize("a", [[[2, 3], [4, 1]], [[[2], [3], [4], [1]]]])
def test_shapes_are_read_flat(a: object) -> None:
    a_axes, b_axes = broadcast_gradient_args(np.array(a), np.array(5))
    assert (a_axes.tolist(), b_axes.tolist()) == ([3], [2, 1, 0])


def test_more_dimensions_than_an_array_can_have() -> None:
    a_axes, b_axes = broadcast_gradient_args(np.full(100, 2), np.array([1]))
    assert (a_axes.tolist(), b_axes.tolist()) == ([], list(range(99, -1, -1)))


def test_strided_read_only_shapes() -> None:
    numbers = np.array([5, 0, 1, 0, 3, 0])
    numbers.flags.writeable = False
    a_axes, b_axes = broadcast_gradient_args(numbers[::2], numbers[4:1:-2])
    assert (a_axes.tolist(), b_axes.tolist()) == ([1], [2, 0])


def test_shapes_have_a_limit() -> None:
    most, long = np.ones(1 << 16, np.int64), np.ones((1 << 16) + 1, np.int64)
    assert broadcast_gradient_args(most, most)[0].size == 0
    for shapes in ((long, most), (most, long)):
        with pytest.raises(TooManyDimensions, match="65537 dimensions; the limit is 65536"):
            broadcast_gradient_args(*shapes)
