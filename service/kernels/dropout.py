"""Gradient of Dropout. Source of the semantics: the CPU training kernel of ONNX Runtime 1.19.2."""

from __future__ import annotations

import numpy as np

from service.dtypes import Array, compute_dtype
from service.errors import InvalidTensor
from service.kernels._checks import one_element, same_shapes
from service.kernels._elementwise import bits, elementwise, prepare
from service.kernels._op import op
from service.kernels._types import Flag, T, U

FAMILY = "Dropout"

_EXAMPLE = {
    "dy": [[1.0, -2.0], [3.0, 4.0]],
    "mask": [[True, False], [False, True]],
    "ratio": 0.5,
    "training_mode": True,
}


@op("DropoutGrad", outputs="dx", example=_EXAMPLE)
def dropout_grad(
    dy: T,
    mask: Flag,
    ratio: U | None = None,
    training_mode: Flag | None = None,
    /,
    *,
    seed: int | None = None,
    out: T | None = None,
) -> T:
    """dx = dy / (1 - ratio) where mask is true, else 0; dx = dy if ratio is 0 or training_mode is false.

    `mask` has the shape of `dy`: Dropout's second output, true where it kept the element. Where it is false, dx is +0
    for any dy. `ratio` and `training_mode` have one element; without them, they are 0.5 and true. dx has the shape
    and dtype of dy; float16 and bfloat16 are computed in float32 and rounded once. `seed`, which nodes of real
    graphs may have, changes nothing. Raises `ShapeMismatch`, and `InvalidTensor`: the ratio must be in [0, 1).
    """
    same_shapes(dy=dy, mask=mask)
    rate = 0.5 if ratio is None else one_element("ratio", ratio)
    if not 0 <= rate < 1:
        raise InvalidTensor(f"ratio is {rate}, but must be in [0, 1)", tensor="ratio")
    if rate == 0 or not (training_mode is None or one_element("training_mode", training_mode)):
        result, (gradient,) = prepare((dy,), out)
        result[...] = gradient
        return result
    kept = compute_dtype(dy.dtype).type(1 - rate)

    def formula(dy: Array, mask: Array, out: Array) -> None:
        np.divide(dy, kept, out=out)
        np.multiply(bits(out), mask, out=bits(out))  # makes NaN, infinities and -0 into +0, without a branch

    return elementwise(formula, (dy, mask), out, temporaries=0)
