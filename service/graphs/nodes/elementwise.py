"""Element-wise operators on universal functions of NumPy and SciPy. 16-bit floats are computed in float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import numpy as np
from scipy import special

from service.dtypes import BFLOAT16, BOOL, FLOAT16, Array, DType, cast
from service.errors import DtypeMismatch, InvalidTensor
from service.graphs.nodes.table import Function, dtype_of, maker
from service.graphs.plan import Node
from service.kernels import claim, spare_memory

WIDE = {FLOAT16: np.dtype(np.float32), BFLOAT16: np.dtype(np.float32)}
"""The dtype of the arithmetic, where it is another one."""


def _named(table: str) -> dict[str, Any]:
    return {op: getattr(np, name) for op, name in (pair.split(":") for pair in table.split())}


UFUNCS: dict[str, Any] = {
    **_named("Add:add Sub:subtract Mul:multiply Abs:abs Neg:negative Exp:exp Log:log Sqrt:sqrt Sign:sign Floor:floor"),
    **_named("Ceil:ceil Round:rint Reciprocal:reciprocal Sin:sin Cos:cos Tan:tan Asin:arcsin Acos:arccos Atan:arctan"),
    **_named("Sinh:sinh Cosh:cosh Tanh:tanh Asinh:arcsinh Acosh:arccosh Atanh:arctanh BitwiseNot:invert"),
    **_named("BitwiseAnd:bitwise_and BitwiseOr:bitwise_or BitwiseXor:bitwise_xor"),
    "Erf": special.erf,
    "Sigmoid": special.expit,
    "Relu": partial(np.maximum, 0),
    "Softplus": partial(np.logaddexp, 0),
}
"""The universal function of each operator whose result has the dtype of its inputs, which is one."""

TESTS: dict[str, Any] = {
    **_named("Equal:equal Less:less LessOrEqual:less_equal Greater:greater GreaterOrEqual:greater_equal IsNaN:isnan"),
    **_named("And:logical_and Or:logical_or Xor:logical_xor Not:logical_not"),
}
"""The universal function of each operator whose result is bool."""

FOLDS: dict[str, Any] = {"Sum": np.add, "Max": np.maximum, "Min": np.minimum, "Mean": np.add}
"""The universal function of each operator that takes any number of inputs."""


def apply(function: Callable[..., Any], *arrays: Array, dtype: DType | None = None, temporaries: int = 0) -> Array:
    """Return function(*arrays, out=...), which broadcasts. `dtype` is the result's, by default that of the arrays.

    `temporaries` says how many arrays of the result's size the function has at a time. Raises `DtypeMismatch`.
    """
    given = arrays[0].dtype
    if any(array.dtype != given for array in arrays):
        problem = f"the inputs are {', '.join(str(array.dtype) for array in arrays)}, but must share a dtype"
        raise DtypeMismatch(problem)
    shape = arrays[0].shape if len(arrays) == 1 else np.broadcast(*arrays).shape
    wide, dtype = WIDE.get(given, given), dtype or given
    if wide != given:
        claim(sum(array.size for array in arrays) * wide.itemsize)
        arrays = tuple(array.astype(wide) for array in arrays)
    computed = wide if dtype == given else dtype
    out = spare_memory(shape, computed)
    if temporaries:
        claim(temporaries * out.nbytes)
    function(*arrays, out=out)
    return out if computed == dtype else narrowed(out, dtype)


def narrowed(wide: Array, dtype: DType) -> Array:
    """Return the numbers as `dtype`, rounded once."""
    claim(wide.size * dtype.itemsize)
    return cast(wide, dtype)


@maker(*UFUNCS)
def _ufunc(node: Node) -> Function:
    return partial(apply, UFUNCS[node.op])


@maker(*TESTS)
def _test(node: Node) -> Function:
    return partial(apply, TESTS[node.op], dtype=BOOL)


@maker(*FOLDS)
def _fold(node: Node) -> Function:
    def fold(*arrays: Array) -> Array:
        total = reduce(partial(apply, FOLDS[node.op]), arrays)
        return apply(np.divide, total, np.asarray(len(arrays), total.dtype)) if node.op == "Mean" else total

    return fold


def divide(a: Array, b: Array, *, out: Array) -> None:
    """out = a / b, of integers towards zero."""
    if a.dtype.kind == "f":
        np.divide(a, b, out=out)
    else:
        np.floor_divide(a, b, out=out)
        np.add(out, (out * b != a) & ((a < 0) != (b < 0)), out=out)


FORMULAS: dict[str, Callable[..., Array]] = {
    "LeakyRelu": lambda x, alpha=0.01: np.where(x < 0, alpha * x, x),
    "PRelu": lambda x, slope: np.where(x < 0, slope * x, x),
    "Elu": lambda x, alpha=1.0: np.where(x < 0, alpha * np.expm1(x), x),
    "Selu": lambda x, alpha=1.6732632, gamma=1.0507010: gamma * np.where(x < 0, alpha * np.expm1(x), x),
    "Celu": lambda x, alpha=1.0: np.where(x < 0, alpha * np.expm1(x / alpha), x),
    "HardSigmoid": lambda x, alpha=0.2, beta=0.5: np.clip(alpha * x + beta, 0, 1),
    "HardSwish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    "Softsign": lambda x: x / (1 + np.abs(x)),
    "Mish": lambda x: x * np.tanh(np.logaddexp(0, x)),
    "Swish": lambda x, alpha=1.0: x * special.expit(alpha * x),
    "ThresholdedRelu": lambda x, alpha=1.0: np.where(x > alpha, x, 0),
    "Shrink": lambda x, bias=0.0, lambd=0.5: np.where(np.abs(x) > lambd, x - np.copysign(bias, x), 0),
    "Gelu": lambda x, approximate="none": _gelu(x, approximate == "tanh"),
}
"""The formula of each activation, with its attributes."""

MICROSOFT: dict[str, Callable[..., Array]] = {
    "Gelu": lambda x: _gelu(x, False),
    "BiasGelu": lambda x, bias: _gelu(x + bias, False),
    "FastGelu": lambda x, bias=None: _gelu(x if bias is None else x + bias, True),
}
"""Those of ONNX Runtime."""

TEMPORARIES = 4
"""The most arrays of the result's size that a formula has at a time, with the result."""


def _gelu(x: Array, is_tanh: bool) -> Array:
    if is_tanh:
        part: Array = special.expit(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))
    else:
        part = special.ndtr(x)
    return x * part


@maker(*FORMULAS)
def _formula(node: Node) -> Function:
    return partial(evaluate, partial(FORMULAS[node.op], **node.attributes))


@maker(*MICROSOFT, domain="com.microsoft")
def _formula_of_onnx_runtime(node: Node) -> Function:
    return partial(evaluate, partial(MICROSOFT[node.op], **node.attributes))


def evaluate(formula: Callable[..., Array], *arrays: Array) -> Array:
    """Return formula(*arrays), which broadcasts, in the dtype of the first. Raises `DtypeMismatch`."""

    def fill(*wide: Array, out: Array) -> None:
        out[...] = formula(*wide)

    return apply(fill, *arrays, temporaries=TEMPORARIES)


@maker("Div")
def _divide(node: Node) -> Function:
    return partial(apply, divide)


@maker("Pow")
def _power(node: Node) -> Function:
    def power(base: Array, exponent: Array) -> Array:
        if base.dtype.kind in "iu" and exponent.dtype.kind not in "iu":
            return _converted(power(base.astype(np.float64), exponent), base.dtype)
        if exponent.size == 1 and base.ndim >= exponent.ndim:
            number = exponent.item()
            return apply(lambda x, out: np.power(x, number, out=out, dtype=out.dtype), base)
        return apply(np.power, base, exponent.astype(base.dtype))

    return power


@maker("Mod")
def _mod(node: Node) -> Function:
    return partial(apply, np.fmod if node.attributes.get("fmod") else np.mod)


@maker("BitShift")
def _shift(node: Node) -> Function:
    return partial(apply, np.left_shift if node.attributes["direction"] == "LEFT" else np.right_shift)


@maker("IsInf")
def _is_inf(node: Node) -> Function:
    positive, negative = node.attributes.get("detect_positive", 1), node.attributes.get("detect_negative", 1)

    def test(x: Array, out: Array) -> None:
        np.isinf(x, out=out)
        out &= (x > 0) if not negative else (x < 0) if not positive else True
        out &= bool(positive or negative)

    return partial(apply, test, dtype=BOOL, temporaries=2)


@maker("Clip")
def _clip(node: Node) -> Function:
    def clip(x: Array, low: Array | None = None, high: Array | None = None) -> Array:
        bounds = [(np.maximum, low), (np.minimum, high)]
        return reduce(
            lambda result, pair: apply(pair[0], result, pair[1]) if pair[1] is not None else result, bounds, x
        )

    return clip


@maker("Where")
def _where(node: Node) -> Function:
    def where(condition: Array, x: Array, y: Array) -> Array:
        if x.dtype != y.dtype:
            raise DtypeMismatch(f"X is {x.dtype} and Y is {y.dtype}, but they must share a dtype")
        out = spare_memory(np.broadcast(condition, x, y).shape, x.dtype)
        out[...] = y
        np.copyto(out, x, where=condition)
        return out

    return where


@maker("Cast")
def _cast(node: Node) -> Function:
    return partial(_converted, dtype=dtype_of(node.attributes["to"]))


@maker("CastLike")
def _cast_like(node: Node) -> Function:
    return lambda x, like: _converted(x, dtype=like.dtype)


def _converted(x: Array, dtype: DType) -> Array:
    return x if x.dtype == dtype else narrowed(x, dtype)


@maker("Identity")
def _identity(node: Node) -> Function:
    return lambda x: x


@maker("Dropout", random=True)
def _dropout(node: Node) -> Function:
    def dropout(
        x: Array, ratio: Array | None = None, training: Array | None = None, *, generator: np.random.Generator
    ) -> tuple[Array, Array]:
        rate = 0.5 if ratio is None else float(ratio.item())
        if training is None or not training.item() or rate == 0:
            claim(x.size)
            return x, np.ones(x.shape, BOOL)
        if not 0 <= rate < 1:
            raise InvalidTensor(f"ratio is {rate}, but must be in [0, 1)")
        claim(5 * x.size)
        mask: Array = np.asarray(generator.random(x.shape, np.float32) >= rate)
        return apply(
            lambda x, out: np.multiply(x * mask, x.dtype.type(1 / (1 - rate)), out=out), x, temporaries=1
        ), mask

    return dropout
