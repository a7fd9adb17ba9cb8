"""Conv and ConvTranspose, and their gradients, with any number of spatial axes.

float16 and bfloat16 are computed in float32 and rounded once. Source of the semantics: ONNX's Conv and
ConvTranspose, and ConvGrad of ONNX Runtime 1.19.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from service.dtypes import FLOAT64, Array
from service.kernels._checks import check_shape
from service.kernels._convolution import (
    Shape,
    conv_gradients,
    conv_transpose_gradients,
    conv_transpose_windows,
    conv_windows,
    work_of,
)
from service.kernels._correlation import MATRIX_BYTES
from service.kernels._narrow import compute_wide, widen_tensor
from service.kernels._op import check_work, op
from service.kernels._types import NotNegative, Positive, Rank4, T
from service.kernels._windows import AutoPad, Windows

FAMILY = "Convolution, pooling and resizing"

_Gradients = Callable[[Windows, Array, Array, Array, Array | None, Array | None], None]

_SMALL = [[[[1.0, 2.0], [3.0, 4.0]]]]
_LARGE = [[[[1.0, 0.0, 2.0], [0.0, 1.0, 0.5], [1.0, 1.0, 0.0]]]]
_KERNEL = [[[[1.0, 0.0], [0.5, -1.0]]]]


@op(
    "ConvGrad",
    outputs="dX dW dB",
    example={"dY": _SMALL, "X": _LARGE, "W": _KERNEL},
    multiply_adds=lambda dY, X, W, **_: work_of(X.shape, dY.shape, W.shape),
)
def conv_grad(
    dY: Rank4[T],
    X: Rank4[T],
    W: Rank4[T],
    /,
    *,
    kernel_shape: list[Positive] | None = None,
    strides: list[Positive] | None = None,
    pads: list[NotNegative] | None = None,
    dilations: list[Positive] | None = None,
    group: Positive = 1,
    auto_pad: AutoPad = "NOTSET",
    wanted: Collection[str] = ("dX", "dW", "dB"),
) -> tuple[Rank4[T], Rank4[T], T]:
    """dX, dW and dB are the gradients of X, W and B in Y = Conv(X, W, B), from that of Y.

    dY [N, M, out...], X [N, C, in...], W [M, C / group, k...] -> dX, dW, of the shapes of X and W, and dB [M], for any
    number of spatial axes. `strides` and `dilations` have a number for each of them, 1 by default. `pads` has those
    before each axis, then those after, 0 by default. `kernel_shape` is that of W.
    out = floor((in + pads - (k - 1) * dilation - 1) / stride) + 1. `auto_pad` may set the pads, as in ONNX's Conv:
    SAME_UPPER and SAME_LOWER give out = ceil(in / stride). Without images or channels, the gradients are zeros. The
    padding is zeros, so NaN and infinities may reach more elements of dX and dW than they touch. Only the requested
    outputs are computed. Raises `ShapeMismatch`, `InvalidParameter`, and `TensorTooLarge` for work of more than about a
    minute.
    """
    attributes = {"strides": strides, "pads": pads, "dilations": dilations}
    windows = conv_windows(X, W, group, kernel_shape, auto_pad=auto_pad, **attributes)
    check_shape("dY", dY, X.shape[0], W.shape[0], *windows.counts)
    return _run(dY, X, W, windows, group, wanted, conv_gradients)


@op(
    "ConvTransposeGrad",
    outputs="dX dW dB",
    example={"dY": _LARGE, "X": _SMALL, "W": _KERNEL},
    multiply_adds=lambda dY, X, W, **_: work_of(dY.shape, X.shape, W.shape),
)
def conv_transpose_grad(
    dY: Rank4[T],
    X: Rank4[T],
    W: Rank4[T],
    /,
    *,
    kernel_shape: list[Positive] | None = None,
    strides: list[Positive] | None = None,
    pads: list[NotNegative] | None = None,
    dilations: list[Positive] | None = None,
    group: Positive = 1,
    auto_pad: AutoPad = "NOTSET",
    output_padding: list[NotNegative] | None = None,
    output_shape: list[Positive] | None = None,
    wanted: Collection[str] = ("dX", "dW", "dB"),
) -> tuple[Rank4[T], Rank4[T], T]:
    """dX, dW and dB are the gradients of X, W and B in Y = ConvTranspose(X, W, B), from that of Y.

    dY [N, M, out...], X [N, C, in...], W [C, M / group, k...] -> dX, dW, of the shapes of X and W, and dB [M].
    out = (in - 1) * stride + output_padding + (k - 1) * dilation + 1 - pads, with the attributes of ConvGrad.
    `output_padding` is 0 by default. `output_shape`, if given, is out; SAME_UPPER and SAME_LOWER give at most
    out = in * stride. Both set the pads. ONNX Runtime has no such kernel. Zeros, NaN and `wanted` are as in ConvGrad.
    Raises `ShapeMismatch`, `InvalidParameter`, and `TensorTooLarge` for work of more than about a minute.
    """
    attributes = {"strides": strides, "pads": pads, "dilations": dilations}
    attributes |= {"output_padding": output_padding, "output_shape": output_shape}
    windows = conv_transpose_windows(X, W, group, kernel_shape, auto_pad=auto_pad, **attributes)
    check_shape("dY", dY, X.shape[0], W.shape[1] * group, *windows.sizes)
    return _run(dY, X, W, windows, group, wanted, conv_transpose_gradients)


def conv(
    X: Array, W: Array, B: Array | None = None, /, *, group: int = 1, kernel_shape: Any = None, **attributes: Any
) -> Array:
    """Return Y = Conv(X, W, B), as ONNX defines it: each pixel of Y sees a window of X.

    X [N, C, in...], W [M, C / group, k...], B [M] -> Y [N, M, out...], with the attributes of ConvGrad. Raises
    `ShapeMismatch`, `InvalidParameter` and `TensorTooLarge`.
    """
    windows = conv_windows(X, W, group, kernel_shape, **attributes)
    shape = len(X), W.shape[0], *windows.counts
    check_work("Conv", work_of(X.shape, shape, W.shape))
    return _forward(X, W, B, shape, windows, group, conv_transpose_gradients)


def conv_transpose(
    X: Array, W: Array, B: Array | None = None, /, *, group: int = 1, kernel_shape: Any = None, **attributes: Any
) -> Array:
    """Return Y = ConvTranspose(X, W, B), as ONNX defines it: each pixel of X adds to a window of Y.

    X [N, C, in...], W [C, M / group, k...], B [M] -> Y [N, M, out...], with the attributes of ConvTransposeGrad. Raises
    `ShapeMismatch`, `InvalidParameter` and `TensorTooLarge`.
    """
    windows = conv_transpose_windows(X, W, group, kernel_shape, **attributes)
    shape = len(X), W.shape[1] * group, *windows.sizes
    check_work("ConvTranspose", work_of(shape, X.shape, W.shape))
    return _forward(X, W, B, shape, windows, group, conv_gradients)


def _forward(
    X: Array, W: Array, B: Array | None, shape: Shape, windows: Windows, group: int, gradients: _Gradients
) -> Array:
    """Return Y. A convolution is the gradient of X in the other one, from that of Y."""
    check_shape("B", B, shape[1])
    given, X, W = X.dtype, widen_tensor(X), widen_tensor(W)

    def fill(memory: Mapping[str, Array]) -> None:
        Y = memory["Y"]
        _compute(gradients, windows, group, X, Y, W, Y, None)
        if B is not None:
            np.add(Y, B.astype(Y.dtype, copy=False).reshape(-1, *[1] * (Y.ndim - 2)), out=Y)

    return compute_wide({"Y": shape}, given, fill)["Y"]


def _run(
    dY: Array, X: Array, W: Array, windows: Windows, group: int, wanted: Collection[str], gradients: _Gradients
) -> Any:
    """Return dX, dW and dB, or None for those not wanted."""
    shapes = {"dX": X.shape, "dW": W.shape, "dB": dY.shape[1:2]}
    given, (dY, X, W) = X.dtype, (widen_tensor(tensor) for tensor in (dY, X, W))

    def fill(memory: Mapping[str, Array]) -> None:
        if "dB" in memory:
            memory["dB"][...] = _channel_sums(dY)
        _compute(gradients, windows, group, dY, X, W, memory.get("dX"), memory.get("dW"))

    outputs = compute_wide({name: shape for name, shape in shapes.items() if name in wanted}, given, fill)
    return tuple(map(outputs.get, shapes))


def _compute(
    gradients: _Gradients,
    windows: Windows,
    group: int,
    dY: Array,
    X: Array,
    W: Array,
    dX: Array | None,
    dW: Array | None,
) -> None:
    """Fill dX and dW, unless they are None, with zeros if a tensor is empty."""

    def images(tensor: Array | None) -> Any:
        return None if tensor is None else tensor.reshape(len(tensor), group, -1, *tensor.shape[2:])

    def kernels(tensor: Array | None) -> Any:
        return None if tensor is None else tensor.reshape(group, -1, W.shape[1], math.prod(W.shape[2:]))

    results = [one for one in (dX, dW) if one is not None]
    if not (dY.size and X.size and W.size):
        for one in results:
            one[...] = 0
    elif results:
        gradients(windows, images(dY), images(X), kernels(W), images(dX), kernels(dW))


def _channel_sums(dY: Array) -> Array:
    """Return the sums over all images and pixels, by channel."""
    totals, height = np.zeros(dY.shape[1]), max(1, (MATRIX_BYTES >> 4) // max(1, dY.shape[1]))
    for start in range(0, len(dY) if dY.size else 0, height):
        planes = dY[start : start + height].sum(axis=tuple(range(2, dY.ndim)))
        totals += planes.sum(axis=0, dtype=FLOAT64)
    return totals
