"""Quantization that a model learns to bear, and its gradient.

float16 and bfloat16 are computed in float32 and rounded once. Source of the semantics: ONNX Runtime 1.19.2. It
overflows where x / scale is beyond 64-bit integers, and does not check the shape of the mask.
"""

from __future__ import annotations

import math

import numpy as np

from service.dtypes import BOOL, Array
from service.errors import InvalidParameter, InvalidTensor
from service.kernels._blocks import block_length, new_output, row_major, share_out
from service.kernels._checks import one_element, same_shapes
from service.kernels._op import op
from service.kernels._types import Flag, T
from service.kernels._updates import update

FAMILY = "Quantization"


@op("FakeQuant", outputs="output mask", example={"input": [-1.0, 0.25, 300.0], "scale": 0.5, "zero_point": 1.0})
def fake_quant(input: T, scale: T, zero_point: T, /, *, quant_min: int = 0, quant_max: int = 255) -> tuple[T, Flag]:
    """output = (clip(q, quant_min, quant_max) - z) * scale, where q = round(input / scale) + z.

    z is `zero_point` without its fraction, and half is rounded to even. `mask` is true where q is not clipped. `scale`
    and `zero_point` have one element each, and the scale is above 0. Infinities are clipped. NaN gives NaN, and a mask
    of false. Raises `InvalidTensor` and, if quant_min is above quant_max, `InvalidParameter`.
    """
    step, zero = one_element("scale", scale), one_element("zero_point", zero_point)
    if not 0 < step < math.inf:
        raise InvalidTensor(f"scale is {step}, but must be above 0 and finite", tensor="scale")
    if not math.isfinite(zero):
        raise InvalidTensor(f"zero_point is {zero}, but must be finite", tensor="zero_point")
    if quant_min > quant_max:
        problem = f"quant_min is {quant_min}, but must be at most quant_max, {quant_max}"
        raise InvalidParameter(problem, parameter="quant_min")
    z, low, high = float(math.trunc(zero)), float(quant_min), float(quant_max)

    def formula(x: Array, out: Array, mask: Array, q: Array) -> None:
        np.divide(x, step, out=q)
        np.rint(q, out=q)
        np.add(q, z, out=q)
        np.clip(q, low, high, out=out)
        np.equal(out, q, out=mask)
        np.subtract(out, z, out=out)
        np.multiply(out, step, out=out)

    output, mask = update({"": formula}, [{"": input}], [input.dtype, BOOL], temporaries=1)
    return output[""], mask[""]


@op("FakeQuantGrad", outputs="dX", example={"dY": [1.0, 2.0], "gradient_mask": [True, False]})
def fake_quant_grad(dY: T, gradient_mask: Flag, /) -> T:
    """dX = dY where gradient_mask is true, else 0.

    `gradient_mask` has the shape of `dY`. Where it is false, dX is +0 also for infinities and NaN. Raises
    `ShapeMismatch`.
    """
    same_shapes(dY=dY, gradient_mask=gradient_mask)
    dX: T = new_output(None, dY.shape, dY.dtype)
    source, mask = (row_major(one).reshape(-1) for one in (dY, gradient_mask))
    target = dX.reshape(-1)
    length = block_length(dY.dtype)

    def select(number: int) -> None:
        part = slice(number * length, (number + 1) * length)
        target[part] = 0
        np.copyto(target[part], source[part], where=mask[part])

    share_out(select, max(1, -(-dY.size // length)))
    return dX
