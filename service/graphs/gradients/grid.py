"""The gradients of GridSample and AffineGrid."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from service.dtypes import INT64, Array
from service.graphs.gradients.arrays import as_dtype
from service.graphs.gradients.tape import Tape, gradient_of, rule
from service.graphs.nodes.grid import Options, corners, options_of, pixels, prepared
from service.graphs.nodes.products import matmul
from service.graphs.plan import Node
from service.kernels.indexing import gather_elements_grad


@rule("GridSample")
def _grid_sample(tape: Tape, node: Node, dY: str) -> Sequence[str]:
    gradients: Sequence[str] = tape.call(partial(_gradients, options_of(node)), dY, *node.inputs, outputs=2)
    return gradients


def _gradients(options: Options, dY: Array, X: Array, grid: Array) -> tuple[Array, Array]:
    image, places = prepared(X, grid)
    dy = dY.reshape(*image.shape[:2], -1).astype(image.dtype, copy=False)
    d_image, d_places = np.zeros_like(image), np.zeros_like(places)
    for at, weight, slopes in corners(options, X.shape, places):
        numbers = np.broadcast_to(at[:, None], dy.shape)
        d_image += gather_elements_grad(dy * weight[:, None], np.array(image.shape, INT64), numbers, axis=2)
        along = (dy * np.take_along_axis(image, numbers, 2)).sum(axis=1)
        for axis, slope in enumerate(slopes):
            d_places[..., axis] += along * slope
    return as_dtype(d_image.reshape(X.shape), X.dtype), as_dtype(d_places.reshape(grid.shape), grid.dtype)


@gradient_of("AffineGrid")
def _affine_grid(dY: Array, A: Array, B: Array, *, align_corners: int = 0) -> Array:
    points = pixels(B.tolist()[2:], A, align_corners)
    return matmul(dY.reshape(len(A), len(points), A.shape[1]), points, transA=1)
