"""A model as a file of ONNX has it, read and checked. Nothing of it runs here, and only Python reads it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from service.dtypes import FLOAT32, INT64, NAMES, Array, DType
from service.errors import InvalidGraph, shown
from service.graphs.exported import origin_of, tensors_of
from service.graphs.functions import Function, inlined
from service.graphs.names import check_names
from service.graphs.nodes import NODES
from service.graphs.nodes.table import dtype_of
from service.graphs.plan import Node, paced
from service.graphs.protobuf import Budget, Message, numbered
from service.graphs.strangers import WAYS, check_kind
from service.graphs.tensors import ATTRIBUTE, TENSOR, array_of, attribute_of, kind_of, with_defaults
from service.graphs.unrolled import MAX_BRANCH_NODES, SEQUENCES, VIEWS, Branch, chosen, unrolled

OPSETS = range(13, 27)
"""The versions of ONNX's own operators that a model may import."""


_FILE = numbered("2:producer 7:graph 8:opset_import 25:functions")
_OPSET = numbered("1:domain 2:version")
_FUNCTION = numbered("1:name 4:input 5:output 7:node 9:opset_import 10:domain 11:attribute")
_GRAPH = numbered("1:node 5:initializer 11:input 12:output 15:sparse_initializer 16:metadata")
_NODE = numbered("1:input 2:output 3:name 4:op_type 5:attribute 7:domain 9:metadata")
_VALUE = numbered("1:name 2:type")
_TYPE = numbered("1:tensor")
_TENSOR_TYPE = numbered("1:elem_type 2:shape")
_SHAPE = numbered("1:dim")
_DIMENSION = numbered("1:dim_value")


@dataclass(frozen=True)
class GraphLimits:
    """The most nodes of a graph, and the most bytes of its initializers."""

    max_nodes: int = 20_000
    max_bytes: int = 1 << 31


DEFAULT_LIMITS = GraphLimits()


class Value(NamedTuple):
    """An input or output of a graph."""

    name: str
    dtype: DType
    shape: tuple[int | None, ...] | None
    """None for a length that is open, or for all of it if the number of dimensions is."""


@dataclass(frozen=True)
class Model:
    """A graph: what it reads, computes and gives."""

    inputs: tuple[Value, ...]
    """What every run must bring."""
    initializers: Mapping[str, Array]
    """The tensors that the file has, by name: weights, and constants."""
    constants: Mapping[str, Array]
    """The outputs of nodes that are constants."""
    nodes: tuple[Node, ...]
    """The others, each behind those whose outputs it reads. Attributes that are left out have their defaults."""
    outputs: tuple[Value, ...]
    budget: Budget
    """What is left of that of the file."""
    module: Mapping[str, str] = field(default_factory=dict)
    """What `tensors_of` returns: the parameters and buffers of the module, if an exporter has named them."""
    producer: str = ""
    """The program that has written the file."""


def read(content: Any, limits: GraphLimits = DEFAULT_LIMITS) -> Model:
    """Return the model in a file's bytes. Raises `InvalidGraph`, which lists all operators that are not served."""
    check_kind(content)
    budget = Budget()
    file = Message(memoryview(content).cast("B"), _FILE, budget)
    if "graph" not in file:
        raise InvalidGraph("the file is no ONNX model, or it is damaged: it has no graph")
    graph = file.messages("graph", _GRAPH)[-1]
    if "sparse_initializer" in graph:
        raise InvalidGraph("the model has sparse initializers, which cannot be read")
    if (count := len(graph.all("node"))) > limits.max_nodes:
        problem = f"the model has {count} nodes; the limit is {limits.max_nodes} (GRADSERVE_MAX_GRAPH_NODES)"
        raise InvalidGraph(problem, limit=limits.max_nodes)
    functions = file.messages("functions", _FUNCTION)
    called = {(_domain(one), one.text("name")) for one in functions}
    bodies = {(_domain(one), one.text("name")): _function(one, called) for one in functions}
    nodes = inlined(_nodes(graph, _opsets(file), called), bodies, limits.max_nodes, budget)
    initializers = _initializers(graph, limits)
    nodes = unrolled(nodes, initializers | _constants(nodes), budget)
    _check_served(nodes)
    constants = _constants(nodes)
    declared = graph.messages("input", _VALUE)
    inputs = [_value(one) for one in declared if one.text("name") not in initializers]
    for value in (_value(one) for one in declared if one.text("name") in initializers):
        _check_initializer(value, initializers[value.name])
    dtypes = {name: one.dtype for name, one in (initializers | constants).items()} | {
        one.name: one.dtype for one in inputs
    }
    checked = [with_defaults(node, dtypes) for node in paced(nodes) if node.op != "Constant"]
    model = Model(
        inputs=tuple(inputs),
        initializers=initializers,
        constants=constants,
        nodes=tuple(one for one in checked if one.outputs),
        outputs=tuple(_value(one) for one in graph.messages("output", _VALUE)),
        budget=budget,
        module=tensors_of(graph),
        producer=file.text("producer"),
    )
    given = {"the file": initializers, "the caller": [one.name for one in inputs], "a constant": constants}
    check_names(given, model.nodes, [one.name for one in model.outputs])
    return model


def _opsets(file: Message) -> dict[str, int]:
    """Return the version of each domain. Raises `InvalidGraph`."""
    opsets = {_domain(one): one.int("version") for one in file.messages("opset_import", _OPSET)}
    version = opsets.get("")
    if version is not None and version not in OPSETS:
        expected = f"{OPSETS[0]} to {OPSETS[-1]}: convert it, for example with onnx.version_converter"
        raise InvalidGraph(f"the model has opset {version} of ONNX, but must have {expected}")
    return opsets


def _domain(message: Message) -> str:
    domain = message.text("domain")
    return "" if domain == "ai.onnx" else domain


def _function(message: Message, called: Collection[tuple[str, str]]) -> Function:
    defaults = {one.text("name"): attribute_of(one, "a function") for one in message.messages("attribute", ATTRIBUTE)}
    nodes = _nodes(message, _opsets(message), called)
    return Function(message.texts("input"), message.texts("output"), nodes, defaults)


def _nodes(message: Message, opsets: Mapping[str, int], called: Collection[tuple[str, str]]) -> list[Node]:
    return [made for one in message.messages("node", _NODE) for made in _made(one, opsets, called)]


def _made(message: Message, opsets: Mapping[str, int], called: Collection[tuple[str, str]]) -> list[Node]:
    """Return a node; for an If between views, what `chosen` makes of it."""
    node = _node(message, opsets, called)
    graphs = [
        graph
        for name in ("then_branch", "else_branch") * ((node.domain, node.op) == ("", "If"))
        for one in message.messages("attribute", ATTRIBUTE)
        if one.text("name") == name
        for graph in one.messages("g", _GRAPH)
        if len(graph.all("node")) <= MAX_BRANCH_NODES and "initializer" not in graph
    ]
    return chosen(node, [_branch(one, opsets, called) for one in graphs]) if len(graphs) == 2 else [node]


def _branch(graph: Message, opsets: Mapping[str, int], called: Collection[tuple[str, str]]) -> Branch:
    nodes = [_node(one, opsets, called) for one in graph.messages("node", _NODE)]
    outputs = [one.text("name") for one in graph.messages("output", _VALUE)]
    return Branch([with_defaults(one) if one.op in VIEWS and not one.domain else one for one in nodes], outputs)


def _node(message: Message, opsets: Mapping[str, int], called: Collection[tuple[str, str]]) -> Node:
    op, domain, name = message.text("op_type"), _domain(message), message.text("name")
    if domain not in opsets:
        raise InvalidGraph(f"the node {shown(name)}, {shown(op)}, has the domain {shown(domain)}, without an opset")
    attributes = {}
    is_read = _is_served(domain, op) or (domain, op) in called or (not domain and op in SEQUENCES)
    for one in message.messages("attribute", ATTRIBUTE) if is_read else ():
        attributes[one.text("name")] = attribute_of(one, f"{op} {name}")
    outputs = message.texts("output")
    while outputs and not outputs[-1]:
        outputs.pop()
    inputs, origin = tuple(message.texts("input")), origin_of(message)
    return Node(op, domain, opsets[domain], inputs, tuple(outputs), attributes, name, *origin)


def _initializers(graph: Message, limits: GraphLimits) -> dict[str, Array]:
    initializers, size = dict[str, Array](), 0
    for one in graph.messages("initializer", TENSOR):
        name = one.text("name")
        if name in initializers:
            raise InvalidGraph(f"the model has two initializers {shown(name)}")
        array = initializers[name] = array_of(one, f"the initializer {shown(name)}")
        size += array.nbytes
        if size > limits.max_bytes:
            raise InvalidGraph(f"the initializers take more than {limits.max_bytes} bytes", limit=limits.max_bytes)
    return initializers


def _check_initializer(value: Value, array: Array) -> None:
    """Raise `InvalidGraph` if an initializer is not as the input of its name."""
    shape = array.shape if value.shape is None else value.shape
    fits = [length in (None, given) for length, given in zip(shape, array.shape, strict=False)]
    if array.dtype != value.dtype or len(shape) != array.ndim or not all(fits):
        has, wants = f"{array.dtype} of shape {shown([*array.shape])}", f"{value.dtype} of shape {shown([*shape])}"
        raise InvalidGraph(f"the initializer {shown(value.name)} is {has}, but the input of that name is {wants}")


def _value(message: Message) -> Value:
    """Return an input or output. Raises `InvalidGraph` unless it is a tensor of a dtype that requests can have."""
    name = message.text("name")
    kinds = [tensor for one in message.messages("type", _TYPE) for tensor in one.messages("tensor", _TENSOR_TYPE)]
    if not kinds:
        raise InvalidGraph(
            f"{shown(name)} is an input or output, but no tensor: sequences, maps and others are not read"
        )
    dtype = dtype_of(kinds[-1].int("elem_type"))
    name_of(name, dtype)
    if "shape" not in kinds[-1]:
        return Value(name, dtype, None)
    dimensions = kinds[-1].messages("shape", _SHAPE)[-1].messages("dim", _DIMENSION)
    lengths = (one.int("dim_value", -1) for one in dimensions)
    return Value(name, dtype, tuple(length if length >= 0 else None for length in lengths))


def name_of(name: str, dtype: DType) -> str:
    """Return the name of a tensor's dtype. Raises `InvalidGraph` if no request can have it."""
    if dtype not in NAMES:
        known = ", ".join(NAMES.values())
        raise InvalidGraph(f"{shown(name)} is {dtype}, but inputs and outputs must be one of {known}")
    return NAMES[dtype]


def _is_served(domain: str, op: str) -> bool:
    return (domain, op) in NODES or (domain, op) == ("", "Constant")


def _check_served(nodes: Iterable[Node]) -> None:
    """Raise `InvalidGraph` with all operators that are not in `NODES`."""
    if keys := {(node.domain, node.op) for node in nodes if not _is_served(node.domain, node.op)}:
        listed = ", ".join(f"{domain}.{op}" if domain else op for domain, op in sorted(keys))
        ways = "".join(f". {op}: {way}" for op, way in WAYS.items() if ("", op) in keys)
        raise InvalidGraph(f"the model has operators that are not served: {listed}{ways}", operators=listed)


def _constants(nodes: Iterable[Node]) -> dict[str, Array]:
    """Return the values of the nodes that are constants, by the name of their output."""
    constants = dict[str, Array]()
    for node in nodes:
        if node.op == "Constant":
            value = _constant(node)
            if node.outputs[0] in constants:
                raise InvalidGraph(f"the model has two constants {shown(node.outputs[0])}")
            constants[node.outputs[0]] = value
    return constants


def _constant(node: Node) -> Array:
    """Return the value of a node that is a constant."""
    value = next(iter(node.attributes.values()), None)
    if len(node.attributes) != 1 or len(node.outputs) != 1 or "STRING" in kind_of(value):
        raise InvalidGraph(f"{node.label} must have one attribute, which is a number or a tensor, and one output")
    if isinstance(value, np.ndarray):
        return value
    return np.array(value, FLOAT32 if "float" in next(iter(node.attributes)) else INT64)
