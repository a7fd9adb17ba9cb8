"""Gradients in 8 bits over real HTTP: codes and scales, in JSON and safetensors, among other forms."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from service.codecs import safetensors as codec
from service.codecs.codes import encode
from service.dtypes import Array
from service.limits import Limits
from tests.api.calls import add, create, fresh, get, metadata, ok, saved, state, value
from tests.api.headers import KEY, REPLAYED
from tests.api.test_buffers_sparse import TO_JSON, post
from tests.serving import assert_problem

SAFE_ANSWER, INT8 = {"Accept": codec.MEDIA_TYPE}, {"encoding": "int8"}

SHAPE = (3, 200)
"""Two whole blocks of 256 elements, and a short one."""


def coded(shape: tuple[int, ...] = SHAPE, seed: int = 1) -> tuple[Array, Array]:
    chance, size = np.random.default_rng(seed), int(np.prod(shape))
    codes = chance.integers(-127, 128, size).astype(np.int8).reshape(shape)
    return codes, chance.integers(0, 9, -(-size // 256)).astype(np.float32) / 4


def decoded(codes: Array, scales: Array) -> Array:
    with np.errstate(invalid="ignore"):
        numbers: Array = codes.reshape(-1) * np.repeat(scales, 256)[: codes.size]
    return numbers.reshape(codes.shape)


def in_lists(codes: Array, scales: Array) -> dict[str, Any]:
    return {"codes": codes.tolist(), "scales": scales.tolist()}


def in_base64(codes: Array, scales: Array) -> dict[str, Any]:
    return {
        name: {"dtype": one.dtype.name, "shape": [*one.shape], "base64": base64.b64encode(one.tobytes()).decode()}
        for name, one in (("codes", codes), ("scales", scales))
    }


def in_safetensors(codes: Array, scales: Array, name: str = "gradient") -> dict[str, Array]:
    return {f"{name}/codes": codes, f"{name}/scales": scales}


FORMS: dict[str, Any] = {
    "lists": lambda *one: {"gradient": in_lists(*one)},
    "base64": lambda *one: {"gradient": in_base64(*one)},
    "safetensors": in_safetensors,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [SHAPE, (), (0, 3), (256,), (2, 300_000)], ids=str)
def test_a_gradient_in_8_bits_has_every_form(http: httpx.Client, form: str, shape: tuple[int, ...]) -> None:
    if form == "lists" and np.prod(shape) == 0:
        pytest.skip("empty lists have no inner dimensions")
    name, one = create(http, shape=shape), coded(shape)
    receipt = ok(post(http, f"{name}/accumulate", FORMS[form](*one), weight=2))
    assert (receipt["count"], receipt["weight"]) == (1, 2.0)
    assert np.array_equal(np.reshape(value(http, name), shape), 2 * decoded(*one))


def test_a_sum_of_all_forms_is_exact(http: httpx.Client) -> None:
    names = [create(http, shape=SHAPE) for _ in range(3)]
    first, second = coded(), coded(seed=2)
    sparse = {f"{names[1]}/indices": np.array([1]), f"{names[1]}/rows": np.full((1, 200), 5, np.float32)}
    body = {**in_safetensors(*first, names[0]), **sparse, names[2]: np.ones(SHAPE, np.float32)}
    assert {one["count"] for one in ok(post(http, "accumulate", body))["buffers"].values()} == {1}
    ok(post(http, "accumulate", {name: in_lists(*second) for name in names}, weight=0.5))
    half = decoded(*second) / 2
    assert np.array_equal(value(http, names[0]), decoded(*first) + half)
    assert np.array_equal(value(http, names[1])[1], 5 + half[1])
    assert np.array_equal(value(http, names[2]), 1 + half)


def test_codes_replace_a_sum_and_answer_it(http: httpx.Client) -> None:
    name = create(http, shape=SHAPE, dtype="float64")
    ok(post(http, f"{name}/accumulate", in_safetensors(*coded(seed=3))))
    answer = ok(post(http, f"{name}/accumulate", FORMS["lists"](*coded()), overwrite=True, **{"return": "value"}))
    assert np.array_equal(answer["value"]["data"], decoded(*coded()))


def test_a_push_in_parts_stages_codes(http: httpx.Client) -> None:
    names, large = [create(http, shape=SHAPE), create(http, shape=(3, 100_000))], coded((3, 100_000), 4)
    parts = [in_safetensors(*coded(), names[0]), in_safetensors(*large, names[1])]
    place: dict[str, Any] = {"push": fresh("push"), "parts": 2}
    assert post(http, "accumulate", parts[0], part=1, **place).status_code == 202
    assert not np.any(value(http, names[0]))
    ok(post(http, "accumulate", parts[1], part=2, **place))
    for name, one in zip(names, (coded(), large), strict=True):
        assert np.array_equal(value(http, name), decoded(*one))


def test_a_repeated_push_of_codes_counts_once(http: httpx.Client) -> None:
    name, headers = create(http, shape=SHAPE), {KEY: fresh("key"), **TO_JSON}
    for attempt in range(3):
        answer = http.post(f"/v1/buffers/{name}/accumulate", content=saved(in_safetensors(*coded())), headers=headers)
        assert ok(answer)["count"] == 1
        assert (REPLAYED in answer.headers) is bool(attempt)
    assert np.array_equal(value(http, name), decoded(*coded()))


@pytest.mark.parametrize("scale", [np.nan, np.inf])
def test_a_scale_that_is_not_finite_follows_the_rule(http: httpx.Client, scale: float) -> None:
    codes, scales = coded()
    scales[1] = scale
    name, strict = create(http, shape=SHAPE), create(http, shape=SHAPE, nonfinite="reject")
    assert_problem(post(http, f"{strict}/accumulate", in_safetensors(codes, scales)), 422, "nonfinite_gradient")
    assert metadata(http, strict)["count"] == 0
    ok(post(http, f"{name}/accumulate", in_safetensors(codes, scales)))
    numbers = np.array(value(http, name), np.float64).reshape(-1)
    assert not np.isfinite(numbers[256:512]).any()
    assert np.isfinite(numbers[:256]).all()


def test_the_norm_is_that_of_the_numbers(http: httpx.Client) -> None:
    name = create(http, shape=(300,), max_norm=17.0)
    codes, scales = np.full(300, 100, np.int8), np.full(2, 0.01, np.float32)  # a norm of 17.32
    assert_problem(post(http, f"{name}/accumulate", in_safetensors(codes, scales)), 422, "norm_too_large", "17.3")
    ok(post(http, f"{name}/accumulate", in_safetensors(codes, scales / 2)))


def encoded(numbers: Array) -> tuple[Array, Array]:
    """Return codes and scales by the rule of the documents, an element at a time."""
    flat = numbers.astype(np.float32).reshape(-1)
    codes, scales = np.zeros(flat.size, np.int8), np.zeros(-(-flat.size // 256), np.float32)
    for block in range(scales.size):
        part = flat[256 * block : 256 * (block + 1)]
        scales[block] = np.abs(part).max() / np.float32(127)
        if np.isfinite(scales[block]) and scales[block]:
            codes[256 * block :][: part.size] = [max(-127, min(127, round(float(x / scales[block])))) for x in part]
    return codes.reshape(numbers.shape), scales


def read(http: httpx.Client, name: str, **query: Any) -> tuple[Array, Array]:
    """Return the codes and the scales of a value, which JSON and safetensors have alike."""
    query = {"encoding": "int8", **query}
    found = codec.decode(memoryview(get(http, name, SAFE_ANSWER, **query).read()), Limits(1 << 30))
    assert {*found} == {"value/codes", "value/scales"}
    member = ok(get(http, name, **query))["coded"]
    for part, one in member.items():
        bits = found[f"value/{part}"]
        assert base64.b64decode(one["base64"]) == bits.tobytes()
        assert (one["dtype"], one["shape"]) == (bits.dtype.name, [*bits.shape])
    return found["value/codes"], found["value/scales"]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_a_value_is_encoded_by_the_rule(http: httpx.Client, dtype: str) -> None:
    numbers = np.random.default_rng(1).normal(size=(7, 300)).astype(dtype)
    numbers[0, :256] = 0
    numbers[1, 0], numbers[6, 299] = (1e4, -1e4)
    name = create(http, shape=numbers.shape, dtype=dtype)
    ok(post(http, f"{name}/accumulate", {"gradient": numbers}, weight=4))
    for query, divisor in (({}, 1), ({"reduce": "mean"}, 4)):
        found = read(http, name, **query)
        for one, expected in zip(found, encoded(4 * numbers.astype(np.float64) / divisor), strict=True):
            assert np.array_equal(one, expected)
        error = np.abs(decoded(*found) - 4 * numbers.astype(np.float64) / divisor)
        assert (error <= np.repeat(found[1], 256)[: error.size].reshape(error.shape) * 0.501).all()


def test_takes_and_many_values_are_encoded(http: httpx.Client) -> None:
    names, numbers = [create(http, shape=(300,)) for _ in range(2)], np.arange(300, dtype=np.float32)
    for name in names:
        ok(post(http, f"{name}/accumulate", {"gradient": numbers}))
    query, both = {"encoding": "int8"}, {"names": names}
    expected = encoded(numbers)
    taken = http.post("/v1/buffers/take", json=both, params=query, headers=SAFE_ANSWER)
    later = http.post("/v1/buffers/value", json=both, params={**query, "step": 0}, headers=SAFE_ANSWER)
    for answer in (taken, later):
        found = codec.decode(memoryview(answer.read()), Limits(1 << 30))
        for name in names:
            assert np.array_equal(found[f"{name}/codes"], expected[0])
            assert np.array_equal(found[f"{name}/scales"], expected[1])
    answer = ok(http.post("/v1/buffers/value", json=both, params={**query, "step": 0}))["buffers"]
    assert {*answer[names[0]]["coded"]} == {"codes", "scales"}
    ok(post(http, f"{names[0]}/accumulate", {"gradient": numbers}))
    assert {*ok(http.post(f"/v1/buffers/{names[0]}/take", params=query))["coded"]} == {"codes", "scales"}


def test_an_encoded_value_has_a_tag_of_its_own(http: httpx.Client) -> None:
    name = create(http, shape=(300,))
    tags = {get(http, name, headers, **query).headers["etag"] for headers in ({}, SAFE_ANSWER) for query in ({}, INT8)}
    assert len(tags) == 4
    tag = get(http, name, **INT8).headers["etag"]
    assert get(http, name, {"If-None-Match": tag}, **INT8).status_code == 304
    assert get(http, name, {"If-None-Match": tag}).status_code == 200
    assert ok(post(http, f"{name}/zero", {}))["step"] == 1
    assert http.post(f"/v1/buffers/{name}/zero", headers={"If-Match": tag}).status_code == 412


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_a_block_that_is_not_finite_is_nan(http: httpx.Client, number: float) -> None:
    numbers = np.ones(600, np.float32)
    numbers[300] = number
    name = create(http, shape=(600,))
    ok(post(http, f"{name}/accumulate", {"gradient": numbers}))
    codes, scales = read(http, name)
    assert np.isfinite(scales).tolist() == [True, False, True]
    assert not codes[256:512].any()
    assert np.isnan(decoded(codes, scales)).tolist() == [False] * 256 + [True] * 256 + [False] * 88


@settings(max_examples=50, deadline=None)
@given(arrays(np.float32, st.integers(0, 600), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_any_numbers_are_encoded_by_the_rule(numbers: Array) -> None:
    with np.errstate(all="ignore"):
        found, expected = encode(numbers), encoded(numbers)
    assert np.array_equal(found[0], expected[0])
    assert found[1].tobytes() == expected[1].tobytes()
    assert np.abs(found[0].astype(int)).max(initial=0) <= 127


def test_an_encoding_goes_without_a_dtype(http: httpx.Client) -> None:
    name = create(http)
    assert_problem(get(http, name, dtype="float16", **INT8), 422, "invalid_parameter", "encoding=int8", "dtype")
    assert_problem(add(http, name, [1, 2], **INT8), 422, "invalid_parameter", "encoding")


CODES, SCALES = coded()
_MORE = np.zeros(4, np.float32)
_NEGATIVE = np.array([1, -0.5, 1], np.float32)
_LEAST = CODES.copy()
_LEAST[1, 60] = -128

REFUSED: dict[str, tuple[Any, str, tuple[str, ...]]] = {
    "no scales": ({"gradient/codes": CODES}, "missing_tensor", ("gradient/scales", "8 bits")),
    "no codes": ({"gradient": {"scales": [1.0]}}, "missing_tensor", ("gradient/codes",)),
    "too many scales": (in_safetensors(CODES, _MORE), "shape_mismatch", ("/scales has shape [4]", "[3]", "600 codes")),
    "a table of scales": (in_safetensors(CODES, SCALES[:, None]), "shape_mismatch", ("[3, 1]", "[3]")),
    "a negative scale": (in_safetensors(CODES, _NEGATIVE), "invalid_tensor", ("/scales[1] is -0.5", "0 or more")),
    "-128": (in_safetensors(_LEAST, SCALES), "invalid_tensor", ("gradient/codes[1][60] is -128", "[-127, 127]")),
    "-129 in JSON": ({"gradient": {"codes": [-129], "scales": [1]}}, "invalid_tensor", ("-129", "int8")),
    "scales in float64": (in_safetensors(CODES, SCALES.astype(np.float64)), "dtype_mismatch", ("/scales is float64",)),
    "codes in int32": (in_safetensors(CODES.astype(np.int32), SCALES), "dtype_mismatch", ("/codes is int32", "int8")),
    "codes alone as a gradient": ({"gradient": CODES}, "dtype_mismatch", ("gradient is int8", "float32")),
    "another shape": (in_safetensors(CODES.reshape(200, 3), SCALES), "shape_mismatch", ("[200, 3]", "[3, 200]")),
    "rows beside codes": (
        {**in_safetensors(CODES, SCALES), "gradient/rows": SCALES},
        "missing_tensor",
        ("gradient/indices",),
    ),
    "a tensor beside codes": (
        {**in_safetensors(CODES, SCALES), "gradient": SCALES},
        "invalid_tensor",
        ("as a tensor and as codes and scales",),
    ),
    "another member": ({"gradient": {**in_lists(CODES, SCALES), "block": 256}}, "invalid_tensor", ("gradient.block",)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_codes_are_refused(http: httpx.Client, case: str) -> None:
    body, code, words = REFUSED[case]
    name, other = create(http, shape=SHAPE), create(http)
    before = state(http, name, other)
    assert_problem(post(http, f"{name}/accumulate", body), 422, code, *words)
    body = {place.replace("gradient", name): one for place, one in body.items()}
    one: Any = np.ones(2) if any(isinstance(one, np.ndarray) for one in body.values()) else [1, 1]
    assert name in assert_problem(post(http, "accumulate", {other: one, **body}), 422, code)["detail"]
    assert state(http, name, other) == before


def test_no_operator_takes_int8(http: httpx.Client) -> None:
    body = {name: np.zeros(2, np.int8) for name in ("dY", "X")}
    answer = http.post("/v1/ops/ReluGrad", content=saved(body), headers=TO_JSON)
    assert_problem(answer, 422, "dtype_mismatch", "int8")
    answer = http.post("/v1/ops/ReluGrad", json={"dY": {"dtype": "int8", "data": [1]}, "X": [1]})
    assert_problem(answer, 422, "dtype_mismatch", "int8")


def test_the_schema_shows_codes(http: httpx.Client) -> None:
    components = ok(http.get("/openapi.json"))["components"]["schemas"]
    assert {"$ref": "#/components/schemas/CodedGradient"} in components["Gradient"]["anyOf"]
    assert components["CodedGradient"]["required"] == ["codes", "scales"]
