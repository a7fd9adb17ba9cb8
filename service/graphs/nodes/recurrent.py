"""LSTM, GRU and RNN. Beyond its own outputs, a node has what the gradient needs: the cells and the gates."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from service.errors import InvalidParameter, shown
from service.graphs.nodes.kernels import attributes_of, run
from service.graphs.nodes.table import Function, maker
from service.graphs.plan import Node
from service.kernels import OPERATORS
from service.kernels.rnn import rnn

IGNORED = ("activation_alpha", "activation_beta", "layout")
"""Attributes that the kernels do not read."""

RNN_DEFAULT = ["Tanh", "Tanh"]
"""The activations that ONNX gives an RNN that names none, with any number of directions."""


@maker("LSTM", "GRU", "RNN")
def recurrent(node: Node) -> Function:
    given = attributes(node)
    if node.op == "RNN":
        return partial(rnn, **given)
    # The histories of an LSTM and a GRU stand behind the final states, as in the node.
    return partial(run, OPERATORS[f"{node.op}Training"], given, {})


def attributes(node: Node) -> dict[str, Any]:
    """Return the attributes of the kernel. Raises `InvalidParameter`."""
    layout = node.attributes.get("layout", 0)
    if layout != 0:  # ONNX Runtime has no other one either
        problem = f"layout is {shown(layout)}, but must be 0: X and Y begin with the steps"
        raise InvalidParameter(problem, parameter="layout")
    given = {name: value for name, value in node.attributes.items() if name not in IGNORED}
    if node.op == "RNN" and given.get("activations") == RNN_DEFAULT:
        del given["activations"]
    kernel = OPERATORS["LSTMTraining" if node.op == "LSTM" else "GRUTraining"]
    return attributes_of(replace(node, attributes=given), kernel)
