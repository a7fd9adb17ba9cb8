"""What PyTorch's exporter writes of the module beside its graph."""

from __future__ import annotations

import re
from collections.abc import Iterator

from service.dtypes import Array
from service.graphs.protobuf import MAX_CHARACTERS, Message, numbered

MADE = re.compile(r"val_\d+|onnx::\w+")
"""The names that the exporters give to constants. A constant with one of them may be a weight in another form."""

NORMALIZATIONS = {
    *("BatchNormalization", "GroupNormalization", "InstanceNormalization", "LayerNormalization"),
    *("RMSNormalization", "SimplifiedLayerNormalization"),
}
"""The operators whose inputs behind the first are scales and biases."""

_ENTRY = numbered("1:key 2:value")
_SIGNATURE = b"pkg.torch.export.ExportedProgram.graph_signature"
_SCOPES, _RULES = b"pkg.torch.onnx.name_scopes", b"pkg.onnxscript.rewriter.rule_name"


def _entries(message: Message, *keys: bytes) -> Iterator[tuple[bytes, str]]:
    """Yield the metadata of these keys, whose values may be long."""
    for data in message.all("metadata"):
        if any(key in bytes(data[: len(key) + 8]) for key in keys):
            entry = Message(data, _ENTRY, message.budget)
            value = entry.data("value")
            message.budget.take(len(value), 0)
            yield bytes(entry.data("key")), str(value, "utf-8", "replace")


def tensors_of(graph: Message) -> dict[str, str]:
    """Return what each tensor of the module is, as PARAMETER or BUFFER, by its name; nothing if the file says nothing.

    Parameters that are one tensor are all here, though the file has the tensor once.
    """
    signature = next((value for _, value in _entries(graph, _SIGNATURE)), "")
    found = dict[str, str]()
    for match in re.finditer(r": (PARAMETER|BUFFER|CONSTANT_TENSOR) target='([^'\n]*)'", signature):
        graph.budget.take()
        found[match[2]] = match[1]
    return found


def origin_of(node: Message) -> tuple[str, str]:
    """Return the module that a node is of, and the rules by which the exporter's optimizer has made it."""
    found = dict(_entries(node, _SCOPES, _RULES))
    scopes = re.findall(r"'([^']*)'", found.get(_SCOPES, ""))[:-1]
    return scopes[-1][:MAX_CHARACTERS] if scopes else "", found.get(_RULES, "")[:MAX_CHARACTERS]


def is_constant(array: Array) -> bool:
    """Return whether all numbers are 1, or all are 0."""
    return bool(array.size and array.min() == array.max() and array.min() in (0, 1))
