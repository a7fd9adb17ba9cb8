"""What a graph holds, in a process of its own: `python -m tests.graphs.held SHAPE` prints figures as JSON."""

from __future__ import annotations

import ctypes
import gc
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from service.graphs.graph import Graph
from service.kernels import Workspace, workspace


def value(name: str, shape: Any = None) -> Any:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def relu(source: str, target: str, **attributes: Any) -> Any:
    return helper.make_node("Relu", [source], [target], **attributes)


def model(nodes: Any, inputs: Any, outputs: Any, weights: Any = (), functions: Any = (), doc: str = "") -> bytes:
    graph = helper.make_graph(nodes, "g", [*map(value, inputs)], [*map(value, outputs)], [*weights], doc_string=doc)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=8, functions=[*functions])
    for number in range(1000 * bool(doc)):
        made.metadata_props.add(key=f"key {number}", value="value " * 100)
    content: bytes = made.SerializeToString()
    return content


def function(name: str, nodes: Any, inputs: Any = ("a",), outputs: Any = ("b",)) -> Any:
    return helper.make_function(
        "f", name, inputs, outputs, nodes, [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
    )


def chained(count: int, prefix: str = "t", outputs: int = 1, **attributes: Any) -> bytes:
    nodes = [relu(f"{prefix}{k}", f"{prefix}{k + 1}", **attributes) for k in range(count)]
    return model(nodes, [f"{prefix}0"], [f"{prefix}{count - k}" for k in range(outputs)])


def long_lists() -> bytes:
    nodes = [helper.make_node("Transpose", [f"t{k}"], [f"t{k + 1}"], perm=[*range(1000, 1128)]) for k in range(1000)]
    return model(nodes, ["t0"], ["t1000"])


def texts() -> bytes:
    """Texts of wide characters."""
    letters = "\U0001f600" * 900
    nodes = [helper.make_node("Einsum", [f"t{k}"], [f"t{k + 1}"], equation=f"{k}{letters}") for k in range(1000)]
    return model(nodes, ["t0"], ["t1000"])


def called(calls: int, body: int, prefix: str = "t") -> bytes:
    inner = [relu("a" if k == 0 else f"i{k}", f"i{k + 1}" if k < body - 1 else "b", name="n" * 50) for k in range(body)]
    nodes = [
        helper.make_node("F", [f"{prefix}{k}"], [f"{prefix}{k + 1}"], domain="f", name="c" * 900) for k in range(calls)
    ]
    return model(nodes, [f"{prefix}0"], [f"{prefix}{calls}"], functions=[function("F", inner)])


def nested() -> bytes:
    functions = [function("F0", [relu("a", "m", name="x" * 500), relu("m", "b")])]
    for k in range(1, 12):
        pair = [("a", "m" * 300), ("m" * 300, "b")]
        functions.append(function(f"F{k}", [helper.make_node(f"F{k - 1}", [x], [y], domain="f") for x, y in pair]))
    return model([helper.make_node("F11", ["x"], ["y"], domain="f")], ["x"], ["y"], functions=functions)


def many_inputs(count: int = 2000) -> bytes:
    nodes = [relu(f"input number {k}", f"output number {k}") for k in range(count)]
    return model(nodes, [one.input[0] for one in nodes], [one.output[0] for one in nodes])


def many_weights(count: int = 2000, size: int = 4) -> bytes:
    nodes = [helper.make_node("Add", [f"t{k}", f"layer.{k}.weight"], [f"t{k + 1}"]) for k in range(count)]
    weights = [numpy_helper.from_array(np.full(size, k, np.float32), f"layer.{k}.weight") for k in range(count)]
    return model(nodes, ["t0"], [f"t{count}"], weights)


def constants() -> bytes:
    nodes = [helper.make_node("Constant", [], [f"c{k}"], value_floats=[0.5] * 200) for k in range(1000)]
    nodes += [helper.make_node("Sum", [f"c{k}" for k in range(1000)], ["y"])]
    return model(nodes, [], ["y"])


def wide() -> bytes:
    return model(
        [helper.make_node("Sum", [f"x{k % 10}" for k in range(100_000)], ["y"])], [f"x{k}" for k in range(10)], ["y"]
    )


def trained() -> bytes:
    nodes = [helper.make_node("Mul", [f"t{k}", f"w{k}"], [f"t{k + 1}"]) for k in range(1000)]
    nodes.append(helper.make_node("ReduceSum", ["t1000"], ["loss"], keepdims=0))
    weights = [numpy_helper.from_array(np.ones(4, np.float32), f"w{k}") for k in range(1000)]
    return model(nodes, ["t0"], ["loss"], weights)


SHAPES: dict[str, Callable[[], bytes]] = {
    "many nodes": lambda: chained(8000),
    "choices of outputs": lambda: chained(5000, outputs=3),
    "long names": lambda: chained(1000, "n" * 900, name="c" * 900, doc_string="d" * 900),
    "long lists of integers": long_lists,
    "wide texts": texts,
    "a function called often": lambda: called(300, 15),
    "a long function": lambda: called(2, 1500, "p" * 900),
    "functions in functions": nested,
    "many inputs and outputs": many_inputs,
    "many weights": many_weights,
    "large weights": lambda: many_weights(20, 1 << 19),
    "metadata and documents": lambda: model([relu("x", "y")], ["x"], ["y"], doc="d" * (4 << 20)),
    "constants": constants,
    "a node of many inputs": wide,
    "a training graph": trained,
}
"""A model of each shape."""


def memory(name: str) -> int:
    """Return the bytes of this process in memory, without free ones: VmRSS, or VmHWM, the most so far."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def measure(shape: str, count: int = 2) -> dict[str, float]:
    """Return what `count` graphs of this shape say and take, what reading one claims, and how long it does not claim.

    Times are those of the processor. Others of the shape are read first: what the allocator keeps free is no graph's.
    """
    Graph.read(many_weights(3), loss="t3")
    content, claims, gaps = SHAPES[shape](), list[int](), list[float]()
    loss = "loss" if shape == "a training graph" else None
    last = time.thread_time()

    def claim(size: int) -> None:
        nonlocal last
        claims.append(size)
        gaps.append(time.thread_time() - last)
        last = time.thread_time()

    def read() -> Graph:
        graph = Graph.read(content, loss=loss)
        for name in graph.operator("g").output_names[:2] if shape == "choices of outputs" else ():
            graph.operator("g")({"t0": np.ones(1, np.float32)}, {}, [name])
        return graph

    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    last = time.thread_time()
    with workspace(Workspace(claim=claim)):
        graphs = [Graph.read(content, loss=loss)]
        claim(0)
    peak = memory("VmHWM") - before
    graphs += [read() for _ in range(count)]
    before = memory("VmRSS")
    graphs += [read() for _ in range(count)]
    return {
        "nbytes": sum(graph.nbytes for graph in graphs[-count:]),
        "held": memory("VmRSS") - before,
        "peak": peak,
        "claimed": sum(size for size in claims if size > 1 << 16),
        "gap": max(gaps),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(sys.argv[1])))
