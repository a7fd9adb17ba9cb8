"""Questions to LSTMTraining and LSTMGrad: of ONNX Runtime, the forward direction at full length, which is all it takes.

S, N and I are never 0, and dW and dR are always asked for: else it ends the process. It is not asked with NaN and B,
where it swallows the NaN, nor for gradients with peepholes, which it leaves out.

torch.nn.LSTM, which has no peepholes, is asked in the terms of both operators. No sequence is empty, which PyTorch
refuses. Every number is a multiple of 1/64, which float32 and float64 both hold: an answer in float64 is one for both.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from service.dtypes import Array
from tests.golden.questions.gru import LENGTHS, LONG, PEER_SIZE, SIZES
from tests.golden.store import Case, draw
from tests.golden.values import generator

STATES = ("HAll", "HFinal", "CFinal", "CAll", "iofc")
GRADIENTS = ("dX", "dW", "dR", "dB", "dH0", "dC0", "dP")


def ask() -> Iterator[Case]:
    flags = (True, False)
    for sizes in SIZES:
        for bias, start, peepholes in itertools.product(flags, flags, flags) if sizes == SIZES[2] else [(True,) * 3]:
            yield _forward(sizes, bias=bias, start=start, peepholes=peepholes)
        yield _backward(sizes, start=sizes != SIZES[1], grads=7)
    for grads in range(7):
        yield _backward(SIZES[2], start=True, grads=grads, sample=3)
    for steps in (4, 32):
        yield from _drawn(steps)
    for direction, bias, lengths in itertools.product(("forward", "bidirectional"), flags, LENGTHS):
        yield _of_torch((5, 3, 2, 4), direction, lengths, bias=bias, start=bias)
    for direction, long in itertools.product(("forward", "bidirectional"), (None, LONG)):
        yield _of_torch((28, 17, 3, 5), direction, long, bias=True, start=True, sample=127)


def tolerance(case: Case, output: str) -> Mapping[str, Any]:
    """How far the kernel may be from the answer."""
    if case.operator == "LSTMTraining":
        # ONNX Runtime's gates are rational approximations, off by up to 5e-7, which a cell collects from step to step.
        return {"rtol": 0.0, "atol": 4e-6}
    # The sums run in another order, and those over all steps and sequences may cancel: their error is that of the
    # largest. The tanh of a cell, which is off by 5e-7, goes into every gradient.
    largest = np.abs(case.outputs[output]).max() if output in ("dW", "dR", "dB", "dP") else 0.0
    return {"rtol": 4e-6, "atol": 4e-6 * max(1.0, largest)}


def _inputs(name: str, sizes: tuple[int, ...], *, start: bool) -> tuple[dict[str, Array], Any]:
    """X, W, R and the starts of a case, and a function that draws more of its numbers."""
    S, N, I, H = sizes  # noqa: E741
    rng = generator("lstm", name)

    def normal(*shape: int) -> Array:
        return np.round(rng.standard_normal(shape, dtype=np.float32) * 64) / 64  # files compress these well

    scale = np.float32(2.0 ** -np.round(np.log2(H) / 2))  # near the root of H
    inputs = {"X": normal(S, N, I), "W": normal(1, 4 * H, I) * scale, "R": normal(1, 4 * H, H) * scale}
    return inputs | ({name: normal(1, N, H) for name in ("Ht0", "Ct0")} if start else {}), normal


def _forward(sizes: tuple[int, ...], *, bias: bool, start: bool, peepholes: bool) -> Case:
    H = sizes[-1]
    name = f"{sizes} B {bias} start {start} P {peepholes}"
    inputs, normal = _inputs(name, sizes, start=start)
    inputs |= {"B": normal(1, 8 * H)} if bias else {}
    inputs |= {"P": normal(1, 3 * H)} if peepholes else {}
    return Case("LSTMTraining", name, inputs, STATES, {"hidden_size": H})


def _backward(sizes: tuple[int, ...], *, start: bool, grads: int, sample: int = 1) -> Case:
    S, N, _, H = sizes
    name = f"{sizes} start {start} gradients {grads}"
    inputs, normal = _inputs(name, sizes, start=start)
    inputs |= {"HAll": normal(S, 1, N, H), "CAll": normal(S, 1, N, H)}
    inputs["iofc"] = abs(normal(S, 1, N, 4 * H)) % 1
    shapes = {"dHAll": (S, 1, N, H), "dHFinal": (1, N, H), "dCFinal": (1, N, H)}
    inputs |= {name: normal(*shape) for bit, (name, shape) in enumerate(shapes.items()) if grads >> bit & 1}
    return Case("LSTMGrad", name, inputs, GRADIENTS, {"hidden_size": H}, sample=sample)


def _drawn(S: int) -> Iterator[Case]:
    """All is uniform in [0, 1), gates and states too, as in ONNX Runtime's tests of the GRU."""
    N = I = H = PEER_SIZE  # noqa: E741
    name = f"drawn {S} steps"
    shapes: dict[str, tuple[int, ...]] = {"X": (S, N, I), "W": (1, 4 * H, I), "R": (1, 4 * H, H)}
    starts, history = {"Ht0": (1, N, H), "Ct0": (1, N, H)}, (S, 1, N, H)
    more: dict[str, tuple[int, ...]] = {"B": (1, 8 * H), **starts, "P": (1, 3 * H)}
    given: dict[str, tuple[int, ...]] = {
        **starts,
        "HAll": history,
        "CAll": history,
        "iofc": (S, 1, N, 4 * H),
        "dHAll": history,
    }
    given |= {"dHFinal": (1, N, H), "dCFinal": (1, N, H)}
    for operator, others, asked in (("LSTMTraining", more, STATES), ("LSTMGrad", given, GRADIENTS)):
        yield Case(operator, name, draw(name, shapes | others), asked, {"hidden_size": H}, sample=31, drawn=True)


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
    name = f"{sizes} {direction} B {bias} start {start} SL {lengths if S < 10 else lengths is not None}"
    random = generator("torch lstm", name)

    def coarse(*shape: int) -> Array:
        return random.integers(-64, 65, shape) / 64

    inputs = {"X": coarse(S, N, I), "W": coarse(D, 4 * H, I), "R": coarse(D, 4 * H, H)}
    inputs |= {"B": coarse(D, 8 * H)} if bias else {}
    inputs |= {"SL": np.array(lengths)} if lengths else {}
    inputs |= {name: coarse(D, N, H) for name in ("Ht0", "Ct0")} if start else {}
    inputs |= {"dHAll": coarse(S, D, N, H), "dHFinal": coarse(D, N, H), "dCFinal": coarse(D, N, H)}
    gradients = ("dX", "dW", "dR", *(["dB"] if bias else []), *(["dH0", "dC0"] if start else []))
    asked = ("HAll", "HFinal", "CFinal", *gradients)
    return Case("LSTM", name, inputs, asked, {"direction": direction}, sample=sample, source="torch")
