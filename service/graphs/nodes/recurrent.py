"""LSTM, GRU and RNN. Beyond its own outputs, a node has what the gradient needs: the cells and the gates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from service.dtypes import Array
from service.errors import InvalidParameter, shown
from service.graphs.nodes.kernels import attributes_of, run
from service.graphs.nodes.table import Function, maker
from service.graphs.plan import Node
from service.kernels import OPERATORS
from service.kernels.rnn import rnn

IGNORED = ("activation_alpha", "activation_beta")
"""Attributes that the activations of the kernels do not read."""

RNN_DEFAULT = ["Tanh", "Tanh"]
"""The activations that ONNX gives an RNN that names none, with any number of directions."""

TURNS = {"x": (1, 0, 2), "y": (2, 0, 1, 3), "h": (1, 2, 0, 3)}
"""The axes of a tensor in the other layout: of X and the states, and of all states, [S, D, N, H] and [N, S, D, H]."""


@maker("LSTM", "GRU", "RNN")
def recurrent(node: Node) -> Function:
    given = attributes(node)
    if node.op == "RNN":
        return turned(partial(rnn, **given), node, "x....x", "yx")
    function = partial(run, OPERATORS[f"{node.op}Training"], given, {})
    if node.op == "GRU":
        return turned(function, node, "x....x", "yx.")
    # The histories stand behind the final states, as in the node.
    return turned(function, node, "x....xx.", "yxx..")


def attributes(node: Node) -> dict[str, Any]:
    """Return the attributes of the kernel. Raises `InvalidParameter`."""
    kernel = "LSTMTraining" if node.op == "LSTM" else "GRUTraining"
    given = {name: value for name, value in node.attributes.items() if name not in (*IGNORED, "layout")}
    if node.op == "RNN" and given.get("activations") == RNN_DEFAULT:
        del given["activations"]
    return attributes_of(OPERATORS[kernel], node.op, given)


def turned(function: Callable[..., Any], node: Node, inputs: str, outputs: str) -> Function:
    """Return a function that takes and gives tensors in the node's layout, from one whose steps come first.

    A letter for each input and each output says how it is turned: see `TURNS`. A dot stands for one that is not.
    """
    layout = node.attributes.get("layout", 0)
    if layout not in (0, 1):
        raise InvalidParameter(f"layout is {shown(layout)}, but must be 0 or 1", parameter="layout")

    def call(*given: Array | None) -> tuple[Any, ...]:
        results = function(*map(_turn, given, inputs))
        return tuple(map(_turn, results, outputs))

    return call if layout else function


def _turn(tensor: Array | None, letter: str) -> Array | None:
    return tensor if tensor is None or letter == "." else tensor.transpose(TURNS[letter])
