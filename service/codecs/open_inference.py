"""Tensors of the Open Inference Protocol, version 2: a JSON request, its tensors in it as lists or after it as bytes.

A tensor may also be in shared memory, which this module neither reads nor writes: the JSON only says where.

With the binary tensor data extension, the header Inference-Header-Content-Length says where the JSON ends. The bytes of
the tensors that have a `binary_data_size` follow, in order, without gaps. Lists may be flat or nested. BF16 travels in
bytes only. NaN and infinities in lists are the strings "NaN", "Infinity" and "-Infinity", or bare words.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import orjson

from service.codecs._bytes import bytes_of, view, view_at, wrong_size
from service.codecs._inference_head import RequestHead, count_lists, read_head
from service.codecs._lists import ListReader, is_empty, list_text, shape_of
from service.codecs._parser import LISTS, Text
from service.codecs.parts import Part, SharedInput
from service.dtypes import BFLOAT16, BOOL, OPEN_INFERENCE, Array, DType
from service.errors import GradserveError, InvalidTensor, MalformedBody, shown
from service.limits import Limits

CACHED_HEAD_BYTES = 1 << 12
"""The largest JSON, in bytes, to cache if bytes follow it."""

CACHED_OUTPUTS = 16
"""The most outputs of an answer whose JSON is cached."""


class InferenceRequest(NamedTuple):
    """A client's request.

    `tensors` are the inputs in the body, `shared` those in shared memory. `outputs` maps the names of the requested
    outputs to whether the client wants each in bytes. If `outputs` is None, the client wants all outputs, and `binary`
    says whether in bytes. `parts` has the outputs that the client wants in shared memory; they count as bytes.
    """

    id: str | None
    tensors: dict[str, Array]
    parameters: dict[str, Any]
    outputs: dict[str, bool] | None
    binary: bool
    shared: dict[str, SharedInput]
    parts: dict[str, Part]


def decode(body: memoryview, header_length: int | None, limits: Limits) -> InferenceRequest:
    """Return the request. Tensors that are bytes in `body` are read-only views of it.

    The JSON ends at `header_length`, or, if that is None, where `body` ends. Raises `MalformedBody`, `InvalidTensor`,
    `InvalidParameter`, `TensorTooLarge` and `TooManyDimensions`.
    """
    if header_length is None:
        text, data = Text(body), None
        head = read_head(text, has_length=False)
    else:
        if header_length > len(body):
            raise MalformedBody(
                f"Inference-Header-Content-Length is {header_length}, but the whole body has {len(body)} bytes"
            )
        raw, data = body[:header_length], body[header_length:]
        if header_length <= CACHED_HEAD_BYTES:
            head, places, end = _cached_head(raw.tobytes(), limits)
            if places is not None and end == len(data):
                tensors = {name: view_at(body, header_length + start, *form) for name, start, form in places}
                return InferenceRequest(head.id, tensors, head.parameters, head.outputs, head.binary, {}, head.parts)
        text = Text(raw)
        if header_length > CACHED_HEAD_BYTES:
            head = read_head(text, has_length=True)
    inputs = _Inputs(text, data, limits)
    tensors = inputs.read(head)
    return InferenceRequest(head.id, tensors, head.parameters, head.outputs, head.binary, inputs.shared, head.parts)


def decode_raw(name: str, dtype: DType, body: memoryview, limits: Limits) -> Array:
    """Return the tensor `name`, of rank 1, whose bytes are the whole body. Raises the same errors as `decode`."""
    shape = [len(body) // dtype.itemsize]
    limits.check(name, shape, dtype)
    return view(name, name, body, dtype, shape)


_Places: TypeAlias = list[tuple[str, int, tuple[DType, list[int]]]]
"""For each input its name, the place of its first byte after the JSON, and its dtype and shape."""


@lru_cache(maxsize=256)
def _cached_head(text: bytes, limits: Limits) -> tuple[RequestHead, _Places | None, int]:
    """Return the head of a small JSON, the places of the inputs in the bytes after it, and where the last input ends.

    The requests of a client have other numbers, but mostly the same JSON. The places are None if each request needs
    more checks: for lists, booleans, shared memory and mistakes.
    """
    head, end = read_head(Text(text), has_length=True), 0
    places: _Places = []
    for name, dtype, shape, size, _, _ in head.inputs:
        if size is None or size != math.prod(shape) * dtype.itemsize or dtype == BOOL:
            return head, None, 0
        places.append((name, end, (dtype, shape)))
        end += size
    try:
        limits.check_count(len(places))
        for name, _, (dtype, shape) in places:
            limits.check(name, shape, dtype)
    except GradserveError:
        return head, None, 0
    if len({name for name, _, _ in places}) < len(places):
        return head, None, 0
    return head, places, end


class _Inputs:
    """Reads the inputs in their order. An input in bytes begins where the previous one ends."""

    def __init__(self, text: Text, data: memoryview | None, limits: Limits) -> None:
        self._text, self._data, self._limits = text, data or memoryview(b""), limits
        self._has_length, self._end, self._lists = data is not None, 0, ListReader()
        self.shared: dict[str, SharedInput] = {}
        """The inputs in shared memory."""

    def read(self, head: RequestHead) -> dict[str, Array]:
        self._limits.check_count(len(head.inputs))
        tensors: dict[str, Array] = {}
        for name, dtype, shape, size, data, part in head.inputs:
            if name in tensors or name in self.shared:
                raise InvalidTensor(f"There are two inputs named {shown(name)}", tensor=name)
            self._limits.check(name, shape, dtype)
            if part is not None:
                if part.size != math.prod(shape) * dtype.itemsize:
                    raise wrong_size(f"{name}.shared_memory_byte_size", name, part.size, dtype, shape)
                self.shared[name] = SharedInput(part, dtype, shape)
            elif size is None:
                tensors[name] = self._from_list(name, data, dtype, shape)
            else:
                tensors[name] = self._from_bytes(name, size, dtype, shape)
        if self._end != len(self._data):
            raise MalformedBody(f"{len(self._data)} bytes follow the JSON, but the inputs take {self._end}")
        self._lists.finish(self._text, lambda: count_lists(head.document))
        return tensors

    def _from_bytes(self, name: str, size: int, dtype: DType, shape: Sequence[int]) -> Array:
        if size and not self._has_length:
            problem = f"{name} has a binary_data_size, but the header Inference-Header-Content-Length is missing"
            raise InvalidTensor(problem, tensor=name)
        start, self._end = self._end, self._end + size
        data = self._data[start : self._end]
        if size != math.prod(shape) * dtype.itemsize:
            raise wrong_size(f"{name}.binary_data_size", name, size, dtype, shape)
        if len(data) < size:
            raise MalformedBody(
                f"{name} takes bytes {start} to {self._end} after the JSON, but only {len(self._data)} came"
            )
        return view(name, name, data, dtype, shape)

    def _from_list(self, name: str, data: Any, dtype: DType, shape: Sequence[int]) -> Array:
        if dtype == BFLOAT16:
            raise InvalidTensor(f"{name} is BF16: send it as bytes, with a binary_data_size", tensor=name)
        if type(data) not in LISTS:
            raise InvalidTensor(f"{name}.data is {shown(data)}, but must be a list", tensor=name)
        list_shape, size = shape_of(name, data, self._limits), math.prod(shape)
        if list_shape not in (tuple(shape), (size,)) and not is_empty(list_shape, shape):
            problem = f"{name}.data has shape {list(list_shape)}, but must have {list(shape)}, or be flat, of {size}"
            raise InvalidTensor(problem, tensor=name)
        return self._lists.read(name, data, list_shape, dtype).reshape(shape)


def encode(
    model: str,
    identity: str | None,
    tensors: Mapping[str, Array],
    binary: Collection[str],
    parameters: Mapping[str, str] | None = None,
    shared: Collection[str] = (),
) -> tuple[list[bytes | memoryview], int | None]:
    """Return the pieces of an answer, and the length of its JSON, or None if no bytes follow the JSON.

    The outputs named in `binary` are bytes, except those named in `shared`, which are in shared memory: as in Triton's
    answers, they have no parameters, which NVIDIA's C++ client reads as those of bytes. Raises `InvalidTensor` for BF16
    in a list.
    """
    if identity is None and not parameters and not shared and 0 < len(tensors) == len(binary) <= CACHED_OUTPUTS:
        layout = [(name, OPEN_INFERENCE[tensor.dtype], tensor.shape, tensor.nbytes) for name, tensor in tensors.items()]
        header = _cached_header(model, tuple(layout))
        return [header, *map(bytes_of, tensors.values())], len(header)
    head: dict[str, Any] = {"id": identity} if identity is not None else {}
    head |= {"model_name": model, "model_version": "1"}
    if parameters:
        head["parameters"] = parameters
    pieces: list[bytes | memoryview] = [orjson.dumps(head)[:-1] + b',"outputs":[']
    blobs: list[bytes | memoryview] = []
    for number, (name, tensor) in enumerate(tensors.items()):
        entry: dict[str, Any] = {"name": name, "datatype": OPEN_INFERENCE[tensor.dtype], "shape": tensor.shape}
        if number:
            pieces.append(b",")
        if name in shared:
            pieces.append(orjson.dumps(entry))
        elif name in binary:
            blobs.append(bytes_of(tensor))
            pieces.append(orjson.dumps({**entry, "parameters": {"binary_data_size": len(blobs[-1])}}))
        elif tensor.dtype == BFLOAT16:
            raise InvalidTensor(f"{name} is BF16, which can only be sent as bytes: request binary_data", tensor=name)
        else:
            pieces += [orjson.dumps(entry)[:-1] + b',"data":', *list_text(tensor.reshape(-1)), b"}"]
    pieces.append(b"]}")
    if not blobs:
        return pieces, None
    header = b"".join(pieces)
    return [header, *blobs], len(header)


@lru_cache(maxsize=256)
def _cached_header(model: str, layout: Sequence[tuple[str, str, tuple[int, ...], int]]) -> bytes:
    """Return the JSON before outputs that are all bytes: a client's answers mostly have the same JSON."""
    outputs = [
        {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size}}
        for name, datatype, shape, size in layout
    ]
    return orjson.dumps({"model_name": model, "model_version": "1", "outputs": outputs})
