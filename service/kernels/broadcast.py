"""BroadcastGradientArgs: the axes that a broadcast stretched. Source of the semantics: ONNX Runtime 1.19.2."""

from __future__ import annotations

import numpy as np

from service.dtypes import Array
from service.errors import ShapeMismatch, TooManyDimensions, shown
from service.kernels._op import op
from service.kernels._types import Shape

FAMILY = "Arithmetic and sums"

MAX_LENGTH = 1 << 16
"""Dimensions of an operand: a thousand times as many as a tensor has. Each takes up to 40 bytes on the way."""


@op(
    "BroadcastGradientArgs",
    outputs="A_axes B_axes",
    example={"A_shape": [2, 16, 1, 1024], "B_shape": [1, 1, 1024, 1024]},
)
def broadcast_gradient_args(A_shape: Shape, B_shape: Shape, /) -> tuple[Shape, Shape]:
    """The axes over which the gradient of broadcast(A, B) must be summed to get that of A, and that of B.

    `A_shape` and `B_shape` hold the shapes of the two operands, as tensors of any rank, read flat. The results are 1-D
    and list axes of the broadcast result in descending order; they may be empty. A leading dimension that one operand
    lacks is listed even if the other operand has 1 there. Raises `ShapeMismatch` if the two do not broadcast, and
    `TooManyDimensions`.
    """
    a: Array = A_shape.ravel()
    b: Array = B_shape.ravel()
    for name, shape in (("A_shape", a), ("B_shape", b)):
        if shape.size > MAX_LENGTH:
            problem = f"{name} has {shape.size} dimensions; the limit is {MAX_LENGTH}"
            raise TooManyDimensions(problem, tensor=name, limit=MAX_LENGTH)
    rank, common = max(a.size, b.size), min(a.size, b.size)
    lead = rank - common  # the number of axes that one operand lacks
    last_a, last_b = a[a.size - common :], b[b.size - common :]
    differ = last_a != last_b
    conflicts = np.flatnonzero(differ & (last_a != 1) & (last_b != 1))
    if conflicts.size:
        place = conflicts[-1]
        raise ShapeMismatch(
            f"A_shape {shown(a.tolist())} and B_shape {shown(b.tolist())} do not broadcast: their dimensions"
            f" {last_a[place]} and {last_b[place]} at axis {lead + place} of the result differ and neither is 1",
            tensor="B_shape",
        )

    def stretched(shape: Array, last: Array) -> Array:
        axes = np.arange(lead) if shape.size < rank else np.arange(0)
        axes = np.append(axes, lead + np.flatnonzero(differ & (last == 1)))
        return axes[::-1].astype(shape.dtype)

    return stretched(a, last_a), stretched(b, last_b)  # type: ignore[return-value]
