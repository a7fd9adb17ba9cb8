"""Gradients of element-wise activations.

Every kernel takes `dY` and the forward input `X` or output `Y`, of the same shape and floating dtype. It returns `dX`,
of that shape and dtype. float16 and bfloat16 are computed in float32 and rounded once. Raises `ShapeMismatch` or
`DtypeMismatch` if the inputs differ. Source of the semantics: the CPU training kernels of ONNX Runtime 1.19.2.
"""

from __future__ import annotations

import numpy as np

from service.dtypes import BOOL, Array
from service.kernels._blocks import scratch
from service.kernels._checks import same_shape
from service.kernels._elementwise import bits, elementwise
from service.kernels._op import op
from service.kernels._types import T

FAMILY = "Activations"

_SAMPLE = {"dY": [[1.0, -2.0], [3.0, 0.5]], "X": [[0.5, -1.0], [2.0, 0.0]]}
_PROBABILITIES = {"dY": [[1.0, -2.0], [3.0, 0.5]], "Y": [[0.5, 0.25], [0.75, 1.0]]}


def _positive(X: Array) -> Array:
    """Return X > 0, in scratch."""
    return np.greater(X, 0, out=scratch(0, X.size, BOOL))


@op("ReluGrad", outputs="dX", example=_SAMPLE)
def relu_grad(dY: T, X: T, /, *, out: T | None = None) -> T:
    """dX = dY where X > 0, else 0.

    X = 0 and X = NaN give exactly +0, for any dY. Where X > 0, dX has the bits of dY.
    """
    same_shape(dY=dY, X=X)

    def formula(dY: Array, X: Array, out: Array) -> None:
        # A masked copy branches at each element. Multiplying bits by 0 or 1 does not, and makes NaN and -0 into +0.
        np.multiply(bits(dY), _positive(X), out=bits(out))

    return elementwise(formula, (dY, X), out, temporaries=0)


@op("LeakyReluGrad", outputs="dX", example=_PROBABILITIES)
def leaky_relu_grad(dY: T, Y: T, /, *, alpha: float = 0.01, out: T | None = None) -> T:
    """dX = dY where Y > 0, else alpha * dY.

    Y is the forward output. Y = 0 and Y = NaN give alpha * dY. For alpha < 0, Y does not tell the sign of the
    forward input, so the result is not the true gradient, as in ONNX Runtime.
    """
    same_shape(dY=dY, Y=Y)

    def formula(dY: Array, Y: Array, out: Array, slope: Array) -> None:
        # The slope without a branch: where Y > 0, flip the bits that differ between alpha and 1.
        alpha_bits, one_bits = (bits(np.asarray(value, slope.dtype)) for value in (alpha, 1))
        np.multiply(_positive(Y), alpha_bits ^ one_bits, out=bits(slope))
        np.bitwise_xor(bits(slope), alpha_bits, out=bits(slope))
        np.multiply(dY, slope, out=out)

    return elementwise(formula, (dY, Y), out, temporaries=1)


@op("SigmoidGrad", outputs="dX", example=_PROBABILITIES)
def sigmoid_grad(dY: T, Y: T, /, *, out: T | None = None) -> T:
    """dX = dY * Y * (1 - Y).

    Y is the forward output, sigmoid(X). The kernel does not check that Y lies in [0, 1].
    """
    same_shape(dY=dY, Y=Y)

    def formula(dY: Array, Y: Array, out: Array, rest: Array) -> None:
        np.subtract(1, Y, out=rest)
        np.multiply(dY, Y, out=out)
        np.multiply(out, rest, out=out)

    return elementwise(formula, (dY, Y), out, temporaries=1)


@op("TanhGrad", outputs="dX", example=_PROBABILITIES)
def tanh_grad(dY: T, Y: T, /, *, out: T | None = None) -> T:
    """dX = dY * (1 - Y * Y).

    Y is the forward output, tanh(X). The kernel does not check that Y lies in [-1, 1].
    """
    same_shape(dY=dY, Y=Y)

    def formula(dY: Array, Y: Array, out: Array) -> None:
        np.multiply(Y, Y, out=out)
        np.subtract(1, out, out=out)
        np.multiply(dY, out, out=out)

    return elementwise(formula, (dY, Y), out, temporaries=0)


@op("QuickGeluGrad", outputs="dX", example=_SAMPLE)
def quick_gelu_grad(dY: T, X: T, /, *, alpha: float = 1.702, out: T | None = None) -> T:
    """dX = dY * s * (1 + alpha * X * (1 - s)), where s = sigmoid(alpha * X).

    alpha = 1 is the gradient of SiLU. X = NaN and X = ±infinity give NaN, and so does an X whose alpha * X overflows.
    The kernel follows the formula, as ONNX Runtime does, although the limits are dY and 0.
    """
    same_shape(dY=dY, X=X)

    def formula(dY: Array, X: Array, out: Array, minus_v: Array, s: Array) -> None:
        np.multiply(X, -alpha, out=minus_v)
        np.exp(minus_v, out=s)
        np.add(s, 1, out=s)
        np.divide(1, s, out=s)  # twice as fast as reciprocal
        np.multiply(dY, s, out=out)
        np.subtract(1, s, out=s)
        np.multiply(s, minus_v, out=s)
        np.subtract(1, s, out=s)
        np.multiply(out, s, out=out)

    return elementwise(formula, (dY, X), out, temporaries=2)
