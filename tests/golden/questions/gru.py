"""Questions to GRUTraining and GRUGrad: of ONNX Runtime, the forward direction at full length, which is all it takes.

S, N and I are never 0, and dW and dR are always asked for: else it ends the process. It is not asked with NaN and B,
where it swallows the NaN. The weights are small enough for gradients not to grow from step to step, but in the cases of
ONNX Runtime's own tests: there they grow to 1e34, and are as exact as others.

torch.nn.GRU is asked in the terms of both operators: its linear_before_reset is 1. No sequence is empty, which PyTorch
refuses. Every number is a multiple of 1/64, which float32 and float64 both hold: an answer in float64 is one for both.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from service.dtypes import Array
from tests.golden.store import Case, draw
from tests.golden.values import generator

SIZES = [(1, 1, 1, 1), (2, 2, 2, 3), (5, 3, 4, 8), (7, 3, 9, 17), (3, 18, 5, 6)]
"""S, N, I, H."""
PEER_STEPS = [2, 4, 16, 32]
PEER_SIZE = 32
"""Sequences, inputs and hidden units alike."""
STATES = ("HAll", "HFinal", "ZRH")
GRADIENTS = ("dX", "dW", "dR", "dB", "dH0")
LENGTHS = (None, [2, 4, 1])  # of 5 steps: none takes the last
LONG = [28] * 9 + [27, 26, 25, 24, 17, 16, 15, 1]
"""Many sequences, which end together or one after the other."""


def ask() -> Iterator[Case]:
    for sizes, linear_before_reset, bias, start in itertools.product(SIZES, (0, 1), (True, False), (True, False)):
        yield from _pair(f"{sizes}", sizes, linear_before_reset, bias=bias, start=start, grads=3)
    for grads in (0, 1, 2):
        for linear_before_reset in (0, 1):
            yield from _pair(f"grads {grads}", (5, 3, 4, 8), linear_before_reset, bias=True, start=True, grads=grads)
    for linear_before_reset in (0, 1):
        yield from _pair("wide", (4, 32, 32, 32), linear_before_reset, bias=True, start=True, grads=3, sample=13)
    yield from _peer_table()
    for steps, linear_before_reset in itertools.product(PEER_STEPS, (0, 1)):
        yield from _peer_drawn(steps, linear_before_reset)
    directions = ("forward", "bidirectional")
    for direction, bias, start, lengths in itertools.product(directions, (True, False), (True, False), LENGTHS):
        yield _of_torch((5, 3, 2, 4), direction, lengths, bias=bias, start=start)
    for direction, long in itertools.product(directions, (None, LONG)):
        yield _of_torch((28, 17, 3, 5), direction, long, bias=True, start=True, sample=31)


def tolerance(case: Case, output: str) -> Mapping[str, Any]:
    """How far the kernel may be from the answer."""
    if case.operator == "GRUTraining":
        # ONNX Runtime's gates are rational approximations, off by up to 5e-7, which a state collects from step to step.
        return {"rtol": 0.0, "atol": 4e-6}
    # The sums run in another order. Those over all steps and sequences may cancel: their error is that of the largest,
    # and grows with the root of how many numbers they are of, 1024 at most, which is 4e-6 in float32.
    largest = np.abs(case.outputs[output]).max() if output in ("dW", "dR", "dB") else 0.0
    return {"rtol": 4e-6, "atol": 4e-6 * max(1.0, largest)}


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
    yield Case("GRUTraining", name, inputs, STATES, attributes, sample=sample)
    given = {"HAll": normal(S, 1, N, H), "ZRH": rng.random((S, 1, N, 3 * H), dtype=np.float32)}
    given |= {"grad_HAll": normal(S, 1, N, H)} if grads & 1 else {}
    given |= {"grad_Ht": normal(1, N, H)} if grads & 2 else {}
    yield Case("GRUGrad", name, {**inputs, **given}, GRADIENTS, attributes, sample=sample)


def _peer_table() -> Iterator[Case]:
    """GRUTest, ForwardCompute and BackwardCompute: tables of numbers, and gates that are all but closed."""

    def table(shape: tuple[int, ...], *numbers: float) -> Array:
        return np.array(numbers, np.float32).reshape(shape)

    b = (3, 4, 10, 11, 12, 13, 0.6, 0.7, 0.8, 0.9, 6, 7, 0.1, 0.2, 0.3, 0.4, 1, 2)
    r = (8, 9, 16, 17, 18, 19, 0.1, 0.2, 0.3, 0.4, 1, 2, 0.6, 0.7, 0.8, 0.9, 6, 7, 3, 4, 10, 11, 12, 13, 0.1, 0.3, 0.5)
    inputs = {
        "X": table((2, 2, 2), 1, 3, 5, 7, 2, 4, 6, 8),
        "W": table((1, 9, 2), 0.1, 0.2, 0.3, 0.4, 1, 2, 3, 4, 10, 11, 12, 13, 0.6, 0.7, 0.8, 0.9, 6, 7),
        "R": table((1, 9, 3), *r),
        "B": table((1, 18), *b),
    }
    attributes = {"hidden_size": 3}
    yield Case("GRUTraining", "peer ForwardCompute", inputs, STATES, attributes)
    h_0 = (0.00993967, 1.01322e-05, 0, 0.00301844, 5.96047e-07, 0)
    h_1 = (0.0167009, 1.43641e-05, 0, 0.00519647, 8.9407e-07, 0)
    zrh_0 = (0.990048, 0.99999, 1, 1, 1, 1, 0.998778, 0.999939, 1, 0.996982, 0.999999, 1, 1, 1, 1, 1, 1, 1)
    zrh_1 = (0.99317, 0.999996, 1, 1, 1, 1, 0.999914, 0.999998, 1, 0.997815, 1, 1, 1, 1, 1, 1, 1, 1)
    grad_0 = (0.13658696, 0.37761405, 0.5353489, 0.53866684, 0.02047455, 0.42426682)
    grad_1 = (0.12669823, 0.28094783, 0.82699543, 0.12687224, 0.4540311, 0.4124293)
    given = {
        "HAll": table((2, 1, 2, 3), *h_0, *h_1),
        "ZRH": table((2, 1, 2, 9), *zrh_0, *zrh_1),
        "grad_HAll": table((2, 1, 2, 3), *grad_0, *grad_1),
    }
    yield Case("GRUGrad", "peer BackwardCompute", {**inputs, **given}, GRADIENTS[:-1], attributes)


def _peer_drawn(S: int, linear_before_reset: int) -> Iterator[Case]:
    """test_gru_forward and test_gru_backward of the Python tests: all is uniform in [0, 1), gates and states too."""
    N = I = H = PEER_SIZE  # noqa: E741
    name = f"peer {S} steps lbr {linear_before_reset}"
    attributes = {"hidden_size": H, "linear_before_reset": linear_before_reset}
    shapes = {"X": (S, N, I), "W": (1, 3 * H, I), "R": (1, 3 * H, H), "B": (1, 6 * H), "H0": (1, N, H)}
    given = {"HAll": (S, 1, N, H), "ZRH": (S, 1, N, 3 * H), "grad_HAll": (S, 1, N, H), "grad_Ht": (1, N, H)}
    # Every 31st element of an output: all columns, of a last dimension of 32.
    yield Case("GRUTraining", name, draw(name, shapes), STATES, attributes, sample=31, drawn=True)
    yield Case("GRUGrad", name, draw(name, shapes | given), GRADIENTS, attributes, sample=31, drawn=True)


def _of_torch(
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
    return Case(
        "GRU", name, inputs, asked, {"direction": direction, "linear_before_reset": 1}, sample=sample, source="torch"
    )
