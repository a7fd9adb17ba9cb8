"""The JSON codec by itself: round trips of every dtype and shape, long lists, and mistakes of every kind."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from service.codecs import _lists, _parser
from service.codecs import json as json_codec
from service.codecs._lists import list_text
from service.codecs.json import DIAGNOSED_BYTES, Document, Encoding
from service.dtypes import BOOL, DTYPES, FLOAT32, FLOAT64, INT64, Array, DType
from service.errors import BodyTooLarge, GradserveError, InvalidTensor, MalformedBody, TensorTooLarge, TooManyDimensions
from service.limits import Limits

LIMITS = Limits(1 << 30)
ENCODINGS: tuple[Encoding, ...] = ("list", "base64")


def encode(tensors: dict[str, Array], encoding: Encoding) -> bytes:
    return b"".join(json_codec.encode(tensors, encoding))


def read(body: bytes | str | dict[str, Any], dtype: str = "float32", limits: Limits = LIMITS) -> Array:
    """The tensor `a` of a body, a bare value or an answer's object."""
    text = json.dumps(body).encode() if isinstance(body, dict) else body.encode() if isinstance(body, str) else body
    document = Document(text, limits)
    form = document.members["a"]
    if not isinstance(form, dict):
        tensor = document.tensor("a", form, DTYPES[dtype])
    elif "base64" in form:
        tensor = document.base64("a", form["base64"], DTYPES[form["dtype"]], form["shape"])
    else:
        tensor = document.tensor("a", form["data"], DTYPES[form["dtype"]], form["shape"])
    document.finish()
    return tensor


def any_array(names: Iterable[str] = DTYPES, min_side: int = 0) -> st.SearchStrategy[Array]:
    shapes = arrays.array_shapes(min_dims=0, max_dims=5, min_side=min_side, max_side=4)

    def of(name: str) -> st.SearchStrategy[Array]:
        dtype = DTYPES[name]
        raw = arrays.arrays(f"u{dtype.itemsize}", shapes)
        return raw.map(lambda bits: (bits & 1).astype(BOOL) if dtype == BOOL else bits.view(dtype))

    return st.sampled_from(sorted(names)).flatmap(of)


@given(any_array())
def test_base64_round_trip_is_bit_exact(array: Array) -> None:
    back = read(encode({"a": array}, "base64"))
    assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())


@given(any_array())
def test_list_round_trip_is_exact_but_for_the_bits_of_nan(array: Array) -> None:
    text = encode({"a": array}, "list")
    back = read(text)
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    same = (back == array) & (np.signbit(back) == np.signbit(array)) if array.dtype.kind in "fV" else back == array
    if array.dtype.kind in "fV":
        same |= np.isnan(array) & np.isnan(back)
    assert np.all(same)
    assert json.loads(text)["a"].keys() == {"dtype", "shape", "data"}  # strict JSON, no NaN


@given(any_array(["float32", "float64"], min_side=1))
def test_what_python_writes_is_read(array: Array) -> None:
    finite = np.nan_to_num(array)
    back = read({"a": {"dtype": array.dtype.name, "shape": list(array.shape), "data": finite.tolist()}})
    np.testing.assert_array_equal(back, finite)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["NaN", "-Infinity", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=12,
)


def as_numpy(value: Any) -> Array:
    """What the value must be read as, decided by NumPy; raises if it is no tensor of numbers."""

    def convert(item: Any) -> Any:
        if isinstance(item, list):
            return [convert(one) for one in item]
        if isinstance(item, str):
            return {"NaN": math.nan, "-Infinity": -math.inf}[item]
        if isinstance(item, bool) or not isinstance(item, (int, float)):
            raise TypeError
        return item

    return np.array(convert(value), np.float64)


@given(values)
def test_a_value_is_a_tensor_exactly_if_numpy_makes_one_of_it(value: Any) -> None:
    if isinstance(value, dict):
        return
    try:
        expected = as_numpy(value)
    except (TypeError, ValueError, KeyError, OverflowError):
        with pytest.raises(InvalidTensor):
            read({"a": value}, "float64")
    else:
        np.testing.assert_array_equal(read({"a": value}, "float64"), expected)


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    try:
        members = Document(body, LIMITS).members
    except MalformedBody:
        return
    assert isinstance(json.loads(body.decode("utf-8-sig")), dict)
    assert all(isinstance(name, str) for name in members)


@given(st.data())
def test_a_damaged_body_is_read_or_refused(data: st.DataObject) -> None:
    body = bytearray(b'{"a": {"dtype": "float32", "shape": [2, 2], "data": [[1.5, "NaN"], [3, -4e-3]]}}')
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(body) - 1))
        body[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    try:
        tensor = read(bytes(body))
    except (GradserveError, KeyError):  # KeyError: this test's own, of a damaged "a" or "dtype"
        return
    assert tensor.size <= 4


@pytest.mark.parametrize("nested", [False, True])
def test_a_list_longer_than_simdjson_counts(monkeypatch: pytest.MonkeyPatch, parser: str, nested: bool) -> None:
    monkeypatch.setattr(_parser, "REUSED_PARSER_BYTES", 0)  # this thread's own parser would keep 400 MB
    length = (0xFFFFFF if parser == "simdjson" else 0xFFFFF) + 5  # orjson's lists have no such bound
    ones = b"[" + b"1," * (length - 1) + b"2]"
    tensor = read(b'{"a": ' + (b"[" + ones + b"]" if nested else ones) + b"}", "int64")
    assert tensor.shape == ((1, length) if nested else (length,))
    assert tensor.flat[-1] == 2
    assert tensor.sum(dtype=np.int64) == length + 1


def test_many_short_rows() -> None:
    rows = 140_000
    tensor = read(b'{"a": [' + b"[1, 2]," * (rows - 1) + b"[3, 4]]}", "int64")
    assert tensor.shape == (rows, 2)
    assert tensor[-1].tolist() == [3, 4]
    with pytest.raises(InvalidTensor, match=r"a\[100000\] has 1 elements, but its neighbours have 2"):
        read(b'{"a": [' + b"[1, 2]," * 100_000 + b"[1]," + b"[1, 2]," * 30_000 + b"[3, 4]]}")


def test_a_mistake_far_inside_is_found() -> None:
    numbers = b"1," * 150_000
    with pytest.raises(InvalidTensor, match=r"a\[150000\] is null"):
        read(b'{"a": [' + numbers + b"null, 1]}")
    with pytest.raises(InvalidTensor, match=r"a\[150000\] is a list"):
        read(b'{"a": [' + numbers + b"[1], 1]}")
    tensor = read(b'{"a": [' + numbers + b'"NaN", 1]}')
    assert np.isnan(tensor[150_000])
    assert np.nansum(tensor) == 150_001


def test_a_bracket_in_another_tensor_does_not_hide_a_mistake() -> None:
    def read_all() -> None:
        document = Document(b'{"a": [1, [2]], "b": [[1], [2]]}', LIMITS)
        for name in "ab":
            document.tensor(name, document.members[name], FLOAT32)
        document.finish()

    with pytest.raises(InvalidTensor, match=r"a\[1\] is a list"):
        read_all()


def test_a_list_among_integers_is_reported() -> None:
    with pytest.raises(InvalidTensor, match=r"a\[1\] is a list, but must be an integer of 64 bits"):
        read(b'{"a": [1, [2]]}', "int64")


def test_integers_are_exact() -> None:
    extremes = [-(1 << 63), (1 << 63) - 1, (1 << 53) + 1]
    assert read({"a": extremes}, "int64").tolist() == extremes
    assert read({"a": [1.0, 2]}, "int64").tolist() == [1, 2]
    assert read({"a": [[(1 << 53) + 1]]}, "float64")[0, 0] == 2.0**53


def test_large_integers_become_floats() -> None:
    assert read({"a": [10**30, (1 << 64) - 1, -5]}, "float64").tolist() == [1e30, 2.0**64, -5.0]


@pytest.mark.parametrize("digits", [400, 5000])
def test_an_integer_that_is_far_too_long_is_out_of_range(digits: int) -> None:
    with pytest.raises(InvalidTensor, match=r"a\[1\]"):
        read(b'{"a": [1, %b]}' % (b"1" * digits))


def test_a_large_body_that_is_not_json_is_refused_without_a_search() -> None:
    for end in (b"}", b"NaN]}"):
        with pytest.raises(MalformedBody, match='not JSON .*"NaN"'):
            read(b'{"a": [' + b"1," * (DIAGNOSED_BYTES // 2) + end)


@pytest.mark.parametrize("encoding", ["list", "base64"])
def test_the_limit_holds_before_anything_is_read(encoding: Encoding) -> None:
    body = encode({"a": np.zeros((3, 100), np.float64)}, encoding)
    with pytest.raises(TensorTooLarge, match=r"\[3, 100\].*2400 bytes"):
        read(body, limits=Limits(2399))
    assert read(body, limits=Limits(2400)).shape == (3, 100)


def test_rank_64_is_the_most() -> None:
    for rank in (64, 65):
        body = b'{"a": ' + b"[" * rank + b"1" + b"]" * rank + b"}"
        if rank == 64:
            assert read(body).shape == (1,) * 64
        else:
            with pytest.raises(TooManyDimensions):
                read(body)
    with pytest.raises(TooManyDimensions, match=r"a\.shape has 70 dimensions"):
        read({"a": {"dtype": "float32", "shape": [1] * 70, "data": []}})


def test_half_precision_is_rounded_once_and_checked() -> None:
    assert read({"a": {"dtype": "float16", "shape": [1], "data": [65519.9]}}).tolist() == [65504.0]
    with pytest.raises(InvalidTensor, match=r"a\[0\] is 65520.0, which is out of float16's range"):
        read({"a": {"dtype": "float16", "shape": [1], "data": [65520]}})
    with pytest.raises(InvalidTensor, match="bfloat16's range"):
        read({"a": {"dtype": "bfloat16", "shape": [1], "data": [3.4e38]}})


def test_answers_are_written_as_they_are() -> None:
    tensors = {"x": np.array([[1, -0.0], [np.nan, -np.inf]]), "n": np.array(7), "b": np.array(True)}
    assert json.loads(encode(tensors, "list")) == {
        "x": {"dtype": "float64", "shape": [2, 2], "data": [[1.0, -0.0], ["NaN", "-Infinity"]]},
        "n": {"dtype": "int64", "shape": [], "data": 7},
        "b": {"dtype": "bool", "shape": [], "data": True},
    }
    assert encode({"x": np.array(np.inf, FLOAT64)}, "list") == b'{"x":{"dtype":"float64","shape":[],"data":"Infinity"}}'
    assert encode({"x": np.array([3, 4], INT64)[::-1]}, "list") == b'{"x":{"dtype":"int64","shape":[2],"data":[4,3]}}'


@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (8,), (100,), (2, 50), (50, 2), (3, 5, 7), (1, 1, 30), (20, 1, 1), (3, 0)]
)
@pytest.mark.parametrize("dtype", ["float16", "float32", "int64", "bool"])
def test_lists_are_the_same_however_they_are_cut(
    shape: tuple[int, ...], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    if tensor.dtype.kind == "f":
        tensor.reshape(-1)[::3] = np.nan
        tensor.reshape(-1)[1::5] = -np.inf
    whole = b"".join(list_text(tensor))
    monkeypatch.setattr(_lists, "WRITTEN_ELEMENTS", 7)
    assert b"".join(list_text(tensor)) == whole
    assert b"".join(list_text(tensor.T)) == b"".join(list_text(tensor.T.copy()))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0), (60,), (3, 20), (60, 1), (20, 1, 3, 1, 1)])
def test_the_text_of_a_tensor_is_no_longer_than_expected(dtype: DType, shape: tuple[int, ...]) -> None:
    worst: Array
    if dtype == BOOL:
        worst = np.zeros(shape, BOOL)
    elif dtype.kind == "i":
        worst = np.full(shape, np.iinfo(dtype).min, dtype)
    else:
        longest = [-1.1754943508222875e-38, -1234567890123.5678, -0.000012345678901234567, -2.2250738585072014e-308]
        with np.errstate(over="ignore"):
            worst = np.resize(np.array([*longest, -np.inf, -1 / 3, -1234567890123456.7]).astype(dtype), shape)
    for encoding in ENCODINGS:
        text = b"".join(json_codec.encode_tensor(worst, encoding))
        head = len(json.dumps({"dtype": "bfloat16", "shape": [20] * 5, encoding: ""}))
        assert len(text) <= json_codec.encoded_bytes(shape, dtype, encoding) + head


def test_of_too_many_elements_nothing_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_codec, "MAX_ELEMENTS", 10)
    assert read(b'{"a": [1,1,1,1,1,1,1,1,1,1]}').size == 10
    with pytest.raises(BodyTooLarge, match="base64") as refused:
        read(b'{"a": [1,1,1,1,1,1,1,1,1,1],"b":1}')
    assert refused.value.context["limit"] == 10
    with pytest.raises(BodyTooLarge, match="10 elements"):  # in as few bytes as they can take
        read(b'{"a":[1,1,1,1,1,1,1,1,1,1,1]}')


def test_of_too_many_lists_nothing_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_codec, "MAX_LISTS", 4)
    assert read(b'{"a": [[1],[1],[1]]}').size == 3
    with pytest.raises(BodyTooLarge, match="4 lists") as refused:
        read(b'{"a": [[1],[1],[1],[1]]}')
    assert refused.value.context["limit"] == 4


def test_lists_are_compared_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_lists, "_BATCH_ITEMS", 3)
    array = np.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    assert np.array_equal(read(json.dumps({"a": array.tolist()}).encode()), array)
    for place, wrong in (((1, 2), 0), ((1, 2, 3), 0), ((1, 2, 3), [0.0]), ((1,), [[0.0]]), ((0, 1, 2, 4), "x")):
        lists: Any = array.tolist()
        inner = lists
        for index in place[:-1]:
            inner = inner[index]
        inner[place[-1]] = wrong
        with pytest.raises(InvalidTensor, match=re.escape("a" + "".join(f"[{k}]" for k in place))):
            read(json.dumps({"a": lists}).encode())


@pytest.fixture(params=[1, 1 << 17])
def ones(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Return one number, or as many as make a body too long for the search for mistakes."""
    monkeypatch.setattr(json_codec, "DIAGNOSED_BYTES", 1 << 18)
    return b",".join([b"1"] * request.param)


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": [%b], "a": [2]}',
        b'{"a": [2], "\\u0061": [%b]}',
        b'{"a": [%b], ":": [3], "a": [2]}',
        b'{"a": {"dtype": "int64", "shape": [1], "data": [%b], "dtype": "bool"}}',
    ],
)
def test_two_members_of_one_name_are_refused(body: bytes, ones: bytes) -> None:
    with pytest.raises(MalformedBody, match="two members"):
        read(body % ones)


@pytest.mark.parametrize("name", [b"a:b", rb"\"", rb"\\", rb"\\\":\\", rb"\u003a", b"::::"])
def test_a_colon_in_a_string_is_no_member(name: bytes, ones: bytes) -> None:
    document = Document(b'{"%b": {"x": ":", "y": "\\":"}, "a": [%b]}' % (name, ones), LIMITS)
    assert document.members.keys() == {json.loads(b'"%b"' % name), "a"}


def test_an_object_among_numbers_is_found(ones: bytes) -> None:
    with pytest.raises(InvalidTensor, match=r"a\[\d+\] is an object"):
        read(b'{"a": [%b, {"x": 1}]}' % ones)


def test_a_byte_order_mark_is_nothing_whatever_follows() -> None:
    for number in ("1", "1" + 30 * "0"):  # which is beyond 64 bits
        assert read(f'\ufeff{{"a": [{number}]}}'.encode(), "float64").tolist() == [float(number)]
    with pytest.raises(MalformedBody, match="column 8"):
        read(b'\xef\xbb\xbf{"a": [}')


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_json_is_utf_8_whatever_its_size(encoding: str) -> None:
    with pytest.raises(MalformedBody, match="not JSON"):
        read('{"a": [1]}'.encode(encoding))
