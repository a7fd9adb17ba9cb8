"""The Open Inference Protocol's codec: JSON, bytes and mixtures of both, and mistakes of every kind."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service import errors
from service.codecs import open_inference as codec
from service.codecs._inference_head import MAX_QUOTATION_MARKS, SMALL_JSON_BYTES
from service.codecs.open_inference import InferenceRequest
from service.codecs.parts import Part, SharedInput
from service.dtypes import BFLOAT16, DTYPES, FLOAT32, OPEN_INFERENCE, Array
from service.limits import Limits
from tests.codecs.test_json import any_array
from tests.codecs.test_safetensors import EVERY_DTYPE, HUGE
from tests.test_contract import assert_same

LIMITS = Limits(1 << 30)
DATATYPES = {datatype: dtype for dtype, datatype in OPEN_INFERENCE.items()}

PADDING = b" " * SMALL_JSON_BYTES
"""Makes JSON long enough for its numbers to stay in the parser."""
EITHER_READER = pytest.mark.parametrize("padding", [b"", PADDING], ids=["small", "large"])


def decode(
    text: Any, data: bytes | None = None, *, length: int | None = None, limits: Limits = LIMITS
) -> InferenceRequest:
    """Decode JSON, an object or a text, with bytes after it if there are any."""
    head = text if isinstance(text, bytes) else json.dumps(text).encode()
    announced = length if data is None else len(head)
    return codec.decode(memoryview(head + (data or b"")), announced, limits)


def one(name: Any = "a", datatype: Any = "FP32", shape: Any = (1,), **more: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, **more}


def size(number: Any) -> dict[str, Any]:
    return {"parameters": {"binary_data_size": number}}


SHARED: dict[str, Any] = {"shared_memory_region": "r", "shared_memory_offset": 2, "shared_memory_byte_size": 4}


def shared(**changed: Any) -> dict[str, Any]:
    return {"parameters": {**SHARED, **changed}}


def read(data: Any, datatype: str = "FP32", shape: Any = (1,), padding: bytes = b"") -> Array:
    """The tensor of `data`, JSON as an object or as text."""
    text = data if isinstance(data, bytes) else json.dumps(data).encode()
    head = json.dumps(one("a", datatype, shape)).encode()[:-1]
    return decode(b'{"inputs": [' + head + b', "data": ' + text + b"}]}" + padding).tensors["a"]


def in_bytes(tensors: dict[str, Array]) -> tuple[bytes, bytes]:
    inputs = [one(name, OPEN_INFERENCE[a.dtype], a.shape, **size(a.nbytes)) for name, a in tensors.items()]
    return json.dumps({"inputs": inputs}).encode(), b"".join(a.tobytes() for a in tensors.values())


# ----- both ways -----

any_arrays = st.dictionaries(st.text(max_size=5), any_array().map(np.asarray), max_size=4)


@given(any_arrays, st.data())
def test_answers_are_read_as_requests(tensors: dict[str, Array], data: st.DataObject) -> None:
    """A mixture of JSON and bytes is bit-exact, except that JSON has only one NaN."""
    in_json = {name for name, a in tensors.items() if a.dtype != BFLOAT16 and data.draw(st.booleans())}
    pieces, length = codec.encode("m", None, tensors, tensors.keys() - in_json)
    body = b"".join(pieces)
    assert (length is None) is (tensors.keys() == in_json)
    answer = json.loads(body if length is None else body[:length])
    assert [o["name"] for o in answer["outputs"]] == list(tensors)
    head = json.dumps({"inputs": answer["outputs"]}).encode()
    got = decode(head, None if length is None else body[length:]).tensors
    assert list(got) == list(tensors)
    for name, a in tensors.items():
        assert (got[name].dtype, got[name].shape) == (a.dtype, a.shape)
        if name in in_json and a.dtype.kind == "f":
            np.testing.assert_array_equal(got[name], a)
            numbers = ~np.isnan(a)
            assert got[name][numbers].tobytes() == a[numbers].tobytes()
        else:
            assert got[name].tobytes() == a.tobytes()


def test_an_answer() -> None:
    tensors = {"x": np.array([[1.5, np.nan]]), "flag": np.array(True), "none": np.zeros((0, 2), np.int32)}
    text = b"".join(codec.encode("m", "id 1", tensors, ())[0])
    assert json.loads(text) == {
        "id": "id 1",
        "model_name": "m",
        "model_version": "1",
        "outputs": [
            one("x", "FP64", [1, 2], data=[1.5, "NaN"]),
            one("flag", "BOOL", [], data=[True]),
            one("none", "INT32", [0, 2], data=[]),
        ],
    }
    pieces, length = codec.encode("m", None, tensors, {"x", "none"})
    answer = json.loads(bytes(pieces[0]))
    assert length == len(pieces[0])
    assert answer["outputs"] == [
        one("x", "FP64", [1, 2], **size(16)),
        one("flag", "BOOL", [], data=[True]),
        one("none", "INT32", [0, 2], **size(0)),
    ]
    assert "id" not in answer
    assert np.shares_memory(np.frombuffer(pieces[1], np.uint8), tensors["x"])


def test_bfloat16_is_answered_in_bytes_only() -> None:
    with pytest.raises(errors.InvalidTensor, match="x is BF16, which can only be sent as bytes: request binary_data"):
        codec.encode("m", None, {"x": np.zeros(2, BFLOAT16)}, ())


@EVERY_DTYPE
def test_bytes_are_read_only_views(dtype: np.dtype[Any]) -> None:
    head, data = in_bytes({"a": np.ones((2, 3), dtype), "b": np.zeros(4, dtype)})
    body = head.ljust(-len(head) % 16 + len(head)) + data
    tensors = codec.decode(memoryview(body), len(body) - len(data), LIMITS).tensors
    assert tensors["a"].tolist() == np.ones((2, 3), dtype).tolist()
    for tensor in tensors.values():
        assert np.shares_memory(tensor, np.frombuffer(body, np.uint8))
        assert not tensor.flags.writeable


def test_bytes_that_lie_askew_are_copied() -> None:
    tensors: dict[str, Array] = {"flag": np.array([True]), "x": np.array([1.5, -2.5])}
    for spaces in range(8):
        head, data = in_bytes(tensors)
        got = decode(head + b" " * spaces, data).tensors
        assert_same(got, tensors)
        assert got["x"].flags.aligned


def test_json_and_bytes_in_any_order() -> None:
    entries = {
        "json": one("json", "INT32", [2], data=[1, 2]),
        "bytes": one("bytes", "INT32", [2], **size(8)),
        "more": one("more", "INT64", [], **size(8)),
        "none": one("none", "FP16", [0], **size(0)),
    }
    data = {"bytes": np.array([3, 4], np.int32).tobytes(), "more": np.array(5).tobytes()}
    for order in itertools.permutations(entries):
        body = b"".join(data.get(name, b"") for name in order)
        tensors = decode({"inputs": [entries[name] for name in order]}, body).tensors
        assert {name: a.tolist() for name, a in tensors.items()} == {
            "json": [1, 2],
            "bytes": [3, 4],
            "more": 5,
            "none": [],
        }
        assert list(tensors) == list(order)


# ----- lists -----


@EITHER_READER
@pytest.mark.parametrize(
    ("data", "shape"),
    [
        ([1, 2, 3, 4, 5, 6], [2, 3]),
        ([[1, 2, 3], [4, 5, 6]], [2, 3]),
        ([[[1], [2]], [[3], [4]], [[5], [6]]], [3, 2, 1]),
        ([5], []),
        ([5], [1, 1, 1]),
        ([], [0]),
        ([], [3, 0]),
        ([[], [], []], [3, 0]),
        ([[], [], []], [3, 0, 2]),
        ([], [0, 1 << 50]),
    ],
)
@pytest.mark.parametrize("datatype", ["FP16", "FP32", "FP64", "INT32", "INT64"])
def test_lists_are_flat_or_nested(data: Any, shape: list[int], datatype: str, padding: bytes) -> None:
    tensor = read(data, datatype, shape, padding)
    assert (tensor.shape, tensor.dtype) == (tuple(shape), DATATYPES[datatype])
    assert tensor.reshape(-1).tolist() == np.array(data).reshape(-1).tolist()


@EITHER_READER
@pytest.mark.parametrize(
    ("data", "shape", "place"),
    [
        ([[1, 2], [3]], [2, 2], r"a\[1\] has 1 elements, but its neighbours have 2"),
        ([1, [2]], [2], r"a\[1\] is a list"),
        ([[1], 2], [2, 1], r"a\[1\] is 2, but its neighbours are lists"),
        ([[1, [2]], [3, 4]], [2, 2], r"a\[0\]\[1\] is a list"),
        ([1, None], [2], r"a\[1\] is null"),
        ([1, True], [2], r"a\[1\] is true"),
        ([1, {}], [2], r"a\[1\] is an object"),
        ([1, "nan"], [2], r"a\[1\] is 'nan'"),
        ([1, ""], [2], r"a\[1\] is ''"),
        ([1, 2, 3], [2, 2], r"a.data has shape \[3\], but must have \[2, 2\], or be flat, of 4"),
        ([[1, 2], [3, 4]], [4, 1], r"a.data has shape \[2, 2\]"),
        ([[1], [2]], [2], r"a.data has shape \[2, 1\]"),
        ([], [1], r"a.data has shape \[0\]"),
        ([[]], [0], r"a.data has shape \[1, 0\]"),
        ([[], []], [3, 0, 2], r"a.data has shape \[2, 0\]"),
        ([1], [0], r"a.data has shape \[1\]"),
        (5, [], r"a.data is 5, but must be a list"),
        ("AAAA", [1], "a.data is 'AAAA', but must be a list"),
        (None, [1], "a must have either data or the parameter binary_data_size"),
        ({"a": 1}, [1], "a.data is .*, but must be a list"),
    ],
)
def test_lists_that_are_no_tensor(data: Any, shape: list[int], place: str, padding: bytes) -> None:
    with pytest.raises(errors.InvalidTensor, match=place):
        read(data, "FP32", shape, padding)


def test_a_list_among_many_numbers() -> None:
    numbers = [0] * SMALL_JSON_BYTES
    with pytest.raises(errors.InvalidTensor, match=rf"a\[{SMALL_JSON_BYTES}\] is a list"):
        read([*numbers, [1], 2], "INT64", [SMALL_JSON_BYTES + 2])
    for extra in ({"id": "[[["}, {"parameters": {"note": "["}}, {"outputs": [{"name": "["}]}):
        text = {"inputs": [one("a", "INT64", [SMALL_JSON_BYTES], data=numbers)], **extra}
        assert not decode(text).tensors["a"].any()  # brackets in texts do no harm


@EITHER_READER
def test_a_bracket_elsewhere_does_not_hide_a_list(padding: bytes) -> None:
    inputs = [one("a", data=[1, [2]], shape=[2]), one("b", data=[[1], [2]], shape=[2, 1])]
    with pytest.raises(errors.InvalidTensor, match=r"a\[1\] is a list"):
        decode(json.dumps({"inputs": inputs, "more": [[[]], "["]}).encode() + padding)


@EITHER_READER
def test_numbers_that_are_not_finite(padding: bytes) -> None:
    for datatype in ("FP16", "FP32", "FP64"):
        tensor = read(["NaN", "Infinity", "-Infinity", -0.0], datatype, [4], padding)
        assert list(map(str, tensor.tolist())) == ["nan", "inf", "-inf", "-0.0"]
    for datatype in ("INT32", "INT64", "BOOL"):
        with pytest.raises(errors.InvalidTensor, match=r"a\[0\] is 'NaN'"):
            read(["NaN"], datatype, [1], padding)


@EITHER_READER
def test_numbers_that_are_not_finite_may_be_bare_words_as_tritonclient_writes_them(padding: bytes) -> None:
    tensor = read(b'[NaN, Infinity,-Infinity, "NaN", 1]', "FP32", [5], padding)
    assert list(map(str, tensor.tolist())) == ["nan", "inf", "-inf", "nan", "1.0"]
    inputs = [one("Infinity NaN", data=[1], shape=[1], parameters={"x": "NaN"})]
    text = json.dumps({"inputs": inputs, "id": "-Infinity, NaN"})
    got = decode(text.replace('"data": [1]', '"data": [-Infinity]').encode() + padding)
    assert (got.id, got.tensors["Infinity NaN"].tolist()) == ("-Infinity, NaN", [-math.inf])
    for bad in (b"[-NaN]", b'[NaN, \\"]', b"[NaNNaN]", b"[+Infinity]", b"[nan]", b"[1NaN]", b"[NaN"):
        with pytest.raises(errors.MalformedBody, match="not JSON"):
            read(bad, padding=padding)


@EITHER_READER
def test_two_members_of_one_name(padding: bytes) -> None:
    for text in (b'"id": "a", "id": "b"', b'"parameters": {"axis": 1, "axis": 2}', b'"id": 1, "\\u0069d": 2'):
        with pytest.raises(errors.MalformedBody, match="two members named"):
            decode(b'{"inputs": [], ' + text + b"}" + padding)
    data = b'{"inputs": [{"name": "a", "datatype": "FP32", "shape": [1], "data": [1.5], "data": [2.5]}]}'
    with pytest.raises(errors.MalformedBody, match="two members named 'data'"):
        decode(data + padding)


def test_what_is_remembered_of_a_request_is_not_its_tensors() -> None:
    head = {"inputs": [one(shape=[2], **size(8))], "parameters": {"axis": 1, "binary_data_output": True}}
    for numbers in ([1.0, 2.0], [3.0, 4.0]):
        got = decode(head, np.array(numbers, np.float32).tobytes())
        assert (got.tensors["a"].tolist(), got.parameters, got.binary) == (numbers, {"axis": 1}, True)
    with pytest.raises(errors.MalformedBody, match="only 4 came"):
        decode(head, F)
    with pytest.raises(errors.TensorTooLarge):
        decode(head, F + F, limits=Limits(7))


@EITHER_READER
@pytest.mark.parametrize(
    ("number", "datatype"),
    [
        (65520, "FP16"),
        (-1e39, "FP32"),
        (1 << 31, "INT32"),
        (-(1 << 31) - 1, "INT32"),
        (1 << 63, "INT64"),
        (10**30, "INT64"),
        (1.5, "INT32"),
        (1e300, "INT64"),
        (True, "INT32"),
        (1, "BOOL"),
        ("true", "BOOL"),
    ],
)
def test_numbers_out_of_range(number: Any, datatype: str, padding: bytes) -> None:
    with pytest.raises(errors.InvalidTensor, match=r"^a\[1\] is"):
        read([0 if datatype != "BOOL" else False, number], datatype, [2], padding)


@EITHER_READER
def test_a_number_beyond_every_float_is_refused(padding: bytes) -> None:
    for text in (b"[1e400]", b"[-1e400]", b"[1" + b"0" * 400 + b"]"):
        with pytest.raises((errors.InvalidTensor, errors.MalformedBody)):
            read(text, "FP64", padding=padding)


@EITHER_READER
def test_integers_and_halves_are_exact(padding: bytes) -> None:
    extremes = [-(1 << 63), (1 << 63) - 1, (1 << 53) + 1]
    assert read(extremes, "INT64", [3], padding).tolist() == extremes
    assert read([1.0, 2], "INT64", [2], padding).tolist() == [1, 2]
    assert read([65519.9, 6e-8], "FP16", [2], padding).tolist() == [65504.0, 2**-24]
    assert read([True, False], "BOOL", [2], padding).tolist() == [True, False]


ESCAPED = ["é", "NaN\u00e9 NaN", "\\", '"', '\\"', '"NaN, "\\', 'NaN\\\\"-Infinity\\\\\\', "\n, NaN"]
"""Strings that JSON writes with backslashes."""


@EITHER_READER
@pytest.mark.parametrize("text", ESCAPED)
def test_bare_words_may_stand_beside_strings_with_escapes(text: str, padding: bytes) -> None:
    head = {"id": text, "parameters": {text: text}, "inputs": [one(shape=[2, 2], data=[[1, 2], [3, 4]])]}
    bare = json.dumps(head).replace("[[1, 2], [3, 4]]", "[[NaN, Infinity], [-Infinity, 4]]")
    request = decode(bare.encode() + padding)
    assert (request.id, request.parameters) == (text, {text: text})
    assert list(map(str, request.tensors["a"].ravel().tolist())) == ["nan", "inf", "-inf", "4.0"]
    before_bytes = json.dumps({**head, "inputs": [one(**size(4))]}).replace(json.dumps(text) + "}", "NaN}")
    assert decode(before_bytes.encode() + padding, F).parameters == {text: "NaN"}


def test_bare_words_beside_too_many_strings_are_refused() -> None:
    strings = MAX_QUOTATION_MARKS // 2
    assert np.isnan(read([*["NaN"] * strings, 1], "FP32", [strings + 1])[:-1]).all()
    with pytest.raises(errors.MalformedBody, match="not JSON"):
        read(b"[" + b'"NaN",' * strings + b"NaN]", "FP32", [strings + 1])


# ----- shared memory -----


@EITHER_READER
def test_parts_of_shared_memory(padding: bytes) -> None:
    """The codec only says where the tensors are: it reads and writes no shared memory."""
    part = Part("r", 2, 4)
    whole = {"parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 0, "shared_memory_offset": None}}
    inputs = [one("a", **shared()), one("b", **size(4)), one("c", shape=[0], **whole)]
    outputs = [
        {"name": "x", **shared(binary_data=False)},
        {"name": "y"},
        {"name": "z", "parameters": {"binary_data": True}},
    ]
    request = decode(json.dumps({"inputs": inputs, "outputs": outputs}).encode() + padding, F)
    assert request.shared == {"a": SharedInput(part, FLOAT32, [1]), "c": SharedInput(Part("r", 0, 0), FLOAT32, [0])}
    assert {name: a.tolist() for name, a in request.tensors.items()} == {"b": [0]}
    assert (request.outputs, request.parts) == ({"x": True, "y": False, "z": True}, {"x": part})
    ones = np.ones(1, np.float32)
    pieces, length = codec.encode("m", None, {"x": ones, "y": ones, "z": ones}, ["x", "z"], shared=request.parts)
    body = b"".join(pieces)
    assert body[length:] == ones.tobytes()
    assert json.loads(body[:length])["outputs"] == [
        one("x", shape=[1]),
        one("y", shape=[1], data=[1.0]),
        one("z", shape=[1], **size(4)),
    ]


def test_an_answer_whose_outputs_are_all_in_shared_memory_is_only_json() -> None:
    pieces, length = codec.encode("m", None, {"x": np.ones(2, np.float32)}, ["x"], shared=["x"])
    assert length is None
    assert json.loads(b"".join(pieces))["outputs"] == [one("x", shape=[2])]


def test_two_inputs_of_one_name_in_shared_memory() -> None:
    for other in (shared(), size(4)):
        for entries in itertools.permutations([one(**shared()), one(**other)]):
            with pytest.raises(errors.InvalidTensor, match="two inputs named 'a'"):
                decode({"inputs": list(entries)}, F if other == size(4) else None)


# ----- what is absent -----


@EITHER_READER
def test_null_is_absence(padding: bytes) -> None:
    """As for KServe, whose types write every optional member, and for Triton in inputs and outputs."""
    none: dict[str, Any] = {"parameters": None}
    listed = {**one("a", data=[1]), **none}
    flat = {**one("b", data=None), "parameters": {"binary_data_size": 4, "shared_memory_region": None}}
    text = {"id": None, **none, "inputs": [listed, flat], "outputs": [{"name": "x", **none}]}
    request = decode(json.dumps(text).encode() + padding, F)
    assert (request.id, request.parameters, request.outputs) == (None, {}, {"x": False})
    assert {name: a.tolist() for name, a in request.tensors.items()} == {"a": [1], "b": [0]}
    assert decode(json.dumps({**text, "outputs": None}).encode() + padding, F).outputs is None
    nulls = {"parameters": {"binary_data_output": None, "axis": None, "headers": {"of": "MLServer"}, "alpha": 2}}
    outputs = [{"name": "x", "parameters": {"binary_data": None, "more": None, "content_type": "np"}}]
    request = decode(json.dumps({**text, **nulls, "outputs": outputs}).encode() + padding, F)
    assert (request.parameters, request.outputs, request.binary) == ({"alpha": 2}, {"x": False}, False)


@EITHER_READER
@pytest.mark.parametrize("more", [{}, {"data": None}, {"parameters": None}, {"parameters": {"x": 1}}, size(0)])
@pytest.mark.parametrize("data", [None, b""])
def test_an_empty_tensor_needs_no_data(more: dict[str, Any], data: bytes | None, padding: bytes) -> None:
    shapes = {datatype: shape for datatype, shape in zip(DATATYPES, itertools.cycle([[0], [3, 0], [0, 1 << 50]]))}
    text = {"inputs": [one(datatype, datatype, shape, **more) for datatype, shape in shapes.items()]}
    for datatype, tensor in decode(json.dumps(text).encode() + padding, data).tensors.items():
        assert (tensor.shape, tensor.dtype) == (tuple(shapes[datatype]), DATATYPES[datatype])


# ----- mistakes -----

BYTES = {"inputs": [one(**size(4))]}
F = bytes(4)
DATA = one(data=[1])

MALFORMED: dict[str, tuple[tuple[Any, ...], dict[str, Any], tuple[str, ...]]] = {
    "nothing": ((b"",), {}, ("not JSON",)),
    "many values": ((b'{"inputs":[' + b",".join([b"[" + b"1," * 4000 + b"1]"] * 70) + b"]}",), {}, ("262144 values",)),
    "not JSON": ((b"{'inputs': []}",), {}, ("not JSON",)),
    "not UTF-8": ((b'{"inputs": "\xff"}',), {}, ("not JSON",)),
    "a list": (([],), {}, ("The request is []", "an object")),
    "no inputs": (({},), {}, ("inputs is null", "a list")),
    "inputs that are an object": (({"inputs": {}},), {}, ("inputs is {}", "a list")),
    "an input that is a number": (({"inputs": [5]},), {}, ("inputs is 5", "an object")),
    "no name": (({"inputs": [{"datatype": "FP32"}]},), {}, ("name of each entry in inputs", "null")),
    "a name that is a number": (({"inputs": [one(5, data=[1])]},), {}, ("name of each entry", "5")),
    "parameters that are a list": (({"inputs": [], "parameters": []},), {}, ("parameters is []", "an object")),
    "parameters of an input": (({"inputs": [one(data=[1], parameters=5)]},), {}, ("a.parameters is 5", "an object")),
    "an id that is a number": (({"id": 5, "inputs": []},), {}, ("id is 5", "a string")),
    "outputs that are a text": (({"inputs": [DATA], "outputs": "x"},), {}, ("outputs is 'x'", "a list")),
    "an output without a name": (({"inputs": [DATA], "outputs": [{}]},), {}, ("name of each entry in outputs",)),
    "an output's parameters": (
        ({"inputs": [DATA], "outputs": [{"name": "x", "parameters": []}]},),
        {},
        ("an output's parameters", "[]"),
    ),
    "a header beyond the body": ((BYTES,), {"length": 1000}, ("Inference-Header-Content-Length is 1000", "whole body")),
    "a header cut short": ((BYTES,), {"length": 10}, ("not JSON",)),
    "a header of nothing": ((BYTES,), {"length": 0}, ("not JSON",)),
    "a header that runs into the bytes": (
        (json.dumps(BYTES).encode() + F,),
        {"length": len(json.dumps(BYTES)) + 2},
        ("not JSON",),
    ),
    "bytes left over": ((BYTES, F + b"\0"), {}, ("5 bytes follow the JSON", "take 4")),
    "bytes of nobody": (({"inputs": [DATA]}, F), {}, ("4 bytes follow the JSON", "take 0")),
    "bytes missing": ((BYTES, F[1:]), {}, ("a takes bytes 0 to 4", "only 3 came")),
    "bytes missing of the second": (
        ({"inputs": [one(**size(4)), one("b", shape=[2], **size(8))]}, bytes(11)),
        {},
        ("b takes bytes 4 to 12", "only 11 came"),
    ),
    "deep": ((b'{"inputs": ' + b"[" * 100_000,), {}, ("The",)),
    "deep, and closed": ((b'{"inputs": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",), {}, ("The",)),
    "deep, in a name": ((b'{"x": ' + b'{"x":' * 100_000 + b"1" + b"}" * 100_001,), {}, ("The",)),
    "more inputs than are read": (
        ({"inputs": [{}] * 20_000, "x": " " * SMALL_JSON_BYTES},),
        {},
        ("items", "limit is 4096"),
    ),
    "more names than are read": (({str(k): 1 for k in range(10_000)},), {}, ("10000 members", "limit is 4096")),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_each_request_that_cannot_be_read(case: str) -> None:
    args, more, words = MALFORMED[case]
    with pytest.raises(errors.MalformedBody) as raised:
        decode(*args, **more)
    for word in words:
        assert word in raised.value.detail, raised.value.detail
    assert len(raised.value.detail) < 400


INVALID: dict[str, tuple[Any, tuple[str, ...]]] = {
    "no datatype": ({"name": "a", "shape": [1], "data": [1]}, ("a.datatype is null", "FP32")),
    "an unknown datatype": (one(datatype="FP8", data=[1]), ("a.datatype is 'FP8'", "BF16", "BOOL")),
    "a datatype that is not read": (one(datatype="BYTES", data=["x"]), ("a.datatype is 'BYTES'",)),
    "NumPy's name": (one(datatype="float32", data=[1]), ("a.datatype is 'float32'",)),
    "a datatype that is a list": (one(datatype=["FP32"], data=[1]), ("a.datatype is ['FP32']",)),
    "no shape": ({"name": "a", "datatype": "FP32", "data": [1]}, ("a.shape is null",)),
    "a shape that is a number": (one(shape=1, data=[1]), ("a.shape is 1",)),
    "a negative dimension": (one(shape=[-1], data=[1]), ("a.shape is [-1]", "non-negative integers")),
    "a fractional dimension": (one(shape=[1.0], data=[1]), ("a.shape is [1.0]",)),
    "a boolean dimension": (one(shape=[True], data=[1]), ("a.shape is [true]",)),
    "a nested dimension": (one(shape=[[1]], data=[1]), ("a.shape is [[1]]",)),
    "a dimension beyond 63 bits": (one(shape=[1 << 63], data=[1]), ("a.shape is [9223372036854775808]",)),
    "neither": (one(), ("a must have either data or the parameter binary_data_size",)),
    "neither, with parameters": (one(parameters={}), ("a must have either",)),
    "both": (one(data=[1], **size(4)), ("a must have either",)),
    "shared memory and data": (one(data=[1], **shared()), ("a must have either",)),
    "shared memory and bytes": (
        one(parameters={**shared()["parameters"], "binary_data_size": 4}),
        ("a must have either", "shared_memory_region"),
    ),
    "shared memory of one element more": (
        one(**shared(shared_memory_byte_size=8)),
        ("a.shared_memory_byte_size holds 8 bytes", "takes 4"),
    ),
    "shared memory of no number": (
        one(**shared(shared_memory_byte_size="4")),
        ("a.shared_memory_byte_size is '4'", "number of bytes"),
    ),
    "shared memory without a size": (
        one(parameters={"shared_memory_region": "r"}),
        ("a.shared_memory_byte_size is null",),
    ),
    "shared memory before its begin": (one(**shared(shared_memory_offset=-1)), ("a.shared_memory_offset is -1",)),
    "shared memory at a fraction": (one(**shared(shared_memory_offset=0.0)), ("a.shared_memory_offset is 0.0",)),
    "shared memory beyond all": (
        one(**shared(shared_memory_offset=1 << 63)),
        ("a.shared_memory_offset is 9223372036854775808",),
    ),
    "shared memory without a name": (one(**shared(shared_memory_region=1)), ("a.shared_memory_region is 1",)),
    "BF16 in a list": (one(datatype="BF16", data=[1]), ("a is BF16", "send it as bytes", "binary_data_size")),
    "bytes of one element less": (one(shape=[2], **size(4)), ("a.binary_data_size holds 4 bytes", "[2] takes 8")),
    "bytes of one element more": (one(**size(8)), ("a.binary_data_size holds 8 bytes", "takes 4")),
    "bytes of no number": (one(**size("4")), ("a.binary_data_size is '4'", "number of bytes")),
    "bytes of a fraction": (one(**size(4.0)), ("a.binary_data_size is 4.0",)),
    "bytes of a boolean": (one(**size(True)), ("a.binary_data_size is true",)),
    "bytes below zero": (one(**size(-4)), ("a.binary_data_size is -4",)),
    "bytes beyond all": (one(**size(1 << 62)), ("a.binary_data_size holds 4611686018427387904 bytes",)),
}


@EITHER_READER
@pytest.mark.parametrize("case", INVALID)
def test_each_invalid_tensor_is_named(case: str, padding: bytes) -> None:
    entry, words = INVALID[case]
    with pytest.raises(errors.InvalidTensor) as raised:
        decode(json.dumps({"inputs": [entry]}).encode() + padding, F)
    for word in words:
        assert word in raised.value.detail, raised.value.detail
    assert raised.value.context["tensor"] == "a"


def test_bytes_without_the_header_that_says_where_they_begin() -> None:
    with pytest.raises(
        errors.InvalidTensor, match="a has a binary_data_size, but the header Inference-Header-Content-Length"
    ):
        decode(BYTES)
    with pytest.raises(errors.MalformedBody, match="not JSON"):
        decode(json.dumps(BYTES).encode() + F)


def test_two_inputs_of_one_name() -> None:
    with pytest.raises(errors.InvalidTensor, match="two inputs named 'a'"):
        decode({"inputs": [DATA, DATA]})
    with pytest.raises(errors.InvalidTensor, match="two inputs named 'a'"):
        decode({"inputs": [one(**size(4)), one(**size(4))]}, F + F)


def test_bytes_of_booleans() -> None:
    entry = {"inputs": [one(datatype="BOOL", shape=[3], **size(3))]}
    assert decode(entry, b"\0\1\1").tensors["a"].tolist() == [False, True, True]
    with pytest.raises(errors.InvalidTensor, match="a has a byte that is neither 0 nor 1"):
        decode(entry, b"\0\1\2")


@EITHER_READER
@pytest.mark.parametrize("shape", [[HUGE], [1 << 32, 1 << 31], [1 << 32] * 2, [(1 << 63) - 1] * 64, [0, HUGE, 4]])
@pytest.mark.parametrize("more", [size(0), size(4), {"data": []}, {"data": [1]}])
def test_shapes_that_no_memory_holds(shape: list[int], more: dict[str, Any], padding: bytes) -> None:
    with pytest.raises(errors.TensorTooLarge, match="^a"):
        decode(json.dumps({"inputs": [one(shape=shape, **more)]}).encode() + padding, F)


def test_the_limits() -> None:
    for entry, data in ((one(shape=[2], data=[1, 2]), b""), (one(shape=[2], **size(8)), bytes(8))):
        with pytest.raises(errors.TensorTooLarge, match=r"a, float32 of shape \[2\], takes 8 bytes; the limit is 7"):
            decode({"inputs": [entry]}, data, limits=Limits(7))
        assert decode({"inputs": [entry]}, data, limits=Limits(8)).tensors["a"].size == 2
    with pytest.raises(errors.TooManyDimensions, match="a has 65 dimensions"):
        decode({"inputs": [one(shape=[1] * 65, data=[1])]})
    nested: Any = 1
    for _ in range(65):
        nested = [nested]
    with pytest.raises(errors.TooManyDimensions, match="a has 65 dimensions"):
        decode({"inputs": [one(data=nested)]})
    assert decode({"inputs": [one(shape=[1] * 64, data=nested[0])]}).tensors["a"].ndim == 64


@EITHER_READER
def test_what_is_asked_for(padding: bytes) -> None:
    def asked(**more: Any) -> InferenceRequest:
        return decode(json.dumps({"inputs": [DATA], **more}).encode() + padding)

    assert asked()[2:] == ({}, None, False, {}, {})
    assert asked(outputs=None).outputs is asked(outputs=[]).outputs is None
    assert asked(id="é", parameters={"alpha": 1.5})[0:5:2] == ("é", {"alpha": 1.5}, False)
    everything = asked(parameters={"binary_data_output": True, "axis": 1})
    assert everything[2:5] == ({"axis": 1}, None, True)
    outputs: list[Any] = [{"name": "y"}, {"name": "x", "parameters": {"binary_data": True}}]
    assert list((asked(outputs=outputs).outputs or {}).items()) == [("y", False), ("x", True)]
    outputs[1]["parameters"] = {"binary_data": False}
    whole = asked(outputs=outputs, parameters={"binary_data_output": True})
    assert whole.outputs == {"y": True, "x": False}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"parameters": {"binary_data_output": 1}}, "binary_data_output is 1, but must be true or false"),
        ({"outputs": [{"name": "x", "parameters": {"binary_data": "yes"}}]}, "binary_data is 'yes'"),
        ({"outputs": [{"name": "x", "parameters": {"classification": 3}}]}, "x has the parameter 'classification'"),
        (
            {"outputs": [{"name": "x", "parameters": {**SHARED, "binary_data": True}}]},
            "both shared_memory_region and binary_data",
        ),
        ({"outputs": [{"name": "x", "parameters": {"content-type": "np"}}]}, "'content-type'"),
    ],
)
def test_what_cannot_be_asked_for(more: dict[str, Any], words: str) -> None:
    with pytest.raises(errors.InvalidParameter, match=words):
        decode({"inputs": [DATA], **more})


# ----- whatever comes -----


def request_or_an_error(body: bytes, length: int | None) -> InferenceRequest | None:
    try:
        return codec.decode(memoryview(body), length, LIMITS)
    except errors.GradserveError as error:
        refused = error
    assert 400 <= refused.status < 500
    return None


@given(st.binary(max_size=100) | st.text('{}[]":,1a', max_size=40).map(str.encode), st.none() | st.integers(0, 120))
def test_any_bytes_are_read_or_refused(body: bytes, length: int | None) -> None:
    request_or_an_error(body, length)


VALID = json.dumps(
    {
        "id": "i",
        "inputs": [
            one("x", "FP32", [2, 2], data=[[1.5, "NaN"], [3, -4e-3]]),
            one("y", "FP64", [2], **size(16)),
            one("f", "BOOL", [2], data=[True, False], parameters={}),
            one("n", "INT64", [], **size(8)),
        ],
        "outputs": [{"name": "o", "parameters": {"binary_data": True}}],
        "parameters": {"binary_data_output": False, "axis": 1},
    }
).encode()
DAMAGE = [b"-1", b"9" * 20, b'"', b"[[", b"{", b"null", b"1e999", b"\\u0000", b"true", b"\xff"]


@given(st.data(), st.sampled_from([b"", PADDING]))
def test_a_damaged_request_is_read_or_refused(data: st.DataObject, padding: bytes) -> None:
    head = bytearray(VALID)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(head)))
        width = data.draw(st.integers(0, 3))
        head[place : place + width] = data.draw(st.binary(max_size=3) | st.sampled_from(DAMAGE))
    length = len(head) + len(padding) + data.draw(st.sampled_from([0, 0, 0, -1, 1]))
    request = request_or_an_error(bytes(head) + padding + bytes(24), length)
    if request is not None:
        assert sum(tensor.nbytes for tensor in request.tensors.values()) < 1000


values = st.none() | st.booleans() | st.integers(-1, 9) | st.sampled_from([HUGE, 1 << 64, 1.5, "NaN", "FP32", "é"])
lists = st.recursive(values, lambda inner: st.lists(inner, max_size=3), max_leaves=8)
entries = st.fixed_dictionaries(
    {
        "name": st.sampled_from("ab") | values,
        "datatype": st.sampled_from(sorted(OPEN_INFERENCE.values())) | values,
        "shape": st.lists(st.integers(0, 2), max_size=2) | lists,
    },
    optional={"data": lists, "parameters": st.dictionaries(st.just("binary_data_size"), values) | values},
)
requests = st.fixed_dictionaries(
    {"inputs": st.lists(entries, max_size=3) | lists},
    optional={"id": values, "outputs": lists, "parameters": st.dictionaries(st.just("axis"), lists) | values},
)


@given(requests, st.none() | st.binary(max_size=16))
def test_a_large_and_a_small_request_are_read_alike(text: dict[str, Any], data: bytes | None) -> None:
    """By two readers, to the same tensors or to the same kind of error."""
    results: list[Any] = []
    for padding in (b"", PADDING):
        head = json.dumps(text).encode() + padding
        try:
            results.append(decode(head, data))
        except errors.GradserveError as error:
            results.append(type(error))
    small, large = results
    if isinstance(small, InferenceRequest) and isinstance(large, InferenceRequest):
        assert small[0::2] == large[0::2]
        assert_same(small.tensors, large.tensors)
    else:
        assert small == large


def test_every_datatype_has_its_dtype() -> None:
    assert set(DATATYPES.values()) == set(DTYPES.values())
    for datatype, dtype in DATATYPES.items():
        assert decode({"inputs": [one(datatype=datatype, shape=[0], **size(0))]}, b"").tensors["a"].dtype == dtype
