"""What Conv, ConvTranspose and their gradients share: their checks, and how the pixels of a tensor see another.

The windows of a convolution with strides see the pixels in phases: each tap sees every stride-th pixel, from one of the
first on. Within a phase the taps are shifted by whole windows, as in a convolution without strides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from service.dtypes import Array
from service.errors import InvalidParameter, ShapeMismatch
from service.kernels._blocks import claim, row_major, spare_memory
from service.kernels._checks import check_shape
from service.kernels._correlation import MATRIX_BYTES, Correlation, Tap
from service.kernels._windows import Phase, Windows, find_phases, make_windows, numbers, padded

COPY_MULTIPLY_ADDS = 10
"""Multiplications and additions of a product that take as long as to copy a number."""

CALL_MULTIPLY_ADDS = 1 << 16
"""Multiplications and additions of a product that take as long as NumPy's calls for a tap of a tile."""

Shape = tuple[int, ...]


def work_of(seen: Shape, partner: Shape, W: Shape) -> int:
    """Return the work of the products, copies and calls for windows over `seen`, for each pixel of `partner` one.

    All are shapes, which nobody has checked yet.
    """
    if not (math.prod(seen) and math.prod(partner) and math.prod(W)) or min(map(len, (seen, partner, W))) < 2:
        return 0
    taps, windows = math.prod(W[2:]), math.prod(partner) // partner[1]
    products, copied = math.prod(partner) * W[1] * taps, windows * seen[1] * taps
    calls = taps * (1 + (products + copied) // (MATRIX_BYTES >> 3))
    return 2 * products + 6 * COPY_MULTIPLY_ADDS * copied + CALL_MULTIPLY_ADDS * calls


def conv_windows(X: Array, W: Array, group: int, kernel_shape: list[int] | None, **attributes: Any) -> Windows:
    """Return the windows over X of Conv, for each pixel of Y one. The attributes are those of `make_windows`.

    Raises `ShapeMismatch` and `InvalidParameter`.
    """
    windows = make_windows(X.shape[2:], _kernel(X, W, kernel_shape), **attributes)
    windows.check_fit("X")
    _check_group("W", W.shape[0], group)
    check_shape("X", X, X.shape[0], W.shape[1] * group, *X.shape[2:])
    return windows


def conv_transpose_windows(
    X: Array,
    W: Array,
    group: int,
    kernel_shape: list[int] | None,
    *,
    auto_pad: str = "NOTSET",
    output_padding: list[int] | None = None,
    output_shape: list[int] | None = None,
    **attributes: Any,
) -> Windows:
    """Return the windows over Y of ConvTranspose, for each pixel of X one. Raises as `conv_windows`."""
    windows = make_windows(X.shape[2:], _kernel(X, W, kernel_shape), **attributes)
    windows = _transposed(windows, auto_pad, output_padding, output_shape)
    _check_group("X", X.shape[1], group)
    check_shape("X", X, X.shape[0], W.shape[0], *X.shape[2:])
    return windows


def _kernel(X: Array, W: Array, kernel_shape: list[int] | None) -> Sequence[int]:
    if X.ndim < 2:
        raise ShapeMismatch(f"X has shape {list(X.shape)}, but must have 2 dimensions or more", tensor="X")
    if W.ndim != X.ndim:
        problem = f"W has shape {list(W.shape)}, but must have as many dimensions as X, {X.ndim}"
        raise ShapeMismatch(problem, tensor="W")
    if kernel_shape is not None and tuple(kernel_shape) != W.shape[2:]:
        problem = f"kernel_shape is {kernel_shape[:8]}, but must be {list(W.shape[2:])}, as W says, or left out"
        raise InvalidParameter(problem, parameter="kernel_shape")
    if 0 in W.shape[2:]:
        raise ShapeMismatch(f"W has shape {list(W.shape)}, but its kernel must have elements", tensor="W")
    return W.shape[2:]


def _check_group(tensor: str, channels: int, group: int) -> None:
    if channels % group:
        problem = f"group is {group}, but must divide the {channels} channels of {tensor}"
        raise InvalidParameter(problem, parameter="group")


def _transposed(
    windows: Windows, auto_pad: str, output_padding: list[int] | None, output_shape: list[int] | None
) -> Windows:
    """Return the windows over Y of ConvTranspose, for each pixel of X one, from windows with the sizes of X."""
    rank = len(windows.sizes)
    extra = numbers("output_padding", rank, output_padding, default=0, least=0)
    terms = zip(windows.sizes, windows.strides, windows.spans, extra, strict=True)
    whole = [(size - 1) * stride + span + more for size, stride, span, more in terms]
    if auto_pad != "NOTSET":
        windows = replace(windows, begins=(0,) * rank, ends=(0,) * rank)
    if output_shape is not None:
        sizes = list(numbers("output_shape", rank, output_shape))
    elif auto_pad.startswith("SAME"):
        axes = zip(whole, windows.sizes, windows.strides, strict=True)
        sizes = [min(most, size * stride) for most, size, stride in axes]
    else:
        sizes = [size - b - e for size, b, e in zip(whole, windows.begins, windows.ends, strict=True)]
    if any(size > most for size, most in zip(sizes, whole, strict=True)):
        raise InvalidParameter(f"output_shape is {sizes}, but must be at most {whole}", parameter="output_shape")
    if output_shape is not None or auto_pad.startswith("SAME"):
        windows = padded(windows, [most - size for most, size in zip(whole, sizes, strict=True)], auto_pad)
    if min(sizes, default=0) < 0:
        raise InvalidParameter(f"pads leave an output of shape {sizes}", parameter="pads")
    return replace(windows, sizes=tuple(sizes))


def conv_gradients(windows: Windows, dY: Array, X: Array, W: Array, dX: Array | None, dW: Array | None) -> None:
    """Let the pixels of dY see X, or those of X see dY, whichever takes less time.

    dY, X and dX are [N, G, channels, pixels...], and W and dW are [G, channels, channels, taps].
    """
    M, C = W.shape[1:3]
    phases = find_phases(windows)
    if dX is not None and len(phases) < math.prod(windows.strides):
        dX[...] = 0
    by_dY = dY.size // M * C * (3 * COPY_MULTIPLY_ADDS + M)
    by_X = X.size // C * M * (COPY_MULTIPLY_ADDS + C) // math.prod(windows.strides)
    if by_dY < by_X:
        scattered = [] if dX is None else [spare_memory(X[pixels].shape, X.dtype) for pixels, _ in phases]
        for one in scattered:
            one[...] = 0
        _see_phases(X, phases, dY, W, dW, scattered=scattered)
        for (pixels, _), one in zip(phases, scattered, strict=False):
            if dX is not None:
                dX[pixels] = one
        return
    for pixels, taps in phases:
        turned = [(number, Tap(0, tuple(-by for by in shift))) for number, shift in taps]
        result = None if dX is None else dX[pixels]
        _see([dY], turned, X[pixels], W.swapaxes(1, 2), None if dW is None else dW.swapaxes(1, 2), result=result)


def conv_transpose_gradients(
    windows: Windows, dY: Array, X: Array, W: Array, dX: Array | None, dW: Array | None
) -> None:
    """Let the pixels of X see dY. The tensors are those of `conv_gradients`."""
    _see_phases(dY, find_phases(windows), X, W, dW, result=dX)


def _see_phases(
    source: Array, phases: Sequence[Phase], partner: Array, W: Array, dW: Array | None, **gradients: Any
) -> None:
    """Let each pixel of `partner` see a window over `source`."""
    sources = [row_major(source[pixels]) for pixels, _ in phases]
    taps = [(number, Tap(place, shift)) for place, (_, taps) in enumerate(phases) for number, shift in taps]
    _see(sources, taps, partner, W, dW, **gradients)


def _see(
    sources: Sequence[Array],
    taps: Sequence[tuple[int, Tap]],
    partner: Array,
    W: Array,
    dW: Array | None,
    **gradients: Any,
) -> None:
    """Correlate `sources` and `partner`, whose channels are the third and the second axis of W."""
    numbers = [number for number, _ in taps]
    order: Any = numbers if numbers != [*range(W.shape[3])] else slice(None)
    if not partner.size:
        if dW is not None:
            dW[..., order] = 0
        return
    claim(W.nbytes)
    weight = W[..., order].swapaxes(2, 3).reshape(*W.shape[:2], -1)
    correlation = Correlation(sources, partner, [tap for _, tap in taps])
    sums = correlation.run(weight, wants_sums=dW is not None, **gradients)
    if sums is not None and dW is not None:
        dW[..., order] = sums.transpose(0, 3, 2, 1)
