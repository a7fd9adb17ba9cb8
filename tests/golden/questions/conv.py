"""Questions to ConvGrad and ConvTransposeGrad.

dY always has the right shape: ONNX Runtime does not check it. PyTorch answers for SAME_*, which ONNX Runtime's gradient
ignores, for float64, which it lacks, and for ConvTransposeGrad.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from service.errors import InvalidParameter, ShapeMismatch
from tests.golden.store import Case
from tests.golden.values import FLOAT16_ULP, generator

REASONS = {"refused-attribute": InvalidParameter, "refused-shape": ShapeMismatch}

# N, C, M, group, in, k, strides, dilations, pads
CALLS: dict[str, tuple[int, int, int, int, list[int], list[int], list[int], list[int], list[int]]] = {
    "1-D": (2, 3, 4, 1, [9], [3], [1], [1], [0, 0]),
    "1-D-strided": (2, 4, 6, 2, [11], [3], [2], [2], [2, 1]),
    "2-D": (2, 3, 4, 1, [6, 5], [3, 2], [1, 1], [1, 1], [1, 0, 1, 0]),
    "2-D-pads": (1, 2, 3, 1, [5, 6], [3, 3], [1, 1], [1, 1], [2, 0, 1, 3]),
    "2-D-strided": (2, 2, 3, 1, [7, 8], [3, 3], [2, 3], [1, 1], [1, 1, 1, 1]),
    "2-D-dilated": (2, 2, 3, 1, [8, 7], [3, 2], [1, 1], [2, 3], [1, 0, 2, 1]),
    "2-D-strided-dilated": (1, 2, 2, 1, [9, 9], [3, 3], [2, 3], [3, 2], [2, 2, 2, 2]),
    "2-D-gaps": (2, 2, 2, 1, [8, 7], [2, 1], [3, 3], [1, 1], [0, 0, 0, 0]),
    "2-D-groups": (2, 6, 4, 2, [5, 5], [3, 3], [1, 1], [1, 1], [1, 1, 1, 1]),
    "2-D-depthwise": (2, 4, 4, 4, [6, 6], [3, 3], [1, 1], [1, 1], [1, 1, 1, 1]),
    "2-D-depthwise-wider": (1, 3, 6, 3, [6, 6], [3, 3], [2, 2], [1, 1], [1, 1, 1, 1]),
    "2-D-few-channels": (2, 1, 9, 1, [7, 8], [3, 5], [2, 1], [1, 1], [1, 2, 1, 2]),
    "2-D-1x1": (3, 4, 3, 1, [4, 5], [1, 1], [1, 1], [1, 1], [0, 0, 0, 0]),
    "2-D-one-window": (3, 2, 3, 1, [3, 4], [3, 4], [1, 1], [1, 1], [0, 0, 0, 0]),
    "3-D": (1, 2, 3, 1, [4, 5, 3], [2, 3, 2], [1, 2, 1], [1, 1, 2], [0, 1, 1, 1, 0, 1]),
}


def ask() -> Iterator[Case]:
    """All questions of this module."""
    for name in CALLS:
        yield _conv(name, name)
    for name in ("1-D-strided", "2-D-strided-dilated", "2-D-groups", "3-D"):
        yield _conv(f"{name}-float64", name, dtype="float64", source="torch")
    yield _conv("float16", "2-D-groups", dtype="float16")
    yield _conv("no-attributes", "1-D", attributes={})
    yield _conv("valid", "2-D-strided", attributes={"strides": [2, 3], "auto_pad": "VALID"})
    yield from _same()
    yield from _refused()
    yield from _transposed()


def tolerance(case: Case, output: str) -> Mapping[str, Any]:
    """How far the kernel may be from the answer: sums in another order, relative to the largest."""
    dtype = case.inputs["X"].dtype
    largest = float(np.abs(case.outputs[output].astype(np.float64)).max(initial=0))
    if dtype == np.float16:
        return {"rtol": FLOAT16_ULP, "atol": 1e-6 * largest}
    return {"atol": {np.float64: 1e-14, np.float32: 1e-6}[dtype.type] * largest}


def _drawn(name: str, shapes: Mapping[str, Sequence[int]], dtype: str) -> dict[str, np.ndarray[Any, Any]]:
    random = generator("conv", name)
    return {tensor: random.normal(size=shape).astype(dtype) for tensor, shape in shapes.items()}


def _counts(sizes: Sequence[int], spans: Sequence[int], strides: Sequence[int], pads: Sequence[int]) -> list[int]:
    begins, ends = pads[: len(sizes)], pads[len(sizes) :]
    axes = zip(sizes, spans, strides, begins, ends, strict=True)
    return [(size + begin + end - span) // stride + 1 for size, span, stride, begin, end in axes]


def _conv(
    name: str,
    call: str,
    *,
    dtype: str = "float32",
    attributes: Mapping[str, Any] | None = None,
    counts: Sequence[int] | None = None,
    source: str = "onnxruntime",
) -> Case:
    N, C, M, group, sizes, kernel, strides, dilations, pads = CALLS[call]
    if attributes is None:
        attributes = {"strides": strides, "dilations": dilations, "pads": pads, "group": group, "kernel_shape": kernel}
    strides, pads = attributes.get("strides", [1] * len(sizes)), attributes.get("pads", [0] * 2 * len(sizes))
    dilations = attributes.get("dilations", [1] * len(sizes))
    spans = [(k - 1) * dilation + 1 for k, dilation in zip(kernel, dilations, strict=True)]
    counts = counts or _counts(sizes, spans, strides, pads)
    shapes = {"dY": (N, M, *counts), "X": (N, C, *sizes), "W": (M, C // group, *kernel)}
    return Case("ConvGrad", name, _drawn(name, shapes, dtype), ("dX", "dW", "dB"), attributes, source=source)


def _same() -> Iterator[Case]:
    for auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        for call, strides in {"1-D": [2], "2-D": [1, 1], "2-D-gaps": [3, 3], "2-D-few-channels": [2, 1]}.items():
            sizes = CALLS[call][4]
            counts = [-(-size // stride) for size, stride in zip(sizes, strides, strict=True)]
            attributes = {"strides": strides, "auto_pad": auto_pad}
            yield _conv(f"{auto_pad}-{call}", call, attributes=attributes, counts=counts, source="torch")


def _refused() -> Iterator[Case]:
    shapes = {"dY": (1, 2, 3, 3), "X": (1, 2, 3, 3), "W": (2, 2, 1, 1)}
    for name, changed, attributes in (
        ("shape-channels", {"X": (1, 3, 3, 3)}, {}),
        ("shape-rank-of-W", {"W": (2, 2, 1)}, {}),
        ("attribute-group", {"W": (2, 1, 1, 1), "X": (1, 3, 3, 3)}, {"group": 3}),
        ("attribute-kernel_shape", {}, {"kernel_shape": [3, 3]}),
        ("attribute-strides", {}, {"strides": [0, 1]}),
        ("attribute-strides-negative", {}, {"strides": [-1, 1]}),
    ):
        inputs = _drawn(name, {**shapes, **changed}, "float32")
        yield Case("ConvGrad", f"refused-{name}", inputs, ("dX", "dW", "dB"), attributes)


def _transposed() -> Iterator[Case]:
    for name in ("1-D-strided", "2-D-pads", "2-D-strided-dilated", "2-D-gaps", "2-D-groups", "2-D-1x1", "3-D"):
        N, C, M, group, sizes, kernel, strides, dilations, pads = CALLS[name]
        extra = [min(1, stride - 1) for stride in strides]
        spans = [(k - 1) * dilation + 1 for k, dilation in zip(kernel, dilations, strict=True)]
        rank = len(sizes)
        axes = zip(sizes, strides, spans, extra, pads[:rank], pads[rank:], strict=True)
        out = [(size - 1) * stride + span + more - b - e for size, stride, span, more, b, e in axes]
        shapes = {"dY": (N, M, *out), "X": (N, C, *sizes), "W": (C, M // group, *kernel)}
        attributes = {"strides": strides, "dilations": dilations, "pads": pads, "group": group}
        attributes["output_padding"] = extra
        dtype = "float32" if name in ("2-D-pads", "2-D-1x1") else "float64"
        inputs = _drawn(name, shapes, dtype)
        yield Case("ConvTransposeGrad", f"{name}-{dtype}", inputs, ("dX", "dW", "dB"), attributes, source="torch")
