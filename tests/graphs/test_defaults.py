"""Each operator runs with the attributes that ONNX gives a node by default, in every opset."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from service.graphs.model import OPSETS
from service.graphs.nodes import NODES, step_of
from service.graphs.plan import Node
from service.graphs.tensors import with_defaults

OPS = sorted(op for domain, op in NODES if not domain and onnx.defs.has(op))

REQUIRED: dict[str, dict[str, Any]] = {
    **{op: {"kernel_shape": [2]} for op in ("AveragePool", "LpPool", "MaxPool")},
    **{op: {"blocksize": 2} for op in ("DepthToSpace", "SpaceToDepth")},
    **{op: {"shape": [2]} for op in ("RandomNormal", "RandomUniform")},
    "BitCast": {"to": 1},
    "BitShift": {"direction": "LEFT"},
    "Cast": {"to": 1},
    "Concat": {"axis": 0},
    "Einsum": {"equation": "i->i"},
    "GroupNormalization": {"num_groups": 2},
    "LRN": {"size": 3},
}
"""The attributes that a node must have."""


@pytest.mark.parametrize("version", OPSETS)
def test_defaults(version: int) -> None:
    for op in OPS:
        try:
            schema = onnx.defs.get_schema(op, version, "")
        except onnx.defs.SchemaError:  # the opset has no such operator yet
            continue
        names = tuple(f"input{k}" for k in range(schema.min_input))
        outputs = tuple(f"output{k}" for k in range(max(1, schema.min_output)))
        node = Node(op, "", version, names, outputs, REQUIRED.get(op, {}))
        assert step_of(with_defaults(node)).label == op


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_rnn_without_activations(direction: str) -> None:
    node = Node("RNN", "", 14, ("X", "W", "R"), ("Y",), {"direction": direction})
    ones = np.ones((1, 1, 1), np.float32)
    assert step_of(with_defaults(node)).function(ones, ones, ones) == np.tanh(np.float32(1))
