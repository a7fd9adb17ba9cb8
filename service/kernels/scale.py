"""Multiplication with one number. Source of the semantics: the CPU training kernels of ONNX Runtime 1.19.2."""

from __future__ import annotations

import numpy as np

from service.dtypes import Array, compute_dtype
from service.errors import InvalidTensor
from service.kernels._checks import one_element
from service.kernels._elementwise import elementwise
from service.kernels._op import op
from service.kernels._types import Bit, Number, T

FAMILY = "Arithmetic and sums"


@op("Scale", outputs="output", example={"input": [[1.0, -2.0], [3.0, 0.5]], "scale": 4.0, "scale_down": 1})
def scale(input: T, scale: Number, /, *, scale_down: Bit = 0, out: T | None = None) -> T:
    """output = input * scale, or input * (1 / scale) with scale_down = 1.

    `input` has any shape; `output` has its shape and dtype. `scale` is one number, of any shape with one element, and
    its dtype may differ. It is converted to the dtype of `input`, or to float32 for float16 and bfloat16, before the
    inverse is taken. float16 and bfloat16 are computed in float32 and rounded once. Raises `InvalidTensor` if `scale`
    has not one element, or is 0 with scale_down = 1.
    """
    dtype = compute_dtype(input.dtype)
    with np.errstate(all="ignore"):
        factor = np.asarray(one_element("scale", scale), dtype)
        if scale_down and factor == 0:
            problem = f"scale is {scale.item()}, which is 0 as {dtype}, but must not be 0 with scale_down = 1"
            raise InvalidTensor(problem, tensor="scale")
        factor = np.divide(dtype.type(1), factor) if scale_down else factor

    def formula(block: Array, out: Array) -> None:
        np.multiply(block, factor, out=out)

    return elementwise(formula, (input,), out, temporaries=0)
