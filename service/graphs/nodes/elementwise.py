"""Element-wise operators on universal functions of NumPy and SciPy. 16-bit floats are computed in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import numpy as np

from service.dtypes import BFLOAT16, BOOL, FLOAT16, Array, DType, cast
from service.errors import DtypeMismatch, InvalidTensor
from service.graphs.nodes.table import Function, dtype_of, function_of, maker
from service.graphs.plan import Node
from service.kernels import claim, share_out, spare_memory

WIDE = {FLOAT16: np.dtype(np.float32), BFLOAT16: np.dtype(np.float32)}
"""The dtype of the arithmetic, where it is another one."""

BLOCK_LENGTH = 1 << 16
"""Elements of a block: with its temporaries, it fits into a cache."""

SHARE = 4
"""Blocks that a thread computes at a time: to start a helper for fewer takes as long."""


def _named(table: str) -> dict[str, Any]:
    return {op: getattr(np, name) for op, name in (pair.split(":") for pair in table.split())}


UFUNCS: dict[str, Any] = {
    **_named("Add:add Sub:subtract Mul:multiply Abs:abs Neg:negative Exp:exp Log:log Sqrt:sqrt Sign:sign Floor:floor"),
    **_named("Ceil:ceil Round:rint Reciprocal:reciprocal Sin:sin Cos:cos Tan:tan Asin:arcsin Acos:arccos Atan:arctan"),
    **_named("Sinh:sinh Cosh:cosh Tanh:tanh Asinh:arcsinh Acosh:arccosh Atanh:arctanh BitwiseNot:invert"),
    **_named("BitwiseAnd:bitwise_and BitwiseOr:bitwise_or BitwiseXor:bitwise_xor"),
    "Relu": partial(np.maximum, 0),
}
"""The universal function of each operator whose result has the dtype of its inputs, which is one."""

TESTS: dict[str, Any] = {
    **_named("Equal:equal Less:less LessOrEqual:less_equal Greater:greater GreaterOrEqual:greater_equal IsNaN:isnan"),
    **_named("And:logical_and Or:logical_or Xor:logical_xor Not:logical_not"),
}
"""The universal function of each operator whose result is bool."""

FOLDS: dict[str, Any] = {"Sum": np.add, "Max": np.maximum, "Min": np.minimum, "Mean": np.add}
"""The universal function of each operator that takes any number of inputs."""


def apply(function: Callable[..., Any], *arrays: Array, dtype: DType | None = None) -> Array:
    """Return function(*arrays, out=...), which broadcasts, and may be called with blocks of the arrays.

    `dtype` is the result's, by default that of the arrays. Raises `DtypeMismatch` unless they share one.
    """
    given = shared_dtype(*arrays)
    shape = arrays[0].shape if len(arrays) == 1 else np.broadcast(*arrays).shape
    wide, out = WIDE.get(given, given), spare_memory(shape, dtype or given)

    def compute(part: Any) -> None:
        blocks = [array[part].astype(wide, copy=False) for array in views]
        target = out[part]
        if wide == given or target.dtype != given:
            function(*blocks, out=target)
        else:
            result = np.empty(target.shape, wide)
            function(*blocks, out=result)
            target[...] = result

    if out.size <= BLOCK_LENGTH:
        views = [*arrays]
        compute(...)
        return out
    views = [array if array.shape == shape else np.broadcast_to(array, shape) for array in arrays]
    if all(view.flags.c_contiguous for view in views):
        views, out = [view.reshape(-1) for view in views], out.reshape(-1)
    parts = _parts(out.shape)

    def compute_some(number: int) -> None:
        for part in parts[SHARE * number :][:SHARE]:
            compute(part)

    share_out(compute_some, -(-len(parts) // SHARE))
    return out.reshape(shape)


def shared_dtype(*arrays: Array) -> DType:
    """Return the dtype of all arrays. Raises `DtypeMismatch`."""
    dtype = arrays[0].dtype
    if any(array.dtype != dtype for array in arrays):
        raise DtypeMismatch(f"the inputs are {', '.join(str(one.dtype) for one in arrays)}, but must share a dtype")
    return dtype


def _parts(shape: Sequence[int]) -> list[Any]:
    """Return the indices of blocks of up to `BLOCK_LENGTH` elements, which together are an array of this shape."""
    axis, inner = len(shape) - 1, 1
    while inner * shape[axis] <= BLOCK_LENGTH:
        inner *= shape[axis]
        axis -= 1
    step = BLOCK_LENGTH // inner
    pieces = [slice(start, start + step) for start in range(0, shape[axis], step)]
    return [(*place, piece) for place in np.ndindex(*shape[:axis]) for piece in pieces]


def converted(array: Array, dtype: DType) -> Array:
    """Return the numbers as this dtype, rounded once."""
    if array.dtype == dtype:
        return array
    claim(array.size * dtype.itemsize)
    return cast(array, dtype)


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


SIMPLE: dict[str, Function] = {
    **{op: partial(apply, function) for op, function in UFUNCS.items()},
    **{op: partial(apply, function, dtype=BOOL) for op, function in TESTS.items()},
    "Div": partial(apply, divide),
    "Mod": lambda a, b, *, fmod=0: apply(np.fmod if fmod else np.mod, a, b),
    "BitShift": lambda x, y, *, direction: apply(np.left_shift if direction == "LEFT" else np.right_shift, x, y),
    "CastLike": lambda x, like: converted(x, like.dtype),
    "Identity": lambda x: x,
}
"""The functions that take a line."""

for _op, _function in SIMPLE.items():
    function_of(_op)(_function)


@maker("Cast")
def _cast(node: Node) -> Function:
    return partial(converted, dtype=dtype_of(node.attributes["to"]))


@maker("BitCast")
def _bit_cast(node: Node) -> Function:
    dtype = dtype_of(node.attributes["to"])

    def reinterpret(x: Array) -> Array:
        if x.itemsize != dtype.itemsize:
            raise DtypeMismatch(f"the input is {x.dtype}, but must have the {8 * dtype.itemsize} bits of {dtype}")
        return (
            apply(np.not_equal, x.view(np.uint8), np.zeros((), np.uint8), dtype=BOOL)
            if dtype == BOOL
            else x.view(dtype)
        )

    return reinterpret


@function_of("Pow")
def _power(base: Array, exponent: Array) -> Array:
    if base.dtype.kind in "iu" and exponent.dtype.kind not in "iu":
        return converted(_power(base.astype(np.float64), exponent), base.dtype)
    if exponent.size == 1 and base.ndim >= exponent.ndim:
        number = exponent.item()
        return apply(lambda x, out: np.power(x, number, out=out, dtype=out.dtype), base)
    return apply(np.power, base, exponent.astype(base.dtype))


@function_of("IsInf")
def _is_infinite(x: Array, *, detect_positive: int = 1, detect_negative: int = 1) -> Array:
    def test(x: Array, out: Array) -> None:
        np.isinf(x, out=out)
        out &= (x > 0) if not detect_negative else (x < 0) if not detect_positive else True
        out &= bool(detect_positive or detect_negative)

    return apply(test, x, dtype=BOOL)


@function_of("Clip")
def _clip(x: Array, low: Array | None = None, high: Array | None = None) -> Array:
    above = x if low is None else apply(np.maximum, x, low)
    return above if high is None else apply(np.minimum, above, high)


@function_of("Where")
def _where(condition: Array, x: Array, y: Array) -> Array:
    out = spare_memory(np.broadcast(condition, x, y).shape, shared_dtype(x, y))
    out[...] = y
    np.copyto(out, x, where=condition)
    return out


@function_of("Dropout", random=True)
def _dropout(
    x: Array, ratio: Array | None = None, training: Array | None = None, *, generator: np.random.Generator
) -> tuple[Array, Array]:
    rate = 0.5 if ratio is None else float(ratio.item())
    if training is None or not training.item() or rate == 0:
        claim(x.size)
        return x, np.ones(x.shape, BOOL)
    if not 0 <= rate < 1:
        raise InvalidTensor(f"ratio is {rate}, but must be in [0, 1)")
    claim(5 * x.size + x.nbytes)
    mask: Array = np.asarray(generator.random(x.shape, np.float32) >= rate)
    kept = mask.astype(x.dtype)
    np.multiply(kept, 1 / (1 - rate), out=kept)
    return apply(np.multiply, x, kept), mask
