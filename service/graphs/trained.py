"""A model's file with other weights in it: their bytes take the place of the old ones, and all else stays."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from service.dtypes import Array
from service.errors import InvalidGraph, shown
from service.graphs.protobuf import Budget, Message, numbered
from service.graphs.tensors import ATTRIBUTE, TENSOR

_FILE, _GRAPH, _NODE = map(numbered, ("7:graph", "1:node 5:initializer", "2:output 4:op_type 5:attribute"))

_NUMBERS = "raw_data", "float_data", "double_data", "floats"
"""The fields of a tensor, or of a constant's attribute, that have floats as bytes."""


def overwrite(content: bytearray, values: Mapping[str, Array]) -> None:
    """Write these values over the initializers and constants of their names in a file that `read` has read.

    The values have the dtypes and shapes of the tensors. Raises `InvalidGraph` for a tensor that the file has not, or
    not as bytes.
    """
    graph = Message(memoryview(content), _FILE, Budget()).messages("graph", _GRAPH)[-1]
    tensors = {one.text("name"): one for one in graph.messages("initializer", TENSOR)}
    for node in graph.messages("node", _NODE) if values.keys() - tensors.keys() else ():
        for attribute in node.messages("attribute", ATTRIBUTE) if node.text("op_type") == "Constant" else ():
            tensors[node.text("output")] = (attribute, *attribute.messages("t", TENSOR))[-1]
    for name, value in values.items():
        if name not in tensors:
            problem = f"the file has no weight {shown(name)}: it is an input of the model, or a constant of a function"
            raise InvalidGraph(problem)
        _overwrite(name, tensors[name], value)


def _overwrite(name: str, tensor: Message, value: Array) -> None:
    data, places = value.reshape(-1).view(np.uint8).data, tensor.all(next(filter(tensor.__contains__, _NUMBERS), ""))
    if sum(map(len, places)) != len(data):
        raise InvalidGraph(f"the weight {shown(name)} is no bytes in the file: save the model with raw_data")
    for place in places:
        place[:], data = data[: len(place)], data[len(place) :]
