"""Questions to GRUTraining and GRUGrad: the forward direction at full length, which is all that ONNX Runtime takes.

S, N and I are never 0, and dW and dR are always asked for: else it ends the process. It is not asked with NaN and B,
where it swallows the NaN. The weights are small enough for gradients not to grow from step to step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from tests.golden.store import Array, Case
from tests.golden.values import generator

SIZES = [(1, 1, 1, 1), (2, 2, 2, 3), (5, 3, 4, 8), (7, 3, 9, 17), (3, 18, 5, 6)]
"""S, N, I, H."""
PEER_SIZES = [(2, 32, 32, 32), (4, 32, 32, 32)]


def ask() -> Iterator[Case]:
    for sizes, linear_before_reset, bias, start in itertools.product(SIZES, (0, 1), (True, False), (True, False)):
        yield from _pair(f"{sizes}", sizes, linear_before_reset, bias=bias, start=start, grads=3)
    for grads in (0, 1, 2):
        for linear_before_reset in (0, 1):
            yield from _pair(f"grads {grads}", (5, 3, 4, 8), linear_before_reset, bias=True, start=True, grads=grads)
    for sizes, linear_before_reset in itertools.product(PEER_SIZES, (0, 1)):
        yield from _pair(f"peer {sizes}", sizes, linear_before_reset, bias=True, start=True, grads=3, sample=13)


def _pair(
    title: str,
    sizes: tuple[int, int, int, int],
    linear_before_reset: int,
    *,
    bias: bool,
    start: bool,
    grads: int,
    sample: int = 1,
) -> Iterator[Case]:
    S, N, I, H = sizes  # noqa: E741
    name = f"{title} lbr {linear_before_reset} B {bias} H0 {start}".replace("/", " ")
    rng = generator("gru", name)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape, dtype=np.float32)

    scale = np.float32(1 / np.sqrt(H))
    inputs = {"X": normal(S, N, I), "W": normal(1, 3 * H, I) * scale, "R": normal(1, 3 * H, H) * scale}
    inputs |= {"B": normal(1, 6 * H)} if bias else {}
    inputs |= {"H0": normal(1, N, H)} if start else {}
    attributes = {"hidden_size": H, "linear_before_reset": linear_before_reset}
    yield Case("GRUTraining", name, inputs, ("HAll", "HFinal", "ZRH"), attributes, sample=sample)
    given = {"HAll": normal(S, 1, N, H), "ZRH": rng.random((S, 1, N, 3 * H), dtype=np.float32)}
    given |= {"grad_HAll": normal(S, 1, N, H)} if grads & 1 else {}
    given |= {"grad_Ht": normal(1, N, H)} if grads & 2 else {}
    outputs = ("dX", "dW", "dR", "dB", "dH0")
    yield Case("GRUGrad", name, {**inputs, **given}, outputs, attributes, sample=sample)
