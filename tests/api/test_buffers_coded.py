"""Gradients in 8 bits over real HTTP, with each store: codes and scales, in JSON and safetensors, among other forms."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import numpy as np
import pytest

from service.dtypes import Array
from tests.api.calls import create, fresh, metadata, ok, saved, state, value
from tests.api.headers import KEY, REPLAYED
from tests.api.test_buffers_sparse import STORES, TO_JSON, post
from tests.serving import assert_problem

STORES = STORES
"""The stores of the fixture `http`."""

SHAPE = (3, 200)
"""Two whole blocks of 256 elements, and a short one."""


def coded(shape: tuple[int, ...] = SHAPE, seed: int = 1) -> tuple[Array, Array]:
    chance, size = np.random.default_rng(seed), int(np.prod(shape))
    codes = chance.integers(-127, 128, size).astype(np.int8).reshape(shape)
    return codes, chance.integers(0, 9, -(-size // 256)).astype(np.float32) / 4


def decoded(codes: Array, scales: Array) -> Array:
    return (codes.reshape(-1) * np.repeat(scales, 256)[: codes.size]).reshape(codes.shape)


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
