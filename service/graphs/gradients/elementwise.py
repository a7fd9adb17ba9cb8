"""The gradients of arithmetic and functions, element by element."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from service.dtypes import Array
from service.graphs.gradients.arrays import kept, rounded_once
from service.graphs.gradients.tape import Tape, gradients, rule
from service.graphs.plan import Node
from service.kernels.activations import leaky_relu_grad, quick_gelu_grad, relu_grad, sigmoid_grad, tanh_grad
from service.kernels.gelu import fast_gelu_grad, gelu_grad


def _elu(dY: Array, X: Array, *, alpha: float = 1.0) -> Array:
    linear = X > 0
    slope: Array = kept(~linear, alpha * np.exp(np.minimum(X, 0))) + linear
    return dY * slope


def _mish(dY: Array, X: Array) -> Array:
    softplus = np.asarray(np.logaddexp(0, X))
    tanh = np.tanh(softplus)
    sigmoid = np.exp(np.subtract(X, softplus, out=softplus), out=softplus)
    slope: Array = tanh + X * (1 - tanh * tanh) * sigmoid
    return dY * slope


def _power(dY: Array, A: Array, B: Array) -> Array:
    # With one Python number, NumPy knows squares and roots, and keeps the dtype.
    number = B.item() if B.size == 1 else B.astype(A.dtype)
    return dY * np.where(B == 0, 0, number * A ** (number - 1))


def _exponent(dY: Array, A: Array, B: Array, Y: Array) -> Array:
    return dY * np.where((A == 0) & (B >= 0), 0, Y * np.log(A))


DERIVATIVES: dict[str, tuple[Callable[..., Any] | None, ...]] = {
    "Abs": (lambda dY, X: dY * np.sign(X),),
    "Acos": (lambda dY, X: -dY / np.sqrt(1 - X * X),),
    "Acosh": (lambda dY, X: dY / np.sqrt(X * X - 1),),
    "Asin": (lambda dY, X: dY / np.sqrt(1 - X * X),),
    "Asinh": (lambda dY, X: dY / np.sqrt(X * X + 1),),
    "Atan": (lambda dY, X: dY / (X * X + 1),),
    "Atanh": (lambda dY, X: dY / (1 - X * X),),
    "Celu": (lambda dY, X, *, alpha=1.0: dY * np.exp(np.minimum(X / alpha, 0)),),
    "Cos": (lambda dY, X: -dY * np.sin(X),),
    "Cosh": (lambda dY, X: dY * np.sinh(X),),
    "Elu": (_elu,),
    "Erf": (lambda dY, X: dY * np.exp(-X * X) * (2 / math.sqrt(math.pi)),),
    "Exp": (lambda dY, Y: dY * Y,),
    "HardSigmoid": (lambda dY, Y, *, alpha=0.2: kept((Y > 0) & (Y < 1), alpha * dY),),
    "HardSwish": (lambda dY, X: dY * (kept(np.abs(X) < 3, X / 3 + 0.5) + (X >= 3)),),
    "Log": (lambda dY, X: dY / X,),
    "Mish": (_mish,),
    "Neg": (lambda dY: -dY,),
    "Reciprocal": (lambda dY, Y: -dY * Y * Y,),
    "Selu": (lambda dY, X, *, alpha=1.6732632, gamma=1.0507010: gamma * _elu(dY, X, alpha=alpha),),
    "Shrink": (lambda dY, X, *, lambd=0.5: kept(np.abs(X) > lambd, dY),),
    "Sin": (lambda dY, X: dY * np.cos(X),),
    "Sinh": (lambda dY, X: dY * np.cosh(X),),
    "Softplus": (lambda dY, Y: -dY * np.expm1(-Y),),
    "Softsign": (lambda dY, X: dY / (1 + np.abs(X)) ** 2,),
    "Sqrt": (lambda dY, Y: dY / (2 * Y),),
    "Tan": (lambda dY, Y: dY * (Y * Y + 1),),
    "ThresholdedRelu": (lambda dY, X, *, alpha=1.0: kept(X > alpha, dY),),
    "Div": (lambda dY, B: dY / B, lambda dY, B, Y: -dY / B * Y),
    "Mod": (lambda dY: dY, lambda dY, A, B: -dY * np.trunc(A / B)),
    "Mul": (lambda dY, B: dY * B, lambda dY, A: dY * A),
    "Pow": (_power, _exponent),
    "PRelu": (lambda dY, X, B: kept(X > 0, dY) + kept(~(X > 0), dY * B), lambda dY, X: kept(~(X > 0), dY * X)),
    "Sub": (lambda dY: dY, lambda dY: -dY),
    "Where": (None, lambda dY, A: kept(A, dY), lambda dY, A: kept(~A, dY)),
    "Clip": (lambda dY, X, Y: kept(Y == X, dY), lambda dY, X, B: kept(X < B, dY), lambda dY, X, C: kept(X > C, dY)),
}
"""The gradients of the inputs of each operator. Their parameters say what they read: see `gradients`."""

SIMPLE = {"Clip", "Mul", "Sub", "Where"}
"""Operators whose gradients are one operation of NumPy, in every dtype."""

for _op, _functions in DERIVATIVES.items():
    _rounded = [function and (function if _op in SIMPLE else rounded_once(function)) for function in _functions]
    gradients(_op, *_rounded, broadcast=len(_functions) > 1)

# These kernels take care of 16-bit floats. LeakyRelu's asks for Y, whose sign X has, and the right one for alpha < 0.
gradients("LeakyRelu", lambda dY, X, *, alpha=0.01: leaky_relu_grad(dY, X, alpha=alpha))
gradients("Relu", lambda dY, Y: relu_grad(dY, Y))
gradients("Sigmoid", sigmoid_grad)
gradients("Tanh", tanh_grad)
gradients("QuickGelu", quick_gelu_grad, domain="com.microsoft")
gradients("Gelu", lambda dY, X: gelu_grad(dY, X), domain="com.microsoft")
gradients("Gelu", lambda dY, X, *, approximate="none": (fast_gelu_grad if approximate == "tanh" else gelu_grad)(dY, X))
gradients("Swish", lambda dY, X, *, alpha=1.0: quick_gelu_grad(dY, X, alpha=alpha))


@rule("BiasGelu", "FastGelu", domain="com.microsoft")
def _bias_gelu(tape: Tape, node: Node, dY: str) -> list[str]:
    Z = tape.call(np.add, *node.inputs) if all(node.inputs[1:]) and len(node.inputs) > 1 else node.inputs[0]
    dZ = tape.call(gelu_grad if node.op == "BiasGelu" else fast_gelu_grad, dY, Z)
    return [tape.like(dZ, one) for one in node.inputs if one]


rule("Cast", "CastLike")(lambda tape, node, dY: [tape.typed(dY, node.inputs[0])])
rule("Add", "Sum")(lambda tape, node, dY: [tape.like(dY, one) for one in node.inputs])


@rule("Mean")
def _mean(tape: Tape, node: Node, dY: str) -> list[str]:
    share = tape.call(rounded_once(lambda dY: dY / len(node.inputs)), dY)
    return [tape.like(share, one) for one in node.inputs]


@rule("Max", "Min")
def _extreme(tape: Tape, node: Node, dY: str) -> list[str]:
    """Inputs that are equal share the gradient."""
    Y = node.outputs[0]
    share = tape.call(_share, dY, Y, *node.inputs)
    shares = [tape.call(lambda share, Y, X: kept(Y == X, share), share, Y, one) for one in node.inputs]
    return [tape.like(one, tensor) for one, tensor in zip(shares, node.inputs, strict=True)]


@rounded_once
def _share(dY: Array, Y: Array, *inputs: Array) -> Array:
    share: Array = dY / np.maximum(sum(Y == one for one in inputs), 1)
    return share
