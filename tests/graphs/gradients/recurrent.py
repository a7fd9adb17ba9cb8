"""The questions to LSTM, GRU and RNN: loops over steps in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from service.dtypes import Array
from tests.graphs.gradients.question import Question

RANDOM = np.random.default_rng(7)
S, N, I, H = 4, 3, 2, 3  # noqa: E741 - ONNX's names

Given: TypeAlias = Tensor | None
DIRECTIONS = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}


def lstm(x: Tensor, h: Tensor, c: Tensor, of_h: Callable[[Tensor], Tensor], P: Given) -> tuple[Tensor, Tensor]:
    i, o, f, g = torch.chunk(x + of_h(h), 4, 1)
    to_i, to_o, to_f = [torch.zeros(1)] * 3 if P is None else P.chunk(3)
    i, f = torch.sigmoid(i + to_i * c), torch.sigmoid(f + to_f * c)
    c = f * c + i * torch.tanh(g)
    return torch.sigmoid(o + to_o * c) * torch.tanh(c), c


def gru(x: Tensor, h: Tensor, c: Tensor, of_h: Callable[[Tensor], Tensor], _: Given, *, reset: bool) -> Any:
    """With `reset`, the gate r multiplies the product with R, else the state before it."""
    xz, xr, xh = x.chunk(3, 1)
    hz, hr, hh = of_h(h).chunk(3, 1)
    z, r = torch.sigmoid(xz + hz), torch.sigmoid(xr + hr)
    candidate = torch.tanh(xh + (r * hh if reset else of_h(r * h).chunk(3, 1)[2]))
    return (1 - z) * candidate + z * h, c


def rnn(x: Tensor, h: Tensor, c: Tensor, of_h: Callable[[Tensor], Tensor], _: Given, *, f: Any = torch.tanh) -> Any:
    return f(x + of_h(h)), c


def through_time(cell: Any, direction: str, *given: Any) -> tuple[Tensor, ...]:
    """Return Y, Y_h and Y_c."""
    X, W, R, B, SL, H0, C0, P = [*given, None, None, None, None, None][:8]
    lengths = torch.full((N,), S) if SL is None else SL
    outputs, last_h, last_c = [], [], []
    for d, back in enumerate(DIRECTIONS[direction]):
        bias = torch.zeros(2 * W.shape[1]).double() if B is None else B[d]
        of_w, of_r = bias.chunk(2)
        h, c = (torch.zeros(N, H).double() if one is None else one[d] for one in (H0, C0))
        history = {}
        for t in reversed(range(S)) if back else range(S):
            states = cell(
                X[t] @ W[d].T + of_w, h, c, lambda h, d=d, b=of_r: h @ R[d].T + b, None if P is None else P[d]
            )
            runs = (t < lengths)[:, None]
            h, c = (torch.where(runs, new, old) for new, old in zip(states, (h, c), strict=True))
            history[t] = torch.where(runs, h, 0)
        outputs.append(torch.stack([history[t] for t in range(S)]))
        last_h.append(h)
        last_c.append(c)
    return torch.stack(outputs, 1), torch.stack(last_h), torch.stack(last_c)


RECURRENT: dict[str, Question] = {}


def recurrent(
    case: str,
    cell: Any,
    gates: int,
    inputs: str = "BSHCP",
    reads: tuple[int, ...] = (0, 1, 2),
    direction: str = "forward",
    **attributes: Any,
) -> None:
    """Add a question. `inputs` are the optional ones that it has: biases, lengths, states and peepholes."""
    op, D = case.split()[0], len(DIRECTIONS[direction])
    numbers: Callable[..., Array] = lambda *shape: RANDOM.normal(size=shape)  # noqa: E731
    optional = {
        "B": numbers(D, 2 * gates * H),
        "S": np.array([4, 1, 2], np.int32),
        "H": numbers(D, N, H),
        "C": numbers(D, N, H),
        "P": numbers(D, 3 * H),
    }
    given: list[Array | None] = [numbers(S, N, I), numbers(D, gates * H, I), numbers(D, gates * H, H)]
    given += [optional[one] if one in inputs else None for one in ("BSHCP" if op == "LSTM" else "BSH")]
    outputs = 3 if op == "LSTM" else 2
    reads = tuple(one for one in reads if one < outputs)

    def function(*tensors: Given) -> tuple[Tensor, ...]:
        results = through_time(cell, direction, *tensors)
        return tuple(results[k] for k in reads)

    more = {"direction": direction, "hidden_size": H}
    RECURRENT[case] = Question(op, function, tuple(given), attributes | more, reads=reads, outputs=outputs)


for _direction in DIRECTIONS:
    recurrent(f"LSTM {_direction}", lstm, 4, direction=_direction)
    recurrent(f"GRU {_direction}", partial(gru, reset=False), 3, direction=_direction)
    recurrent(f"RNN {_direction}", rnn, 1, direction=_direction)
recurrent("LSTM of the last state", lstm, 4, "B", (1,))
recurrent("LSTM of all states", lstm, 4, "", (0,), "bidirectional")
recurrent("GRU linear before reset", partial(gru, reset=True), 3, linear_before_reset=1)
recurrent("GRU of all states", partial(gru, reset=True), 3, "BS", (0,), linear_before_reset=1)
recurrent("RNN of relu", partial(rnn, f=torch.relu), 1, "B", (1,), "bidirectional", activations=["Relu", "relu"])
recurrent("RNN without biases", rnn, 1, "H")
