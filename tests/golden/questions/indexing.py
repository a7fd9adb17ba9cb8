"""Questions to the gradients of GatherElements, GatherND and Slice, and to ShrunkenGather.

The incoming gradient always has the right shape: ONNX Runtime does not check it. PyTorch answers where it refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from service.dtypes import Array
from service.errors import AxisOutOfRange, IndexOutOfRange, InvalidParameter, InvalidTensor, ShapeMismatch
from tests.golden.store import Case
from tests.golden.values import generator

REASONS = {
    "refused-axis": AxisOutOfRange,
    "refused-index": IndexOutOfRange,
    "refused-shape|refused-many": ShapeMismatch,
    "refused-rank": InvalidParameter,
    "refused-step": InvalidTensor,
}


def ask() -> Iterator[Case]:
    """All questions of this module."""
    yield from _gather_elements()
    yield from _gather_nd()
    yield from _slices()
    yield from _shrunken()


def _elements(
    name: str, shape: Sequence[int], within: Sequence[int], axis: int, dtype: str = "float32", index: str = "int64"
) -> Case:
    random = generator("GatherElementsGrad", name)
    size = shape[axis]
    indices = random.integers(-size, size, within).astype(index)
    dY = random.normal(size=within).astype(dtype)
    inputs = {"dY": dY, "shape": np.array(shape), "indices": indices}
    return Case("GatherElementsGrad", name, inputs, ("dX",), {"axis": axis})


def _gather_elements() -> Iterator[Case]:
    shapes = [((5,), (9,)), ((3, 4), (2, 4)), ((3, 4), (3, 7)), ((2, 3, 4), (1, 2, 4)), ((2, 3, 1, 4), (2, 5, 1, 3))]
    for number, (shape, within) in enumerate(shapes):
        for axis in range(-len(shape), len(shape)):
            if all(
                one <= most for k, (one, most) in enumerate(zip(within, shape, strict=True)) if k != axis % len(shape)
            ):
                dtype, index = ("float32", "float64")[axis % 2], ("int32", "int64")[(axis + number) % 2]
                yield _elements(
                    f"{dtype}-{list(shape)}-{list(within)}-axis={axis}-{index}", shape, within, axis, dtype, index
                )
    yield _elements("float16", (3, 4), (3, 9), 1, "float16")
    yield _elements("sequential", (3,), (2000,), 0)
    yield _elements("nothing", (3, 4), (0, 4), 0)
    beyond = _elements("refused-index", (3, 4), (2, 4), 0)
    beyond.inputs["indices"][1, 2] = 3
    yield beyond
    fine = _elements("axis", (3, 4), (2, 4), 0)
    yield Case("GatherElementsGrad", "refused-axis", fine.inputs, ("dX",), {"axis": 2})
    yield _elements("refused-shape-of-other-axis", (3, 4), (2, 5), 0)
    yield Case("GatherElementsGrad", "refused-shape-rank", {**fine.inputs, "shape": np.array([3, 4, 1])}, ("dX",))


def _nd(name: str, shape: Sequence[int], indices: Array, batch_dims: int = 0, dtype: str = "float32") -> Case:
    random = generator("GatherNDGrad", name)
    update = random.normal(size=(*indices.shape[:-1], *shape[batch_dims + indices.shape[-1] :])).astype(dtype)
    inputs = {"shape": np.array(shape), "indices": indices, "update": update}
    return Case("GatherNDGrad", name, inputs, ("output",), {"batch_dims": batch_dims})


def _gather_nd() -> Iterator[Case]:
    random = generator("GatherNDGrad")
    for shape, rows in (((5,), (7,)), ((3, 4), (2, 3)), ((2, 3, 4), (2, 5)), ((2, 3, 2, 2), (2, 3, 1))):
        for batch_dims in range(min(len(rows), len(shape))):
            for depth in range(len(shape) - batch_dims + 1):
                if rows[:batch_dims] != shape[:batch_dims]:
                    continue
                dims = np.array(shape[batch_dims : batch_dims + depth])
                indices = random.integers(-dims, dims, (*rows, depth)) if depth else np.zeros((*rows, 0), np.int64)
                dtype = ("float32", "float64")[depth % 2]
                yield _nd(
                    f"{dtype}-{list(shape)}-{list(rows)}-b={batch_dims}-k={depth}", shape, indices, batch_dims, dtype
                )
    yield _nd("float16", (3, 4), np.array([[1, 2], [1, 2], [0, -1]]), 0, "float16")
    yield _nd("nothing", (3, 4), np.zeros((0, 2), np.int64))
    yield _nd("refused-index", (3, 4), np.array([[1, 4]]))
    yield _nd("refused-shape-depth", (3,), np.array([[1, 2]]))


def _slices() -> Iterator[Case]:
    random = generator("SliceGrad")
    for number in range(60):
        shape = tuple(int(n) for n in random.integers(1, 6, random.integers(1, 4)))
        count = int(random.integers(1, len(shape) + 1))
        axes = random.permutation(len(shape))[:count] - len(shape) * int(random.integers(2))
        starts, ends = random.integers(-7, 8, count), random.integers(-7, 8, count)
        steps = random.choice([-3, -2, -1, 1, 2, 3], count)
        name = f"{number}-{list(shape)}"
        inner = [
            step
            for axis, step in zip(axes.tolist(), steps.tolist(), strict=True)
            if axis % len(shape) == len(shape) - 1
        ]
        source = "torch" if inner and inner[0] < 0 else "onnxruntime"
        yield _slice(name, shape, starts, ends, axes, steps, source)
    yield _slice("huge", (5, 4), [-(2**62), 0], [2**62, 2**62], [0, 1], [1, 3])
    dY: dict[str, Array] = {"dY": np.ones((2, 2), np.float32), "shape": np.array([3, 2])}
    two = {"starts": np.array([0]), "ends": np.array([2])}
    yield Case("SliceGrad", "defaults", {**dY, **two}, ("dX",))
    yield Case("SliceGrad", "refused-step", {**dY, **two, "axes": np.array([0]), "steps": np.array([0])}, ("dX",))
    yield Case("SliceGrad", "refused-axis", {**dY, **two, "axes": np.array([2])}, ("dX",))
    twice = {"starts": np.array([0, 0]), "ends": np.array([2, 2]), "axes": np.array([0, -2])}
    yield Case("SliceGrad", "refused-axis-twice", {**dY, **twice}, ("dX",))
    yield Case("SliceGrad", "refused-shape-of-ends", {**dY, **two, "ends": np.array([2, 2])}, ("dX",))
    yield Case("SliceGrad", "refused-shape-of-starts", {**dY, **two, "starts": np.array([[0]])}, ("dX",))


def _slice(
    name: str,
    shape: Sequence[int],
    starts: object,
    ends: object,
    axes: object,
    steps: object,
    source: str = "onnxruntime",
) -> Case:
    given = {"starts": np.array(starts), "ends": np.array(ends), "axes": np.array(axes), "steps": np.array(steps)}
    rows: list[list[int]] = np.stack(list(given.values()), axis=1).tolist()
    length = [len(range(*_python(start, end, axis, step, shape))) for start, end, axis, step in rows]
    sliced = list(shape)
    for axis, one in zip(given["axes"].tolist(), length, strict=True):
        sliced[axis] = one
    dY = generator("SliceGrad", name).normal(size=sliced).astype(np.float32)
    return Case("SliceGrad", name, {"dY": dY, "shape": np.array(shape), **given}, ("dX",), source=source)


def _python(start: int, end: int, axis: int, step: int, shape: Sequence[int]) -> tuple[int, int, int]:
    """The range of indices that ONNX's Slice takes."""
    size = shape[axis]
    start, end = start + size * (start < 0), end + size * (end < 0)
    if step > 0:
        return min(max(start, 0), size), min(max(end, 0), size), step
    return min(max(start, 0), size - 1), min(max(end, -1), size - 1), step


def _shrunken() -> Iterator[Case]:
    data = generator("ShrunkenGather").normal(size=(4, 3)).astype(np.float32)
    for name, indices, axis in (("rows", [3, 0, -1], 0), ("columns", [2], 1), ("nothing", [], -2)):
        inputs: dict[str, Array] = {"data": data, "indices": np.array(indices, np.int64)}
        yield Case("ShrunkenGather", name, inputs, ("output",), {"axis": axis})
    beyond = {"data": data, "indices": np.array([4])}
    yield Case("ShrunkenGather", "refused-index", beyond, ("output",))
    many = {"data": data, "indices": np.array([0] * 5)}
    yield Case("ShrunkenGather", "refused-many", many, ("output",))
