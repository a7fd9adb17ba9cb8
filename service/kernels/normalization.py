"""Gradients of layer normalization, in its three forms.

Let N be the product of the dimensions before `axis`, and M that of the others: each of the N rows is normalized over
its M numbers. `scale` and `bias` have the M dimensions. A row's statistics have the N dimensions, each other one being
1, or are flat [N]. The inverse of the standard deviation has epsilon in it, so `epsilon`, like `stash_type`, which
nodes of real graphs carry, changes nothing.

The tensors are of up to three dtypes. The arithmetic is in float64 if one of them is, else in float32. Sums of
more than 1024 rows are in float64, and outputs are rounded once. M = 1 and empty tensors are right. NaN makes its row
of X_grad and its column of scale_grad NaN. Source of the semantics: ONNX Runtime 1.19.2's CPU training kernels.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from service.dtypes import Array
from service.kernels._op import op
from service.kernels._row_gradients import Gradients, Rows
from service.kernels._types import Rank2, T, U, V

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
