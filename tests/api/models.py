"""Small models in ONNX, for tests of graphs over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from service.dtypes import Array

FOLDER = Path(__file__).parent.parent / "graphs" / "models"


def model(*nodes: Any, inputs: Any = (), outputs: Any = (), initializers: Any = (), **weights: Any) -> bytes:
    """A file of these nodes. An input or output is a pair of name and shape, or a name with an open shape."""

    def values(pairs: Any) -> list[Any]:
        named = [(one, None) if isinstance(one, str) else one for one in pairs]
        return [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in named]

    floats = [numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "test", values(inputs), values(outputs), [*floats, *initializers])
    opsets = [helper.make_opsetid("", 17)]
    content: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    return content


def linear(factor: float = 2.0) -> bytes:
    """y = x w + b, with w = [[factor], [3]] and b = [1]."""
    nodes = helper.make_node("MatMul", ["x", "w"], ["xw"]), helper.make_node("Add", ["xw", "b"], ["y"])
    return model(*nodes, inputs=[("x", ["n", 2])], outputs=[("y", ["n", 1])], w=[[factor], [3]], b=[1])


def doubtful() -> bytes:
    """y = norm(norm(x)), where both norms read the scale w and the bias b, as when an exporter merges them."""
    nodes = [
        helper.make_node("LayerNormalization", [x, "w", "b"], [y], name=f"/{y}/LayerNormalization")
        for x, y in (("x", "h"), ("h", "y"))
    ]
    return model(*nodes, inputs=[("x", ["n", 2])], outputs=[("y", ["n", 2])], w=[1, 2], b=[0, 3])


DOUBTS = [
    f"'{name}' is read by LayerNormalization in 2 modules, '/h, /y': were they equal at the start?" for name in "wb"
]


def chain(length: int, size: int = 2) -> bytes:
    """The product of `length` matrices of this size, and one more, without an input."""
    nodes = [helper.make_node("MatMul", [f"w{step}", "w0"], [f"w{step + 1}"]) for step in range(length)]
    return model(*nodes, outputs=[f"w{length}"], w0=np.eye(size))


def trained(name: str = "dlrm") -> tuple[bytes, dict[str, dict[str, Array]]]:
    """A training graph of ONNX Runtime's tool, and one step of it: `input`, `parameter`, `gradient` and `loss`."""
    step: dict[str, dict[str, Array]] = {"input": {}, "parameter": {}, "gradient": {}, "loss": {}}
    with np.load(FOLDER / f"{name}.npz") as file:
        for key in file.files:
            kind, _, tensor = key.partition(".")
            step.setdefault(kind, {})[tensor] = file[key]
    return (FOLDER / f"{name}.onnx").read_bytes(), step
