"""Graphs in the file of an export: each model is a tensor of int32, with zeros behind its bytes.

`__metadata__["graphs"]` holds, as JSON, the rest of each graph by the name of its tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any, TypeAlias

import numpy as np

from service.buffers.graph_changes import PutGraph
from service.buffers.graphs import digest_of, named_graph
from service.buffers.names import BufferName
from service.buffers.packed import present
from service.buffers.readonly import Moment
from service.buffers.record import Record
from service.codecs.safetensors import TensorType
from service.dtypes import BOOL, INT32, Array
from service.errors import MalformedBody, shown
from service.host.documents import DocumentInvalid, Members, check, is_number, parse

ROOM = "graphs/"
"""What the name of a tensor has before the name of its graph: no buffer has a slash in its name."""

MAX_SECONDS = 10**11
"""The latest time of creation, in the year 5138: a time in milliseconds would be later."""

_GRAPH: Members = {
    "options": (
        "an object of texts",
        lambda value: isinstance(value, dict) and all(isinstance(each, str) for each in value.values()),
    ),
    "created": ("seconds since 1970, from 0 to 10^11", lambda value: is_number(value, 0, MAX_SECONDS)),
    "bytes": ("an integer, 0 or more", lambda value: type(value) is int and value >= 0),
    "digest": ("a text", lambda value: isinstance(value, str)),
}


SavedGraph: TypeAlias = tuple[BufferName, PutGraph]
"""A graph of a file, and the change that makes it again."""


def prefix_of(prefix: str, hidden: str) -> str:
    """Return the prefix that buffers have which are graphs or runs whose names have this prefix; all names are joined.

    `hidden` is the namespace of those in the default namespace.
    """
    own = BufferName(hidden, "").joined
    return own[:-1] + prefix[1:] if prefix[:1] in ("", "~") else own + prefix


def tensor_of(graph: Record) -> str:
    """Return the name of the tensor that holds the model."""
    _, name = graph.full_name.kind
    return BufferName(name.namespace, ROOM + name.name).joined


def type_of(graph: Record) -> TensorType:
    """Return the dtype and the shape of the tensor that holds the model."""
    return INT32, (-(-graph.spec.nbytes // INT32.itemsize),)


def described(graph: Record) -> dict[str, Any]:
    """Return the rest of the graph."""
    options, digest = graph.about["options"], graph.about["digest"]
    return {"options": options, "created": graph.created, "bytes": graph.spec.nbytes, "digest": digest}


def pieces(moment: Moment, graph: Record) -> Iterator[Array]:
    """Yield the bytes of the tensor. Raises `GraphCorrupt`."""
    with named_graph(graph.name, "model"):
        yield from moment.streamed(graph.spec, graph.value)
    yield np.zeros(-graph.spec.nbytes % INT32.itemsize, np.uint8)


def read(what: str, metadata: str | None, tensors: Mapping[str, Array]) -> dict[str, SavedGraph]:
    """Return the graphs of a file by the names of their tensors. Raises `MalformedBody`."""
    graphs = checked(what, ("graphs", "tensor"), metadata, _GRAPH, _GRAPH.keys())
    return {tensor: _saved(what, tensor, members, tensors.get(tensor)) for tensor, members in graphs.items()}


def checked(
    what: str, words: tuple[str, str], metadata: str | None, rules: Members, required: Set[str]
) -> dict[str, Any]:
    """Return the members of each buffer, graph or run in the metadata of a file. Raises `MalformedBody`."""
    everything = f"The metadata of the {words[0]} in {what}"
    try:
        found: dict[str, Any] = parse(everything, "{}" if metadata is None else metadata)
        if not isinstance(found, dict):
            raise DocumentInvalid(f"{everything} is {shown(found)}, but must be an object")
        for name, members in found.items():
            if isinstance(members, dict):
                members = found[name] = {present(member): value for member, value in members.items()}
            check(f"The metadata of the {words[1]} {shown(name)} in {what}", members, rules, required)
    except DocumentInvalid as error:
        raise MalformedBody(str(error)) from None
    return found


def _saved(what: str, tensor: str, members: Mapping[str, Any], numbers: Array | None) -> SavedGraph:
    namespace, name = BufferName.split(tensor)
    if not name.startswith(ROOM):
        raise MalformedBody(f"{what} has the tensor {shown(tensor)} for a graph, but its name must have {ROOM} in it")
    content = None if numbers is None else numbers.reshape(-1).view(BOOL)[: members["bytes"]]
    if content is None or digest_of(content.data) != members["digest"]:
        raise MalformedBody(f"{what} has no tensor {shown(tensor)} as its metadata describes it")
    name = name.removeprefix(ROOM)
    options, created = members["options"], float(members["created"])
    change = PutGraph(name=name, content=content, digest=members["digest"], options=options, created=created)
    return BufferName(namespace, name), change
