"""The gradients of LSTM, GRU and RNN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from service.graphs.gradients.tape import Tape, rule
from service.graphs.nodes.recurrent import attributes
from service.graphs.plan import Node
from service.kernels.gru import gru_grad
from service.kernels.lstm import lstm_grad
from service.kernels.rnn import rnn_grad

KERNELS: dict[str, Callable[..., Any]] = {"LSTM": lstm_grad, "GRU": gru_grad, "RNN": rnn_grad}


@rule("LSTM", outputs=5)
@rule("GRU", outputs=3)
@rule("RNN", outputs=2)
def recurrent(tape: Tape, node: Node, dY: str, dY_h: str, *others: str) -> Sequence[str | None]:
    X, W, R, B, SL, H0, C0, P = [*node.inputs, *[""] * (8 - len(node.inputs))]
    Y, _Y_h, *kept = node.outputs
    given = {
        "LSTM": (X, W, R, SL, H0, C0, Y, *kept[1:], dY, dY_h, *others[:1], P),
        "GRU": (X, W, R, B, SL, H0, Y, *kept, dY, dY_h),
        "RNN": (X, W, R, SL, H0, Y, dY, dY_h),
    }
    kernel = partial(KERNELS[node.op], **attributes(node), wanted=tape.wanted(node, "dX dW dR dB - dH0 dC0 dP"))
    dX, dW, dR, dB, *of_states = tape.call(kernel, *given[node.op], outputs=7 if node.op == "LSTM" else 5)
    return [dX, dW, dR, dB, None, *of_states]
