"""Concat and Split, its gradient. Source of the semantics: the CPU training kernels of ONNX Runtime 1.19.2."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Annotated

import numpy as np

from service.dtypes import INT64, INTEGERS, Array
from service.errors import InvalidTensor, ShapeMismatch, TooManyTensors
from service.kernels._blocks import new_output, share_out
from service.kernels._checks import normalize_axis
from service.kernels._op import op
from service.kernels._types import Element, Group, Rank2, TSize

FAMILY = "Indexing, slicing and joining"

ALONE_BYTES = 1 << 22
"""Bytes that one thread copies. To start a helper for fewer takes as long as to copy them."""

MAX_PARTS = 1 << 14
"""Outputs of SplitTraining: as many tensors as a request may have by default."""


@op(
    "ConcatTraining",
    outputs="concat_result per_input_length",
    example={"inputs": {"0": [[1.0, 2.0]], "1": [[3.0, 4.0], [5.0, 6.0]]}, "axis": 0},
)
def concat_training(
    inputs: Group[Rank2[Element]], /, *, axis: int
) -> tuple[Rank2[Element], Annotated[Array, INTEGERS]]:
    """concat_result = the inputs, one behind the other along `axis`. per_input_length = their lengths there.

    The inputs have one dtype, which may be any, and one shape except along `axis`. `per_input_length` is 1-D and int64;
    SplitTraining takes it as `split`. Raises `AxisOutOfRange` and `ShapeMismatch`.
    """
    (first, model), *_ = inputs.items()
    axis = normalize_axis(axis, model.ndim, f"inputs.{first}")
    before, after = model.shape[:axis], model.shape[axis + 1 :]
    for name, one in inputs.items():
        if one.ndim != model.ndim or one.shape[:axis] != before or one.shape[axis + 1 :] != after:
            problem = f"inputs.{name} has shape {list(one.shape)}, but must have that of inputs.{first}"
            problem += f", {list(model.shape)}, except along axis {axis}"
            raise ShapeMismatch(problem, tensor=f"inputs.{name}")
    lengths = [one.shape[axis] for one in inputs.values()]
    result: Array = new_output(None, (*before, sum(lengths), *after), model.dtype)
    _copy([*zip(_parts(result, axis, lengths), inputs.values(), strict=True)], result.nbytes)
    return result, np.array(lengths, INT64)  # type: ignore[return-value]


@op("SplitTraining", outputs="outputs", example={"input": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "split": [1, 2]})
def split_training(input: Rank2[Element], split: TSize, /, *, axis: int = 0) -> Group[Rank2[Element]]:
    """outputs = the parts of `input` along `axis`, of the lengths in `split`.

    `split` is 1-D and says how many outputs there are. Its lengths are 0 or more and sum to the dimension. The outputs
    have the names 0, 1, 2, ..., and the dtype of `input`, which may be any. Raises `AxisOutOfRange`, `ShapeMismatch`,
    `InvalidTensor` for a negative length and for no lengths, and `TooManyTensors` for more than 16,384.
    """
    axis = normalize_axis(axis, input.ndim, "input")
    lengths = _lengths(split, axis, input.shape[axis])
    before, after = input.shape[:axis], input.shape[axis + 1 :]
    # One piece of memory for all outputs: to get four takes as long as to copy a megabyte.
    memory: Array = new_output(None, input.shape, input.dtype)
    memory = memory.reshape(input.shape[axis], math.prod(before + after))
    outputs = [one.reshape(*before, len(one), *after) for one in _parts(memory, 0, lengths)]
    _copy([*zip(outputs, _parts(input, axis, lengths), strict=True)], input.nbytes)
    return {str(k): output for k, output in enumerate(outputs)}  # type: ignore[misc]


def _lengths(split: Array, axis: int, size: int) -> list[int]:
    if split.ndim != 1:
        problem = f"split has shape {list(split.shape)}, but must have one dimension: a length for each output"
        raise ShapeMismatch(problem, tensor="split")
    if split.size > MAX_PARTS:
        problem = f"split has {split.size} lengths, one for each output; the limit is {MAX_PARTS}"
        raise TooManyTensors(problem, tensor="split", limit=MAX_PARTS)
    lengths: list[int] = split.tolist()
    if not lengths:
        raise InvalidTensor("split is empty, but must have the length of each output", tensor="split")
    if min(lengths) < 0:
        place = lengths.index(min(lengths))
        problem = f"split[{place}] is {lengths[place]}, but a length must be 0 or more"
        raise InvalidTensor(problem, tensor="split")
    if sum(lengths) != size:
        problem = f"The lengths in split sum to {sum(lengths)}, but input has {size} along axis {axis}"
        raise ShapeMismatch(problem, tensor="split")
    return lengths


def _parts(tensor: Array, axis: int, lengths: Sequence[int]) -> Iterator[Array]:
    """Yield the views of the tensor that have these lengths along `axis`, in order."""
    whole = (slice(None),) * axis
    for start, stop in itertools.pairwise(itertools.accumulate(lengths, initial=0)):
        yield tensor[*whole, start:stop]


def _copy(pairs: Sequence[tuple[Array, Array]], size: int) -> None:
    """Copy to the first tensor of each pair the second: `size` bytes."""

    def copy(number: int) -> None:
        target, source = pairs[number]
        target[...] = source

    if size > ALONE_BYTES:
        share_out(copy, len(pairs))
        return
    for number in range(len(pairs)):
        copy(number)
