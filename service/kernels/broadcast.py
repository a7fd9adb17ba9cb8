"""BroadcastGradientArgs: which axes a broadcast stretched. Source of the semantics: ONNX Runtime 1.19.2."""

from __future__ import annotations

import numpy as np

from service.errors import ShapeMismatch
from service.kernels._op import Shape, op


@op(
    "BroadcastGradientArgs",
    outputs="A_axes B_axes",
    example={"A_shape": [2, 16, 1, 1024], "B_shape": [1, 1, 1024, 1024]},
)
def broadcast_gradient_args(A_shape: Shape, B_shape: Shape, /) -> tuple[Shape, Shape]:
    """The axes over which the gradient of broadcast(A, B) must be summed to get that of A, and that of B.

    `A_shape` and `B_shape` hold the shapes of the two operands, read flat whatever their own rank. The results are
    1-D, number the axes of the broadcast result and are in descending order; without such an axis they are empty. A
    leading dimension that one operand lacks is listed even if the other's is 1. Raises `ShapeMismatch` if the two do
    not broadcast.
    """
    a, b = (shape.ravel().tolist() for shape in (A_shape, B_shape))
    rank = max(len(a), len(b))
    a_axes, b_axes = [], []
    for axis in range(rank - 1, -1, -1):
        a_place, b_place = axis - rank + len(a), axis - rank + len(b)
        if a_place < 0:
            a_axes.append(axis)
        elif b_place < 0:
            b_axes.append(axis)
        elif a[a_place] != b[b_place]:
            if a[a_place] == 1:
                a_axes.append(axis)
            elif b[b_place] == 1:
                b_axes.append(axis)
            else:
                raise ShapeMismatch(
                    f"A_shape {a} and B_shape {b} do not broadcast: their dimensions {a[a_place]} and {b[b_place]} at"
                    f" axis {axis} of the result differ and neither is 1",
                    tensor="B_shape",
                )
    return np.array(a_axes, A_shape.dtype), np.array(b_axes, B_shape.dtype)  # type: ignore[return-value]
