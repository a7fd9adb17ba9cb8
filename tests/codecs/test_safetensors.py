"""The safetensors codec against the safetensors library, both ways, and every rule of the format, broken."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import example, given
from hypothesis import strategies as st

from service.codecs import safetensors as codec
from service.dtypes import BFLOAT16, DTYPES, FLOAT32, SAFETENSORS, Array, DType
from service.errors import GradserveError, InvalidTensor, MalformedBody, TensorTooLarge, TooManyDimensions
from service.limits import Limits
from tests.codecs.test_json import any_array
from tests.test_contract import assert_same

LIMITS = Limits(1 << 30)

EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)

names = st.text(max_size=5).filter(lambda name: name != codec.METADATA)
any_arrays = st.dictionaries(names, any_array().map(np.asarray), max_size=4)


def encode(tensors: dict[str, Array]) -> bytes:
    return b"".join(codec.encode(tensors))


def decode(body: bytes, limits: Limits = LIMITS) -> dict[str, Array]:
    return codec.decode(memoryview(body), limits)


def file(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A file with this header, as JSON or as text, that says to be `length` bytes long."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


# ----- both ways -----


def of_every_shape(dtype: DType) -> dict[str, Array]:
    shapes = {"scalar": (), "row": (3,), "cube": (2, 3, 4), "none": (0,), "rows": (0, 3), "columns": (3, 0)}
    return {name: np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype) for name, shape in shapes.items()}


@EVERY_DTYPE
@pytest.mark.parametrize("metadata", [None, {}, {"format": "np", "é": ": , [ {"}])
def test_a_file_of_the_library_is_read(dtype: DType, metadata: dict[str, str] | None) -> None:
    tensors = of_every_shape(dtype)
    read = decode(safetensors.numpy.save(tensors, metadata))
    assert_same({name: read[name] for name in tensors}, tensors)
    assert read.keys() == tensors.keys()


def read_by_the_library(body: bytes) -> dict[str, Array]:
    """What `safetensors.numpy.load` gives, which knows no BF16; its `deserialize` does."""
    dtypes = {name: dtype for dtype, name in SAFETENSORS.items()}
    return {
        name: np.frombuffer(one["data"], dtypes[one["dtype"]]).reshape(one["shape"])
        for name, one in safetensors.deserialize(body)  # type: ignore[no-untyped-call]
    }


@EVERY_DTYPE
def test_a_file_of_ours_is_read_by_the_library(dtype: DType) -> None:
    tensors = of_every_shape(dtype)
    loaded = read_by_the_library(encode(tensors))
    assert_same({name: loaded[name] for name in tensors}, tensors)
    if dtype != BFLOAT16:
        loaded = safetensors.numpy.load(encode(tensors))
        assert_same({name: loaded[name] for name in tensors}, tensors)


@given(any_arrays)
def test_round_trip_is_bit_exact(tensors: dict[str, Array]) -> None:
    body = encode(tensors)
    read, loaded = decode(body), read_by_the_library(body)
    assert read.keys() == loaded.keys() == tensors.keys()
    assert_same({name: read[name] for name in tensors}, tensors)
    assert_same({name: loaded[name] for name in tensors}, tensors)


@given(any_arrays, st.none() | st.dictionaries(st.text(max_size=3), st.text('":,[{\\a', max_size=5), max_size=3))
def test_any_file_of_the_library_is_read(tensors: dict[str, Array], metadata: dict[str, str] | None) -> None:
    read = decode(safetensors.numpy.save(tensors, metadata or None))  # two empty ones give a file that is not JSON
    assert read.keys() == tensors.keys()
    assert_same({name: read[name] for name in tensors}, tensors)


def test_the_library_writes_other_layouts_right_only_after_ascontiguousarray() -> None:
    """safetensors#825. Once the first assertion fails, the recipes in the documents need no `np.ascontiguousarray`."""
    gradient = np.array([[1, 4], [2, 5], [3, 6]], np.float32).T
    assert decode(safetensors.numpy.save({"gradient": gradient}))["gradient"].tolist() == [[1, 4, 2], [5, 3, 6]]
    for layout in (gradient, gradient[:, ::2], gradient[::-1], np.asfortranarray(gradient)):
        read = decode(safetensors.numpy.save({"gradient": np.ascontiguousarray(layout)}))
        assert_same(read, {"gradient": layout})


def test_scattered_rows_are_written_in_their_order() -> None:
    grid = np.arange(12, dtype=np.int32).reshape(3, 4)
    tensors: dict[str, Array] = {"transposed": grid.T, "backwards": grid[::-1], "column": grid[:, 1]}
    assert_same(decode(encode(tensors)), tensors)


def test_the_header_may_be_padded_and_in_any_order() -> None:
    spaced = json.dumps({"b": entry(offsets=[4, 8]), "a": entry(offsets=[0, 4])}, indent=3).encode() + b" " * 50
    tensors = decode(file(spaced, np.array([1, 2], np.float32).tobytes()))
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {"b": [2.0], "a": [1.0]}
    assert decode(file({})) == decode(file({codec.METADATA: {}})) == {}


# ----- views -----


@EVERY_DTYPE
def test_tensors_are_read_only_views(dtype: DType) -> None:
    tensors = {"x": np.zeros((3, 5), dtype), "y": np.ones(2, dtype)}
    for body in (encode(tensors), safetensors.numpy.save(tensors)):
        for tensor in decode(body).values():
            assert np.shares_memory(tensor, np.frombuffer(body, np.uint8))
            assert tensor.flags.aligned
            assert not tensor.flags.writeable


def test_a_writeable_body_gives_views_that_are_not() -> None:
    body = bytearray(encode({"x": np.zeros(3)}))
    tensor = codec.decode(memoryview(body), LIMITS)["x"]
    body[-8:] = np.ones(1).tobytes()
    assert tensor.tolist() == [0, 0, 1]
    assert not tensor.flags.writeable


def test_bytes_that_lie_askew_are_copied_to_where_numpy_is_fast() -> None:
    header = json.dumps({"flag": entry("BOOL", [1], [0, 1]), "x": entry("F64", [2], [1, 17])}).encode()
    body = file(header + b" " * (-len(header) % 8), b"\1" + np.array([1.5, -2.5]).tobytes())
    tensors = decode(body)
    assert tensors["x"].tolist() == [1.5, -2.5]
    assert tensors["x"].flags.aligned
    assert not tensors["x"].flags.writeable


def test_nothing_is_copied_to_be_written() -> None:
    tensors: dict[str, Array] = {
        "half": np.ones(3, np.float16),
        "double": np.ones((2, 2)),
        "single": np.ones(1, np.float32),
    }
    header, *pieces = codec.encode(tensors)
    assert len(header) % 8 == 0
    # Those of large elements first, so that each begins at a multiple of its own.
    for piece, name in zip(pieces, ("double", "single", "half"), strict=True):
        assert np.shares_memory(np.frombuffer(piece, np.uint8), tensors[name])


# ----- rules -----

FOUR = bytes(4)
HUGE = 1 << 62

BROKEN: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "nothing": (b"", ("0 bytes", "begins with 8")),
    "no whole length": (bytes(7), ("7 bytes", "begins with 8")),
    "no header": (bytes(8), ("header is not JSON",)),
    "a header beyond the body": (file({}, length=3), ("length is 3 bytes", "only 2 bytes follow")),
    "a header beyond all bodies": (file({}, length=(1 << 64) - 1), (f"{(1 << 64) - 1} bytes", "only 2")),
    "a header cut short": (file({"a": entry()}, FOUR, length=20), ("header is not JSON",)),
    "a header that runs into the bytes": (file({"a": entry()}, FOUR, length=60), ("header is not JSON",)),
    "not UTF-8": (file(b'{"\xff": 1}'), ("header is not JSON", "UTF-8")),
    "a surrogate": (file(b'{"\\ud800": 1}'), ("header is not JSON",)),
    "not JSON": (file(b"{a: 1}"), ("header is not JSON",)),
    "NaN": (file(b'{"a": NaN}'), ("header is not JSON",)),
    "two values": (file(b"{} {}"), ("header is not JSON",)),
    "a list": (file([]), ("header is []", "an object")),
    "a number": (file(5), ("header is 5", "an object")),
    "a tensor that is none": (file({"a": 5}), ("'a' is 5", "an object")),
    "a name twice": (file(b'{"a": 1, "a": 2}'), ("two members named 'a'",)),
    "a name twice, once escaped": (file(b'{"a": 1, "\\u0061": 2}'), ("two members named 'a'",)),
    "a name twice, with colons": (file(b'{":": "::", ":": [":"]}'), ("two members named ':'",)),
    "a key twice": (
        file(b'{"a": {"dtype": "F32", "dtype": "I32", "shape": [1], "data_offsets": [0, 4]}}', FOUR),
        ("two members named 'dtype'",),
    ),
    "metadata twice": (file(b'{"__metadata__": {}, "__metadata__": {}}'), ("two members named '__metadata__'",)),
    "no dtype": (file({"a": {"shape": [1], "data_offsets": [0, 4]}}, FOUR), ("'a'", "must have dtype")),
    "no shape": (file({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, FOUR), ("'a'", "must have dtype, shape")),
    "no offsets": (file({"a": {"dtype": "F32", "shape": [1]}}, FOUR), ("'a'", "data_offsets null")),
    "an unknown key": (file({"a": entry(unit="m")}, FOUR), ("'a'", "'unit'", "must have dtype, shape")),
    "offsets of a text": (file({"a": entry(offsets="04")}, FOUR), ("'a'", "'04'", "two non-negative integers")),
    "one offset": (file({"a": entry(offsets=[0])}, FOUR), ("'a'", "[0]", "two non-negative integers")),
    "three offsets": (file({"a": entry(offsets=[0, 4, 4])}, FOUR), ("'a'", "[0, 4, 4]", "two non-negative integers")),
    "a fractional offset": (file({"a": entry(offsets=[0, 4.0])}, FOUR), ("'a'", "4.0", "two non-negative integers")),
    "a boolean offset": (file({"a": entry(offsets=[False, 4])}, FOUR), ("'a'", "false", "two non-negative integers")),
    "a negative offset": (file({"a": entry(offsets=[-4, 0])}, FOUR), ("'a'", "[-4, 0]", "non-negative integers")),
    "offsets in the wrong order": (file({"a": entry(offsets=[4, 0])}, FOUR), ("'a'", "[4, 0]")),
    "an end before the start": (
        file({"a": entry(), "b": entry(shape=[0], offsets=[4, 0])}, FOUR),
        ("'b'", "[4, 0]", "begin at 4"),
    ),
    "an end beyond the bytes": (file({"a": entry()}, bytes(3)), ("3 bytes follow", "'a'", "ends at 4")),
    "an end far beyond the bytes": (file({"a": entry(offsets=[0, HUGE])}, FOUR), ("4 bytes follow", "'a'", str(HUGE))),
    "an end beyond 64 bits": (file({"a": entry(offsets=[0, 10**30])}, FOUR), ("'a'", "data_offsets")),
    "a hole at the start": (file({"a": entry(offsets=[4, 8])}, bytes(8)), ("'a'", "[4, 8]", "begin at 0")),
    "a hole between": (file({"a": entry(), "b": entry(offsets=[5, 9])}, bytes(9)), ("'b'", "[5, 9]", "begin at 4")),
    "a hole at the end": (file({"a": entry()}, bytes(5)), ("5 bytes follow", "ends at 4")),
    "bytes of nobody": (file({}, FOUR), ("4 bytes follow", "end at 0")),
    "an overlap": (file({"a": entry(), "b": entry(offsets=[3, 7])}, bytes(7)), ("'b'", "[3, 7]", "begin at 4")),
    "the same bytes twice": (file({"a": entry(), "b": entry()}, FOUR), ("'b'", "[0, 4]", "begin at 4")),
    "metadata of numbers": (file({"__metadata__": {"a": 1}}), ("__metadata__", "names to strings")),
    "metadata of objects": (file({"__metadata__": {"a": {}}}), ("__metadata__", "names to strings")),
    "metadata that is a list": (file({"__metadata__": []}), ("__metadata__ is []", "an object")),
    "deep": (file(b'{"a": ' + b"[" * 100_000), ("header is",)),
    "deep, and closed": (file(b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"), ("header",)),
    "more values than are read": (file(b'{"a": [' + b"1," * (1 << 18) + b"1]}"), ("header has more than 262144",)),
}


@pytest.mark.parametrize("case", BROKEN)
def test_each_broken_rule_is_named(case: str) -> None:
    body, words = BROKEN[case]
    with pytest.raises(MalformedBody) as raised:
        decode(body)
    for word in words:
        assert word in raised.value.detail, raised.value.detail
    assert len(raised.value.detail) < 400


def test_a_header_that_came_before_is_judged_by_the_bytes_that_follow_now() -> None:
    whole = encode({"a": np.arange(4, dtype=np.float32), "b": np.ones(2, bool)})
    assert decode(whole)["a"].tolist() == [0, 1, 2, 3]
    for other in (whole[:-1], whole + b"\0"):
        with pytest.raises(MalformedBody, match="bytes follow the header"):
            decode(other)
    with pytest.raises(InvalidTensor, match="neither 0 nor 1"):
        decode(whole[:-1] + b"\2")
    with pytest.raises(TensorTooLarge):
        decode(whole, Limits(8))
    again = decode(whole[:-18] + bytes(18))
    assert not again["a"].any()
    assert not again["b"].any()


INVALID: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "an unknown dtype": (file({"a": entry("F8_E4M3", [4])}, FOUR), ("a.dtype is 'F8_E4M3'", "F32", "BOOL")),
    "a dtype in small letters": (file({"a": entry("f32")}, FOUR), ("a.dtype is 'f32'",)),
    "a dtype that is a number": (file({"a": entry(32)}, FOUR), ("a.dtype is 32",)),
    "a dtype that is a list": (file({"a": entry(["F32"])}, FOUR), ("a.dtype is ['F32']",)),
    "a shape that is a number": (file({"a": entry(shape=1)}, FOUR), ("a.shape is 1", "list of non-negative integers")),
    "a negative dimension": (file({"a": entry(shape=[-1])}, FOUR), ("a.shape is [-1]", "non-negative integers")),
    "two negative dimensions": (file({"a": entry(shape=[-1, -1])}, FOUR), ("a.shape is [-1, -1]",)),
    "a fractional dimension": (file({"a": entry(shape=[1.0])}, FOUR), ("a.shape is [1.0]",)),
    "a boolean dimension": (file({"a": entry(shape=[True])}, FOUR), ("a.shape is [true]",)),
    "a nested dimension": (file({"a": entry(shape=[[1]])}, FOUR), ("a.shape is [[1]]",)),
    "a dimension beyond 63 bits": (file({"a": entry(shape=[1 << 63])}, FOUR), ("a.shape is [9223372036854775808]",)),
    "a dimension beyond 64 bits": (file({"a": entry(shape=[10**30])}, FOUR), ("a.shape is [1e+30]",)),
    "too few bytes": (file({"a": entry(shape=[2])}, FOUR), ("a.data_offsets holds 4 bytes", "[2] takes 8")),
    "too many bytes": (
        file({"a": entry(shape=[], offsets=[0, 8])}, bytes(8)),
        ("a.data_offsets holds 8 bytes", "[] takes 4"),
    ),
    "bytes of an empty tensor": (file({"a": entry(shape=[0, 5])}, FOUR), ("holds 4 bytes", "[0, 5] takes 0")),
    "a boolean of 2": (file({"a": entry("BOOL", [4])}, b"\0\1\2\1"), ("a.data_offsets", "neither 0 nor 1")),
    "a boolean of 255": (file({"a": entry("BOOL", [4])}, b"\0\1\0\xff"), ("a.data_offsets", "neither 0 nor 1")),
}


@pytest.mark.parametrize("case", INVALID)
def test_each_invalid_tensor_is_named(case: str) -> None:
    body, words = INVALID[case]
    with pytest.raises(InvalidTensor) as raised:
        decode(body)
    for word in words:
        assert word in raised.value.detail, raised.value.detail
    assert raised.value.context["tensor"] == "a"


@pytest.mark.parametrize(
    "shape",
    [[HUGE], [1 << 32, 1 << 31], [1 << 32, 1 << 32], [1 << 62, 4, 1], [(1 << 63) - 1] * 64, [0, HUGE, 4], [1 << 40]],
)
def test_shapes_that_no_memory_holds(shape: list[int]) -> None:
    """Products of 2^63, 2^64 and more, which would be small or negative in 64 bits."""
    for offsets in ([0, 0], [0, 4]):
        with pytest.raises(TensorTooLarge, match="^a"):
            decode(file({"a": entry(shape=shape, offsets=offsets)}, bytes(offsets[1])))


def test_the_limit_of_a_tensor() -> None:
    body = encode({"a": np.zeros((3, 100))})
    with pytest.raises(TensorTooLarge, match=r"a, float64 of shape \[3, 100\], takes 2400 bytes"):
        decode(body, Limits(2399))
    assert decode(body, Limits(2400))["a"].shape == (3, 100)


def test_rank_64_is_the_most() -> None:
    assert decode(encode({"a": np.zeros((1,) * 64, FLOAT32)}))["a"].ndim == 64
    with pytest.raises(TooManyDimensions, match="a has 65 dimensions; the limit is 64"):
        decode(file({"a": entry(shape=[1] * 65)}, FOUR))


def test_a_header_of_more_than_100_megabytes_is_refused() -> None:
    body = np.zeros(100_000_100, np.uint8)  # which stay unmapped
    body[:8] = np.frombuffer((100_000_001).to_bytes(8, "little"), np.uint8)
    with pytest.raises(MalformedBody, match="100000001 bytes.*limit is 100000000"):
        codec.decode(body.data, LIMITS)


def test_long_names_are_cut_in_messages() -> None:
    with pytest.raises(MalformedBody) as raised:
        decode(file({"x" * 100_000: entry(offsets=[4, 8])}, bytes(8)))
    assert len(raised.value.detail) < 400


# ----- whatever comes -----


def tensors_or_an_error(body: bytes) -> dict[str, Array] | None:
    try:
        return decode(body)
    except GradserveError as error:
        refused = error
    assert 400 <= refused.status < 500
    return None


@given(st.binary(max_size=100) | st.binary(max_size=50).map(file))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    tensors_or_an_error(body)


VALID = encode(
    {
        "x": np.arange(6, dtype=np.float32).reshape(2, 3),
        "flags": np.array([True, False]),
        "none": np.zeros((0, 3), np.float16),
        "n": np.array(-5),
    }
)


@given(st.data())
def test_a_damaged_file_is_read_or_refused(data: st.DataObject) -> None:
    body = bytearray(VALID)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(body)))
        size = data.draw(st.integers(0, 3))
        body[place : place + size] = data.draw(st.binary(max_size=3) | st.sampled_from([b"-1", b"9" * 20, b'"', b"[["]))
    read = tensors_or_an_error(bytes(body))
    if read is not None:
        length = int.from_bytes(body[:8], "little")
        assert sum(tensor.nbytes for tensor in read.values()) == len(body) - 8 - length


values = st.none() | st.booleans() | st.integers(-1, 9) | st.sampled_from([HUGE, 1 << 64, 1.5, "F32", "BOOL", "é"])
lists = st.lists(values, max_size=4)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(sorted(SAFETENSORS.values())) | values,
        "shape": st.lists(st.integers(0, 3), max_size=3) | lists,
        "data_offsets": st.tuples(st.integers(0, 4), st.integers(4, 12)) | lists,
    },
    optional={"more": values},
)


@given(st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), entries | values | lists), st.binary(max_size=12))
@example({"a": entry()}, FOUR)
def test_a_file_is_read_exactly_if_the_library_reads_it(header: dict[str, Any], data: bytes) -> None:
    """Except for mistakes that the library accepts: bytes of booleans above 1, and unknown keys."""
    body = file(header, data)
    read = tensors_or_an_error(body)
    try:
        loaded = read_by_the_library(body)
    except (safetensors.SafetensorError, KeyError):  # KeyError: a dtype that is not one of ours
        assert read is None
        return
    if read is not None:
        assert_same({name: read[name] for name in loaded}, loaded)
    else:
        odd = any(isinstance(one, dict) and "more" in one for one in header.values())
        assert odd or any(one.dtype == np.bool_ and one.view(np.uint8).max(initial=0) > 1 for one in loaded.values())
