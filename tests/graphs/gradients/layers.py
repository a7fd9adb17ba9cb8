"""The questions to layers and their rules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from service.dtypes import Array
from tests.graphs.gradients.question import Question

RANDOM = np.random.default_rng(46)


def numbers(*shape: int) -> Array:
    return RANDOM.normal(size=shape)


def different(*shape: int) -> Array:
    """Different numbers that all floating dtypes have, so that each window has one greatest."""
    return (RANDOM.permutation(int(np.prod(shape))).reshape(shape) - 100) / 32


LAYERS: dict[str, Question] = {}


def layer(case: str, function: Callable[..., Any], *inputs: Array | None, **options: Any) -> None:
    """Add a question. The case begins with the operator; options that are no field of `Question` are attributes."""
    assert case not in LAYERS
    fields = {name: options.pop(name) for name in ("frozen", "opset", "outputs", "reads") if name in options}
    LAYERS[case] = Question(case.split()[0], function, inputs, options, **fields)


def convolution(case: str, rank: int, size: int, kernel: int, stride: int, pad: int, dilation: int, group: int) -> None:
    """Add a Conv and a ConvTranspose of 4 channels to 6, or 6 to 4."""
    attributes: dict[str, Any] = {"strides": [stride] * rank, "pads": [pad] * 2 * rank, "dilations": [dilation] * rank}
    options = {"stride": stride, "padding": pad, "dilation": dilation, "groups": group}
    conv, transpose = getattr(F, f"conv{rank}d"), getattr(F, f"conv_transpose{rank}d")
    W, X = numbers(6, 4 // group, *[kernel] * rank), numbers(2, 4, *[size] * rank)
    layer(f"Conv {case}", lambda *given: conv(*given, **options), X, W, numbers(6), group=group, **attributes)
    extra = [stride - 1] * rank
    layer(
        f"ConvTranspose {case}",
        lambda *given: transpose(*given, output_padding=extra, **options),
        *(numbers(2, 6, *[size // 2] * rank), W, numbers(4 // group * group)),
        **(attributes | {"group": group, "output_padding": extra}),
    )


convolution("of one axis", 1, 9, 3, 2, 1, 1, 1)
convolution("with strides", 2, 8, 3, 2, 1, 1, 1)
convolution("with dilations and groups", 2, 7, 3, 1, 2, 2, 2)
convolution("of three axes", 3, 6, 2, 2, 0, 1, 1)
layer(
    "Conv of one row",
    lambda X, W: F.conv2d(X, W, stride=2, padding=1),
    numbers(2, 4, 1, 6),
    numbers(3, 4, 3, 3),
    strides=[2, 2],
    pads=[1, 1, 1, 1],
)
layer("Conv without a bias", F.conv2d, numbers(2, 3, 5, 5), numbers(4, 3, 2, 2))
layer(
    "Conv SAME",
    lambda X, W: F.conv2d(F.pad(X, (0, 1, 0, 1)), W),
    numbers(1, 2, 4, 5),
    numbers(3, 2, 2, 2),
    auto_pad="SAME_UPPER",
)


def pools(case: str, rank: int, size: int, kernel: int, stride: int, pad: int, ceil: bool = False) -> None:
    """Add a MaxPool and an AveragePool."""
    X, options = different(1, 2, *[size] * rank), {"stride": stride, "padding": pad, "ceil_mode": ceil}
    attributes: dict[str, Any] = {"kernel_shape": [kernel] * rank, "strides": [stride] * rank, "pads": [pad] * 2 * rank}
    most, average = getattr(F, f"max_pool{rank}d"), getattr(F, f"avg_pool{rank}d")
    layer(f"MaxPool {case}", lambda X: most(X, kernel, **options), X, **attributes, ceil_mode=int(ceil))
    include = rank > 1
    layer(
        f"AveragePool {case}",
        lambda X: average(X, kernel, count_include_pad=include, **options),
        X,
        **attributes,
        ceil_mode=int(ceil),
        count_include_pad=int(include),
    )


pools("of one axis", 1, 9, 3, 2, 1)
pools("that overlaps", 2, 6, 3, 1, 1)
pools("of three axes", 3, 5, 2, 2, 0)
pools("that sticks out", 2, 6, 3, 2, 1, ceil=True)
pools("that sticks out by one", 3, 3, 2, 2, 0, ceil=True)
pools("with one window", 2, 5, 5, 1, 0)
layer(
    "MaxPool with dilations",
    lambda X: F.max_pool2d(X, 2, 1, 0, 2),
    numbers(1, 2, 5, 5),
    kernel_shape=[2, 2],
    dilations=[2, 2],
)
layer("GlobalAveragePool", lambda X: X.mean((2, 3), keepdim=True), numbers(2, 3, 4, 5))
layer("GlobalMaxPool", lambda X: X.amax((2, 3), keepdim=True), different(2, 3, 4, 5))


def norms(case: str, X: Array, p: int, **attributes: Any) -> None:
    """Add an LpPool, whose sums are products with ones."""
    options = {"stride": attributes.get("strides", 1), "dilation": attributes.get("dilations", 1)}
    kernel, channels = attributes["kernel_shape"], X.shape[1]
    ones, pads = torch.ones(channels, 1, *kernel).double(), attributes.get("pads", [0] * 6)[: len(kernel)]
    sums = getattr(F, f"conv{len(kernel)}d")

    def pool(X: Tensor) -> Tensor:
        return sums(X.abs() ** p, ones, groups=channels, padding=pads, **options) ** (1 / p)

    layer(f"LpPool {case}", pool, X, p=p, **attributes)


norms("of one axis", numbers(2, 3, 7), 2, kernel_shape=[3], strides=[2])
norms("with padding", numbers(2, 2, 5, 6), 3, kernel_shape=[3, 2], pads=[1, 0, 1, 0], strides=[1, 2])
norms("with dilations", numbers(1, 2, 6, 6), 1, kernel_shape=[2, 2], dilations=[3, 2])
norms("of three axes", numbers(1, 2, 4, 4, 4), 4, kernel_shape=[2, 2, 2])
layer(
    "LpPool that sticks out",
    lambda X: F.lp_pool2d(F.pad(X, (0, 1, 0, 1)), 2, 2, 2),
    numbers(1, 2, 5, 5),
    kernel_shape=[2, 2],
    strides=[2, 2],
    ceil_mode=1,
)
layer("GlobalLpPool", lambda X: (X.abs() ** 3).sum((2, 3), keepdim=True) ** (1 / 3), numbers(2, 3, 4, 5), p=3)


def local_response(X: Tensor, size: int, alpha: float, beta: float, bias: float) -> Tensor:
    squares = F.pad(X.square().movedim(1, -1), ((size - 1) // 2, size // 2))
    return X / (bias + alpha / size * squares.unfold(-1, size, 1).sum(-1).movedim(-1, 1)) ** beta


layer("LRN", lambda X: F.local_response_norm(X, 3, 0.5, 0.75, 2), numbers(2, 5, 3, 4), size=3, alpha=0.5, bias=2.0)
for _size, _shape in ((2, (2, 4, 3)), (9, (1, 4, 2, 2)), (1, (2, 3, 1, 2, 2))):
    _options: dict[str, Any] = {"size": _size, "alpha": 1.5, "beta": 0.5, "bias": 1.0}
    layer(f"LRN of size {_size}", partial(local_response, **_options), numbers(*_shape), **_options)


def places(*shape: int, reach: int = 90, unit: int = 64) -> Array:
    """Places that all floating dtypes have, away from the middle and the edges of pixels."""
    return (RANDOM.integers(-reach, reach, shape) + 0.5) / unit


def sampled(mode: str, padding: str, corners: int, X: Array, *out: int, **options: Any) -> None:
    """Add a GridSample at places inside and outside."""
    grid = places(len(X), *out, X.ndim - 2, **options)
    options = {"mode": mode, "padding_mode": padding, "align_corners": corners}
    names = {"linear": "bilinear", "cubic": "bicubic"}
    layer(
        f"GridSample {mode} {padding} {corners} {len(out)}",
        lambda X, grid: F.grid_sample(X, grid, names.get(mode, mode), padding, bool(corners)),
        *(X, grid),
        **options,
        opset=20,
    )


for _mode in ("nearest", "linear", "cubic"):
    for _padding in ("zeros", "border", "reflection"):
        for _corners in (0, 1):
            sampled(_mode, _padding, _corners, numbers(2, 3, 4, 5), 3, 6)
            if _mode != "cubic":
                sampled(_mode, _padding, _corners, numbers(1, 2, 3, 4, 5), 2, 3, 4)
sampled("bilinear", "reflection", 0, numbers(1, 1, 1, 3), 8, 1, unit=8)
sampled("bicubic", "reflection", 0, numbers(1, 1, 2, 3), 4, 4, unit=8)
sampled("bilinear", "reflection", 1, numbers(1, 1, 1, 3), 4, 4, unit=8)
layer(
    "GridSample of an image alone",
    lambda X, grid: F.grid_sample(X, grid, align_corners=False),
    numbers(1, 2, 4, 4),
    places(1, 3, 3, 2, reach=60),
    frozen=[1],
    opset=16,
)


def batch_norm(training: bool) -> Callable[..., Tensor]:
    return lambda X, scale, B, mean, var: F.batch_norm(X, mean, var, scale, B, training=training)


CHANNELS = numbers(3), numbers(3), numbers(3), np.abs(numbers(3)) + 0.5
layer("BatchNormalization", batch_norm(False), numbers(4, 3, 2, 2), *CHANNELS, frozen=[3, 4])
layer("BatchNormalization of opset 13", batch_norm(False), numbers(4, 3, 2, 2), *CHANNELS, frozen=[3, 4], opset=13)
layer(
    "BatchNormalization in training", batch_norm(True), numbers(4, 3, 2, 2), *CHANNELS, frozen=[3, 4], training_mode=1
)
layer("BatchNormalization of rows", batch_norm(True), numbers(4, 3), *CHANNELS, frozen=[3, 4], training_mode=1)
layer(
    "LayerNormalization",
    lambda X, scale, B: F.layer_norm(X, (5,), scale, B),
    3 * numbers(2, 4, 5) + 1,
    numbers(5),
    numbers(5),
)
layer(
    "LayerNormalization of two axes",
    lambda X, scale: F.layer_norm(X, (4, 5), scale, eps=1e-3),
    numbers(2, 4, 5),
    numbers(4, 5),
    axis=1,
    epsilon=1e-3,
)
layer(
    "LayerNormalization with one scale",
    lambda X, scale, B: F.layer_norm(X, (4, 5)) * scale + B,
    numbers(2, 4, 5),
    numbers(1),
    numbers(4, 1),
    axis=-2,
)
layer("SimplifiedLayerNormalization", lambda X, scale: F.rms_norm(X, (5,), scale, 1e-5), numbers(2, 4, 5), numbers(5))
layer(
    "RMSNormalization",
    lambda X, scale: F.rms_norm(X, (4, 5), scale, 1e-5),
    numbers(2, 4, 5),
    numbers(4, 5),
    axis=1,
    opset=23,
)
layer(
    "InstanceNormalization",
    lambda X, scale, B: F.instance_norm(X, weight=scale, bias=B),
    numbers(2, 3, 4, 5),
    numbers(3),
    numbers(3),
)
layer(
    "GroupNormalization",
    lambda X, scale, B: F.group_norm(X, 2, scale, B),
    numbers(2, 4, 3, 2),
    numbers(4),
    numbers(4),
    num_groups=2,
)
layer(
    "GroupNormalization of opset 18",
    lambda X, scale, B: F.group_norm(X, 2) * scale.repeat_interleave(2)[:, None] + B.repeat_interleave(2)[:, None],
    numbers(3, 4, 5),
    numbers(2),
    numbers(2),
    num_groups=2,
    opset=18,
)


def resized(case: str, size: tuple[int, ...], torch_mode: str, mode: str, places: str, **options: Any) -> None:
    """Add a Resize of an image, to a size, or by scales that give the size."""
    X = numbers(1, 2, 4, 6) if len(size) == 2 else numbers(1, 2, *range(3, 3 + len(size)))
    by_sizes = None, None, np.array([1, 2, *size])
    by_scales = None, np.array([1, 1, *(new / old for new, old in zip(size, X.shape[2:], strict=True))])
    more = {"align_corners": places == "align_corners"} if "nearest" not in torch_mode else {}
    more |= {"antialias": True} if "antialias" in options else {}
    layer(
        f"Resize {case}",
        lambda X, *_: F.interpolate(X, size, mode=torch_mode, **more),
        X,
        *(by_scales if options.pop("scaled", False) else by_sizes),
        frozen=[2],
        mode=mode,
        coordinate_transformation_mode=places,
        **options,
    )


resized("nearest", (8, 3), "nearest", "nearest", "asymmetric", nearest_mode="floor", scaled=True)
resized("nearest to odd sizes", (7, 4), "nearest", "nearest", "asymmetric", nearest_mode="floor")
resized("nearest and exact", (7, 9), "nearest-exact", "nearest", "half_pixel", nearest_mode="round_prefer_ceil")
resized("linear", (8, 3), "bilinear", "linear", "half_pixel", scaled=True)
resized("linear at the corners", (7, 3), "bilinear", "linear", "align_corners")
resized("linear of one axis", (5,), "linear", "linear", "pytorch_half_pixel")
resized("linear of three axes", (4, 6, 3), "trilinear", "linear", "half_pixel")
resized("cubic", (7, 3), "bicubic", "cubic", "half_pixel")
resized("cubic at the corners", (7, 9), "bicubic", "cubic", "align_corners")
smooth = {"antialias": 1, "exclude_outside": 1}
resized("linear and smooth", (3, 9), "bilinear", "linear", "half_pixel", **smooth)
resized("cubic and smooth", (3, 2), "bicubic", "cubic", "half_pixel", cubic_coeff_a=-0.5, **smooth)
layer(
    "Resize of two axes",
    lambda X, *_: F.interpolate(X, (8, 6), mode="bilinear"),
    numbers(1, 2, 4, 6),
    None,
    np.array([2.0, 1.0]),
    frozen=[2],
    mode="linear",
    axes=[2, 3],
)
