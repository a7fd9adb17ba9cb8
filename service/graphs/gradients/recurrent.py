"""The gradients of LSTM, GRU and RNN."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from service.graphs.gradients.tape import Tape, rule
from service.graphs.nodes.recurrent import attributes, turned
from service.graphs.plan import Node
from service.kernels.gru import gru_grad
from service.kernels.lstm import lstm_grad
from service.kernels.rnn import rnn_grad


@rule("LSTM", outputs=5)
def lstm(tape: Tape, node: Node, dY: str, dY_h: str, dY_c: str, *_: str) -> Sequence[str | None]:
    X, W, R, _B, SL, H0, C0, P = _all(node, 8)
    Y, _Y_h, _Y_c, *kept = node.outputs
    kernel = partial(lstm_grad, **attributes(node), wanted=tape.wanted(node, "dX dW dR dB - dH0 dC0 dP"))
    function = turned(kernel, node, "x...xxh..hxx.", "x...xx.")
    given = (X, W, R, SL, H0, C0, Y, *kept, dY, dY_h, dY_c, P)
    return _around_lengths(tape.call(function, *given, outputs=7))


@rule("GRU", outputs=3)
def gru(tape: Tape, node: Node, dY: str, dY_h: str, *_: str) -> Sequence[str | None]:
    Y, _Y_h, gates = node.outputs
    kernel = partial(gru_grad, **attributes(node), wanted=tape.wanted(node, "dX dW dR dB - dH0"))
    function = turned(kernel, node, "x....xh.hx", "x...x")
    return _around_lengths(tape.call(function, *_all(node, 6), Y, gates, dY, dY_h, outputs=5))


@rule("RNN", outputs=2)
def rnn(tape: Tape, node: Node, dY: str, dY_h: str) -> Sequence[str | None]:
    X, W, R, _B, SL, H0 = _all(node, 6)
    kernel = partial(rnn_grad, **attributes(node), wanted=tape.wanted(node, "dX dW dR dB - dH0"))
    function = turned(kernel, node, "x...xhhx", "x...x")
    return _around_lengths(tape.call(function, X, W, R, SL, H0, node.outputs[0], dY, dY_h, outputs=5))


def _all(node: Node, count: int) -> list[str]:
    """Return the node's inputs, "" for those at its end that are left out."""
    return [*node.inputs, *[""] * (count - len(node.inputs))]


def _around_lengths(gradients: Sequence[str]) -> list[str | None]:
    """Return the gradients of X, W, R and B, none for the lengths of the sequences, and the others."""
    return [*gradients[:4], None, *gradients[4:]]
