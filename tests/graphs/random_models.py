"""Small models of random nodes, of both domains, as a stranger may write them: most fit, and some almost."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from onnx import TensorProto, defs, helper, numpy_helper

from service.dtypes import DTYPES
from service.graphs.nodes import NODES
from service.kernels import OPERATORS
from tests.graphs.hostile import FLOATS, INTEGERS, TEXTS

OPS = sorted(NODES)
KINDS = [TensorProto.FLOAT] * 6 + [TensorProto.INT64] * 3
OTHER_KINDS = [TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.INT32, TensorProto.BOOL]
OTHER_KINDS += [TensorProto.UINT8, TensorProto.INT8, TensorProto.UINT64, TensorProto.STRING]
TYPES = {f"tensor({str(name).lower()})": number for name, number in TensorProto.DataType.items()}
"""The number of each type that ONNX's schemas name."""
SHAPES = [[], [1], [2], [2, 3], [3, 2], [1, 2, 3], [2, 2, 4, 4], [0], [2, 0, 3]]


def random_model(seed: int) -> tuple[bytes, dict[str, str]]:
    """Return a model of one to four nodes, and the options of its upload."""
    rng = random.Random(seed)
    tensors: dict[str, Any] = {}
    inputs, initializers = [], []
    for number in range(rng.randint(1, 8)):
        kind, shape = rng.choice(KINDS if rng.random() < 0.97 else OTHER_KINDS), rng.choice(SHAPES)
        name = rng.choice(["w", "x", "y_grad", "w_grad"]) + str(number)
        tensors[name] = kind
        if kind != TensorProto.STRING and rng.random() < 0.6:
            dtype = helper.tensor_dtype_to_np_dtype(kind)
            numbers = np.random.default_rng(rng.randrange(1 << 30)).integers(0, 3, shape).astype(dtype)
            initializers.append(numpy_helper.from_array(numbers, name))
        else:
            open_shape = None if rng.random() < 0.2 else [rng.choice(["n", None, one]) for one in shape]
            inputs.append(helper.make_tensor_value_info(name, kind, open_shape))
    nodes, made = [], list[str]()
    for number in range(rng.choice([1, 1, 1, 2, 3, 4])):
        nodes.append(_node(rng, number, {**tensors, **dict.fromkeys(made, TensorProto.FLOAT)}))
        made += [one for one in nodes[-1].output if one]
    shown = rng.sample(made, rng.randint(1, len(made))) if made else ["x0"]
    outputs = [
        helper.make_tensor_value_info(one, rng.choice(KINDS), rng.choice([None, None, [], [1]])) for one in shown
    ]
    graph = helper.make_graph(nodes, "g", inputs, outputs, initializers)
    opsets = [helper.make_opsetid("", rng.choice([13, 17, 17, 21, 23])), helper.make_opsetid("com.microsoft", 1)]
    options: dict[str, str] = {}
    if rng.random() < 0.2:
        options["loss"] = rng.choice([*made, "MSELoss", "SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
    if rng.random() < 0.1:
        options["train"] = rng.choice(["*", "w*", "!w0", "x0,w1", *tensors])
    content: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    return content, options


def _node(rng: random.Random, number: int, tensors: dict[str, Any]) -> Any:
    domain, op = rng.choice(OPS)
    least, most, results, attributes, wanted = _declared(domain, op)
    if rng.random() < 0.1:
        least, most, results = 0, most + 1, results + 2
    inputs = []
    for place in range(rng.randint(least, max(least, min(most, least + 4)))):
        names = [*tensors]
        if rng.random() < 0.95 and place < len(wanted):
            names = [one for one, kind in tensors.items() if kind in wanted[place]] or names
        inputs.append(rng.choice(names))
    if op == "InPlaceAccumulatorV2" and rng.random() < 0.2:
        inputs[:1] = [f"{rng.choice([*tensors])}_grad.accumulation.buffer"]
    inputs = ["" if rng.random() < 0.02 else one for one in inputs]
    outputs = [f"o{number}.{place}" for place in range(rng.randint(min(1, results), max(1, min(results, 3))))]
    outputs = ["" if rng.random() < 0.03 else one for one in outputs]
    node = helper.make_node(op, inputs, outputs, domain=domain, name=f"n{number}")
    for name, kind, required in attributes:
        if rng.random() < (0.97 if required else 0.3):
            node.attribute.append(_attribute(rng, name, kind))
    return node


def _declared(domain: str, op: str) -> tuple[int, int, int, list[tuple[str, str, bool]], list[set[Any]]]:
    """Return the least and the most inputs, the most outputs, each attribute with its type, and each input's types."""
    try:
        schema = defs.get_schema(op, 23, domain)
    except defs.SchemaError:
        if op not in OPERATORS:
            return 1, 2, 1, [], []
        operator = OPERATORS[op]
        kinds = {int: "INT", float: "FLOAT", str: "STRING"}
        named = [
            (one.name, kinds.get(one.item_type, "INT") + "S" * one.is_list, one.required) for one in operator.attributes
        ]
        types = [{helper.np_dtype_to_tensor_dtype(DTYPES[name]) for name in one.kind.dtypes} for one in operator.inputs]
        return len(operator.needed_names), len(operator.inputs), len(operator.outputs), named, types
    given = [(name, str(one.type).rpartition(".")[2], one.required) for name, one in schema.attributes.items()]
    kinds_of = [{TYPES[one] for one in port.types if one in TYPES} for port in schema.inputs]
    return schema.min_input, schema.max_input, schema.max_output, given, kinds_of


def _attribute(rng: random.Random, name: str, kind: str) -> Any:
    if rng.random() < 0.05:
        kind = rng.choice(["INT", "INTS", "FLOAT", "FLOATS", "STRING", "STRINGS"])
    choices: dict[str, list[Any]] = {"INT": [0, 1, 2, -1, 1, 11, *INTEGERS[:4]], "FLOAT": FLOATS, "STRING": TEXTS}
    base = choices.get(kind.rstrip("S"))
    if name == "equation" and kind == "STRING":
        base = ["i,i->i", "ij,jk->ik", "i->", "...,...->...", *TEXTS]
    if base is None:
        return helper.make_attribute(name, numpy_helper.from_array(np.array([1], np.float32)))
    value: Any = (
        [rng.choice(base) for _ in range(rng.choice([0, 1, 2, 2, 4]))] if kind.endswith("S") else rng.choice(base)
    )
    number = {"INT": 2, "INTS": 7, "FLOAT": 1, "FLOATS": 6, "STRING": 3, "STRINGS": 8}[kind]
    return helper.make_attribute(name, value, attr_type=number)
