"""The tensors and attributes of a model's file, and what ONNX says of an operator's attributes."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from service.dtypes import BFLOAT16, BOOL, FLOAT16, FLOAT32, FLOAT64, INT64, Array, DType
from service.errors import DtypeMismatch, InvalidGraph, shown
from service.graphs.functions import Reference
from service.graphs.nodes.kernels import POOLS
from service.graphs.nodes.table import dtype_of
from service.graphs.plan import Node, paced
from service.graphs.protobuf import Budget, Message, numbered
from service.kernels import OPERATORS, check_dtypes
from service.limits import MAX_RANK

ATTRIBUTE = numbered("1:name 2:f 3:i 4:s 5:t 6:g 7:floats 8:ints 9:strings 20:type 21:reference")
TENSOR = numbered(
    "1:dims 2:data_type 4:float_data 5:int32_data 7:int64_data 8:name 9:raw_data 10:double_data 11:uint64_data"
    " 13:external_data 14:data_location"
)
ITEM_BYTES = 40
"""What a number takes in a list."""

_KINDS = numbered("1:f 2:i 3:s 4:t 6:floats 7:ints 8:strings")
"""The field of an attribute's value, by its type."""


def array_of(message: Message, label: str) -> Array:
    """Return a tensor that the file has, which nobody can write to."""
    if "external_data" in message or message.int("data_location"):
        problem = f"{label} has its data in another file: save the model in one file, onnx.save(onnx.load(path), path)"
        raise InvalidGraph(
            f"{problem}, or put(name, path) with gradserve-client[onnx], which reads the files beside it"
        )
    shape, dtype = tuple(message.ints("dims").tolist()), dtype_of(message.int("data_type"))
    if len(shape) > MAX_RANK:
        raise InvalidGraph(f"{label} has {len(shape)} dimensions; the limit is {MAX_RANK}", limit=MAX_RANK)
    if min(shape, default=0) < 0:
        raise InvalidGraph(f"{label} has the shape {shown(list(shape))}")
    if "raw_data" in message:
        data = message.data("raw_data")
        array = np.frombuffer(data, np.uint8)
    else:
        array = _typed(message, dtype).view(np.uint8)
    if array.size != math.prod(shape) * dtype.itemsize or math.prod(max(one, 1) for one in shape) >= 1 << 59:
        problem = f"{label}, {dtype} of shape {shown(list(shape))}, has {array.size} bytes of data"
        raise InvalidGraph(f"{problem}, but must have {math.prod(shape) * dtype.itemsize}")
    message.budget.take(array.size, 0)
    array = array.copy().view(dtype) if dtype != BOOL else array != 0
    array.flags.writeable = False
    return array.reshape(shape)


def _typed(message: Message, dtype: DType) -> Array:
    """Return the numbers of a tensor that has them in the field of its type."""
    if dtype in (FLOAT32, FLOAT64):
        return message.floats("float_data" if dtype == FLOAT32 else "double_data", dtype.str)
    if dtype.kind == "u" and dtype.itemsize > 2:
        return message.ints("uint64_data").astype(dtype)
    whole = message.ints("int64_data" if dtype == INT64 else "int32_data")
    if dtype in (FLOAT16, BFLOAT16):
        return whole.astype(np.uint16).view(dtype)
    return whole.astype(dtype)


def attribute_of(message: Message, label: str) -> Any:
    """Return the value of an attribute: a number, a text, a list of them, or an array. In a function, a reference."""
    if "reference" in message:
        return Reference(message.text("reference"))
    match _KINDS.get(message.int("type")):
        case "f":
            return (_floats(message, "f") or [0.0])[-1]
        case "i":
            return message.int("i")
        case "s":
            return message.text("s")
        case "t":
            return array_of((message.messages("t", TENSOR) or [Message(memoryview(b""), TENSOR, Budget())])[-1], label)
        case "floats":
            return _floats(message, "floats")
        case "ints":
            return _listed(message, message.ints("ints")).tolist()
        case "strings":
            return message.texts("strings")
    name = shown(message.text("name"))
    raise InvalidGraph(f"the attribute {name} of {label} is no number, text, tensor, or list of numbers or texts")


def _floats(message: Message, name: str) -> list[float]:
    """Return the shortest decimals that are the same float32: the numbers that the author wrote, in every dtype."""
    return [float(str(number)) for number in paced(_listed(message, message.floats(name)))]


def _listed(message: Message, numbers: Array) -> Array:
    """Return the numbers, when there is memory for a list of them."""
    message.budget.take(ITEM_BYTES * numbers.size, 0)
    return numbers


def with_defaults(node: Node, dtypes: Mapping[str, DType] = {}) -> Node:
    """Return the node with the attributes that it leaves out. `dtypes` are those of the tensors that are known.

    Raises `InvalidGraph` if it is not as ONNX says or, for what ONNX does not know, as our operators are declared.
    """
    longest = max((len(value) for value in node.attributes.values() if isinstance(value, list)), default=0)
    if longest > 2 * MAX_RANK:
        problem = f"{node.label} has an attribute of {longest} items; the limit is {2 * MAX_RANK}, two for each axis"
        raise InvalidGraph(problem, limit=2 * MAX_RANK)
    declared = (None if node.domain else _declared(node.op, node.version)) or _ours(node.op)
    given = [k for k, name in enumerate(node.inputs) if name]
    if len(node.inputs) > declared.most_inputs or not {*declared.needed}.issubset(given):
        expected = f"{len(declared.needed)} to {declared.most_inputs}"
        raise InvalidGraph(f"{node.label} has {len(node.inputs)} inputs, but must have {expected}")
    if not declared.least_outputs <= len(node.outputs) <= declared.most_outputs:
        expected = f"{declared.least_outputs} to {declared.most_outputs}"
        raise InvalidGraph(f"{node.label} has {len(node.outputs)} outputs, but must have {expected}")
    if declared.kinds is None:  # the kernel checks its attributes
        pairs = zip(OPERATORS[node.op].inputs if node.op in OPERATORS else (), node.inputs, strict=False)
        try:
            check_dtypes((one.name, one, dtypes[tensor]) for one, tensor in pairs if tensor in dtypes)
        except DtypeMismatch as error:
            raise InvalidGraph(f"{node.label}: {error.detail}") from None
        return node
    for name, value in node.attributes.items():
        kind = declared.kinds.get(name)
        if kind is None:
            raise InvalidGraph(f"{node.label} has no attribute {shown(name)} in opset {node.version}")
        if kind_of(value) != kind:
            raise InvalidGraph(f"the attribute {name} of {node.label} is {shown(value)}, but must be {kind}")
    if missing := declared.required - node.attributes.keys():
        raise InvalidGraph(f"{node.label} needs the attribute {min(missing)}")
    return replace(node, attributes={**declared.defaults, **node.attributes})


class _Declared(NamedTuple):
    """What an operator takes and gives: the places of the inputs that it needs, counts, and its attributes in ONNX."""

    needed: Sequence[int]
    most_inputs: int
    least_outputs: int
    most_outputs: int
    kinds: Mapping[str, str] | None = None
    required: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = {}


_OTHERS = {"BiasGelu": (2, 2, 1), "FastGelu": (1, 2, 1), "Gelu": (1, 1, 1), "Swish": (1, 1, 1)}
_OTHERS |= {"SimplifiedLayerNormalization": (2, 2, 2), "If": (2, 4, 1)}
"""The least and the most inputs, and the most outputs, of operators that neither ONNX nor a kernel declares."""


def _ours(op: str) -> _Declared:
    """Return the declaration of an operator of ONNX Runtime's."""
    if op in _OTHERS:
        least, *most = _OTHERS[op]
        return _Declared(range(least), most[0], 1, most[1])
    inputs, outputs = OPERATORS[op].inputs, OPERATORS[op].outputs
    needed = [k for k, one in enumerate(inputs) if not one.optional and not (op in POOLS and one.name == "shape")]
    counts = [sys.maxsize if tensors[-1].group else len(tensors) for tensors in (inputs, outputs)]
    return _Declared(needed, counts[0], 1, counts[1])


@cache
def _declared(op: str, version: int) -> _Declared | None:
    """Return what ONNX says of its operator in this version, or in the last one that has it; None if it has none."""
    from onnx import defs

    try:
        schema = defs.get_schema(op, version, "")
    except defs.SchemaError:  # ONNX Runtime writes operators of later versions
        try:
            schema = defs.get_schema(op, defs.onnx_opset_version(), "")
        except defs.SchemaError:
            return None
    defaults = {}
    for name, one in schema.attributes.items():
        message = Message(memoryview(one.default_value.SerializeToString()), ATTRIBUTE, Budget())
        if message.int("type") and (one.default_value.type != 4 or one.default_value.t.data_type):
            defaults[name] = attribute_of(message, op)
    return _Declared(
        *(range(schema.min_input), schema.max_input, schema.min_output, schema.max_output),
        {name: str(one.type).rpartition(".")[2] for name, one in schema.attributes.items()},
        frozenset(name for name, one in schema.attributes.items() if one.required),
        defaults,
    )


def kind_of(value: Any) -> str:
    """Return ONNX's name for the type of an attribute's value."""
    if isinstance(value, list):
        return f"{kind_of(value[0])}S" if value else "INTS"
    return {int: "INT", float: "FLOAT", str: "STRING"}.get(type(value), "TENSOR")
