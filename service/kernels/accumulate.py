"""Accumulation of gradients: the arithmetic of a buffer, without the buffer.

The results are new arrays; the inputs stay unchanged. Source of the semantics: the CPU training kernels of ONNX Runtime
1.19.2. Those kernels reinterpret the bytes of another dtype, write out of bounds or return the wrong shape. These
kernels convert and check the gradient, and the result has the buffer's shape.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from service.dtypes import BFLOAT16, BOOL, FLOAT16, FLOAT64, Array, DType, cast, compute_dtype
from service.errors import InvalidTensor, ShapeMismatch
from service.kernels._blocks import block_length, new_output, scratch, share_out
from service.kernels._narrow import narrow, widen
from service.kernels._op import op
from service.kernels._types import T_GRAD, AnyTensor, Flag, T

FAMILY = "Accumulation of gradients"

_BUFFER = {"gradient_buffer": [[1.0, 2.0], [3.0, 4.0]], "gradient": [0.5, -0.5]}


@op("InPlaceAccumulator", outputs="accumulated_gradient", example={**_BUFFER, "do_update": True})
def in_place_accumulator(
    gradient_buffer: T, gradient: T_GRAD, do_update: Flag | None = None, /, *, out: T | None = None
) -> T:
    """accumulated_gradient = gradient_buffer + gradient; gradient_buffer where do_update is false.

    `gradient` broadcasts into the buffer's shape, and its dtype may differ. The result has the buffer's shape and
    dtype. Buffers of float16 and bfloat16 are added in float32 and rounded once. Only the first element of `do_update`
    counts; it is true if left out. If it is false, `gradient` may have any shape. Raises `ShapeMismatch`, and
    `InvalidTensor` for an empty `do_update`.
    """
    if _flag("do_update", do_update, default=True):
        return _assign(add, gradient_buffer, gradient, out)
    return _assign(_keep, gradient_buffer, gradient_buffer, out)


@op("InPlaceAccumulatorV2", outputs="updated accumulated_gradient", example={**_BUFFER, "overwrite": False})
def in_place_accumulator_v2(
    gradient_buffer: T, gradient: T_GRAD, overwrite: Flag | None = None, /, *, out: T | None = None
) -> tuple[Flag, T]:
    """accumulated_gradient = gradient_buffer + gradient; gradient where overwrite is true. updated = [true].

    `gradient` broadcasts into the buffer's shape, and its dtype may differ. The result has the buffer's shape and
    dtype, also when overwriting. Buffers of float16 and bfloat16 are added in float32 and rounded once. Only the first
    element of `overwrite` counts; it is false if left out. Raises `ShapeMismatch`, and `InvalidTensor` for an empty
    `overwrite`.
    """
    rule = replace if _flag("overwrite", overwrite, default=False) else add
    return np.ones(1, BOOL), _assign(rule, gradient_buffer, gradient, out)


@op("ZeroGradient", outputs="zero_gradient", example={"old_gradient": [[1.0, 2.0], [3.0, 4.0]], "reset_signal": True})
def zero_gradient(old_gradient: T, reset_signal: AnyTensor, /, *, out: T | None = None) -> T:
    """zero_gradient = zeros of old_gradient's shape and dtype.

    All zeros are +0. `reset_signal` may be any tensor, and is ignored, as in ONNX Runtime.
    """
    return _assign(_clear, old_gradient, old_gradient, out)


def _flag(name: str, flag: Array | None, *, default: bool) -> bool:
    if flag is None:
        return default
    if not flag.size:
        raise InvalidTensor(f"{name} is empty, but must hold true or false", tensor=name)
    return bool(flag.flat[0])


def add(result: Array, total: Array | int, gradient: Array, weight: float = 1.0) -> None:
    """result = total + weight * gradient, for arrays of one shape, rounded once.

    The sum has `compute_dtype` of the result's dtype. For a `weight` other than 1 the product is rounded to it, too.
    """
    # NumPy converts in small pieces: the sum is rounded once, and a whole converted copy never exists.
    dtype = compute_dtype(result.dtype)
    if gradient.dtype == FLOAT16:
        gradient = widen(gradient, 0)
    if weight != 1:
        gradient = np.multiply(gradient, dtype.type(weight), dtype=dtype, casting="unsafe")
    if result.dtype == FLOAT16:
        total = widen(total, 1) if isinstance(total, np.ndarray) else total
        wide = scratch(2, result.size, dtype).reshape(result.shape)
        narrow(np.add(total, gradient, out=wide, dtype=dtype, casting="unsafe"), result, (0, 1))
    else:
        np.add(total, gradient, out=result, dtype=dtype, casting="unsafe")


def replace(result: Array, total: Array | int, gradient: Array, weight: float = 1.0) -> None:
    """result = weight * gradient, computed and rounded as in `add`."""
    if weight == 1:
        rounded = cast(gradient, result.dtype) if (gradient.dtype, result.dtype) == (FLOAT64, BFLOAT16) else gradient
        np.copyto(result, rounded, casting="unsafe")
    else:
        dtype = compute_dtype(result.dtype)
        np.multiply(gradient, dtype.type(weight), out=result, dtype=dtype, casting="unsafe")


def converted(total: Array, dtype: DType, weight: float = 1.0) -> Array:
    """Return total / weight as `dtype`, computed in the wider of the two dtypes, at least float32, and rounded once.

    If the weight is beyond that dtype's range, the division is in float64.
    """
    if weight == 1:
        return total if total.dtype == dtype else cast(total, dtype)
    wide = np.promote_types(compute_dtype(total.dtype), compute_dtype(dtype))
    if not np.finfo(wide).tiny <= abs(weight) <= np.finfo(wide).max:
        wide = FLOAT64
    if wide == FLOAT64 and dtype == BFLOAT16:
        return cast(np.divide(total, weight, dtype=wide), dtype)
    result = np.empty(total.shape, dtype)
    np.divide(total, wide.type(weight), out=result, dtype=wide, casting="unsafe")
    return result


def _keep(result: Array, buffer: Array, gradient: Array) -> None:
    result[...] = buffer


def _clear(result: Array, buffer: Array, gradient: Array) -> None:
    result[...] = 0


def _assign(rule: Callable[[Array, Array, Array], None], buffer: T, gradient: Array, out: T | None) -> T:
    """Apply `rule(result, buffer, gradient)` in blocks, with `gradient` broadcast to the shape of the buffer."""
    try:
        gradient = np.broadcast_to(gradient, buffer.shape)
    except ValueError:
        raise ShapeMismatch(
            f"gradient has shape {list(gradient.shape)}, which does not broadcast into the shape of gradient_buffer,"
            f" {list(buffer.shape)}",
            tensor="gradient",
        ) from None
    result = new_output(out, buffer.shape, buffer.dtype)
    tensors: list[Array] = [result, *(t.copy() if np.may_share_memory(t, result) else t for t in (buffer, gradient))]
    if all(tensor.flags.c_contiguous for tensor in tensors):
        tensors = [tensor.reshape(-1) for tensor in tensors]
    tensors = [np.atleast_1d(tensor) for tensor in tensors]
    rows, length = len(tensors[0]), block_length(buffer.dtype)
    step = _rows_in_block(tensors[0], length)

    def compute(number: int) -> None:
        _apply(rule, [tensor[number * step : (number + 1) * step] for tensor in tensors], length)

    share_out(compute, -(-rows // step))
    return result


def _rows_in_block(tensor: Array, length: int) -> int:
    return max(1, length * len(tensor) // max(1, tensor.size))


def _apply(rule: Callable[..., None], tensors: list[Array], length: int) -> None:
    """Apply the rule to blocks of at most `length` elements: it may convert them in scratch."""
    if tensors[0].size <= length:
        rule(*tensors)
    elif len(tensors[0]) == 1:
        _apply(rule, [tensor[0] for tensor in tensors], length)
    else:
        step = _rows_in_block(tensors[0], length)
        for start in range(0, len(tensors[0]), step):
            _apply(rule, [tensor[start : start + step] for tensor in tensors], length)
