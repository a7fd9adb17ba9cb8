"""GridSample, which reads an image at the places of a grid, and AffineGrid, which makes such places."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from service.dtypes import INT64, Array, compute_dtype
from service.errors import DtypeMismatch, InvalidGraph, ShapeMismatch, shown
from service.graphs.nodes.elementwise import narrowed
from service.graphs.nodes.products import matmul
from service.graphs.nodes.table import Function, maker
from service.graphs.plan import Node
from service.kernels import claim

TEMPORARIES = 8
"""Tensors of the size of the output or the grid that a run holds at a time."""


@maker("GridSample")
def _grid_sample(node: Node) -> Function:
    return partial(sample, options_of(node))


@dataclass(frozen=True)
class Options:
    """How places between and outside of pixels count. `is_linear` stands against the nearest pixel."""

    is_linear: bool
    padding: str
    align_corners: bool


def options_of(node: Node) -> Options:
    """Return the options of a node. Raises `InvalidGraph`."""
    mode, padding = node.attributes.get("mode", "linear"), node.attributes.get("padding_mode", "zeros")
    if mode not in ("linear", "bilinear", "nearest") or padding not in ("zeros", "border", "reflection"):
        raise InvalidGraph(f"mode is {mode} and padding_mode {padding}, but only linear and nearest are served")
    return Options(mode != "nearest", padding, bool(node.attributes.get("align_corners", 0)))


def sample(options: Options, X: Array, grid: Array) -> Array:
    """Return X [N, C, H, W] at the places of the grid [N, h, w, 2], as [N, C, h, w]. Raises `ShapeMismatch`."""
    image, places = prepared(X, grid)
    total = np.zeros((*X.shape[:2], places.shape[1]), image.dtype)
    for at, weight, _ in corners(options, X.shape, places):
        total += np.take_along_axis(image, at[:, None], 2) * weight[:, None]
    total = total.reshape(*X.shape[:2], *grid.shape[1:3])
    return total if total.dtype == X.dtype else narrowed(total, X.dtype)


def prepared(X: Array, grid: Array) -> tuple[Array, Array]:
    """Return the image as [N, C, H * W] and the places as [N, h * w, 2], in the dtype of the arithmetic."""
    if X.ndim != 4 or grid.ndim != 4 or grid.shape[3] != 2 or len(X) != len(grid) or 0 in X.shape:
        problem = f"X has shape {list(X.shape)} and grid {list(grid.shape)}, but these must be [N, C, H, W]"
        raise ShapeMismatch(f"{problem} of at least one pixel, and [N, h, w, 2]")
    if X.dtype != grid.dtype:
        raise DtypeMismatch(f"X is {X.dtype} and grid {grid.dtype}, but they must share a dtype")
    points, dtype = grid.shape[1] * grid.shape[2], compute_dtype(X.dtype)
    claim(TEMPORARIES * len(X) * points * (X.shape[1] + 2) * max(8, dtype.itemsize) + X.size * dtype.itemsize)
    wide = (one.astype(dtype, copy=False) for one in (X, grid))
    image, places = next(wide).reshape(*X.shape[:2], -1), next(wide).reshape(len(X), points, 2)
    return image, places


def corners(options: Options, shape: tuple[int, ...], places: Array) -> Iterator[tuple[Array, Array, list[Array]]]:
    """Yield, for each pixel around the places, its number, its weight, and the weight's slopes along x and y."""
    sizes = shape[:1:-1]
    axes = [_axis(options, size, places[..., k]) for k, size in enumerate(sizes)]
    for x, x_weight, x_slope in axes[0]:
        for y, y_weight, y_slope in axes[1]:
            yield y * sizes[0] + x, x_weight * y_weight, [x_slope * y_weight, x_weight * y_slope]


def _axis(options: Options, size: int, g: Array) -> list[tuple[Array, Array, Array]]:
    """Return the pixels on both sides of the places along an axis, their weights, and the slopes of these."""
    scale = (size - 1) / 2 if options.align_corners else size / 2
    x: Any = np.nan_to_num(g * scale + (size - 1) / 2, nan=-2.0)
    slope: Any = np.full_like(x, scale)
    if options.padding == "reflection":
        low, span = (0.0, size - 1.0) if options.align_corners else (-0.5, float(size))
        turns, rest = np.divmod(x - low, span) if span else (np.zeros_like(x), np.zeros_like(x))
        x, slope = low + np.where(turns % 2, span - rest, rest), np.where(turns % 2, -slope, slope)
    if options.padding != "zeros":
        slope = np.where((x < 0) | (x > size - 1), 0, slope)
        x = np.clip(x, 0, size - 1)
    x = np.clip(x, -2, size + 1)
    first = np.floor(x) if options.is_linear else np.rint(x)
    part = x - first if options.is_linear else np.zeros_like(x)
    pairs = (
        [(first, 1 - part, -slope), (first + 1, part, slope)] if options.is_linear else [(first, 1 - part, 0 * slope)]
    )
    seen = [((0 <= at) & (at < size), at, *rest) for at, *rest in pairs]
    return [
        (np.clip(at, 0, size - 1).astype(INT64), np.where(inside, weight, 0), np.where(inside, one, 0))
        for inside, at, weight, one in seen
    ]


@maker("AffineGrid")
def _affine_grid(node: Node) -> Function:
    return partial(affine_grid, align_corners=node.attributes.get("align_corners", 0))


def affine_grid(theta: Array, size: Array, *, align_corners: int) -> Array:
    """Return the places of the pixels of an image of this size, moved by theta, as [N, h, w, 2] or with a depth."""
    spatial = size.tolist()[2:] if size.ndim == 1 else []
    axes = len(spatial)
    if axes not in (2, 3) or min(spatial) < 0 or theta.shape != (int(size[0]), axes, axes + 1):
        problem = f"theta has shape {list(theta.shape)} and size is {shown(size.tolist())}"
        raise ShapeMismatch(f"{problem}, but these must be [N, 2, 3] and [N, C, h, w], or have one axis more")
    places = matmul(pixels(spatial, theta, align_corners), theta, transB=1)
    return places.reshape(len(theta), *spatial, axes)


def pixels(spatial: list[int], theta: Array, align_corners: int) -> Array:
    """Return the places of all pixels, from -1 to 1 along each axis, the last axis first, and 1."""
    claim(8 * (2 * len(spatial) + 2) * math.prod(spatial) + 16 * sum(spatial))
    axes = [np.linspace(-1, 1, n) if n > 1 else np.zeros(n) for n in spatial]
    if not align_corners:
        axes = [(2 * np.arange(n) + 1) / max(1, n) - 1 for n in spatial]
    grids = np.meshgrid(*axes, indexing="ij")
    return np.stack([*grids[::-1], np.ones(spatial)], axis=-1).reshape(-1, len(spatial) + 1).astype(theta.dtype)
