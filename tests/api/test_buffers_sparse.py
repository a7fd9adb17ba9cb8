"""Sparse gradients over real HTTP, with each store: indices and rows, in JSON and safetensors, among dense tensors."""

from __future__ import annotations

import json
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest

from service.codecs import safetensors as codec
from service.dtypes import Array
from tests.api.calls import add, create, fresh, metadata, ok, saved, state, value
from tests.api.headers import KEY, REPLAYED, SAFE
from tests.serving import assert_problem, serving

STORES = ["lmdb", "postgres"]

TO_JSON = {**SAFE, "Accept": "application/json"}

INDICES, ROWS = np.array([0, -1, 0]), np.array([[1, 2], [3, 4], [5, 6]], np.float32)


def post(http: httpx.Client, path: str, body: Any, **params: Any) -> httpx.Response:
    """Post gradients: a dict of JSON, or a dict of arrays as safetensors."""
    if any(isinstance(one, np.ndarray) for one in body.values()):
        content: Any = b"".join(codec.encode(body))
        return http.post(f"/v1/buffers/{path}", content=content, headers=TO_JSON, params=params)
    return http.post(f"/v1/buffers/{path}", json=body, params=params)


def in_json(indices: Any = INDICES, rows: Any = ROWS) -> dict[str, Any]:
    return {"indices": np.asarray(indices).tolist(), "rows": np.asarray(rows).tolist()}


def in_safetensors(name: str = "gradient", indices: Any = INDICES, rows: Any = ROWS) -> dict[str, Array]:
    return {f"{name}/indices": np.asarray(indices), f"{name}/rows": np.asarray(rows)}


OBJECTS = {
    "rows": {"dtype": "float64", "shape": [3, 2], "data": ROWS.tolist()},
    "indices": {"dtype": "int32", "data": INDICES.tolist()},
}
IN_BASE64 = {
    "indices": {"dtype": "int64", "shape": [1], "base64": "//////////8="},
    "rows": {"dtype": "float16", "shape": [1, 2], "base64": "ADwAQA=="},
}
FORMS: dict[str, Any] = {
    "lists": {"gradient": in_json()},
    "objects": {"gradient": OBJECTS},
    "base64": {"gradient": IN_BASE64},
    "safetensors": in_safetensors(),
    "int32 and bfloat16": in_safetensors(indices=INDICES.astype(np.int32), rows=ROWS.astype(ml_dtypes.bfloat16)),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_sparse_gradient_has_every_form(http: httpx.Client, form: str) -> None:
    name = create(http, shape=(4, 2))
    receipt = ok(post(http, f"{name}/accumulate", FORMS[form], weight=10))
    assert (receipt["count"], receipt["weight"]) == (1, 10.0)
    expected = [[0, 0], [10, 20]] if form == "base64" else [[60, 80], [30, 40]]
    assert value(http, name) == [expected[0], [0, 0], [0, 0], expected[1]]


@pytest.mark.parametrize("form", ["JSON", "safetensors"])
def test_dense_and_sparse_gradients_share_a_request(http: httpx.Client, form: str) -> None:
    table, bias, scalar = create(http, shape=(40_000, 2)), create(http), create(http, shape=())
    body: dict[str, Any] = {table: in_json(), bias: [1, 2], scalar: 3}
    if form == "safetensors":
        body = {**in_safetensors(table), bias: np.array([1, 2.0]), scalar: np.array(3.0)}
    receipts = ok(post(http, "accumulate", body, contributor="ann"))["buffers"]
    assert {name: one["count"] for name, one in receipts.items()} == {table: 1, bias: 1, scalar: 1}
    assert (value(http, bias), value(http, scalar)) == ([1, 2], 3)
    rows = value(http, table)
    assert (rows[0], rows[-1], any(map(any, rows[1:-1]))) == ([6, 8], [3, 4], False)


def test_a_sparse_gradient_can_answer_the_sum(http: httpx.Client) -> None:
    name = create(http, shape=(2, 2))
    answer = ok(post(http, f"{name}/accumulate", FORMS["lists"], **{"return": "value"}))
    assert answer["value"]["data"] == [[6, 8], [3, 4]]
    answer = ok(post(http, f"{name}/accumulate", {"gradient": in_json([], [])}, **{"return": "value"}))
    assert (answer["count"], answer["value"]["data"]) == (2, [[6, 8], [3, 4]])
    answer = ok(post(http, f"{name}/accumulate", FORMS["base64"], overwrite=True, **{"return": "value"}))
    assert answer["value"]["base64"]


def rows_at(indices: Any) -> dict[str, Any]:
    return {"gradient": {"indices": indices, "rows": [[1, 2]]}}


REFUSED: dict[str, tuple[Any, str, tuple[str, ...]]] = {
    "JSON without rows": ({"gradient": {"indices": [0]}}, "missing_tensor", ("gradient/rows",)),
    "JSON without indices": ({"gradient": {"rows": [[1, 2]]}}, "missing_tensor", ("gradient/indices",)),
    "safetensors without rows": ({"gradient/indices": np.zeros(1, np.int64)}, "missing_tensor", ("gradient/rows",)),
    "safetensors without indices": ({"gradient/rows": ROWS}, "missing_tensor", ("gradient/indices",)),
    "another member": ({"gradient": {**in_json(), "axis": 0}}, "invalid_tensor", ("gradient.axis", "indices, rows")),
    "a member of a tensor": ({"gradient": {**in_json(), "shape": [3]}}, "invalid_tensor", ("gradient.shape",)),
    "a strange member": (rows_at({"data": [0], "more": 1}), "invalid_tensor", ("gradient/indices.more",)),
    "null": ({"gradient": {"indices": None, "rows": [[1, 2]]}}, "invalid_tensor", ("gradient/indices",)),
    "nested objects": ({"gradient": {"indices": in_json(), "rows": [[1, 2]]}}, "invalid_tensor", ("gradient/indices",)),
    "floats for indices": ({"gradient": {"indices": [0.5], "rows": [[1, 2]]}}, "invalid_tensor", ("0.5",)),
    "float32 for indices": (
        rows_at({"dtype": "float32", "data": [0]}),
        "dtype_mismatch",
        ("gradient/indices", "float32", "int32, int64"),
    ),
    "flags for indices": (in_safetensors(indices=[True], rows=ROWS[:1]), "dtype_mismatch", ("t/indices", "bool")),
    "integers for rows": (in_safetensors(rows=ROWS.astype(np.int64)), "dtype_mismatch", ("gradient/rows", "int64")),
    "one index": ({"gradient": {"indices": 0, "rows": [1, 2]}}, "shape_mismatch", ("gradient/indices", "[]")),
    "a table of indices": (in_safetensors(indices=[[0]], rows=[[[1.0, 2]]]), "shape_mismatch", ("indices", "[1, 1]")),
    "too few rows": (in_safetensors(rows=ROWS[:2]), "shape_mismatch", ("gradient/rows", "[2, 2]", "[3, 2]")),
    "rows of another width": ({"gradient": in_json(rows=ROWS[:, :1])}, "shape_mismatch", ("[3, 1]", "[3, 2]")),
    "an index too large": ({"gradient": in_json([0, 4, 0])}, "index_out_of_range", ("/indices[1] is 4", "[-4, 3]")),
    "an index too small": (in_safetensors(indices=[0, 0, -5]), "index_out_of_range", ("gradient/indices[2] is -5",)),
    "both": ({**in_safetensors(), "gradient": ROWS}, "invalid_tensor", ("gradient", "as a tensor and as")),
    "another gradient": ({"gradient": in_json(), "other": in_json()}, "unknown_tensor", ("other",)),
    "another part": ({"gradient/values": ROWS}, "unknown_tensor", ("gradient/values",)),
    "a slash in JSON": ({"gradient/indices": [0], "gradient/rows": [[1, 2]]}, "unknown_tensor", ("gradient/indices",)),
    "ragged rows": ({"gradient": {"indices": [0, 1], "rows": [[1, 2], [3]]}}, "invalid_tensor", ("gradient/rows",)),
    "a list for an index": ({"gradient": {"indices": [[0], 1, 2], "rows": ROWS.tolist()}}, "invalid_tensor", ("ind",)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_sparse_gradient_is_refused(http: httpx.Client, case: str) -> None:
    body, code, words = REFUSED[case]
    name, other = create(http, shape=(4, 2)), create(http)
    before = state(http, name, other)
    assert_problem(post(http, f"{name}/accumulate", body), 422, code, *words)
    if code != "unknown_tensor":
        body = {place.replace("gradient", name): one for place, one in body.items()}
        one = np.ones(2) if any(isinstance(one, np.ndarray) for one in body.values()) else [1, 1]
        problem = assert_problem(post(http, "accumulate", {other: one, **body}), 422, code)
        assert name in problem["detail"]
        assert problem["tensor"].startswith(name)
    assert state(http, name, other) == before


def test_a_buffer_without_dimensions_has_no_rows(http: httpx.Client) -> None:
    name = create(http, shape=())
    answer = add(http, name, in_json([0], [1]))
    problem = assert_problem(answer, 422, "shape_mismatch", "no dimensions", "send one number")
    assert problem["tensor"] == "gradient/rows"


def test_the_state_of_the_buffer_is_checked_before_the_rows(http: httpx.Client) -> None:
    name = create(http, shape=(4, 2))
    assert_problem(add(http, fresh(), in_json()), 404, "unknown_buffer")
    assert_problem(add(http, name, in_json([9], [[1, 2]]), step=3), 409, "stale_step")
    assert_problem(add(http, name, in_json(), {"If-Match": '"7-7"'}), 412, "precondition_failed")
    assert_problem(add(http, "a b", in_json()), 422, "invalid_parameter")
    assert_problem(post(http, "accumulate", {"a/b": in_json()}), 422, "invalid_parameter")
    assert_problem(post(http, "accumulate", in_safetensors("a/b")), 422, "invalid_parameter")


def test_a_repeated_sparse_gradient_counts_once(http: httpx.Client) -> None:
    name = create(http, shape=(40_000, 2))
    headers = {KEY: fresh("key"), **TO_JSON}
    for attempt in range(3):
        answer = http.post(f"/v1/buffers/{name}/accumulate", content=saved(in_safetensors()), headers=headers)
        assert ok(answer)["count"] == 1
        assert (REPLAYED in answer.headers) is bool(attempt)
    assert metadata(http, name)["count"] == 1
    http.delete(f"/v1/buffers/{name}")
    answer = http.post(f"/v1/buffers/{name}/accumulate", content=saved(in_safetensors()), headers=headers)
    assert ok(answer)["count"] == 1
    create(http, name, shape=(1,))  # the rows do not fit this buffer, but they are not for it either
    answer = http.post(f"/v1/buffers/{name}/accumulate", content=saved(in_safetensors()), headers=headers)
    assert_problem(answer, 410, "step_gone")


def test_many_rows_are_sorted_in_the_pool(http: httpx.Client) -> None:
    name = create(http, shape=(100_000,), dtype="float64")
    random = np.random.default_rng(2)
    indices, rows = random.integers(-100_000, 100_000, 50_000), random.integers(-9, 9, 50_000).astype(np.float64)
    ok(post(http, f"{name}/accumulate", in_safetensors(indices=indices, rows=rows)))
    expected = np.zeros(100_000)
    np.add.at(expected, indices, rows)
    assert value(http, name) == expected.tolist()


def test_each_part_counts_as_a_tensor() -> None:
    with serving(max_tensors=3) as url, httpx.Client(base_url=url) as http:
        names = [create(http, shape=(4, 2)) for _ in range(2)]
        assert ok(post(http, "accumulate", {names[0]: in_json()}))
        for body in ({name: in_json() for name in names}, {**in_safetensors(names[0]), **in_safetensors(names[1])}):
            assert_problem(post(http, "accumulate", body), 413, "too_many_tensors", "4 tensors", "3")


def test_the_places_of_rows_are_reserved() -> None:
    with serving(max_bytes_in_flight=1 << 20, max_tensor_bytes=1 << 18) as url, httpx.Client(base_url=url) as http:
        name = create(http, shape=(4,), dtype="float16")
        body = in_safetensors(indices=np.zeros(1 << 15, np.int32), rows=np.zeros(1 << 15, np.float16))
        assert_problem(post(http, f"{name}/accumulate", body), 413, "tensor_too_large", "1310720 more")
        assert metadata(http, name)["count"] == 0


def test_the_schema_shows_a_sparse_gradient(http: httpx.Client) -> None:
    schema = ok(http.get("/openapi.json"))
    components = schema["components"]["schemas"]
    for path, name in (("/v1/buffers/{name}/accumulate", "GradientBody"), ("/v1/buffers/accumulate", "GradientBodies")):
        sent = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert sent == {"$ref": f"#/components/schemas/{name}"}
        assert '#/components/schemas/Gradient"' in json.dumps(components[name])
    assert {"$ref": "#/components/schemas/SparseGradient"} in components["Gradient"]["anyOf"]
    assert components["SparseGradient"]["required"] == ["indices", "rows"]
