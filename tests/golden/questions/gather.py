"""Questions to GatherGrad. `grad` always has the shape that `shape` and `indices` ask for: it is not checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from service.dtypes import Array
from service.errors import IndexOutOfRange, InvalidTensor
from tests.golden.store import Case
from tests.golden.values import generator, special

SHAPES = [(5,), (3, 4), (2, 3, 4), (2, 3, 2, 4), (2, 2, 3, 1, 2)]
INDEX_SHAPES: list[tuple[int, ...]] = [(), (4,), (2, 3), (2, 1, 2)]
EMPTY: list[tuple[tuple[int, ...], int, list[object]]] = [
    ((3, 2), 0, []),
    ((3, 2), 1, []),
    ((3, 2), 0, [[], []]),
    ((0, 3), 0, []),
    ((0,), 0, []),
    ((3, 0), 0, [0, 2]),
    ((0, 3), 1, [0, 2, -1]),
    ((2, 0, 3), 0, [[1, 1]]),
]
GRAD = np.array([[[0, 1, 2], [3, 4, 5]]] * 2, np.float32)

REASONS = {r"indices element out of data bounds": IndexOutOfRange, r"shape.Size\(\) must be >= 0": InvalidTensor}


def ask() -> Iterator[Case]:
    """All questions of this module."""
    for dtype in ("float32", "float64"):
        for shape in SHAPES:
            yield from _axes(dtype, shape)
    for number, (shape, axis, indices) in enumerate(EMPTY):
        yield _case(f"empty-{number}-{list(shape)}-axis={axis}", shape, np.array(indices, np.int64), axis)
    yield from _special()
    yield from _refused()
    yield from _peer()
    yield from _peer_gradient_checker()


def _case(
    name: str, shape: tuple[int, ...], indices: Array, axis: int | None, dtype: npt.DTypeLike = "float32"
) -> Case:
    """Random `grad` of the right shape."""
    place = (axis or 0) % len(shape)
    expected = (*shape[:place], *indices.shape, *shape[place + 1 :])
    grad = np.asarray(generator("GatherGrad", name).normal(size=expected), dtype)
    return _given(name, np.array(shape), indices, grad, axis)


def _given(name: str, shape: Array, indices: Array, grad: Array, axis: int | None) -> Case:
    inputs = {"shape": shape.astype(np.int64), "indices": indices, "grad": grad}
    return Case("GatherGrad", name, inputs, ("output",), {} if axis is None else {"axis": axis})


def _axes(dtype: str, shape: tuple[int, ...]) -> Iterator[Case]:
    """Every axis with every shape of indices, which are int32 and int64 by turns and negative by half."""
    for axis in range(-len(shape), len(shape)):
        index_shapes = INDEX_SHAPES if dtype == "float32" else [INDEX_SHAPES[axis % 4]]
        for number, index_shape in enumerate(index_shapes):
            index_dtype = ("int32", "int64")[(axis + number) % 2]
            name = f"{dtype}-{list(shape)}-axis={axis}-{index_dtype}-{list(index_shape)}"
            size = shape[axis]
            indices = generator("indices", name).integers(-size, size, index_shape)
            yield _case(name, shape, np.asarray(indices, index_dtype), axis, dtype)


def _special() -> Iterator[Case]:
    random = generator("GatherGrad", "special")
    yield _case("float32-duplicates-sequential", (3,), random.integers(0, 3, 2000), 0)
    yield _case("float32-duplicates-sequential-rows", (2, 3, 5), random.integers(-3, 3, 300), 1)
    yield _case("float16-duplicates", (3, 4), random.integers(0, 3, 50), 0, "float16")
    values = special(np.float32)
    pairs = np.stack(np.meshgrid(values, values)).reshape(2, -1)
    yield _given("float32-special-sums", np.array([1, pairs.shape[1]]), np.array([0, 0]), pairs, 0)
    yield _given("float32-special-moved", np.array([3, len(values)]), np.array([2]), values[None], 0)
    yield _given("shape-2-D", np.array([[3, 2]]), np.array([2, 0]), np.ones((2, 2), np.float32), None)
    yield _given("shape-scalar", np.array(5), np.array([2, -1]), np.ones(2, np.float32), None)


def _refused() -> Iterator[Case]:
    asked: dict[str, tuple[Sequence[int], object, tuple[int, ...], int]] = {
        "index-above": ((3, 2), [0, 3], (2, 2), 0),
        "index-below": ((3, 2), [0, -4], (2, 2), 0),
        "index-of-second-axis": ((2, 3), [[0, 1], [5, 1]], (2, 2, 2), 1),
        "index-of-empty-dimension": ((0, 3), [0], (1, 3), 0),
        "index-of-empty-rows": ((3, 0), [3], (1, 0), 0),
        "axis-above": ((3, 2), [0], (1, 2), 2),
        "axis-below": ((3, 2), [0], (1, 2), -3),
        "axis-of-scalar": ((), [0], (1,), 0),
        "negative-dimension": ((3, -2), [0], (1, 2), 0),
    }
    for name, (shape, indices, grad_shape, axis) in asked.items():
        grad = np.ones(grad_shape, np.float32)
        yield _given(f"refused-{name}", np.array(shape, np.int64), np.array(indices), grad, axis)


def _peer() -> Iterator[Case]:
    for name, given in {"axis0_indices2d_float": [[0, 1], [0, 1]], "negative_indices": [[0, -1], [0, -2]]}.items():
        yield _given(f"peer-GatherGrad_{name}", np.array([3, 3]), np.array(given), GRAD, 0)
    asked: dict[str, tuple[tuple[int, int], int]] = {
        "Gather_axis1_float_impl2": ((3, 4), 1),
        "Gather_axis0_float_impl2": ((3, 4), 0),
        "GatherFewDistinctIndices": ((2, 32), 0),
    }
    for name, (shape, axis) in asked.items():
        random = generator("GatherGrad", "peer", name)
        indices = random.integers(0, shape[axis], (6, 128))
        grad = random.uniform(1, 10, (*shape[:axis], 6, 128, *shape[axis + 1 :])).astype(np.float32)
        yield _given(f"peer-{name}", np.array(shape), indices, grad, axis)


def _peer_gradient_checker() -> Iterator[Case]:
    asked: dict[str, tuple[tuple[int, ...], object, int]] = {
        "no-duplicates": ((4, 2, 3, 2), [2, 0], 0),
        "duplicates": ((4, 2, 3, 2), [3, 0, 2, 3, 3, 1, 0, 3], 0),
        "axis-1": ((4, 2, 3, 2), [1, 0, 1], 1),
        "2-D-indices": ((4, 2, 3, 2), [[0, 1, 1], [2, 3, 0]], 0),
        "negative-indices": ((4, 2), [-1, 0, -2], 0),
    }
    for name, (shape, indices, axis) in asked.items():
        yield _case(f"peer-GradientChecker-{name}", shape, np.array(indices), axis)
