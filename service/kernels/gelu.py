"""GELU: the gradients of its two forms, with and without a bias, and QuickGelu.

`dY` and `X` have the same shape and floating dtype, and the result has them, too. float16 and bfloat16 are computed in
float32 and rounded once. Where X is an infinity, the result is the limit, and only NaN gives NaN. Raises
`ShapeMismatch` or `DtypeMismatch`. Source of the semantics: the CPU training kernels of ONNX Runtime 1.19.2.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from service.dtypes import FLOAT64, Array
from service.errors import ShapeMismatch
from service.kernels._checks import same_shape
from service.kernels._elementwise import bits, elementwise
from service.kernels._op import op
from service.kernels._types import T

FAMILY = "Activations"

FAR = 40.0
"""Beyond this and below its negative, GELU's slope is 1 and 0 in float64."""

CUBIC = 0.044715
"""The weight of the cube in the tanh form."""

ROOT = float(np.sqrt(2 / np.pi))

# erfcx(a / sqrt(2)) / 2 is, up to 3e-8, a polynomial of t = 1 / (POLE + a) without a constant. These numbers are our
# own least-squares fit, with equal errors where exp(-a * a / 2) is large and small relative errors elsewhere. At a = 0,
# the float32 result is exactly 1 / 2.
POLE = 3.5
POLYNOMIAL = np.array([-174.3220628, 169.369516, -21.14358889, 8.82805699, 1.12011327, 0.40569859], np.float32)
"""The coefficients, that of the highest power first."""

_SAMPLE = {"dY": [[1.0, -2.0], [3.0, 0.5]], "X": [[0.5, -1.0], [2.0, 0.0]]}

Slope = Callable[[Array, Array, Array], None]
"""A function of a, out and scratch. It writes the slope at -a to `out`, where a >= 0, and may overwrite all three."""


@op("GeluGrad", outputs="dX", example=_SAMPLE)
def gelu_grad(dY: T, X: T, /, *, out: T | None = None) -> T:
    """dX = dY * (P(X) + X * p(X)), where P and p are the standard normal distribution and its density.

    P(X) is (1 + erf(X / sqrt(2))) / 2. This is the gradient of GELU in its exact form.
    """
    return _grad(_erf_slope, dY, X, None, out)


@op("FastGeluGrad", outputs="dX", example=_SAMPLE)
def fast_gelu_grad(dY: T, X: T, /, *, out: T | None = None) -> T:
    """dX = dY * f'(X), where f(X) = X * (1 + tanh(sqrt(2 / pi) * (X + 0.044715 * X^3))) / 2.

    This is the gradient of GELU in its tanh form.
    """
    return _grad(_tanh_slope, dY, X, None, out)


@op("BiasGeluGrad_dX", outputs="dX", example={**_SAMPLE, "B": [0.5, 1.0]})
def bias_gelu_grad_dx(dY: T, X: T, B: T, /, *, out: T | None = None) -> T:
    """dX = dY * (P(Z) + Z * p(Z)), where Z = X + B, with P and p as in GeluGrad.

    B [C] is added along the last dimension of X, C. The gradient of B is the sum of dX over all other dimensions.
    """
    return _grad(_erf_slope, dY, X, B, out)


@op("BiasFastGeluGrad_dX", outputs="dX", example={**_SAMPLE, "B": [0.5, 1.0]})
def bias_fast_gelu_grad_dx(dY: T, X: T, B: T, /, *, out: T | None = None) -> T:
    """dX = dY * f'(X + B), where f is GELU in its tanh form, as in FastGeluGrad.

    B [C] is added along the last dimension of X, C. The gradient of B is the sum of dX over all other dimensions.
    """
    return _grad(_tanh_slope, dY, X, B, out)


@op("QuickGelu", outputs="Y", example={"X": [[0.5, -1.0], [2.0, 0.0]]})
def quick_gelu(X: T, /, *, alpha: float = 1.702, out: T | None = None) -> T:
    """Y = X * sigmoid(alpha * X).

    alpha = 1 is SiLU. The kernel's sigmoid is exact far out, where that of ONNX Runtime is 0 or 1 from about 17 on.
    """
    largest = np.finfo(np.float64 if X.dtype == FLOAT64 else np.float32).max
    low, high = (-largest if alpha > 0 else -np.inf), (largest if alpha < 0 else np.inf)

    def formula(X: Array, out: Array, divisor: Array) -> None:
        np.clip(X, -largest, largest, out=divisor)
        np.multiply(divisor, -alpha, out=divisor)
        np.exp(divisor, out=divisor)
        np.add(divisor, 1, out=divisor)
        np.clip(X, low, high, out=out)  # the infinity where the sigmoid is 0, as its limit is 0
        np.divide(out, divisor, out=out)

    return elementwise(formula, (X,), out, temporaries=1)


def _grad(slope: Slope, dY: T, X: T, B: T | None, out: T | None) -> T:
    same_shape(dY=dY, X=X)

    def formula(dY: Array, X: Array, out: Array, a: Array, spare: Array) -> None:
        np.clip(X, -FAR, FAR, out=a)
        np.abs(a, out=a)
        slope(a, out, spare)
        _reflect(X, out, spare)
        np.multiply(out, dY, out=out)

    def with_bias(dY: Array, X: Array, B: Array, out: Array, Z: Array, a: Array, spare: Array) -> None:
        rows = (-1, B.size)
        np.add(X.reshape(rows), B, out=Z.reshape(rows))
        formula(dY, Z, out, a, spare)

    if B is None:
        return elementwise(formula, (dY, X), out, temporaries=2)
    if X.ndim == 0 or B.shape != X.shape[-1:]:
        problem = f"B has shape {list(B.shape)}, but must have one dimension, the last of X, whose shape is"
        raise ShapeMismatch(f"{problem} {list(X.shape)}", tensor="B")
    return elementwise(with_bias, (dY, X), out, temporaries=3, row=B)


def _reflect(X: Array, slope: Array, spare: Array) -> None:
    """Replace the slope at -|X| with that at X, without a branch: they add up to 1, those at X and -X."""
    sign, half = (bits(np.asarray(number, X.dtype)) for number in (-0.0, 0.5))
    np.bitwise_and(bits(X), sign, out=bits(spare))
    np.bitwise_xor(bits(slope), bits(spare), out=bits(slope))
    np.bitwise_or(bits(spare), half, out=bits(spare))
    np.add(spare, 0.5, out=spare)  # 1 or 0
    np.subtract(spare, slope, out=slope)


def _erf_slope(a: Array, out: Array, spare: Array) -> None:
    """out = exp(-a^2 / 2) * (erfcx(a / sqrt(2)) / 2 - a / sqrt(2 * pi))."""
    from scipy.special import erfcx  # late: most servers never need it

    if a.dtype == FLOAT64:
        np.multiply(a, np.sqrt(0.5), out=out)
        erfcx(out, out=out)
        np.multiply(out, 0.5, out=out)
    else:
        np.add(a, POLE, out=spare)
        np.divide(1, spare, out=spare)
        np.multiply(spare, POLYNOMIAL[0], out=out)
        for coefficient in POLYNOMIAL[1:]:
            np.add(out, coefficient, out=out)
            np.multiply(out, spare, out=out)
    np.multiply(a, ROOT / 2, out=spare)
    np.subtract(out, spare, out=out)
    np.multiply(a, a, out=a)
    np.multiply(a, -0.5, out=a)
    np.exp(a, out=a)
    np.multiply(out, a, out=out)


def _tanh_slope(a: Array, out: Array, spare: Array) -> None:
    """out = s * (1 - a * 2u'(a) * (1 - s)), where s = (1 + tanh(u(-a))) / 2 is the sigmoid of -2u(a)."""
    np.multiply(a, a, out=spare)
    np.multiply(spare, -2 * ROOT * CUBIC, out=out)
    np.add(out, -2 * ROOT, out=out)
    np.multiply(out, a, out=out)
    np.exp(out, out=out)
    np.multiply(spare, 6 * ROOT * CUBIC, out=spare)
    np.add(spare, 2 * ROOT, out=spare)
    np.multiply(spare, a, out=spare)
    np.add(out, 1, out=a)
    np.divide(1, a, out=a)  # 1 - s
    np.multiply(out, a, out=out)  # s
    np.multiply(spare, a, out=spare)
    np.subtract(1, spare, out=spare)
    np.multiply(out, spare, out=out)
