"""Tensors of the Open Inference Protocol, version 2: a JSON request, its tensors in it as lists or after it as bytes.

With the binary tensor data extension the JSON ends where the header Inference-Header-Content-Length says, and the bytes
of the tensors that have a `binary_data_size` follow, in order, without gaps. Lists may be flat or nested. BF16 travels
in bytes only; NaN and infinities in lists are the strings "NaN", "Infinity" and "-Infinity", or bare words.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import orjson
import simdjson

from service.codecs._bytes import bytes_of, view, view_at, wrong_size
from service.codecs._headers import as_object, check_shape, load
from service.codecs._lists import LISTS, Numbers, is_empty, shape_of
from service.codecs.json import Pairs, list_text, members_of, parse
from service.dtypes import BFLOAT16, BOOL, OPEN_INFERENCE, Array, DType
from service.errors import GradserveError, InvalidParameter, InvalidTensor, MalformedBody, shown
from service.limits import Limits

SMALL = 1 << 16
"""Up to this size JSON is read into Python objects; beyond, its numbers stay in the parser."""

MOST_ITEMS = 1 << 12
"""The most items of a list that does not hold numbers of a tensor."""

KNOWN_BYTES = 1 << 12
"""Up to this size JSON that bytes follow is remembered."""

_DTYPES: dict[Any, DType] = {name: dtype for dtype, name in OPEN_INFERENCE.items()}

_SHARED_MEMORY = "shared_memory_region"


class Request(NamedTuple):
    """What a client asks for: `outputs` maps the names to whether each is wanted in bytes; None: all, as `binary`."""

    id: str | None
    tensors: dict[str, Array]
    parameters: dict[str, Any]
    outputs: dict[str, bool] | None
    binary: bool


def decode(body: memoryview, header_length: int | None, limits: Limits) -> Request:
    """The request, its tensors read-only views of `body` where they are bytes.

    `header_length` is where the JSON ends; None: at the end. Raises `MalformedBody`, `InvalidTensor`,
    `InvalidParameter`, `TensorTooLarge` and `TooManyDimensions`.
    """
    if header_length is None:
        text, data, head = body, None, _head(body)
    else:
        if header_length > len(body):
            raise MalformedBody(
                f"Inference-Header-Content-Length is {header_length}, but the whole body has {len(body)} bytes"
            )
        text, data = body[:header_length], body[header_length:]
        if header_length <= KNOWN_BYTES:
            head, places, end = _known_head(text.tobytes(), limits)
            if places is not None and end == len(data):
                tensors = {name: view_at(body, header_length + start, *form) for name, start, form in places}
                return Request(head.id, tensors, head.parameters, head.outputs, head.binary)
        else:
            head = _head(text)
    tensors = _Inputs(text, data, limits).read(head)
    return Request(head.id, tensors, head.parameters, head.outputs, head.binary)


def decode_raw(name: str, dtype: DType, body: memoryview, limits: Limits) -> Array:
    """The tensor `name`, of rank 1, of which `body` holds the bytes and nothing else. Raises like `decode`."""
    shape = [len(body) // dtype.itemsize]
    limits.check(name, shape, dtype)
    return view(name, name, body, dtype, shape)


class _Entry(NamedTuple):
    """An input as the JSON describes it: the `size` of its bytes, or, if that is None, its `data`, a list."""

    name: str
    dtype: DType
    shape: list[int]
    size: int | None
    data: Any


class _Head(NamedTuple):
    """A request's JSON, read and checked but for the tensors' numbers. To be shared, so not to be changed."""

    document: dict[str, Any]
    id: str | None
    inputs: list[_Entry]
    parameters: dict[str, Any]
    outputs: dict[str, bool] | None
    binary: bool


def _head(text: memoryview | bytes) -> _Head:
    document = _read(text)
    parameters = dict(as_object(document.get("parameters", {}), "parameters"))
    identity = document.get("id")
    if identity is not None and not isinstance(identity, str):
        raise MalformedBody(f"id is {shown(identity)}, but must be a string")
    inputs = [_entry(entry) for entry in _objects(document.get("inputs"), "inputs")]
    binary = _flag(parameters.pop("binary_data_output", False), "binary_data_output")
    outputs = None
    if document.get("outputs") is not None:
        asked = [_output(entry, binary) for entry in _objects(document["outputs"], "outputs")]
        outputs = dict(asked)
        if len(outputs) < len(asked):
            twice = next(name for name, count in Counter(name for name, _ in asked).items() if count > 1)
            raise MalformedBody(f"The request has two outputs named {shown(twice)}")
    return _Head(document, identity, inputs, parameters, outputs or None, binary)


_Places: TypeAlias = list[tuple[str, int, tuple[DType, list[int]]]]
"""Inputs that are all in bytes: their names, where they begin, their dtypes and shapes."""


@lru_cache(maxsize=256)
def _known_head(text: bytes, limits: Limits) -> tuple[_Head, _Places | None, int]:
    """The head of a small JSON that bytes follow, which are so many, and where in them the inputs are.

    A client's requests differ in their tensors, but hardly in that. None for inputs that are to be looked at each time:
    lists, booleans, and whatever is wrong.
    """
    head, end = _head(text), 0
    places: _Places = []
    for name, dtype, shape, size, _ in head.inputs:
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


def _entry(entry: Mapping[str, Any]) -> _Entry:
    name = _name(entry, "inputs")
    text = entry.get("datatype")
    dtype = _DTYPES.get(text) if isinstance(text, str) else None
    if dtype is None:
        known = ", ".join(_DTYPES)
        raise InvalidTensor(f"{name}.datatype is {shown(text)}, but must be one of {known}", tensor=name)
    shape = check_shape(name, entry.get("shape"))
    parameters = entry.get("parameters", {})
    if not isinstance(parameters, dict):
        raise MalformedBody(f"{name}.parameters is {shown(parameters)}, but must be an object")
    size = parameters.get("binary_data_size")
    if size is None and _SHARED_MEMORY in parameters:
        raise InvalidTensor(f"{name} is in shared memory, which is not read here; send its bytes", tensor=name)
    if (size is None) is ("data" not in entry):
        raise InvalidTensor(f"{name} must have either data or the parameter binary_data_size", tensor=name)
    if size is not None and (type(size) is not int or size < 0):
        raise InvalidTensor(f"{name}.binary_data_size is {shown(size)}, but must be a number of bytes", tensor=name)
    return _Entry(name, dtype, shape, size, entry.get("data"))


class _Inputs:
    """Reads the inputs one after the other, those in bytes from where the one before ended."""

    def __init__(self, text: memoryview, data: memoryview | None, limits: Limits) -> None:
        self._text, self._data, self._limits = text, data, limits
        self._end, self._numbers = 0, Numbers()

    def read(self, head: _Head) -> dict[str, Array]:
        self._limits.check_count(len(head.inputs))
        tensors: dict[str, Array] = {}
        for entry in head.inputs:
            name, dtype, shape, size, data = entry
            if name in tensors:
                raise InvalidTensor(f"There are two inputs named {shown(name)}", tensor=name)
            self._limits.check(name, shape, dtype)
            if size is None:
                tensors[name] = self._from_list(name, data, dtype, shape)
            else:
                tensors[name] = self._from_bytes(name, size, dtype, shape)
        if self._data is not None and self._end != len(self._data):
            raise MalformedBody(f"The bytes after the JSON are {len(self._data)}, but the inputs take {self._end}")
        self._numbers.prove(self._text, lambda: _lists(head.document))
        return tensors

    def _from_bytes(self, name: str, size: int, dtype: DType, shape: Sequence[int]) -> Array:
        if self._data is None:
            raise InvalidTensor(
                f"{name} has a binary_data_size, but the header Inference-Header-Content-Length is missing", tensor=name
            )
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
            raise InvalidTensor(
                f"{name} is BF16, which can only be sent as bytes, with a binary_data_size", tensor=name
            )
        if type(data) not in LISTS:
            raise InvalidTensor(f"{name}.data is {shown(data)}, but must be a list", tensor=name)
        found = shape_of(name, data, self._limits)
        if found not in (tuple(shape), (math.prod(shape),)) and not is_empty(found, shape):
            raise InvalidTensor(
                f"{name}.data has shape {list(found)}, but must have {list(shape)}, or be flat, of {math.prod(shape)}",
                tensor=name,
            )
        return self._numbers.read(name, data, found, dtype).reshape(shape)


def _read(text: memoryview | bytes) -> dict[str, Any]:
    try:
        return _parsed(text)
    except MalformedBody:
        quoted = _quoted(bytes(text))
        if quoted == text:
            raise
        return _parsed(quoted)


def _parsed(text: memoryview | bytes) -> dict[str, Any]:
    """The JSON as Python objects; but where it is large, the numbers of tensors stay in the parser."""
    if len(text) <= SMALL:
        return as_object(load(text, "The request"), "The request")
    try:
        return as_object(_plain(parse(text)), "The request")
    except RecursionError:
        raise MalformedBody("The request is nested too deeply") from None


def _quoted(text: bytes) -> bytes:
    """The JSON with NaN and infinities as strings where they are bare words, as Python's `json` writes them."""
    if b"\\" in text or not (b"NaN" in text or b"Infinity" in text):
        return text  # with backslashes, a quotation mark need not begin or end a string
    parts = text.split(b'"')
    for number in range(0, len(parts), 2):  # those between strings
        part = parts[number].replace(b"Infinity", b'"Infinity"').replace(b'-"Infinity"', b'"-Infinity"')
        parts[number] = part.replace(b"NaN", b'"NaN"')
    return b'"'.join(parts)


def _plain(value: Any, key: str = "") -> Any:
    if isinstance(value, (simdjson.Object, Pairs)):
        return {name: _plain(member, name) for name, member in members_of(value, shown(key) if key else "The request")}
    if type(value) not in LISTS or key == "data":
        return value
    if len(value) > MOST_ITEMS:
        raise MalformedBody(f"{shown(key)} has {len(value)} items; the limit is {MOST_ITEMS}")
    return [_plain(item) for item in value]


def _lists(value: Any, key: str = "") -> int:
    """The lists in `value`, but for those that hold a tensor's numbers."""
    if isinstance(value, dict):
        return sum(_lists(member, name) for name, member in value.items())
    return 1 + sum(map(_lists, value)) if isinstance(value, list) and key != "data" else 0


def _objects(value: Any, what: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise MalformedBody(f"{what} is {shown(value)}, but must be a list")
    return [as_object(entry, what) for entry in value]


def _name(entry: Mapping[str, Any], what: str) -> str:
    name = entry.get("name")
    if not isinstance(name, str):
        raise MalformedBody(f"{what} must each have a name, a string, but one has {shown(name)}")
    return name


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidParameter(f"{name} is {shown(value)}, but must be true or false", parameter=name)
    return value


def _output(entry: Mapping[str, Any], binary: bool) -> tuple[str, bool]:
    name = _name(entry, "outputs")
    parameters = as_object(entry.get("parameters", {}), "an output's parameters")
    for unknown in parameters.keys() - {"binary_data"}:
        raise InvalidParameter(
            f"{name} has the parameter {shown(unknown)}, but outputs only have binary_data", parameter=unknown
        )
    return name, _flag(parameters.get("binary_data", binary), "binary_data")


def encode(
    model: str,
    identity: str | None,
    tensors: Mapping[str, Array],
    binary: Collection[str],
    parameters: Mapping[str, str] | None = None,
) -> tuple[list[bytes | memoryview], int | None]:
    """The pieces of an answer, and the length of its JSON if bytes follow: of the outputs named in `binary`.

    Raises `InvalidTensor` for BF16 in a list.
    """
    if identity is None and not parameters and 0 < len(tensors) == len(binary):
        header = _known_header(
            model, tuple([(name, OPEN_INFERENCE[one.dtype], one.shape, one.nbytes) for name, one in tensors.items()])
        )
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
        if name in binary:
            blobs.append(bytes_of(tensor))
            pieces.append(orjson.dumps({**entry, "parameters": {"binary_data_size": len(blobs[-1])}}))
        elif tensor.dtype == BFLOAT16:
            raise InvalidTensor(
                f"{name} is BF16, which can only be answered as bytes: ask for binary_data", tensor=name
            )
        else:
            pieces += [orjson.dumps(entry)[:-1] + b',"data":', *list_text(tensor.reshape(-1)), b"}"]
    pieces.append(b"]}")
    if not blobs:
        return pieces, None
    header = b"".join(pieces)
    return [header, *blobs], len(header)


@lru_cache(maxsize=256)
def _known_header(model: str, layout: Sequence[tuple[str, str, tuple[int, ...], int]]) -> bytes:
    """The JSON before outputs that are all in bytes: a client's answers differ in their numbers, but hardly in that."""
    outputs = [
        {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size}}
        for name, datatype, shape, size in layout
    ]
    return orjson.dumps({"model_name": model, "model_version": "1", "outputs": outputs})
