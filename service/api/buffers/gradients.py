"""The gradients in the body of a request: dense, sparse, or in 8 bits.

A sparse gradient is two tensors, integer `indices` and `rows`, and a gradient in 8 bits is int8 `codes` and `scales`.
In JSON they are the members of an object, which takes the place of the tensor. In a safetensors file, and in errors,
their names are `NAME/indices` and so on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TypeAlias

import numpy as np

from service.api.buffers.request import Received
from service.api.http.answer import JSON
from service.api.http.body import header_of, is_quick
from service.api.http.call import Call
from service.api.http.offload import INLINE_LOOKUPS
from service.api.http.tensor_forms import read_tensor
from service.buffers.changes import Add
from service.buffers.gradients import Coded, Rows, Sent
from service.buffers.names import BufferName
from service.codecs import json as json_codec
from service.codecs import safetensors
from service.codecs.codes import BLOCK_LENGTH, LARGEST_CODE, block_count
from service.dtypes import CODES, FLOATS, INTEGERS, NAMES, SCALES, WIRE_NAMES, Array, Kind
from service.errors import (
    DtypeMismatch,
    IndexOutOfRange,
    InvalidTensor,
    MalformedBody,
    MissingTensor,
    ShapeMismatch,
    UnknownTensor,
    shown,
)
from service.limits import Limits

FORMS = {
    "a sparse gradient": {"indices": INTEGERS, "rows": FLOATS},
    "a gradient in 8 bits": {"codes": CODES, "scales": SCALES},
}
"""The tensors of the gradients that have two."""

PARTS = {part: kind for form in FORMS.values() for part, kind in form.items()}

INLINE_INDICES = 1 << 12
"""Indices that the event loop sorts itself: about half a millisecond."""

SORTED_BYTES = 40
"""Bytes of memory for an index: counted from the front, in order, its place, and twice that to sort them."""

Gradients: TypeAlias = Mapping[str, Sent]

Parts: TypeAlias = dict[str, dict[str, Array]]
"""The tensors of these gradients, by the gradient's name and their own."""


async def gradients(call: Call, received: Received) -> tuple[Gradients, json_codec.Encoding]:
    """Return the gradients in the body, and the default form of tensors in the answer."""
    text = received.body if received.sent == JSON else header_of(received.body)
    inline = is_quick(text, received.sent != JSON)
    return _decode(call, received) if inline else await call.decode_in_pool(text, _decode, call, received)


def _decode(call: Call, received: Received) -> tuple[Gradients, json_codec.Encoding]:
    began = time.perf_counter_ns()
    if received.sent == JSON and "name" in call.parameters and bytes(received.body[:64]).lstrip().startswith(b"["):
        raise MalformedBody('The body is a list, but must be an object: send {"gradient": [1, 2]}')
    decoded = (_from_json if received.sent == JSON else _from_safetensors)(received.body, call.engine.limits)
    call.spent["decode"] = time.perf_counter_ns() - began
    return decoded


def _from_json(body: memoryview, limits: Limits) -> tuple[Gradients, json_codec.Encoding]:
    document = json_codec.Document(body, limits)
    tensors: dict[str, Array] = {}
    parts: Parts = {}
    for name, member in document.members.items():
        if isinstance(member, dict) and not PARTS.keys().isdisjoint(member):
            parts[name] = _parts(document, name, member)
        else:
            tensors[name] = read_tensor(document, name, member, FLOATS.default)
    limits.check_count(len(tensors) + sum(map(len, parts.values())))
    document.finish()
    return _checked(tensors, parts), document.encoding


def _parts(document: json_codec.Document, name: str, members: Mapping[str, object]) -> dict[str, Array]:
    for member in members:
        if member not in PARTS:
            forms = " or ".join(", ".join(form) for form in FORMS.values())
            problem = f"{name}.{member} is unknown; the members of such a gradient are {forms}"
            raise InvalidTensor(problem, tensor=name)
    places = {part: f"{name}/{part}" for part in members}
    return {
        part: read_tensor(document, place, document.member(place, members[part]), PARTS[part].default)
        for part, place in places.items()
    }


def _from_safetensors(body: memoryview, limits: Limits) -> tuple[Gradients, json_codec.Encoding]:
    tensors = safetensors.decode(body, limits)
    parts: Parts = {}
    for place in [*tensors]:
        if "/" not in place:
            continue
        name, _, part = place.rpartition("/")
        if part in PARTS:
            parts.setdefault(name, {})[part] = tensors.pop(place)
    return _checked(tensors, parts), "list"


def _checked(tensors: Mapping[str, Array], parts: Parts) -> Gradients:
    """Return all gradients. Raises `DtypeMismatch`, and what `_joined` raises."""
    for name, tensor in tensors.items():
        if NAMES.get(tensor.dtype) not in FLOATS.dtypes:
            raise _wrong_dtype(name, tensor, FLOATS)
    if not parts:
        return tensors
    if twice := tensors.keys() & parts.keys():
        name = min(twice)
        raise InvalidTensor(
            f"{name} is there as a tensor and as {' and '.join(sorted(parts[name]))}, but must be one of them",
            tensor=name,
        )
    return {**tensors, **{name: _joined(name, each) for name, each in parts.items()}}


def _joined(name: str, parts: Mapping[str, Array]) -> Rows | Coded:
    """Return a gradient of two tensors. Raises `MissingTensor`, `InvalidTensor`, `DtypeMismatch` and `ShapeMismatch`.

    Parts of both forms lack one of each.
    """
    form, kinds = next((form, kinds) for form, kinds in FORMS.items() if not kinds.keys().isdisjoint(parts))
    for part, kind in kinds.items():
        place = f"{name}/{part}"
        if part not in parts:
            raise MissingTensor(f"{place} is missing: {form} has {' and '.join(kinds)}", tensor=place)
        if WIRE_NAMES[parts[part].dtype] not in kind.dtypes:
            raise _wrong_dtype(place, parts[part], kind)
    if more := parts.keys() - kinds.keys():
        place = f"{name}/{min(more)}"
        raise InvalidTensor(f"{place} is one too many: {form} has {' and '.join(kinds)} alone", tensor=place)
    return _coded(name, **parts) if "codes" in parts else _rows(name, **parts)


def _rows(name: str, indices: Array, rows: Array) -> Rows:
    if indices.ndim != 1:
        problem = f"{name}/indices has shape {list(indices.shape)}, but must have one dimension"
        raise ShapeMismatch(problem, tensor=f"{name}/indices")
    return Rows(indices, rows)


def _coded(name: str, codes: Array, scales: Array) -> Coded:
    expected, place = (block_count(codes.size),), f"{name}/scales"
    if scales.shape != expected:
        problem = f"{place} has shape {list(scales.shape)}, but must have {list(expected)}: one for each"
        raise ShapeMismatch(f"{problem} {BLOCK_LENGTH} of the {codes.size} codes", tensor=place)
    if (scales < 0).any():
        first = int((scales < 0).argmax())
        raise InvalidTensor(f"{place}[{first}] is {scales[first]}, but must be 0 or more", tensor=place)
    if codes.size and codes.min() < -LARGEST_CODE:
        first = int((codes < -LARGEST_CODE).argmax())
        subscripts = "".join(f"[{k}]" for k in np.unravel_index(first, codes.shape))
        problem = f"{name}/codes{subscripts} is -128, but must be in [-127, 127]"
        raise InvalidTensor(problem, tensor=f"{name}/codes")
    return Coded(codes, scales)


def _wrong_dtype(name: str, tensor: Array, kind: Kind) -> DtypeMismatch:
    return DtypeMismatch(f"{name} is {tensor.dtype}, but must be one of {', '.join(kind.dtypes)}", tensor=name)


def only_gradient(tensors: Gradients) -> Sent:
    """Return the tensor `gradient`. Raises `UnknownTensor` for another name, and `MissingTensor`."""
    for name, value in tensors.items():
        if name in ("weight", "step") and isinstance(value, np.ndarray) and value.size == 1:
            raise UnknownTensor(f"{name} goes into the query: ?{name}={float(value.item()):g}", tensor=name)
        if name != "gradient":
            raise UnknownTensor(f"{shown(name)} is unknown: this request takes the tensor gradient", tensor=name)
    if not tensors:
        raise MissingTensor("accumulate needs the tensor 'gradient'", tensor="gradient")
    return tensors["gradient"]


async def sort_rows(call: Call, adds: Sequence[Add]) -> None:
    """Sort the rows of sparse gradients, so that the store's writer finds them sorted. Raises `Busy`."""
    sparse = {one.name: (one.gradient, one.tensor) for one in adds if isinstance(one.gradient, Rows) and one.do_update}
    if sparse:
        inline = sum(len(rows.indices) for rows, _ in sparse.values()) <= INLINE_INDICES and not call.store.blocks
        await call.offload(inline, _sort, call, sparse)


def _sort(call: Call, sparse: Mapping[str, tuple[Rows, str]]) -> None:
    store, names = call.store, [BufferName(call.store.namespace, name) for name in sparse]
    for start in range(0, len(names), INLINE_LOOKUPS):  # all their records may take much memory
        for name, record in store.look(names[start : start + INLINE_LOOKUPS]).items():
            rows, tensor = sparse[name.name]
            call.reserve(SORTED_BYTES * len(rows.indices))
            with suppress(ShapeMismatch, IndexOutOfRange):  # the add raises it, unless the request repeats an old one
                rows.onto(record.spec.shape, tensor)
