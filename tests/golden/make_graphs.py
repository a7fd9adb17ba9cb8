"""Run real training graphs and store their training nodes: `python -m tests.golden.make_graphs FOLDER [--all TARGET]`.

FOLDER/NAME has `training_model.onnx` and `optimizer_model.onnx`, which ONNX Runtime's `generate_artifacts` writes, and
`expected.npz`: `input.X` and `parameter.X`, the step's inputs and parameters, `gradient.X` and `learning_rate`. Stored
in `graphs/NAME.npz` is one node of each operator with the same attributes and shapes, but a large one only if there is
no smaller one with the same attributes. `--all` stores every node in TARGET. Needs onnx, ONNX Runtime, and PyTorch,
which answers in place of kernels that ONNX Runtime does not have.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import helper, numpy_helper

from service.dtypes import Array
from tests.golden import graph, ort
from tests.golden.graph import Node

LARGE_BYTES = 48 << 10
"""Tensors of a node that is stored for its shapes alone have fewer bytes."""
INFERENCE = {"BiasGelu", "Gelu"}
"""Operators of com.microsoft that the package for inference has, too."""
TRAINING = {"AveragePoolGrad", "MaxPoolGrad", "SoftmaxCrossEntropyLoss"}
"""Operators of ai.onnx that the package for inference does not have."""


def is_training(node: Any) -> bool:
    return node.op_type in TRAINING or (node.domain == "com.microsoft" and node.op_type not in INFERENCE)


def attributes_of(node: Any) -> dict[str, Any]:
    def read(value: Any) -> Any:
        return value.decode() if isinstance(value, bytes) else [*map(read, value)] if isinstance(value, list) else value

    return {one.name: read(helper.get_attribute_value(one)) for one in node.attribute}


def run_graph(model: Any, given: dict[str, Array]) -> dict[str, Array]:
    """Every tensor of the graph by its name. What no one gives, which is the buffers of gradients, is zeros."""
    tensors = {one.name: numpy_helper.to_array(one) for one in model.graph.initializer}
    for one in model.graph.input:
        kind = one.type.tensor_type
        shape = [dimension.dim_value for dimension in kind.shape.dim]
        tensors[one.name] = given.get(one.name, np.zeros(shape, helper.tensor_dtype_to_np_dtype(kind.elem_type)))
    pending: list[Any] = []
    for node in model.graph.node:
        if node.op_type == "ConvTransposeGrad":
            tensors |= run_nodes(model, pending, tensors)
            tensors |= conv_transpose_grad(node, tensors)
            pending = []
        else:
            pending.append(node)
    return tensors | run_nodes(model, pending, tensors)


def run_nodes(model: Any, nodes: Sequence[Any], tensors: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs of the nodes, name -> array, from ONNX Runtime."""
    made = [name for node in nodes for name in node.output if name]
    names = dict.fromkeys(name for node in nodes for name in node.input if name in tensors)
    inputs = {name: np.array(tensors[name]) for name in names}  # some kernels write to their inputs
    kinds = [
        helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for k, v in inputs.items()
    ]
    part = onnx.ModelProto()
    part.CopyFrom(model)
    for field in ("node", "input", "output", "initializer"):
        part.graph.ClearField(field)
    part.graph.node.extend(nodes)
    part.graph.input.extend(kinds)
    part.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in made)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(part.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip(made, session.run(made, inputs), strict=True))


def conv_transpose_grad(node: Any, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """dX, dW and dB of a node in two dimensions, from PyTorch in float64."""
    given = attributes_of(node)
    dY, X, W = (torch.tensor(tensors[name], dtype=torch.float64, requires_grad=True) for name in node.input[:3])
    B = torch.zeros(W.shape[1] * given["group"], dtype=torch.float64, requires_grad=True)
    strides, dilations, (top, left, *ends) = given["strides"], given["dilations"], given["pads"]
    assert [top, left] == ends
    reach = [dilation * (size - 1) + 1 for dilation, size in zip(dilations, W.shape[2:], strict=True)]
    sizes = zip(X.shape[2:], strides, ends, reach, strict=True)
    least = [(size - 1) * stride - 2 * pad + one for size, stride, pad, one in sizes]
    more = [size - one for size, one in zip(dY.shape[2:], least, strict=True)]
    Y = torch.nn.functional.conv_transpose2d(X, W, B, strides, ends, more, given["group"], dilations)
    gradients = torch.autograd.grad(Y, (X, W, B), dY)
    return {name: one.float().numpy() for name, one in zip(node.output, gradients, strict=False) if name}


def node_of(node: Any, tensors: Mapping[str, Array]) -> Node:
    shape = [*tensors[node.output[0]].shape] if node.op_type in ort.SHAPED else None
    source = "torch" if node.op_type == "ConvTransposeGrad" else "onnxruntime"
    return Node(node.op_type, [*node.input], [*node.output], attributes_of(node), shape, source)


def optimizer_step(folder: Path, expected: Mapping[str, Array]) -> tuple[Node, dict[str, Array]]:
    """The AdamWOptimizer of the first step, and its tensors. The parameters are in the order of the graph."""
    (node,) = onnx.load(folder / "optimizer_model.onnx").graph.node
    names = [key.removeprefix("parameter.") for key in expected if key.startswith("parameter.")]
    zeros = {name: np.zeros_like(expected[f"parameter.{name}"]) for name in names}
    inputs: dict[str, Array] = {"lr": np.array([expected["learning_rate"]], np.float32), "step": np.array([1])}
    inputs |= {f"weights.{name}": expected[f"parameter.{name}"] for name in names}
    inputs |= {f"gradients.{name}": expected[f"gradient.{name}"] for name in names}
    inputs |= {f"{group}.{name}": zeros[name] for group in ("momentums_1", "momentums_2") for name in names}
    asked = ("updated_flag", "updated_weights", "updated_momentums_1", "updated_momentums_2")
    outputs = ort.run(node.op_type, inputs, asked, attributes_of(node))
    sequences = ("weights", "gradients", "momentums_1", "momentums_2")
    given: list[graph.Name] = ["lr", "step", *({name: f"{group}.{name}" for name in names} for group in sequences)]
    made: list[graph.Name] = [asked[0], *({name: f"{group}.{name}" for name in names} for group in asked[1:])]
    return Node(node.op_type, given, made, attributes_of(node)), {**inputs, **outputs}


def chosen(graphs: Collection[tuple[list[Node], dict[str, Array]]]) -> list[list[Node]]:
    """Of each graph, the nodes to store: of those with the same attributes the smallest, and others of other shapes."""
    every = [(place, node, tensors) for place, (nodes, tensors) in enumerate(graphs) for node in nodes]
    seen: dict[str, set[str]] = defaultdict(set)
    found: list[list[Node]] = [[] for _ in graphs]
    for place, node, tensors in sorted(every, key=lambda one: size(one[1], one[2])):
        shapes = seen[json.dumps([node.operator, node.attributes])]
        shape = str([tensors[name].shape for name in graph.names(node.inputs)])
        if not shapes or (size(node, tensors) < LARGE_BYTES and shape not in shapes):
            shapes.add(shape)
            found[place].append(node)
    return found


def size(node: Node, tensors: Mapping[str, Array]) -> int:
    return sum(tensors[name].nbytes for name in graph.names([*node.inputs, *node.outputs]))


def of_folder(folder: Path) -> tuple[list[Node], dict[str, Array]]:
    """The training nodes of both graphs in the folder, and their tensors."""
    expected = dict(np.load(folder / "expected.npz"))
    given = {
        key.partition(".")[2]: array for key, array in expected.items() if key.startswith(("input.", "parameter."))
    }
    model = onnx.load(folder / "training_model.onnx")
    tensors = run_graph(model, given)
    step, more = optimizer_step(folder, expected)
    return [*(node_of(node, tensors) for node in model.graph.node if is_training(node)), step], tensors | more


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--all", type=Path, metavar="TARGET")
    arguments = parser.parse_args()
    onnxruntime.set_seed(0)  # of Dropout
    found = {
        path.parent.name: of_folder(path.parent) for path in sorted(arguments.folder.glob("*/training_model.onnx"))
    }
    target = arguments.all or graph.FOLDER
    target.mkdir(parents=True, exist_ok=True)
    kept = [nodes for nodes, _ in found.values()] if arguments.all else chosen(found.values())
    for (name, (_, tensors)), nodes in zip(found.items(), kept, strict=True):
        graph.write(target / f"{name}.npz", nodes, tensors)
        print(f"{name}: {len(nodes)} nodes, {(target / f'{name}.npz').stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
