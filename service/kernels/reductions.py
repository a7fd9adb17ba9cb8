"""Sums along axes, and the gradient of a division, which needs them where an operand was broadcast.

Floating numbers are added in float64 and rounded once; integers wrap around. Source of the semantics: the CPU training
kernels of ONNX Runtime 1.19.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from service.dtypes import FLOAT64, INT64, Array, cast, compute_dtype
from service.errors import ShapeMismatch
from service.kernels._blocks import block_length, claim, new_output, share_out, spare_memory
from service.kernels._checks import normalize_axis
from service.kernels._op import op
from service.kernels._types import Bit, Number, Rank2, T, Tind

FAMILY = "Arithmetic and sums"

MIN_WIDTH = 1024
"""The fewest columns of a part, unless there are fewer: short pieces of distant rows are slow to read."""

Part = tuple[slice, ...]


def _largest_output(data: Array, axes: Array, **_: object) -> int:
    """The elements of the output if data is empty: few bytes may ask for many zeros."""
    return 0 if data.size else math.prod(filter(None, data.shape))


@op(
    "ReduceSumTraining",
    outputs="reduced",
    example={"data": [[1.0, 2.0], [3.0, 4.0]], "axes": [0]},
    multiply_adds=_largest_output,
)
def reduce_sum_training(
    data: Rank2[Number], axes: Tind, /, *, keepdims: Bit = 1, noop_with_empty_axes: Bit = 0
) -> Rank2[Number]:
    """reduced = sum(data), along `axes`.

    `axes` [K] may be negative, and one may occur twice. Without any, the sum is along all axes; with
    `noop_with_empty_axes`, reduced is then data. `keepdims` keeps the summed dimensions, as 1. A sum of nothing is 0.
    Raises `ShapeMismatch`, and `AxisOutOfRange`, also for each axis of a scalar.
    """
    if axes.ndim != 1:
        raise ShapeMismatch(f"axes has shape {list(axes.shape)}, but must have one dimension", tensor="axes")
    for axis in (axes.min(), axes.max()) if axes.size else ():
        normalize_axis(int(axis), data.ndim, "axes", "data")
    claim(axes.nbytes)
    summed = {axis % data.ndim for axis in (axes if axes.size <= data.ndim else np.unique(axes)).tolist()}
    if not axes.size and not noop_with_empty_axes:
        summed = {*range(data.ndim)}
    kept = [1 if axis in summed else size for axis, size in enumerate(data.shape)]
    shape = kept if keepdims else [size for axis, size in enumerate(data.shape) if axis not in summed]
    reduced: Number = new_output(None, tuple(shape), data.dtype)
    _sum(data, summed, reduced)
    return reduced


@op(
    "DivGrad",
    outputs="dA dB",
    example={"dY": [[1.0, 2.0], [3.0, 4.0]], "A": [[2.0, -1.0], [4.0, 8.0]], "B": [2.0, 4.0]},
)
def div_grad(dY: Rank2[T], A: Rank2[T], B: T, /, *, wanted: Collection[str] = ("dA", "dB")) -> tuple[Rank2[T], T]:
    """dA = dY / B; dB = -(dY / B) * (A / B); each summed along the axes that broadcast A, or B.

    `dY` has the shape of A / B. dA has the shape of A, and dB that of B. In this order nothing over- or underflows on
    the way, as B * B would. float16 and bfloat16 are computed in float32 and rounded once. Only the requested outputs
    are computed. Raises `ShapeMismatch`.
    """
    try:
        shape = np.broadcast_shapes(A.shape, B.shape)
    except ValueError:
        problem = f"A has shape {list(A.shape)} and B {list(B.shape)}, but they must broadcast"
        raise ShapeMismatch(problem, tensor="B") from None
    if dY.shape != shape:
        problem = f"dY has shape {list(dY.shape)}, but must have that of A / B, {list(shape)}"
        raise ShapeMismatch(problem, tensor="dY")
    shape = shape or (1,)  # a part of a scalar is a number, to which nothing can be written
    dtype = compute_dtype(dY.dtype)
    quotient = spare_memory(shape, dtype)
    upper, top, bottom = (np.broadcast_to(tensor, shape) for tensor in (dY, A, B))

    def divide(part: Part) -> None:
        np.divide(upper[part], bottom[part], out=quotient[part], dtype=dtype, casting="unsafe")

    def multiply(part: Part) -> None:
        ratio = np.divide(top[part], bottom[part], dtype=dtype, casting="unsafe")
        np.multiply(quotient[part], np.negative(ratio, out=ratio), out=quotient[part])

    steps = _steps(shape, block_length(dtype), range(len(shape)))
    _in_parts(divide, shape, steps)
    dA = _summed_like(A, quotient) if "dA" in wanted else None
    if "dB" not in wanted:
        return dA, None  # type: ignore[return-value]
    _in_parts(multiply, shape, steps)
    return dA, _summed_like(B, quotient)  # type: ignore[return-value]


def _summed_like(tensor: Array, terms: Array) -> Array:
    """Return the sum of `terms` along the axes that broadcast `tensor` to their shape."""
    total: Array = new_output(None, tensor.shape, tensor.dtype)
    lead = terms.ndim - tensor.ndim
    _sum(terms, {k for k, size in enumerate(terms.shape) if k < lead or tensor.shape[k - lead] != size}, total)
    return total


def _sum(data: Array, summed: Collection[int], out: Array) -> None:
    """out = the sum of `data` along the axes `summed`; `out` has the other dimensions, and may have some more of 1.

    Where parts share a place in the output, their sums are added in order afterwards.
    """
    if not data.size:
        out[...] = 0
        return
    shape, axes = tuple(1 if axis in summed else size for axis, size in enumerate(data.shape)), tuple(summed)
    steps = _steps(data.shape, block_length(FLOAT64), sorted(range(data.ndim), key=summed.__contains__))
    counts = [-(-size // step) for size, step in zip(data.shape, steps, strict=True)]
    copies = math.prod(count for axis, count in enumerate(counts) if axis in summed)
    dtype, target = INT64 if out.dtype.kind == "i" else FLOAT64, out.reshape(shape)
    totals = spare_memory((copies, *shape), dtype) if copies > 1 else None

    def add(part: Part) -> None:
        total = np.add.reduce(data[part], axis=axes, dtype=dtype, keepdims=True)
        place = tuple(slice(None) if axis in summed else one for axis, one in enumerate(part))
        if totals is None:
            target[place] = cast(total, out.dtype)
        else:
            starts = [one.start // steps[axis] for axis, one in enumerate(part) if axis in summed]
            copy = np.ravel_multi_index(starts, [counts[axis] for axis in sorted(summed)])
            totals[copy][place] = total

    _in_parts(add, data.shape, steps)
    if totals is not None:
        claim(out.size * dtype.itemsize)
        with np.errstate(all="ignore"):
            target[...] = cast(np.add.reduce(totals, axis=0), out.dtype)


def _steps(shape: tuple[int, ...], length: int, axes: Iterable[int]) -> list[int]:
    """Return the sizes of parts of at most about `length` elements: cut the first of the axes first."""
    steps, size = [max(1, size) for size in shape], math.prod(shape)
    for axis in axes:
        if size > length:
            narrowest = min(shape[axis], MIN_WIDTH if axis == len(shape) - 1 else 1)
            inner = size // shape[axis]
            steps[axis] = max(narrowest, length // inner)
            size = inner * steps[axis]
    return steps


def _in_parts(work: Callable[[Part], object], shape: tuple[int, ...], steps: Sequence[int]) -> None:
    """Call `work` with all parts of a tensor, which threads share."""
    counts = [-(-size // step) for size, step in zip(shape, steps, strict=True)]

    def on_part(number: int) -> None:
        places = np.unravel_index(number, counts) if number else (np.intp(0),) * len(counts)
        work(tuple(slice(int(k) * step, (int(k) + 1) * step) for k, step in zip(places, steps, strict=True)))

    share_out(on_part, math.prod(counts))
