"""`/v1/buffers` over real HTTP, with each store: create, list, describe and delete buffers."""

from __future__ import annotations

import gzip
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import lmdb
import pytest

from service.kernels import OPERATORS
from tests.api.calls import (
    PATIENCE,
    add,
    create,
    etag,
    fresh,
    get,
    metadata,
    naming,
    ok,
    post,
    serving_workers,
    state,
    value,
)
from tests.commands import called
from tests.serving import assert_problem, serving

# ----- create -----


def test_put_creates_a_buffer_of_zeros(http: httpx.Client) -> None:
    name = fresh("layer.0:W_-")
    answer = http.put(f"/v1/buffers/{name}", json={"shape": [2, 3]})
    assert answer.status_code == 201
    assert answer.url.join(answer.headers["location"]).path == f"/v1/buffers/{name}"
    assert answer.headers["etag"] == '"0-0"'
    made = answer.json()
    spec = {"name": name, "shape": [2, 3], "dtype": "float32", "nonfinite": "allow", "keep": 1, "bytes": 24}
    rules = {"min_count": 1, "per_contributor": 1, "quorum": None, "quorum_weight": None, "contributors": None}
    unset = {
        "max_norm": None,
        "ttl_seconds": None,
        "deadline_seconds": None,
        "missing": None,
        "missing_since": None,
        "run": None,
        "life": None,
    }
    begun = {"step": 0, "version": 0, "count": 0, "weight": 0.0, "closed_steps": [], "contributors_in": {}}
    assert {key: made[key] for key in made if not key.endswith("_at")} == spec | rules | unset | begun
    assert made["expires_at"] is made["deadline_at"] is made["closed_at"] is None
    assert abs(made["created_at"] - time.time()) < 3600
    assert http.get(answer.url.join(answer.headers["location"])).json() == made
    assert value(http, name) == [[0, 0, 0], [0, 0, 0]]


def test_creating_a_buffer_again_changes_nothing(http: httpx.Client) -> None:
    rules: dict[str, Any] = {"shape": [2], "dtype": "float64", "nonfinite": "reject"}
    rules |= {"quorum": 5, "keep": 2, "ttl_seconds": 60}
    name = create(http, **rules)
    add(http, name, [1, 2])
    before = metadata(http, name)
    answer = http.put(f"/v1/buffers/{name}", json=rules)
    assert (answer.status_code, answer.headers["etag"], answer.json()) == (200, '"0-1"', before)
    assert metadata(http, name) == before


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"shape": [3]}, ("shape [3]", "not [4]")),
        ({"dtype": "float16"}, ("dtype", "'float16'", "'float32'")),
        ({"quorum": 2}, ("quorum 2", "not null")),
        ({"keep": 2}, ("keep 2", "not 1")),
        ({"nonfinite": "reject"}, ("nonfinite", "'reject'")),
        ({"ttl_seconds": 60}, ("ttl_seconds 60",)),
        ({"max_norm": 1.5}, ("max_norm 1.5, not null",)),
    ],
)
def test_creating_a_buffer_again_with_other_rules_is_refused(
    http: httpx.Client, other: dict[str, Any], words: tuple[str, ...]
) -> None:
    name = create(http, **{"shape": (4,), **other})
    before = state(http, name)
    answer = http.put(f"/v1/buffers/{name}", json={"shape": [4]})
    assert assert_problem(answer, 409, "buffer_exists", name, *words)["buffer"] == name
    assert state(http, name) == before


BODIES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "no shape": ({}, ("shape", "missing")),
    "shape is a number": ({"shape": 3}, ("shape", "array", "3")),
    "shape is null": ({"shape": None}, ("shape", "null")),
    "negative dimension": ({"shape": [2, -1]}, ("shape.1", "-1")),
    "fractional dimension": ({"shape": [1.5]}, ("shape.0", "1.5")),
    "a boolean for a dimension": ({"shape": [True]}, ("shape.0", "true")),
    "dimension beyond 64 bits": ({"shape": [10**30]}, ("shape.0",)),
    "dtype": ({"shape": [], "dtype": "float8"}, ("dtype", "'float8'", "'bfloat16'")),
    "integer dtype": ({"shape": [], "dtype": "int64"}, ("dtype", "'int64'", "'float32'")),
    "quorum of none": ({"shape": [], "quorum": 0}, ("quorum", "0")),
    "fractional quorum": ({"shape": [], "quorum": 1.5}, ("quorum", "1.5")),
    "quorum beyond 64 bits": ({"shape": [], "quorum": 10**30}, ("quorum",)),
    "nothing to keep": ({"shape": [], "keep": 0}, ("keep", "0")),
    "too much to keep": ({"shape": [], "keep": 2001}, ("keep", "2000", "2001")),
    "a text to keep": ({"shape": [], "keep": "2"}, ("keep", "'2'")),
    "no time": ({"shape": [], "ttl_seconds": 0}, ("ttl_seconds", "0")),
    "negative time": ({"shape": [], "ttl_seconds": -1}, ("ttl_seconds", "-1")),
    "a boolean for a time": ({"shape": [], "ttl_seconds": True}, ("ttl_seconds", "true")),
    "longer than time lasts": ({"shape": [], "ttl_seconds": 1e300}, ("ttl_seconds",)),
    "no norm": ({"shape": [], "max_norm": 0}, ("max_norm", "0")),
    "a text for a norm": ({"shape": [], "max_norm": "1"}, ("max_norm", "'1'")),
    "nonfinite": ({"shape": [], "nonfinite": "maybe"}, ("nonfinite", "'allow' or 'reject'", "'maybe'")),
}


@pytest.mark.parametrize("case", BODIES)
def test_a_bad_member_is_named(http: httpx.Client, case: str) -> None:
    body, words = BODIES[case]
    name = fresh()
    try:
        problem = assert_problem(http.put(f"/v1/buffers/{name}", json=body), 422, "invalid_parameter", *words)
        assert problem["parameter"] == words[0]
        assert_problem(http.get(f"/v1/buffers/{name}"), 404, "unknown_buffer", name)
        assert http.get("/v1/buffers").status_code == 200
    finally:
        httpx.delete(f"{http.base_url}/v1/buffers/{name}")  # on its own connection: a bug would close the other


def test_a_body_without_tensors_is_bounded_before_it_is_parsed(http: httpx.Client) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}

    def ask(method: str, path: str, text: str) -> httpx.Response:
        return http.request(method, f"/v1/buffers/{path}", content=gzip.compress(text.encode(), 1), headers=headers)

    many = "1," * ((1 << 17) + 1)
    assert_problem(ask("PUT", fresh(), f'{{"shape": [{many}1]}}'), 413, "body_too_large", "262144")
    assert_problem(ask("POST", "take", f'{{"names": [{many}1]}}'), 422, "invalid_request", "131072 elements")
    long = '{"names": ["a"' + " " * (256 * 100_000) + "]}"
    assert assert_problem(ask("POST", "take", long), 413, "body_too_large")["limit"] == 256 * 100_000


def test_names_beyond_the_limit_are_refused(http: httpx.Client) -> None:
    answer = http.post("/v1/buffers/take", json={"names": [f"b{number}" for number in range(100_001)]})
    assert_problem(answer, 422, "invalid_parameter", "names", "100000 items")


def test_an_unknown_member_is_named(http: httpx.Client) -> None:
    answer = http.put(f"/v1/buffers/{fresh()}", json={"shape": [], "qourum": 3})
    assert assert_problem(answer, 422, "unknown_parameter", "member", "'qourum'")["parameter"] == "qourum"
    answer = http.put(f"/v1/buffers/{fresh()}", json={"shpe": [2]})  # the unknown member, not the missing shape
    assert_problem(answer, 422, "unknown_parameter", "'shpe'", "one of shape, dtype")


@pytest.mark.parametrize(
    ("content", "word"),
    [(b"", "not JSON"), (b"{", "not JSON"), (b"[1]", "object"), (b"5", "object"), (b"\xff", "JSON")],
)
def test_a_body_must_be_a_json_object(http: httpx.Client, content: bytes, word: str) -> None:
    answer = http.put(f"/v1/buffers/{fresh()}", content=content)
    assert_problem(answer, 400, "malformed_body", word)


def test_a_duplicate_member_is_refused(http: httpx.Client) -> None:
    answer = http.put(f"/v1/buffers/{fresh()}", content=b'{"shape": [2], "shape": [3]}')
    assert_problem(answer, 400, "malformed_body", "two members", "'shape'")
    answer = http.post("/v1/buffers/zero", content=b'{"names": ["a"], "names": ["b"]}')
    assert_problem(answer, 400, "malformed_body", "two members", "'names'")


def test_a_buffer_beyond_a_limit_is_not_created(http: httpx.Client) -> None:
    path = f"/v1/buffers/{fresh()}"
    answer = http.put(path, json={"shape": [1 << 21]})
    problem = assert_problem(answer, 413, "tensor_too_large", "buffer", "[2097152]", "4194304")
    assert problem["limit"] == 1 << 22
    assert_problem(http.put(path, json={"shape": [1] * 65}), 422, "too_many_dimensions", "buffer", "65", "64")
    answer = http.put(path, content=b" " * (5 << 20))
    assert_problem(answer, 413, "body_too_large")
    assert_problem(http.put(path, json={"shape": []}, params={"quorum": 3}), 422, "unknown_parameter", "'quorum'")
    assert_problem(http.get(path), 404, "unknown_buffer")


@pytest.mark.parametrize("name", ["a b", "é", "a+b", "a,b", "x" * 201, "a~b", "a%0a", "%00"])
@pytest.mark.parametrize(
    ("method", "end"), [("PUT", ""), ("GET", ""), ("GET", "/value"), ("POST", "/accumulate"), ("POST", "/zero")]
)
def test_an_invalid_buffer_name_is_refused(http: httpx.Client, name: str, method: str, end: str) -> None:
    bodies = {"": {"shape": []}, "/accumulate": {"gradient": 1}}
    answer = http.request(method, f"/v1/buffers/{name}{end}", json=bodies.get(end) if method != "GET" else None)
    problem = assert_problem(answer, 422, "invalid_parameter", "buffer name", "200")
    assert problem["parameter"] == "name"
    assert_problem(http.delete(f"/v1/buffers/{name}"), 422, "invalid_parameter", "buffer name")


@pytest.mark.parametrize("name", ["x" * 200, "accumulate", "value", "A.b_c:d-0"])
def test_valid_buffer_names_are_accepted(http: httpx.Client, name: str) -> None:
    create(http, name)
    assert ok(add(http, name, [1, 2]))["count"] == 1
    assert value(http, name) == [1, 2]
    assert http.delete(f"/v1/buffers/{name}").status_code == 204


# ----- list, metadata, delete -----


def test_a_listing_is_paged_and_filtered_by_prefix(http: httpx.Client) -> None:
    prefix = fresh("list.")
    names = [create(http, f"{prefix}:{number:02}") for number in range(7)]
    create(http, f"{prefix}.other")
    add(http, names[0], [1, 1])
    for limit in (1, 3, 7, 100):
        found: list[Any] = []
        cursor: str | None = ""
        while cursor is not None:
            answer = http.get("/v1/buffers", params={"prefix": f"{prefix}:", "limit": limit, "cursor": cursor}).json()
            assert len(answer["buffers"]) <= limit
            found += answer["buffers"]
            cursor = answer["next_cursor"]
        assert [one["name"] for one in found] == names
        assert found[0] == metadata(http, names[0])
    everything = http.get("/v1/buffers", params={"limit": 1000}).json()["buffers"]
    assert set(names) < {one["name"] for one in everything}
    assert http.get("/v1/buffers", params={"prefix": f"{prefix}/"}).json() == {"buffers": [], "next_cursor": None}
    for prefix in ("x" * 1000, "é", "\0"):
        assert http.get("/v1/buffers", params={"prefix": prefix}).json()["buffers"] == []


@pytest.mark.parametrize(("name", "wrong"), [("limit", "0"), ("limit", "1001"), ("limit", "x"), ("prefex", "a")])
def test_a_wrong_parameter_of_a_listing_is_named(http: httpx.Client, name: str, wrong: str) -> None:
    code = "invalid_parameter" if name == "limit" else "unknown_parameter"
    assert_problem(http.get("/v1/buffers", params={name: wrong}), 422, code, name)
    answer = http.get("/v1/buffers", params=[("limit", "1"), ("limit", "2")])
    assert_problem(answer, 422, "invalid_parameter", "'limit'", "2 times")


def test_metadata_follows_every_change(http: httpx.Client) -> None:
    name = create(http)
    created = metadata(http, name)

    def now() -> tuple[Any, ...]:
        got = http.get(f"/v1/buffers/{name}")
        one = got.json()
        assert got.headers["etag"].startswith(f'"{one["step"]}-{one["version"]}-')
        assert one["created_at"] == created["created_at"] <= one["updated_at"]
        return one["step"], one["version"], one["count"], one["weight"], one["closed_steps"]

    assert now() == (0, 0, 0, 0.0, [])
    add(http, name, [1, 1], weight=2.5)
    add(http, name, [1, 1])
    assert now() == (0, 2, 2, 3.5, [])
    post(http, name, "take")
    assert now() == (1, 3, 0, 0.0, [0])
    post(http, name, "zero")
    assert now() == (2, 4, 0, 0.0, [0])
    add(http, name, [1, 1], overwrite=True, weight=-3)
    assert now() == (2, 5, 1, -3.0, [0])
    assert_problem(http.get(f"/v1/buffers/{name}", params={"x": 1}), 422, "unknown_parameter", "'x'")


def test_a_deleted_buffer_is_unknown(http: httpx.Client) -> None:
    name = create(http)
    add(http, name, [1, 2])
    answer = http.delete(f"/v1/buffers/{name}")
    assert (answer.status_code, answer.content) == (204, b"")
    path = f"/v1/buffers/{name}"
    changed = [add(http, name, [1, 2]), post(http, name, "zero"), post(http, name, "take"), http.delete(path)]
    for again in (*changed, http.get(path), get(http, name)):
        assert assert_problem(again, 404, "unknown_buffer", repr(name))["buffer"] == name
    create(http, name, (3,))
    assert value(http, name) == [0, 0, 0]


def test_an_unsupported_method_is_refused(http: httpx.Client) -> None:
    name = create(http)
    for method, path in (("POST", name), ("GET", f"{name}/accumulate"), ("PUT", f"{name}/value")):
        assert_problem(http.request(method, f"/v1/buffers/{path}"), 405, "method_not_allowed", method)


def test_a_buffer_expires_after_its_time_to_live(http: httpx.Client) -> None:
    name = create(http, ttl_seconds=0.2)
    made = http.get(f"/v1/buffers/{name}")
    if made.status_code == 200:
        assert made.json()["expires_at"] == pytest.approx(made.json()["updated_at"] + 0.2)
    deadline = time.monotonic() + PATIENCE
    while http.get(f"/v1/buffers/{name}").status_code != 404:
        assert time.monotonic() < deadline
    assert_problem(get(http, name), 404, "unknown_buffer")
    assert_problem(add(http, name, [1, 1]), 404, "unknown_buffer")
    assert http.get("/v1/buffers", params={"prefix": name}).json()["buffers"] == []
    assert_problem(http.post("/v1/buffers/zero", json={"names": [name]}), 404, "unknown_buffer")
    create(http, name, (3,))


# ----- ETag, If-None-Match, If-Match -----


def test_an_unchanged_representation_is_not_sent(http: httpx.Client) -> None:
    name = create(http)
    add(http, name, [1, 2])
    for path in (f"/v1/buffers/{name}", f"/v1/buffers/{name}/value"):
        tag = http.get(path).headers["etag"]
        for known in (tag, f'"9-9", {tag}', "*", f"W/{tag}", f'{tag},"x"'):
            answer = http.get(path, headers={"If-None-Match": known})
            assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", tag)
        assert http.get(path, headers={"If-None-Match": '"9-9"'}).status_code == 200
        for wrong in ("x", tag.strip('"'), '"'):
            answer = http.get(path, headers={"If-None-Match": wrong})
            assert_problem(answer, 422, "invalid_parameter", "If-None-Match", repr(wrong))
        add(http, name, [1, 2])
        assert http.get(path, headers={"If-None-Match": tag}).status_code == 200


def test_if_none_match_creates_a_missing_buffer_only(http: httpx.Client) -> None:
    name, tag = fresh(), '"0-0"'
    path, rules, key = f"/v1/buffers/{name}", {"shape": [2]}, {"Idempotency-Key": fresh("key")}
    first = http.put(path, json=rules, headers={"If-None-Match": "*", **key})
    assert (first.status_code, first.headers["etag"]) == (201, tag)
    for unless in ("*", tag, f'"9-9", {tag}'):
        again = http.put(path, json=rules, headers={"If-None-Match": unless})
        assert assert_problem(again, 412, "precondition_failed", "If-None-Match", f"'{name}'", tag)["buffer"] == name
    lines = [("If-None-Match", '"9-9"'), ("If-None-Match", "*")]
    assert_problem(http.put(path, json=rules, headers=lines), 412, "precondition_failed", "If-None-Match")
    assert http.put(path, json=rules, headers={"If-None-Match": '"9-9"'}).status_code == 200
    assert_problem(http.put(path, json=rules, headers={"If-None-Match": "x"}), 422, "invalid_parameter", "'x'")
    repeated = http.put(path, json=rules, headers={"If-None-Match": "*", **key})
    assert (repeated.status_code, repeated.content) == (201, first.content)
    assert repeated.headers["Idempotency-Replayed"] == "true"


def test_a_closed_step_keeps_its_etag(http: httpx.Client) -> None:
    name = create(http, keep=2)
    add(http, name, [1, 2])
    tag = post(http, name, "take").headers["etag"]
    assert tag == etag(http, name) == '"1-2"'
    closed = get(http, name, step=0).headers["etag"]
    assert closed.startswith('"0-2-')
    add(http, name, [1, 2])
    assert get(http, name, step=0, headers={"If-None-Match": closed}).status_code == 304
    assert get(http, name, headers={"If-None-Match": closed}).status_code == 200


MUTATIONS: dict[str, Callable[[httpx.Client, str, dict[str, str]], httpx.Response]] = {
    "create": lambda http, name, headers: http.put(f"/v1/buffers/{name}", json={"shape": [2]}, headers=headers),
    "delete": lambda http, name, headers: http.delete(f"/v1/buffers/{name}", headers=headers),
    "accumulate": lambda http, name, headers: add(http, name, [1, 2], headers),
    "zero": lambda http, name, headers: post(http, name, "zero", headers),
    "take": lambda http, name, headers: post(http, name, "take", headers),
    "into": lambda http, name, headers: http.post(
        "/v1/ops/ReluGrad", params={"into": f"dX:{name}"}, json={"dY": [1, 2], "X": [1, 1]}, headers=headers
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_change_needs_a_matching_if_match(http: httpx.Client, mutation: str) -> None:
    name = create(http)
    add(http, name, [1, 2])
    mutate, before = MUTATIONS[mutation], state(http, name)
    for stale in ('"0-0"', '"0-2", "1-1"', 'W/"0-1"'):
        problem = assert_problem(mutate(http, name, {"If-Match": stale}), 412, "precondition_failed", name, '"0-1"')
        assert problem["buffer"] == name
        assert state(http, name) == before
    for wrong in ("0-1", "", ",", '"0-1', 'W/"', '"0-1"x', "x"):
        problem = assert_problem(mutate(http, name, {"If-Match": wrong}), 422, "invalid_parameter", "If-Match")
        assert problem["parameter"] == "If-Match"
        assert state(http, name) == before
    for right in ('"0-1"', "*", '"5-5", "0-1"', ',"0-1" ,,'):
        assert mutate(http, name, {"If-Match": right}).is_success
        if mutation == "delete":
            create(http, name)
            add(http, name, [1, 2])
        elif mutation != "create":
            assert state(http, name) != before
            assert mutate(http, name, {"If-Match": '"0-1"'}).status_code == 412
            http.delete(f"/v1/buffers/{name}")
            create(http, name)
            add(http, name, [1, 2])


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_if_match_fails_for_an_unknown_buffer(http: httpx.Client, mutation: str) -> None:
    status, code = (412, "precondition_failed") if mutation == "create" else (404, "unknown_buffer")
    for tag in ("*", '"0-0"'):
        assert_problem(MUTATIONS[mutation](http, fresh(), {"If-Match": tag}), status, code)


@pytest.mark.parametrize("tag", ["*", '"0-0"', "malformed"])
def test_if_match_is_refused_for_many_buffers(http: httpx.Client, tag: str) -> None:
    a, b = create(http), create(http)
    before = state(http, a, b)
    many: dict[str, Any] = {"accumulate": {a: [1, 1]}, "zero": naming(a), "take": naming(a)}
    many["create"] = {"buffers": {a: {"shape": [2]}}}
    for what, body in many.items():
        answer = http.post(f"/v1/buffers/{what}", json=body, headers={"If-Match": tag})
        assert_problem(answer, 422, "invalid_parameter", "If-Match")
    params, body = {"into": [f"dW:{a}", f"dR:{b}"]}, dict(OPERATORS["GRUGrad"].example)
    answer = http.post("/v1/ops/GRUGrad", params=params, json=body, headers={"If-Match": tag})
    assert_problem(answer, 422, "invalid_parameter", "If-Match")
    assert state(http, a, b) == before


def _of_many(http: httpx.Client, name: str, headers: dict[str, str], what: str) -> httpx.Response:
    body = {name: [1, 2]} if what == "accumulate" else {"names": [name]}
    return http.post(f"/v1/buffers/{what}", json=body, headers=headers)


READS: dict[str, Callable[[httpx.Client, str, dict[str, str]], httpx.Response]] = {
    "metadata": lambda http, name, headers: http.get(f"/v1/buffers/{name}", headers=headers),
    "value": lambda http, name, headers: http.get(f"/v1/buffers/{name}/value", headers=headers),
}
NEITHER: dict[str, Callable[[httpx.Client, str, dict[str, str]], httpx.Response]] = {
    **{f"{what} many": partial(_of_many, what=what) for what in ("accumulate", "zero", "take", "value")},
    "list": lambda http, name, headers: http.get("/v1/buffers", headers=headers),
    "operator": lambda http, name, headers: http.post("/v1/ops/ReluGrad", json={"dY": 1, "X": 1}, headers=headers),
    "operator, from": lambda http, name, headers: http.post(
        "/v1/ops/ReluGrad", params={"from": f"X:{name}"}, json={"dY": [1, 1]}, headers=headers
    ),
}
UNHEEDED = [
    *(("If-None-Match", what) for what in [*MUTATIONS, *NEITHER] if what != "create"),
    *(("If-Match", what) for what in [*READS, *NEITHER]),
]


@pytest.mark.parametrize(("header", "what"), UNHEEDED)
def test_an_unsupported_precondition_is_refused(http: httpx.Client, header: str, what: str) -> None:
    ask, name = {**MUTATIONS, **READS, **NEITHER}[what], create(http)
    before = state(http, name)
    assert ask(http, create(http), {}).is_success
    for tag in ("*", '"0-0"', '"9-9"'):
        problem = assert_problem(ask(http, name, {header: tag}), 422, "invalid_parameter", header, "one buffer")
        assert problem["parameter"] == header
    assert state(http, name) == before


def test_two_if_match_headers_form_one_list(http: httpx.Client) -> None:
    name = create(http)
    answer = http.post(f"/v1/buffers/{name}/zero", headers=[("If-Match", '"9-9"'), ("If-Match", '"0-0"')])
    assert answer.status_code == 200


def test_one_of_several_clients_with_the_same_etag_wins(http: httpx.Client, pool: ThreadPoolExecutor) -> None:
    name = create(http)
    tag = {"If-Match": etag(http, name)}
    answers = list(pool.map(lambda _: add(http, name, [1, 1], tag).status_code, range(16)))
    assert sorted(answers) == [200] + [412] * 15
    assert value(http, name) == [1, 1]


# ----- the store -----


def test_several_workers_cannot_use_the_memory_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSERVE_WORKERS", "2")
    monkeypatch.setenv("GRADSERVE_STORE", "memory:")
    status, _, said = called("serve", "--port", "0")
    assert status != 0
    for word in ("GRADSERVE_STORE", "memory:", "GRADSERVE_WORKERS", "2", "lmdb:"):
        assert word in said
    assert "Traceback" not in said


def test_buffers_outlive_the_server(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"store": f"lmdb:{tmp_path / 'new' / 'store'}", "store_bytes": 1 << 26}
    with serving(**settings) as url, httpx.Client(base_url=url) as client:
        name = create(client, keep=2)
        add(client, name, [1, 2])
        post(client, name, "take")
        add(client, name, [5, 6], weight=2)
        before = state(client, name), value(client, name, step=0)
    with serving(**settings) as url, httpx.Client(base_url=url) as client:
        assert (state(client, name), value(client, name, step=0)) == before


def test_a_full_store_refuses_adds_and_changes_nothing(tmp_path: Path) -> None:
    settings = {"store": f"lmdb:{tmp_path}", "store_bytes": 1 << 20}
    with serving(**settings) as url, httpx.Client(base_url=url, timeout=30) as client:
        small, large = create(client), create(client, shape=(1 << 19,))
        add(client, small, [1, 2])
        before = state(client, small, large)
        assert_problem(add(client, large, 1), 507, "store_full")
        answer = client.post("/v1/buffers/accumulate", json={small: [1, 1], large: 1})
        assert_problem(answer, 507, "store_full")
        assert state(client, small, large) == before
        assert ok(add(client, small, [1, 2]))["count"] == 2


def test_a_store_failure_changes_nothing(tmp_path: Path) -> None:
    """Another program holds every place in LMDB's table of readers."""
    with serving_workers(2, tmp_path) as url, httpx.Client(base_url=url, timeout=30) as client:
        name = create(client)
        add(client, name, [1, 2])
        with ExitStack() as stack:
            env = stack.enter_context(lmdb.open(str(tmp_path), max_dbs=8, readonly=True))
            with suppress(lmdb.ReadersFullError):
                for _ in range(env.info()["max_readers"] + 1):
                    stack.enter_context(env.begin())
            assert_problem(client.get(f"/v1/buffers/{name}"), 503, "store_failed", "MDB_READERS_FULL")
        assert ok(add(client, name, [1, 2]))["count"] == 2
        assert value(client, name) == [2, 4]


@pytest.mark.parametrize("accept", ["application/problem+json", "text/html"])
def test_an_answer_without_a_body_ignores_accept(http: httpx.Client, accept: str) -> None:
    http.put("/v1/buffers/short-lived", json={"shape": []}).raise_for_status()
    assert http.delete("/v1/buffers/short-lived", headers={"Accept": accept}).status_code == 204


def test_a_name_with_a_slash_is_explained(http: httpx.Client) -> None:
    for path in ("layer/weight", "layer%2Fweight"):
        assert_problem(http.put(f"/v1/buffers/{path}", json={"shape": []}), 404, "not_found", "no slash")
