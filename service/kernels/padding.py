"""The operator that puts padding back, which ONNX Runtime's training graphs have left out.

Source of the semantics: PadAndUnflatten of ONNX Runtime's GPU provider, and its unit tests.
"""

from __future__ import annotations

import math
from typing import Any

from service.dtypes import Array
from service.errors import InvalidTensor, ShapeMismatch
from service.kernels._blocks import block_length, check_wanted, new_output
from service.kernels._checks import check_shape
from service.kernels._op import op
from service.kernels._scatter import clear, flat_indices
from service.kernels._types import Rank2, Shape, T, Tind

FAMILY = "Indexing, slicing and joining"


def _work(input: Array, indices: Array, unflatten_dims: Array) -> int:
    return math.prod(unflatten_dims.ravel()[:2].tolist()) * math.prod(input.shape[1:])


@op(
    "PadAndUnflatten",
    outputs="output",
    example={"input": [1.0, 2.0, 3.0], "indices": [0, 1, 3], "unflatten_dims": [2, 3]},
    multiply_adds=_work,
)
def pad_and_unflatten(input: T, indices: Tind, unflatten_dims: Shape, /) -> Rank2[T]:
    """output = zeros(unflatten_dims + input.shape[1:]), whose first two axes, as one, have `input` at `indices`.

    input [K, ...], indices [K], unflatten_dims [2] -> output [M1, M2, ...]. Negative indices count from the end. Of the
    same indices, the last one counts. The numbers keep their bits. ONNX Runtime has a kernel on GPUs only. Raises
    `ShapeMismatch`, `IndexOutOfRange` and `InvalidTensor` for a negative dimension.
    """
    if not input.ndim:
        raise ShapeMismatch("input has shape [], but must have 1 dimension or more", tensor="input")
    check_shape("indices", indices, len(input))
    check_shape("unflatten_dims", unflatten_dims, 2)
    dims: list[int] = unflatten_dims.tolist()
    for place, dim in enumerate(dims):
        if dim < 0:
            problem = f"unflatten_dims[{place}] is {dim}, but a dimension must be 0 or more"
            raise InvalidTensor(problem, tensor="unflatten_dims")
    rest = input.shape[1:]
    targets = flat_indices(indices, math.prod(dims))
    output: Any = new_output(None, (*dims, *rest), input.dtype)
    clear(output)
    if output.size:
        rows, height = output.reshape(-1, *rest), max(1, block_length(input.dtype) // math.prod(rest))
        for start in range(0, len(input), height):
            check_wanted()
            part = slice(start, start + height)
            rows[targets[part]] = input[part]
    return output
