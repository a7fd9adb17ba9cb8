"""The JSON of an Open Inference Protocol request: read and checked, except for the tensors' numbers.

Small JSON becomes Python objects. In large JSON the numbers of tensors stay in the parser.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from service.codecs._bytes import count
from service.codecs._headers import MAX_HEADER_VALUES, as_object, check_shape, load
from service.codecs._parser import LISTS, OBJECTS, Body, Text, without_mark
from service.codecs.json import members_of, parse
from service.codecs.parts import PARAMETERS, Part, part_of
from service.dtypes import OPEN_INFERENCE, DType
from service.errors import InvalidParameter, InvalidTensor, MalformedBody, shown

SMALL_JSON_BYTES = 1 << 16
"""The largest JSON, in bytes, to read into Python objects: each number becomes an object."""

MAX_ID_CHARACTERS = 1 << 12
"""Characters of a request's id, which the answer repeats."""

MAX_LIST_ITEMS = 1 << 12
"""The most items of a list in large JSON that does not hold a tensor's numbers: each item becomes a Python object."""

MAX_QUOTATION_MARKS = 1 << 18
"""The most quotation marks in JSON that may have bare NaN and infinities: it is cut at each, in up to 0.5 us."""

_OF_OUTPUTS = PARAMETERS | {"binary_data"}
"""The parameters that an output may have."""

_OF_MLSERVER = ("content_type", "headers")
"""Parameters that MLServer's clients send with anything, mostly as null. They are ignored."""

_DTYPES: dict[Any, DType] = {name: dtype for dtype, name in OPEN_INFERENCE.items()}


class InputHead(NamedTuple):
    """An input in the JSON.

    It has either `size`, how many bytes after the JSON it takes, or `data`, a list, or its `part` of shared memory.
    """

    name: str
    dtype: DType
    shape: list[int]
    size: int | None
    data: Any
    part: Part | None


class RequestHead(NamedTuple):
    """A request's JSON. A cache shares it, so nothing may change it."""

    document: dict[str, Any]
    id: str | None
    inputs: list[InputHead]
    parameters: dict[str, Any]
    outputs: dict[str, bool] | None
    binary: bool
    parts: dict[str, Part]


def read_head(text: Text, has_length: bool) -> RequestHead:
    """Read the JSON of a request. `has_length` says whether a header has told where it ends.

    Raises `MalformedBody`, `InvalidTensor` and `InvalidParameter`.
    """
    try:
        document = _read(text)
    except MalformedBody as error:
        error.detail += _about_length(text.body, has_length)
        raise
    parameters = _parameters_of(document, "parameters")
    identity = document.get("id")
    if identity is not None and not isinstance(identity, str):
        raise MalformedBody(f"id is {shown(identity)}, but must be a string")
    if identity is not None and len(identity) > MAX_ID_CHARACTERS:
        raise MalformedBody(f"id has {len(identity)} characters; the limit is {MAX_ID_CHARACTERS}")
    inputs = [_read_input(entry) for entry in _as_objects(document.get("inputs"), "inputs")]
    binary = _as_boolean(parameters.pop("binary_data_output", False), "binary_data_output")
    outputs, parts = None, dict[str, Part]()
    if document.get("outputs") is not None:
        outputs, parts = _read_outputs(_as_objects(document["outputs"], "outputs"), binary)
    return RequestHead(document, identity, inputs, parameters, outputs or None, binary, parts)


def count_lists(value: Any, key: str = "") -> int:
    """Count the lists in `value`, except those of tensors' numbers."""
    if isinstance(value, dict):
        return sum(count_lists(member, name) for name, member in value.items())
    return 1 + sum(map(count_lists, value)) if isinstance(value, list) and key != "data" else 0


def _read(text: Text) -> dict[str, Any]:
    try:
        return _parse(text)
    except MalformedBody:
        quoted = _quote_nonfinite(bytes(text.body))
        if quoted == text.body:
            raise
        return _parse(Text(quoted))


def _about_length(text: Body, has_length: bool) -> str:
    """Return what an error about the JSON says of its end. A client may forget or miscount it."""
    if has_length:
        return f"; Inference-Header-Content-Length says that it has {len(text)} bytes"
    if b"binary_data_size" not in bytes(text):
        return ""
    return (
        "; an input has a binary_data_size, but the header Inference-Header-Content-Length is missing:"
        " it says how many bytes the JSON has"
    )


def _parse(text: Text) -> dict[str, Any]:
    if len(text.body) <= SMALL_JSON_BYTES:
        return as_object(load(without_mark(text.body), "The request"), "The request")
    try:
        return as_object(_unpack(parse(text), iter(range(MAX_HEADER_VALUES))), "The request")
    except RecursionError:
        raise MalformedBody("The request is nested too deeply") from None


def _quote_nonfinite(text: bytes) -> bytes:
    """Make strings of NaN and infinities that are bare words, as Python's `json` writes them."""
    if not (b"NaN" in text or b"Infinity" in text) or count(text, b'"') > MAX_QUOTATION_MARKS:
        return text
    # Write escaped backslashes and quotation marks as numbers: every other quotation mark begins or ends a string.
    parts = text.replace(rb"\\", rb"\u005c").replace(rb"\"", rb"\u0022").split(b'"')
    for number in range(0, len(parts), 2):  # the parts between strings
        part = parts[number].replace(b"Infinity", b'"Infinity"').replace(b'-"Infinity"', b'"-Infinity"')
        parts[number] = part.replace(b"NaN", b'"NaN"')
    return b'"'.join(parts)


def _unpack(value: Any, budget: Iterator[int], key: str = "") -> Any:
    """Make Python objects of the parser's, except of the lists of tensors' numbers: as many as `budget` has numbers."""
    if next(budget, None) is None:
        raise MalformedBody(f"The request has more than {MAX_HEADER_VALUES} values besides its tensors")
    if isinstance(value, OBJECTS):
        members = members_of(value, shown(key) if key else "The request")
        return {name: _unpack(member, budget, name) for name, member in members}
    if type(value) not in LISTS or key == "data":
        return value
    if len(value) > MAX_LIST_ITEMS:
        raise MalformedBody(f"{shown(key)} has {len(value)} items; the limit is {MAX_LIST_ITEMS}")
    return [_unpack(item, budget) for item in value]


def _read_input(entry: Mapping[str, Any]) -> InputHead:
    name = _name_of(entry, "inputs")
    text = entry.get("datatype")
    dtype = _DTYPES.get(text) if isinstance(text, str) else None
    if dtype is None:
        raise InvalidTensor(f"{name}.datatype is {shown(text)}, but must be one of {', '.join(_DTYPES)}", tensor=name)
    shape = check_shape(name, entry.get("shape"))
    parameters = _parameters_of(entry, f"{name}.parameters")
    size, data, part = parameters.get("binary_data_size"), entry.get("data"), part_of(name, parameters)
    absent = (size, data, part).count(None)
    if absent == 3 and 0 in shape:
        size, absent = 0, 2
    if absent != 2:
        raise InvalidTensor(
            f"{name} must have either data or the parameter binary_data_size or the parameter shared_memory_region",
            tensor=name,
        )
    if size is not None and (type(size) is not int or size < 0):
        raise InvalidTensor(f"{name}.binary_data_size is {shown(size)}, but must be a number of bytes", tensor=name)
    return InputHead(name, dtype, shape, size, data, part)


def _read_outputs(entries: list[dict[str, Any]], binary: bool) -> tuple[dict[str, bool], dict[str, Part]]:
    """Return for each requested output whether it leaves as bytes, and the parts of those that go to shared memory."""
    read = [_read_output(entry, binary) for entry in entries]
    outputs = {name: in_bytes for name, in_bytes, _ in read}
    if len(outputs) < len(read):
        duplicate = next(name for name, times in Counter(name for name, _, _ in read).items() if times > 1)
        raise MalformedBody(f"The request has two outputs named {shown(duplicate)}")
    return outputs, {name: part for name, _, part in read if part is not None}


def _read_output(entry: Mapping[str, Any], binary: bool) -> tuple[str, bool, Part | None]:
    name = _name_of(entry, "outputs")
    parameters = _parameters_of(entry, "an output's parameters")
    for unknown in parameters.keys() - _OF_OUTPUTS:
        raise InvalidParameter(
            f"{name} has the parameter {shown(unknown)}, but outputs only have binary_data and those of shared memory",
            parameter=unknown,
        )
    part, in_bytes = part_of(name, parameters), _as_boolean(parameters.get("binary_data", binary), "binary_data")
    if part is not None and parameters.get("binary_data"):
        raise InvalidParameter(f"{name} has both shared_memory_region and binary_data", parameter="binary_data")
    return name, in_bytes or part is not None, part


def _parameters_of(entry: Mapping[str, Any], title: str) -> dict[str, Any]:
    """Return the parameters of a request, an input or an output. Null is absence, also of one parameter."""
    parameters = entry.get("parameters")
    given = {} if parameters is None else as_object(parameters, title)
    return {name: value for name, value in given.items() if value is not None and name not in _OF_MLSERVER}


def _as_objects(value: Any, title: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise MalformedBody(f"{title} is {shown(value)}, but must be a list")
    return [as_object(entry, title) for entry in value]


def _as_boolean(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidParameter(f"{name} is {shown(value)}, but must be true or false", parameter=name)
    return value


def _name_of(entry: Mapping[str, Any], title: str) -> str:
    name = entry.get("name")
    if not isinstance(name, str):
        raise MalformedBody(f"The name of each entry in {title} must be a string, but one is {shown(name)}")
    return name
