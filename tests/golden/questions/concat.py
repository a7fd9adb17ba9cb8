"""Questions to ConcatTraining and SplitTraining.

Not asked: tensors of no elements alone. ONNX Runtime loses their lengths, or its process ends.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from service.dtypes import Array
from service.errors import InvalidTensor, ShapeMismatch
from tests.golden.store import Case
from tests.golden.values import generator

SHAPES = [(4,), (4, 3), (2, 4, 3)]
LENGTHS = [[4], [1, 3], [0, 3, 1]]
KINDS = ["float32", "float64", "float16", "int32", "int64", "bool"]

REASONS = {
    r"must have same rank|Can't merge shape info": ShapeMismatch,
    r"refused-negative": InvalidTensor,
    r"refused-(sum|matrix)": ShapeMismatch,
}


def ask() -> Iterator[Case]:
    """All questions of this module."""
    for shape in SHAPES:
        for axis in range(-len(shape), len(shape)):
            for lengths in LENGTHS:
                yield from _both(f"{list(shape)}-axis={axis}-{lengths}", shape, axis, lengths)
    for kind in KINDS:
        yield from _both(f"{kind}", (4, 3), 0, [1, 3], kind)
    yield from _refused()


def _numbers(name: str, shape: tuple[int, ...], kind: str = "float32") -> Array:
    return np.asarray(generator("Concat", name).integers(-9, 9, shape), kind)


def _concat(name: str, axis: int, *parts: Array) -> Case:
    inputs = {f"inputs.{k}": part for k, part in enumerate(parts)}
    return Case("ConcatTraining", name, inputs, ("concat_result", "per_input_length"), {"axis": axis})


def _split(name: str, axis: int, given: Array, split: object, count: int) -> Case:
    inputs = {"input": given, "split": np.array(split, np.int64)}
    return Case("SplitTraining", name, inputs, tuple(f"outputs.{k}" for k in range(count)), {"axis": axis})


def _both(name: str, shape: tuple[int, ...], axis: int, lengths: list[int], kind: str = "float32") -> Iterator[Case]:
    """Lengths of a dimension of 4, whose place `axis` takes."""
    place = axis % len(shape)
    whole = _numbers(name, (*shape[:place], 4, *shape[place + 1 :]), kind)
    parts = np.split(whole, np.cumsum(lengths)[:-1], axis)
    yield _concat(name, axis, *parts)
    if kind in ("float32", "int32", "int64"):  # the only ones that ONNX Runtime splits
        yield _split(name, axis, whole, lengths, len(lengths))


def _refused() -> Iterator[Case]:
    ones = np.ones((2, 3), np.float32)
    for name, axis, other in (("axis", 2, ones), ("rank", 0, ones[0]), ("dimension", 0, ones[:, :2])):
        yield _concat(f"refused-{name}", axis, ones, other)
    yield _concat("refused-scalar", 0, np.array(1.0, np.float32), np.array(2.0, np.float32))
    for name, split in (("sum", [1, 2]), ("negative", [3, -1]), ("matrix", [[1, 1]])):
        yield _split(f"refused-{name}", 0, ones, split, 2)
    yield _split("refused-axis", 2, ones, [1, 1], 2)
    yield _split("refused-scalar", 0, np.array(1.0, np.float32), [1], 1)
