"""Questions to torch.nn.GRU, in the terms of GRUTraining and GRUGrad: its linear_before_reset is 1.

No sequence is empty, which PyTorch refuses. Every number is a multiple of 1/64, which float32 and float64 both hold: an
answer in float64 is one for both.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from service.dtypes import Array
from tests.golden.store import Case
from tests.golden.values import generator

LENGTHS = (None, [2, 4, 1])  # of 5 steps: none takes the last
LONG = [28] * 9 + [27, 26, 25, 24, 17, 16, 15, 1]
"""Many sequences, which end together or one after the other."""


def ask() -> Iterator[Case]:
    """All questions of this module."""
    directions = ("forward", "bidirectional")
    for direction, bias, start, lengths in itertools.product(directions, (True, False), (True, False), LENGTHS):
        yield _case((5, 3, 2, 4), direction, lengths, bias=bias, start=start)
    for direction, long in itertools.product(directions, (None, LONG)):
        yield _case((28, 17, 3, 5), direction, long, bias=True, start=True, sample=31)


def _case(
    sizes: tuple[int, int, int, int],
    direction: str,
    lengths: list[int] | None,
    *,
    bias: bool,
    start: bool,
    sample: int = 1,
) -> Case:
    S, N, I, H = sizes  # noqa: E741
    D = 2 if direction == "bidirectional" else 1
    name = f"{sizes} {direction} B {bias} H0 {start} SL {lengths if S < 10 else lengths is not None}"
    random = generator("torch", name)

    def coarse(*shape: int) -> Array:
        return random.integers(-64, 65, shape) / 64

    inputs = {"X": coarse(S, N, I), "W": coarse(D, 3 * H, I), "R": coarse(D, 3 * H, H)}
    inputs |= {"B": coarse(D, 6 * H)} if bias else {}
    inputs |= {"SL": np.array(lengths)} if lengths else {}
    inputs |= {"H0": coarse(D, N, H)} if start else {}
    gradients = [f"d{name}" for name in inputs if name != "SL"]
    inputs |= {"grad_HAll": coarse(S, D, N, H), "grad_Ht": coarse(D, N, H)}
    asked = ("HAll", "HFinal", *gradients)
    return Case("GRU", name, inputs, asked, {"direction": direction, "linear_before_reset": 1}, sample=sample)
