"""Layer and group normalization, and their gradients.

In layer normalization, let N be the product of the dimensions before `axis`, and M that of the others: each of the N
rows is normalized over its M numbers. `scale` and `bias` have the M dimensions. A row's statistics have the N
dimensions, each other one being 1, or are flat [N]. The inverse of the standard deviation has epsilon in it, so
`epsilon`, like `stash_type`, which nodes of real graphs carry, changes nothing in a gradient.

The tensors are of up to three dtypes. The arithmetic is in float64 if one of them is, else in float32. Sums of
more than 1024 rows are in float64, and outputs are rounded once. M = 1 and empty tensors are right. NaN makes its row
of X_grad and its column of scale_grad NaN. Source of the semantics: ONNX Runtime 1.19.2's CPU training kernels.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np

from service.dtypes import FLOAT64, Array, cast, compute_dtype
from service.errors import ShapeMismatch
from service.kernels._blocks import claim, new_output, row_major, share_out
from service.kernels._checks import check_shape, normalize_axis
from service.kernels._narrow import load, room_for, store, widen_tensor
from service.kernels._op import op
from service.kernels._row_gradients import BLOCK_ELEMENTS, Gradients, Rows
from service.kernels._types import Rank2, T, U, V

FAMILY = "Normalization"

_SAMPLE = {"Y_grad": [[1.0, -1.0], [2.0, 0.5]], "scale": [1.0, 2.0]}
_FORWARD, _INVERSE = [[1.0, 2.0], [4.0, 2.0]], [[2.0], [1.0]]


@op(
    "LayerNormalizationGrad",
    outputs="X_grad scale_grad bias_grad",
    example={**_SAMPLE, "X": _FORWARD, "mean": [[1.5], [3.0]], "inv_std_dev": _INVERSE},
)
def layer_normalization_grad(
    Y_grad: Rank2[V],
    X: Rank2[T],
    scale: V,
    mean: Rank2[U],
    inv_std_dev: Rank2[U],
    /,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
    wanted: Collection[str] = ("X_grad", "scale_grad", "bias_grad"),
) -> tuple[Rank2[T], V, V]:
    """X_grad = i * (b - mean(b) - x * mean(b * x)), where b = Y_grad * scale, i = inv_std_dev, x = (X - mean) * i.

    The means are over the dimensions from `axis` on. scale_grad = sum(Y_grad * x) and bias_grad = sum(Y_grad) are
    sums over those before it. X_grad has the shape and dtype of X; the others have those of scale. Only the
    requested outputs are computed. Raises `AxisOutOfRange` and `ShapeMismatch`.
    """
    rows = Rows.of("X", X, Y_grad, axis, {"scale": scale}, {"mean": mean, "inv_std_dev": inv_std_dev})

    def subtract_mean(X: Array, part: slice, columns: slice, out: Array) -> Array:
        return np.subtract(X, rows.row_values(mean, part), out=out)

    return Gradients(rows, subtract_mean, scale, inv_std_dev, wanted).all()


@op(
    "SimplifiedLayerNormalizationGrad",
    outputs="X_grad scale_grad",
    example={**_SAMPLE, "X": _FORWARD, "inv_std_var": _INVERSE},
)
def simplified_layer_normalization_grad(
    Y_grad: Rank2[V],
    X: Rank2[T],
    scale: V,
    inv_std_var: Rank2[U],
    /,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
    wanted: Collection[str] = ("X_grad", "scale_grad"),
) -> tuple[Rank2[T], V]:
    """X_grad = inv_std_var * (b - x * mean(b * x)), where b = Y_grad * scale, x = X * inv_std_var: that of RMSNorm.

    The mean is over the dimensions from `axis` on. scale_grad = sum(Y_grad * x) is a sum over those before it. X_grad
    has the shape and dtype of X, and scale_grad those of scale. Only the requested outputs are computed. Raises
    `AxisOutOfRange` and `ShapeMismatch`.
    """
    rows = Rows.of("X", X, Y_grad, axis, {"scale": scale}, {"inv_std_var": inv_std_var})
    return Gradients(rows, lambda X, *_: X, scale, inv_std_var, wanted, centered=False).all()[:2]


@op(
    "InvertibleLayerNormalizationGrad",
    outputs="X_grad scale_grad bias_grad",
    example={**_SAMPLE, "Y": [[-1.0, 2.0], [1.0, -2.0]], "bias": [0.0, 0.0], "inv_std_var": _INVERSE},
)
def invertible_layer_normalization_grad(
    Y_grad: Rank2[V],
    Y: Rank2[V],
    scale: V,
    bias: V,
    inv_std_var: Rank2[U],
    /,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
    wanted: Collection[str] = ("X_grad", "scale_grad", "bias_grad"),
) -> tuple[Rank2[V], V, V]:
    """X_grad = inv_std_var * (b - mean(b) - x * mean(b * x)), where b = Y_grad * scale, x = (Y - bias) / scale.

    Y is the forward output. The rest is as in LayerNormalizationGrad; X_grad has the shape and dtype of Y. x is less
    exact than from X, as Y is rounded. Where an element of scale is 0, x is lost: all of X_grad and that element of
    scale_grad are NaN. Raises `AxisOutOfRange` and `ShapeMismatch`.
    """
    rows = Rows.of("Y", Y, Y_grad, axis, {"scale": scale, "bias": bias}, {"inv_std_var": inv_std_var})

    def invert(Y: Array, part: slice, columns: slice, out: Array) -> Array:
        np.subtract(Y, rows.column_values(bias, columns), out=out)
        return np.divide(out, rows.column_values(scale, columns), out=out)

    return Gradients(rows, invert, scale, inv_std_var, wanted, normalized=True).all()


def layer_normalization(
    X: Array,
    scale: Array,
    bias: Array | None = None,
    /,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
    centered: bool = True,
) -> tuple[Array, ...]:
    """Return Y = (X - mean) * inv_std_dev * scale + bias, the mean, and inv_std_dev = 1 / sqrt(variance + epsilon).

    The statistics are over the dimensions from `axis` on, to which `scale` and `bias` are broadcast. Y has the shape
    and dtype of X. The others have the dimensions before `axis`, each other one being 1, and the dtype of the
    arithmetic. Unless `centered`, the mean is 0 and not returned: RMSNorm. Raises `AxisOutOfRange`, and `ValueError`
    for a scale or bias that cannot be broadcast.
    """
    axis, dtype = normalize_axis(axis, X.ndim, "X"), compute_dtype(X.dtype)
    N, M, columns = math.prod(X.shape[:axis]), math.prod(X.shape[axis:]), X.shape[axis:]
    factor = np.broadcast_to(scale, columns).reshape(M).astype(dtype)
    offset = None if bias is None else np.broadcast_to(bias, columns).reshape(M).astype(dtype)
    Y: Array = new_output(None, X.shape, X.dtype)
    claim(2 * N * dtype.itemsize)
    means, inverses = np.zeros((2, N, 1), dtype)
    rows, target = row_major(X).reshape(N, M), Y.reshape(N, M)
    height = max(1, BLOCK_ELEMENTS // max(1, M))

    def normalize(number: int) -> None:
        part = slice(number * height, (number + 1) * height)
        x, out = load(rows[part], dtype, 0), room_for(target[part], dtype, 1)
        if centered:
            np.mean(x, axis=1, keepdims=True, out=means[part])
            x = np.subtract(x, means[part], out=out)
        inverses[part, 0] = 1 / np.sqrt(np.vecdot(x, x) / M + epsilon)
        np.multiply(x, inverses[part], out=out)
        np.multiply(out, factor, out=out)
        if offset is not None:
            np.add(out, offset, out=out)
        store(out, target[part], (0, 2))

    share_out(normalize, -(-N // height) if M else 0)
    kept = (*X.shape[:axis], *[1] * (X.ndim - axis))
    return (Y, *([means.reshape(kept)] if centered else []), inverses.reshape(kept))


def group_normalization(
    X: Array, scale: Array, bias: Array, /, *, num_groups: int | None = None, epsilon: float = 1e-5
) -> tuple[Array, ...]:
    """Return Y = (X - mean) * inv_std_dev * scale + bias, the mean, and inv_std_dev, of each group of channels.

    X is [N, C, ...]; `scale` and `bias` are [C] or [num_groups]. Y has the shape and dtype of X, and the others are
    [N * num_groups, 1], in the dtype of the arithmetic. By default each channel is a group: InstanceNormalization.
    Raises `ShapeMismatch`.
    """
    channels = X.shape[1] if X.ndim > 1 else 0
    groups = num_groups or channels
    if not channels or channels % groups:
        problem = f"X has shape {list(X.shape)}, but axis 1 must have channels, in {num_groups or 'any'} groups"
        raise ShapeMismatch(problem, tensor="X")
    check_shape("scale", scale, groups if scale.size == groups else channels)
    check_shape("bias", bias, *scale.shape)
    x, pixels = widen_tensor(X), math.prod(X.shape[2:])
    rows = x.reshape(len(X) * groups, channels // groups * pixels)
    Y, *statistics = layer_normalization(rows, np.ones(1, x.dtype), epsilon=epsilon)
    target = Y.reshape(len(X), channels, pixels)
    np.multiply(target, _over_channels(scale, target), out=target)
    np.add(target, _over_channels(bias, target), out=target)
    return Y.reshape(X.shape).astype(X.dtype, copy=False), *statistics


def group_normalization_grad(
    dY: Array, X: Array, scale: Array, mean: Array, inverse: Array, /
) -> tuple[Array, Array, Array]:
    """Return the gradients of X, scale and bias in `group_normalization`, from that of Y, and what it returned."""
    shape = *X.shape[:2], math.prod(X.shape[2:])
    given, x = widen_tensor(dY).reshape(shape), widen_tensor(X).reshape(len(mean), X.size // max(1, len(mean)))
    claim(3 * x.nbytes)
    ones, scaled = np.ones(x.shape[1], x.dtype), (given * _over_channels(scale, given)).reshape(x.shape)
    dX, *_ = layer_normalization_grad(scaled, x, ones, mean, inverse, wanted=("X_grad",))
    products = given * ((x - mean) * inverse).reshape(shape)
    sums = (one.sum(axis=(0, 2), dtype=FLOAT64).reshape(len(scale), -1).sum(axis=1) for one in (products, given))
    dscale, dbias = (cast(one, scale.dtype) for one in sums)
    return dX.reshape(X.shape).astype(X.dtype, copy=False), dscale, dbias


def _over_channels(tensor: Array, images: Array) -> Array:
    """Return a column for [N, C, S], from a number for each channel or group."""
    return np.repeat(tensor.astype(images.dtype), images.shape[1] // tensor.size)[:, None]
