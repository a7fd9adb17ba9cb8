"""Activations, as formulas of whole arrays, which `apply` calls with blocks of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
from scipy import special

from service.dtypes import FLOAT64, Array
from service.graphs.nodes.elementwise import apply
from service.graphs.nodes.table import Function, maker
from service.graphs.plan import Node
from service.kernels.gelu import FAR, POLE, POLYNOMIAL

NEAR = 0.5
"""Below this, the first terms of its series are the error function in float32."""

SERIES = np.array([-1 / 1320, 1 / 216, -1 / 42, 1 / 10, -1 / 3, 1], np.float32) * np.float32(2 / math.sqrt(math.pi))
"""The coefficients of z^11, z^9 and so on, down to z."""


def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + exp(-x))."""
    return 1 / (1 + np.exp(-x))


def softplus(x: Array) -> Array:
    """Return log(1 + exp(x))."""
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def normal(x: Array) -> Array:
    """Return the probability that a standard normal number is below x. In float32 its error is up to 1e-7."""
    if x.dtype == FLOAT64:
        return np.asarray(special.ndtr(x))
    return (x >= 0) - np.copysign(_tail(np.abs(x)), x)


def _tail(a: Array) -> Array:
    """Return the probability that a standard normal number is above a, a >= 0, in float32."""
    a = np.minimum(a, FAR)
    t = 1 / (POLE + a)
    return _polynomial(POLYNOMIAL, t) * t * np.exp(a * a * -0.5)


def _polynomial(coefficients: Array, x: Array) -> Array:
    """Return the polynomial, whose constant is the last coefficient."""
    total = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total *= x
        total += coefficient
    return total


def erf(x: Array) -> Array:
    """Return the error function."""
    if x.dtype == FLOAT64:
        return np.asarray(special.erf(x))
    near, is_near = np.clip(x, -NEAR, NEAR), np.abs(x) < NEAR
    far = np.copysign(1 - 2 * _tail(np.abs(x) * np.float32(math.sqrt(2))), x)
    result: Array = is_near * (_polynomial(SERIES, near * near) * near) + ~is_near * far
    return result


def _elu(x: Array, alpha: float, width: float) -> Array:
    result: Array = np.maximum(x, 0) + alpha * np.expm1(np.minimum(x, 0) / width)
    return result


def gelu(x: Array, bias: Array | float = 0, approximate: str = "none") -> Array:
    """Return z * normal(z), where z = x + bias, or its form with tanh."""
    z = x + bias
    if approximate == "tanh":
        return z * sigmoid(2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z * z * z))
    return z * normal(z)


FORMULAS: dict[str, Callable[..., Array]] = {
    "Sigmoid": sigmoid,
    "Softplus": softplus,
    "Erf": erf,
    "LeakyRelu": lambda x, alpha=0.01: np.maximum(x, 0) + alpha * np.minimum(x, 0),
    "PRelu": lambda x, slope: np.maximum(x, 0) + slope * np.minimum(x, 0),
    "Elu": lambda x, alpha=1.0: _elu(x, alpha, 1),
    "Selu": lambda x, alpha=1.6732632, gamma=1.0507010: gamma * _elu(x, alpha, 1),
    "Celu": lambda x, alpha=1.0: _elu(x, alpha, alpha),
    "HardSigmoid": lambda x, alpha=0.2, beta=0.5: np.clip(alpha * x + beta, 0, 1),
    "HardSwish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    "Softsign": lambda x: x / (1 + np.abs(x)),
    "Mish": lambda x: x * np.tanh(softplus(x)),
    "Swish": lambda x, alpha=1.0: x * sigmoid(alpha * x),
    "ThresholdedRelu": lambda x, alpha=1.0: np.where(x > alpha, x, 0),
    "Shrink": lambda x, bias=0.0, lambd=0.5: np.where(np.abs(x) > lambd, x - np.copysign(bias, x), 0),
    "Gelu": lambda x, approximate="none": gelu(x, approximate=approximate),
}
"""The formula of each activation, with its attributes."""

MICROSOFT: dict[str, Callable[..., Array]] = {
    "Gelu": gelu,
    "BiasGelu": gelu,
    "FastGelu": partial(gelu, approximate="tanh"),
}
"""Those of ONNX Runtime."""


@maker(*FORMULAS)
def _formula(node: Node) -> Function:
    return partial(evaluate, partial(FORMULAS[node.op], **node.attributes))


@maker(*MICROSOFT, domain="com.microsoft")
def _formula_of_onnx_runtime(node: Node) -> Function:
    return partial(evaluate, MICROSOFT[node.op])


def evaluate(formula: Callable[..., Array], *arrays: Array) -> Array:
    """Return formula(*arrays), which broadcasts, in the dtype of the first. Raises `DtypeMismatch`."""

    def fill(*blocks: Array, out: Array) -> None:
        out[...] = formula(*blocks)

    return apply(fill, *arrays)
