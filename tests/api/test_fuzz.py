"""Malformed requests over real HTTP: each answer is the gradient or a problem of ours, never a 5xx.

`make fuzz` makes more requests.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.numpy import save

from service.api.http.answer import JSON
from service.codecs.safetensors import MEDIA_TYPE
from service.dtypes import Array
from service.kernels import OPERATORS
from tests.serving import assert_problem

MANY = int(os.environ.get("GRADSERVE_FUZZ", "1"))
FUZZ = settings(max_examples=150 * MANY, suppress_health_check=[HealthCheck.function_scoped_fixture])

COMPRESS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}

METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"]

dimensions = st.integers(-2, 5) | st.sampled_from([2**31, 2**62, 2**63, 10**30])
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.floats()
    | st.sampled_from(["NaN", "Infinity", "", "AAAA", "é", 2**63, 10**400])
)
lists = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4), max_leaves=16)
objects = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["float16", "bfloat16", "float32", "float64", "int32", "int64", "bool", "float", 5]),
        "shape": st.lists(dimensions, max_size=4) | lists,
        "data": lists,
        "base64": st.text("A/=+é", max_size=16) | lists,
        "more": scalars,
    },
)
rectangles = st.lists(st.lists(st.integers(-3, 3), min_size=2, max_size=2), max_size=3)
tensors = lists | objects | rectangles


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, Any, dict[str, Any]]:
    operator = OPERATORS[draw(st.sampled_from(sorted(OPERATORS)))]
    groups = st.dictionaries(st.text("ab.\0", max_size=2), tensors, max_size=3) | tensors
    body = {
        one.name: draw((groups if one.group else tensors) | st.just(operator.example.get(one.name)))
        for one in operator.inputs
    }
    if draw(st.integers(0, 9)) == 0:
        body[draw(st.text("\0a[é", max_size=3) | st.text(max_size=3))] = draw(tensors)
    if draw(st.integers(0, 9)) == 0:
        body.pop(draw(st.sampled_from(sorted(body))))
    values = st.integers(-3, 3) | st.floats() | st.text(max_size=3) | st.just(10**30)
    names = st.sampled_from([*(one.name for one in operator.attributes), "encoding", "more"])
    strange = draw(st.dictionaries(names, values, max_size=2) if draw(st.booleans()) else st.just({}))
    return operator.name, body, {**operator.example_attributes, **strange}


def check(answer: httpx.Response) -> None:
    if answer.status_code == 200:
        for one in answer.json().values():
            for tensor in [one] if isinstance(one.get("dtype"), str) else one.values():
                assert {"dtype", "shape"} <= tensor.keys()
    else:
        assert answer.status_code < 500, answer.text
        assert_problem(answer, answer.status_code, answer.json()["code"])


@FUZZ
@given(requests())
def test_strange_tensors_get_an_answer_or_a_problem(
    client: httpx.Client, request_: tuple[str, Any, dict[str, Any]]
) -> None:
    op, body, params = request_
    content = json.dumps(body)  # with NaN and Infinity bare, as Python writes them
    check(client.post(f"/v1/ops/{op}", content=content, params=params, headers={"Content-Type": JSON}))


@FUZZ
@given(st.data())
def test_damaged_bodies_get_an_answer_or_a_problem(client: httpx.Client, data: st.DataObject) -> None:
    operator = OPERATORS[data.draw(st.sampled_from(sorted(OPERATORS)))]
    body = bytearray(json.dumps(dict(operator.example)).encode())
    for _ in range(data.draw(st.integers(1, 5))):
        place = data.draw(st.integers(0, len(body)))
        body[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    headers = {"Content-Type": JSON}
    params = dict(operator.example_attributes)
    plain = client.post(f"/v1/ops/{operator.name}", content=bytes(body), headers=headers, params=params)
    check(plain)
    coding = data.draw(st.sampled_from(sorted(COMPRESS)))
    headers["Content-Encoding"] = coding
    content = COMPRESS[coding](bytes(body))
    coded = client.post(f"/v1/ops/{operator.name}", content=content, headers=headers, params=params)
    assert (coded.status_code, coded.content) == (plain.status_code, plain.content)


@FUZZ
@given(st.data())
def test_damaged_compressed_bodies_get_an_answer_or_a_problem(client: httpx.Client, data: st.DataObject) -> None:
    operator = OPERATORS[data.draw(st.sampled_from(sorted(OPERATORS)))]
    coding = data.draw(st.sampled_from(sorted(COMPRESS)))
    body = bytearray(COMPRESS[coding](json.dumps(dict(operator.example)).encode()))
    place = data.draw(st.integers(0, len(body)))
    body[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    headers = {"Content-Type": JSON, "Content-Encoding": coding}
    params = dict(operator.example_attributes)
    check(client.post(f"/v1/ops/{operator.name}", content=bytes(body), headers=headers, params=params))


@FUZZ
@given(
    st.text(max_size=8), st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"]), st.binary(max_size=8)
)
def test_strange_paths_and_methods_get_an_answer_or_a_problem(
    client: httpx.Client, name: str, method: str, content: bytes
) -> None:
    url = client.base_url.copy_with(raw_path=b"/v1/ops/" + httpx.URL(params={"n": name}).query[2:])
    answer = client.request(method, url, content=content)
    assert answer.status_code < 500
    if answer.status_code >= 400:
        assert_problem(answer, answer.status_code, answer.json()["code"])


parts = st.fixed_dictionaries({}, optional=dict.fromkeys(["indices", "rows", "codes", "scales", "data"], tensors))
strange = st.dictionaries(st.sampled_from(["gradient", "a", "a/rows", "a/codes", "é"]), parts | tensors, max_size=3)
dtypes = st.sampled_from([np.int8, np.float32, np.float16, np.float64, np.int64, np.bool_]).map(np.dtype)
shapes = st.sampled_from([(2, 2), (1, 2), (2,), (1,), (0,), ()])
few = st.integers(-3, 2)
FORMS: list[dict[str, st.SearchStrategy[Any]]] = [
    {"": arrays(np.float32, (2, 2))},
    {"/indices": arrays(np.int64, (2,), elements=few), "/rows": arrays(np.float32, (2, 2))},
    {"/codes": arrays(np.int8, (2, 2)), "/scales": arrays(np.float32, (1,), elements=few)},
]


@st.composite
def gradients(draw: st.DrawFn) -> dict[str, Array]:
    """Return a gradient for the buffer `a`, or for two, mostly without a mistake."""
    found = dict[str, Array]()
    for name in draw(st.sampled_from([["gradient"], ["gradient"], ["a", "gradient"], ["a", "é"]])):
        for part, right in draw(st.sampled_from(FORMS)).items():
            if draw(st.integers(0, 9)):
                found[name + part] = draw(right if draw(st.integers(0, 9)) else arrays(dtypes, shapes))
    return found


def in_json(found: Mapping[str, Array]) -> str:
    members: dict[str, Any] = {}
    for place, array in found.items():
        name, _, part = place.partition("/")
        members[name] = {**members.get(name, {}), part: array.tolist()} if part else array.tolist()
    return json.dumps(members)


@pytest.fixture
def held(client: httpx.Client) -> httpx.Client:
    """Return a client of a server with two buffers."""
    for name in ("gradient", "a"):
        client.put(f"/v1/buffers/{name}", json={"shape": [2, 2]})
    return client


@FUZZ
@given(strange.map(json.dumps) | gradients().map(in_json) | gradients().map(save), st.booleans())
def test_strange_gradients_count_once_or_not_at_all(held: httpx.Client, body: str | bytes, many: bool) -> None:
    """They are dense, sparse or in 8 bits."""
    before = counts(held)
    headers = {
        "Content-Type": "application/json" if isinstance(body, str) else MEDIA_TYPE,
        "Accept": "application/json",
    }
    path = "accumulate" if many else "gradient/accumulate"
    answer = held.post(f"/v1/buffers/{path}", content=body, headers=headers)
    changed = [name for name, count in counts(held).items() if count != before[name]]
    if answer.status_code == 200:
        receipts = answer.json()["buffers"] if many else {"gradient": answer.json()}
        assert {name: one["count"] for name, one in receipts.items()} == {name: before[name] + 1 for name in changed}
    else:
        check(answer)
        assert not changed


def counts(http: httpx.Client) -> dict[str, int]:
    """Return how many gradients each of the two buffers has."""
    return {name: http.get(f"/v1/buffers/{name}").json()["count"] for name in ("gradient", "a")}
