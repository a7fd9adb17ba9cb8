"""`Idempotency-Key` on every request that changes a buffer: repeated requests count once."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from service.kernels import OPERATORS
from tests.api.calls import PATIENCE, add, as_file, create, fresh, loaded, metadata, naming, ok, post, state, value
from tests.api.headers import KEY, REPLAYED, TO_SAFETENSORS
from tests.serving import assert_problem, in_flight, serving, wait_until
from tests.test_contract import example

ONES = {"gradient": [1, 1]}
GATHER = {"shape": [2], "indices": [1, 1]}
SUM = {"gradient_buffer": [1, 2], "gradient": [1, 1]}
ACCUMULATE = "InPlaceAccumulatorV2?into=accumulated_gradient"


@pytest.fixture
def key() -> dict[str, str]:
    return {KEY: fresh("key ")}


Request = tuple[str, str, dict[str, Any]]

MUTATIONS: dict[str, Callable[[str, str], Request]] = {
    "create": lambda a, b: ("PUT", f"/v1/buffers/{a}.new", {"json": {"shape": [3]}}),
    "create what is there": lambda a, b: ("PUT", f"/v1/buffers/{a}", {"json": {"shape": [2]}}),
    "set rules": lambda a, b: ("PATCH", f"/v1/buffers/{a}", {"json": {"quorum": 7}}),
    "set rules and close": lambda a, b: ("PATCH", f"/v1/buffers/{a}", {"json": {"quorum": 1}}),
    "delete": lambda a, b: ("DELETE", f"/v1/buffers/{a}", {}),
    "accumulate": lambda a, b: ("POST", f"/v1/buffers/{a}/accumulate?weight=2", {"json": ONES}),
    "accumulate nothing": lambda a, b: ("POST", f"/v1/buffers/{a}/accumulate?do_update=false", {"json": ONES}),
    "accumulate and see": lambda a, b: ("POST", f"/v1/buffers/{a}/accumulate?return=value", {"json": ONES}),
    "accumulate bytes": lambda a, b: ("POST", f"/v1/buffers/{a}/accumulate", as_file({"gradient": np.ones(2)})),
    "close a quorum": lambda a, b: ("POST", f"/v1/buffers/{b}/accumulate?return=value", {"json": ONES}),
    "zero": lambda a, b: ("POST", f"/v1/buffers/{a}/zero", {}),
    "take": lambda a, b: ("POST", f"/v1/buffers/{a}/take?reduce=mean&dtype=float16", {}),
    "take bytes": lambda a, b: ("POST", f"/v1/buffers/{a}/take", {"headers": TO_SAFETENSORS}),
    "take when there are enough": lambda a, b: ("POST", f"/v1/buffers/{a}/take?min_count=1&timeout=9", {}),
    "accumulate many": lambda a, b: ("POST", "/v1/buffers/accumulate?return=value", {"json": {a: [1, 1], b: [2, 2]}}),
    "zero many": lambda a, b: ("POST", "/v1/buffers/zero", {"json": {"names": [a, b]}}),
    "zero a prefix": lambda a, b: ("POST", f"/v1/buffers/zero?prefix={a}", {}),
    "take many": lambda a, b: ("POST", "/v1/buffers/take", {"json": {"names": [b, a]}}),
    "take a prefix": lambda a, b: ("POST", f"/v1/buffers/take?prefix={a}", {}),
    "take a prefix as bytes": lambda a, b: ("POST", f"/v1/buffers/take?prefix={a}", {"headers": TO_SAFETENSORS}),
    "zero a prefix of none": lambda a, b: ("POST", f"/v1/buffers/zero?prefix={a}.none", {}),
    "into": lambda a, b: ("POST", f"/v1/ops/ReluGrad?into=dX:{a}", {"json": {"dY": [1, 2], "X": [1, 1]}}),
    "gather into": lambda a, b: ("POST", f"/v1/ops/GatherGrad?into=output:{a}&from=grad:{a}", {"json": GATHER}),
    "into one of two": lambda a, b: ("POST", f"/v1/ops/{ACCUMULATE}:{a}", {"json": SUM}),
    "into as bytes": lambda a, b: ("POST", f"/v1/ops/ReluGrad?into=dX:{a}", as_file({"dY": [1.0] * 2, "X": [1.0] * 2})),
}


def send(http: httpx.Client, request: Request, key: dict[str, str]) -> httpx.Response:
    method, path, more = request
    return http.request(method, path, **{**more, "headers": {**more.get("headers", {}), **key}})


def everything(http: httpx.Client, prefix: str) -> Any:
    names = [one["name"] for one in http.get("/v1/buffers", params={"prefix": prefix}).json()["buffers"]]
    return state(http, *names)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_replay_answers_the_same_and_changes_nothing(http: httpx.Client, mutation: str, key: dict[str, str]) -> None:
    a = create(http)
    b = create(http, f"{a}.b", quorum=2, keep=5)
    add(http, a, [3, 4], weight=2)
    add(http, b, [5, 6])
    request = MUTATIONS[mutation](a, b)
    first = send(http, request, key)
    assert first.is_success
    assert REPLAYED not in first.headers
    after = everything(http, a)
    for _ in range(2):
        again = send(http, request, key)
        assert (again.status_code, again.content) == (first.status_code, first.content)
        assert again.headers[REPLAYED] == "true"
        for header in ("etag", "location", "content-type"):
            assert again.headers.get(header) == first.headers.get(header)
        assert everything(http, a) == after


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_key_is_for_one_request(http: httpx.Client, mutation: str, key: dict[str, str]) -> None:
    a = create(http)
    b = create(http, f"{a}.b", quorum=2)
    ok(add(http, create(http), [1, 1], key))
    before = everything(http, a)
    problem = assert_problem(send(http, MUTATIONS[mutation](a, b), key), 422, "idempotency_key_reused", key[KEY])
    assert "another request" in problem["detail"]
    assert everything(http, a) == before


def test_another_request_with_the_same_key_is_refused(http: httpx.Client, key: dict[str, str]) -> None:
    name, other = create(http), create(http)
    path = f"/v1/buffers/{name}/accumulate"
    ok(http.post(path, json=ONES, headers=key))
    for answer in (
        http.post(path, json={"gradient": [1, 2]}, headers=key),
        http.post(path, json=ONES, headers=key, params={"weight": 2}),
        http.post(f"/v1/buffers/{other}/accumulate", json=ONES, headers=key),
        http.post(f"/v1/buffers/{name}/zero", headers=key),
        http.put(f"/v1/buffers/{name}", json={"shape": [2]}, headers=key),
        http.delete(f"/v1/buffers/{name}", headers=key),
        http.post("/v1/buffers/take", json={"names": [name]}, headers=key),
        http.post("/v1/buffers/take", params={"prefix": name}, headers=key),
        http.post("/v1/ops/ReluGrad", params={"into": f"dX:{name}"}, json={"dY": [1, 1], "X": [1, 1]}, headers=key),
    ):
        assert_problem(answer, 422, "idempotency_key_reused")
    assert value(http, name) == [1, 1]


INPUTS = [{"name": one, "shape": [2], "datatype": "FP32", "data": [1, 1]} for one in ("dY", "X")]
ONE_ADD: dict[str, Any] = {
    "/v1/buffers/{name}/accumulate": ONES,
    "/v1/ops/ReluGrad?into=dX:{name}": {"dY": [1, 1], "X": [1, 1]},
    "/v2/models/ReluGrad/infer": {"inputs": INPUTS, "parameters": {"into": "dX:{name}"}},
}


@pytest.mark.parametrize("path", ONE_ADD)
def test_compression_does_not_change_the_request_of_a_key(http: httpx.Client, key: dict[str, str], path: str) -> None:
    name = create(http)
    plain = json.dumps(ONE_ADD[path]).replace("{name}", name).encode()
    for number, content in enumerate((gzip.compress(plain, mtime=1), gzip.compress(plain, mtime=2), plain)):
        coding = {} if content is plain else {"Content-Encoding": "gzip"}
        headers = {**key, **coding, "Content-Type": "application/json"}
        answer = http.post(path.format(name=name), content=content, headers=headers)
        assert answer.status_code == 200, answer.text
        assert answer.headers.get(REPLAYED) == ("true" if number else None)
    assert value(http, name) == [1, 1]


@pytest.mark.parametrize("text", ["x", "x" * 255, "a key with spaces", '"quoted"', "!~", "8e03978e-40d5-43e8-bc93"])
def test_printable_keys_are_accepted(http: httpx.Client, text: str) -> None:
    name = create(http)
    for _ in range(2):
        assert ok(http.post(f"/v1/buffers/{name}/accumulate", json=ONES, headers={KEY: text}))["count"] == 1


BAD_KEYS: dict[str, tuple[list[bytes], str]] = {
    "empty": ([b""], "255"),
    "long": ([b"x" * 256], "255"),
    "not ASCII": (["schlüssel".encode()], "255"),
    "not printable": ([b"a\tb"], "255"),
    "twice": ([b"a", b"a"], "given 2 times"),
    "two": ([b"a", b"b"], "given 2 times"),
}


@pytest.mark.parametrize("case", BAD_KEYS)
def test_invalid_keys_are_refused(http: httpx.Client, case: str) -> None:
    name = create(http)
    given, words = BAD_KEYS[case]
    headers = [(KEY.encode(), one) for one in given]
    body = {"dY": [1, 2], "X": [1, 1]}
    for answer in (
        http.post(f"/v1/buffers/{name}/accumulate", json=ONES, headers=headers),
        http.post("/v1/buffers/accumulate", json={name: [1, 1]}, headers=headers),
        http.post(f"/v1/buffers/{name}/zero", headers=headers),
        http.post(f"/v1/buffers/{name}/take", headers=headers),
        http.put(f"/v1/buffers/{name}", json={"shape": [2]}, headers=headers),
        http.delete(f"/v1/buffers/{name}", headers=headers),
        http.post("/v1/ops/ReluGrad", params={"into": f"dX:{name}"}, json=body, headers=headers),
    ):
        assert assert_problem(answer, 422, "invalid_parameter", KEY, words)["parameter"] == KEY
    assert metadata(http, name)["version"] == 0


def test_a_failed_request_stores_no_key(http: httpx.Client) -> None:
    name = fresh()
    body = {"dY": [1, 2], "X": [1, 1]}
    path, into = f"/v1/buffers/{name}/accumulate", f"/v1/ops/ReluGrad?into=dX:{name}"
    first, second, third, fourth = ({KEY: fresh("key")} for _ in range(4))
    assert_problem(http.post(path, json=ONES, headers=first), 404, "unknown_buffer")
    assert_problem(http.post(into, json=body, headers=second), 404, "unknown_buffer")
    create(http, name, nonfinite="reject")
    assert_problem(http.post(path, json={"gradient": ["NaN", 1]}, headers=first), 422, "nonfinite_gradient")
    assert_problem(http.post(path, json={"gradient": [1, 2, 3]}, headers=first), 422, "shape_mismatch")
    assert_problem(http.post(path, json=ONES, headers={**first, "If-Match": '"9-9"'}), 412, "precondition_failed")
    assert_problem(post(http, name, "take", third, min_count=1), 409, "too_few_gradients")
    assert_problem(http.post(f"{path}?step=1", json=ONES, headers=fourth), 409, "stale_step")
    for answer in (http.post(path, json=ONES, headers=first), http.post(into, json=body, headers=second)):
        assert answer.status_code == 200
        assert REPLAYED not in answer.headers
    assert value(http, name) == [2, 3]
    taken = post(http, name, "take", third, min_count=1)
    assert ok(taken)["value"]["data"] == [2, 3]
    assert REPLAYED not in taken.headers
    assert ok(http.post(f"{path}?step=1", json=ONES, headers=fourth))["step"] == 1


def test_a_replay_ignores_the_current_state(http: httpx.Client, key: dict[str, str]) -> None:
    """The same request without the key would be refused now."""
    name = create(http)
    path = f"/v1/buffers/{name}/accumulate?step=0"
    first = http.post(path, json=ONES, headers={**key, "If-Match": '"0-0"'})
    post(http, name, "zero")
    again = http.post(path, json=ONES, headers={**key, "If-Match": '"0-0"'})
    assert (again.status_code, again.json()) == (200, first.json())
    http.delete(f"/v1/buffers/{name}")
    assert http.post(path, json=ONES, headers=key).json() == first.json()


def test_a_repeated_take_answers_the_same_value(http: httpx.Client, key: dict[str, str]) -> None:
    name = create(http, keep=2)
    numbers = np.random.default_rng(6).standard_normal((700, 300), np.float32)
    large = create(http, shape=numbers.shape)
    http.post(f"/v1/buffers/{large}/accumulate", **as_file({"gradient": numbers}))
    add(http, name, [1, 2])
    answers = [post(http, large, "take", {**TO_SAFETENSORS, **key}) for _ in range(3)]
    assert all(loaded(one)[0]["value"].tobytes() == numbers.tobytes() for one in answers)
    own = {KEY: fresh("key")}
    first = post(http, name, "take", own)
    add(http, name, [7, 7])
    assert post(http, name, "take", own).content == first.content
    ok(post(http, name, "take"))
    assert post(http, name, "take", own).content == first.content  # the store still keeps the step
    ok(post(http, name, "take"))
    assert_problem(post(http, name, "take", own), 410, "step_gone", name)
    assert metadata(http, name)["step"] == 3


def test_a_repeated_take_of_a_lost_value_says_that_it_counted(http: httpx.Client, key: dict[str, str]) -> None:
    a, b = create(http), create(http)
    add(http, a, [1, 2])
    add(http, b, [3, 4])
    first = ok(http.post("/v1/buffers/take", json=naming(a, b), headers=key))["buffers"]
    http.delete(f"/v1/buffers/{a}")
    answer = http.post("/v1/buffers/take", json=naming(a, b), headers=key)
    again = assert_problem(answer, 410, "step_gone", "counted once", f"'{a}'")
    receipts = {name: {what: one[what] for what in one if what != "value"} for name, one in first.items()}
    assert again["receipts"] == receipts
    assert value(http, b, step=receipts[b]["step"]) == [3, 4]


def test_reading_values_ignores_the_key(http: httpx.Client, key: dict[str, str]) -> None:
    name = create(http)
    add(http, name, [1, 2], key)
    for ask in ({"json": naming(name)}, {"params": {"prefix": name}}):
        answer = http.post("/v1/buffers/value", headers=key, **ask)
        assert ok(answer)["buffers"][name]["value"]["data"] == [1, 2]
        assert REPLAYED not in answer.headers


def test_a_value_is_never_replayed_with_an_older_receipt(http: httpx.Client, key: dict[str, str]) -> None:
    name = create(http)
    first = ok(add(http, name, [1, 2], key, **{"return": "value"}))
    add(http, name, [50, 60])
    again = add(http, name, [1, 2], key, **{"return": "value"})
    assert again.headers[REPLAYED] == "true"
    receipt = again.json()
    assert receipt["version"] == 1
    assert receipt.get("value") in (None, first["value"])


def test_a_repeated_take_by_prefix_takes_the_same_buffers(http: httpx.Client, key: dict[str, str]) -> None:
    prefix = fresh("then.")
    names = [create(http, f"{prefix}:{number}") for number in range(3)]
    for number, name in enumerate(names):
        add(http, name, [number, 1])
    first = http.post("/v1/buffers/take", params={"prefix": f"{prefix}:"}, headers=key)
    assert list(ok(first)["buffers"]) == names
    late = create(http, f"{prefix}:00")
    add(http, late, [9, 9])
    again = http.post("/v1/buffers/take", params={"prefix": f"{prefix}:"}, headers=key)
    assert (again.content, again.headers[REPLAYED]) == (first.content, "true")
    assert value(http, late) == [9, 9]


def test_a_repeated_into_does_not_need_its_input_buffers(http: httpx.Client, key: dict[str, str]) -> None:
    source, name = create(http), create(http)
    add(http, source, [5, 6])
    params = {"from": f"dY:{source}", "into": f"dX:{name}"}
    first = http.post("/v1/ops/ReluGrad", json={"X": [1, 1]}, params=params, headers=key)
    before = state(http, name)
    http.delete(f"/v1/buffers/{source}")
    again = http.post("/v1/ops/ReluGrad", json={"X": [1, 1]}, params=params, headers=key)
    assert (ok(again), again.headers[REPLAYED]) == (ok(first), "true")
    assert state(http, name) == before


@pytest.mark.parametrize("answer", ["small", "large"])
@pytest.mark.parametrize("then", ["deleted", "created again", "changed"])
def test_a_repeated_into_with_a_lost_input_has_a_small_answer_only(
    http: httpx.Client, key: dict[str, str], then: str, answer: str
) -> None:
    tensors = example(OPERATORS["GRUGrad"])
    if answer == "large":  # dX has 4,800 bytes
        tensors["X"], tensors["W"] = np.ones((2, 1, 600), np.float32), np.ones((1, 3, 600), np.float32)
    grad = tensors.pop("grad_HAll")
    source, name = create(http, shape=grad.shape, dtype=str(grad.dtype)), create(http, shape=tensors["W"].shape)
    params = {"from": f"grad_HAll:{source}", "into": f"dW:{name}", "outputs": "dX,dW"}
    request = as_file(tensors, Accept="application/json", **key)

    def ask() -> httpx.Response:
        return http.post("/v1/ops/GRUGrad", params=params, **request)

    first = ok(ask())
    assert ok(ask()) == first
    if then == "changed":
        ok(http.post(f"/v1/buffers/{source}/zero"))
    else:
        assert http.delete(f"/v1/buffers/{source}").status_code == 204
    if then == "created again":
        create(http, source, shape=grad.shape, dtype=str(grad.dtype))
    if answer == "large":
        problem = assert_problem(ask(), 410, "step_gone", "counted once", source)
        assert problem["receipts"] == {name: first["dW"]}
    else:
        again = ask()
        assert (ok(again), again.headers[REPLAYED]) == (first, "true")
    assert metadata(http, name)["count"] == 1


@pytest.mark.parametrize("how", ["one", "many", "into", "into and answered"])
def test_a_repeated_add_to_a_recreated_buffer_is_gone(http: httpx.Client, key: dict[str, str], how: str) -> None:
    name, other = create(http, shape=[2]), create(http, shape=[2])
    ways: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
        "one": (f"/v1/buffers/{name}/accumulate", {"gradient": [1, 2]}, {}),
        "many": ("/v1/buffers/accumulate", {other: [1, 2], name: [1, 2]}, {}),
        "into": ("/v1/ops/ReluGrad", {"dY": [1, 2], "X": [1, 1]}, {"into": f"dX:{name}"}),
        "into and answered": (
            "/v1/ops/InPlaceAccumulatorV2",
            {"gradient_buffer": [0, 0], "gradient": [1, 2]},
            {"into": f"accumulated_gradient:{name}"},
        ),
    }
    path, body, params = ways[how]
    if how == "many":  # the third buffer is deleted, too
        third = create(http, shape=[2])
        body = {third: [1, 2], **body}
    first = ok(http.post(path, json=body, headers=key, params=params))
    assert http.delete(f"/v1/buffers/{name}").status_code == 204
    again = http.post(path, json=body, headers=key, params=params)
    assert (ok(again), again.headers[REPLAYED]) == (first, "true")
    if how == "many":
        assert http.delete(f"/v1/buffers/{third}").status_code == 204
    create(http, name, shape=[2])
    answer = http.post(path, json=body, headers=key, params=params)
    problem = assert_problem(answer, 410, "step_gone", "counted once", name, "new key")
    assert problem["buffer"] == name
    assert problem["receipts"][name]["count"] == 1
    assert metadata(http, name)["count"] == 0
    if how == "many":
        create(http, third, shape=[2])
    ok(http.post(path, json=body, headers={KEY: fresh("key ")}, params=params))
    assert metadata(http, name)["count"] == 1


def test_a_repeated_into_of_several_outputs_adds_once(http: httpx.Client, key: dict[str, str]) -> None:
    gru = OPERATORS["GRUGrad"]
    tensors = example(gru)
    whole = gru(tensors, {})
    kept = {name: create(http, shape=whole[name].shape) for name in ("dW", "dR")}
    params = {"into": [f"{name}:{buffer}" for name, buffer in kept.items()]}
    request = as_file(tensors, **key)
    first, again = (http.post("/v1/ops/GRUGrad", params=params, **request) for _ in range(2))
    assert first.content == again.content
    assert again.headers[REPLAYED] == "true"
    assert {name: metadata(http, buffer)["count"] for name, buffer in kept.items()} == {"dW": 1, "dR": 1}


# ----- at once -----


@pytest.mark.parametrize("clients", [2, 8])
@pytest.mark.parametrize("what", ["accumulate", "take", "many", "into", "create"])
def test_concurrent_requests_with_one_key_count_once(
    http: httpx.Client, pool: ThreadPoolExecutor, what: str, clients: int
) -> None:
    for _ in range(3):
        name, key = create(http), {KEY: fresh("key")}
        add(http, name, [1, 2])
        requests: dict[str, Request] = {
            "accumulate": ("POST", f"/v1/buffers/{name}/accumulate?return=value", {"json": ONES}),
            "take": ("POST", f"/v1/buffers/{name}/take", {}),
            "many": ("POST", f"/v1/buffers/take?prefix={name}", {}),
            "into": ("POST", f"/v1/ops/ReluGrad?into=dX:{name}", {"json": {"dY": [1, 1], "X": [1, 1]}}),
            "create": ("PUT", f"/v1/buffers/{name}.new", {"json": {"shape": [1]}}),
        }
        together = threading.Barrier(clients)

        def call(request: Request, key: dict[str, str], together: threading.Barrier = together) -> httpx.Response:
            together.wait(PATIENCE)
            return send(http, request, key)

        calls = [pool.submit(call, requests[what], key) for _ in range(clients)]
        answers = [one.result(PATIENCE) for one in calls]
        assert len({(one.status_code, one.content) for one in answers}) == 1
        assert answers[0].is_success, answers[0].text
        assert sorted(REPLAYED in one.headers for one in answers) == [False] + [True] * (clients - 1)
        assert metadata(http, name)["version"] == (1 if what == "create" else 2)


def test_one_of_several_concurrent_requests_with_one_key_wins(http: httpx.Client, pool: ThreadPoolExecutor) -> None:
    name, key = create(http), {KEY: fresh("key")}
    answers = list(pool.map(lambda number: add(http, name, [number, 1], key), range(8)))
    assert sorted(one.status_code for one in answers) == [200] + [422] * 7
    assert metadata(http, name)["count"] == 1


def test_a_take_that_waits_twice_takes_once(http: httpx.Client, pool: ThreadPoolExecutor, key: dict[str, str]) -> None:
    """A client retries before the server notices that the first connection is gone."""
    name = create(http)
    waiting = [pool.submit(post, http, name, "take", key, min_count=1, timeout=5) for _ in range(2)]
    wait_until(lambda: in_flight(http.base_url) == 2)
    add(http, name, [1, 2])
    answers = [one.result(PATIENCE) for one in waiting]
    assert [one.status_code for one in answers] == [200, 200]
    assert answers[0].content == answers[1].content
    assert sorted(REPLAYED in one.headers for one in answers) == [False, True]
    assert metadata(http, name)["step"] == 1


def test_retries_of_many_clients_count_once(http: httpx.Client, pool: ThreadPoolExecutor) -> None:
    name = create(http)

    def work(number: int) -> None:
        for step in range(5):
            for _ in range(3):
                ok(add(http, name, [number, 1], {KEY: f"{name} {number} {step}"}))

    list(pool.map(work, range(8)))
    assert value(http, name) == [5 * sum(range(8)), 40]
    assert metadata(http, name)["count"] == 40


# ----- after a restart -----


def test_a_replay_survives_a_restart(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"store": f"lmdb:{tmp_path / 'store'}", "store_bytes": 1 << 26}
    kinds = ("create", "create what is there", "accumulate", "zero", "zero a prefix", "into", "take")
    with serving(**settings) as url, httpx.Client(base_url=url) as http:
        name = create(http)
        requests = {kind: MUTATIONS[kind](name, name) for kind in kinds}
        answers = {kind: send(http, request, {KEY: kind}) for kind, request in requests.items()}
        assert all(answer.is_success for answer in answers.values())
        after = everything(http, name)
    with serving(**settings) as url, httpx.Client(base_url=url) as http:
        for kind, request in requests.items():
            again = send(http, request, {KEY: kind})
            assert (again.content, again.headers[REPLAYED]) == (answers[kind].content, "true")
        assert everything(http, name) == after
        assert_problem(add(http, name, [9, 9], {KEY: "take"}), 422, "idempotency_key_reused")


def test_a_repeated_zero_or_delete_leaves_a_recreated_buffer_alone(http: httpx.Client, key: dict[str, str]) -> None:
    name = create(http, shape=[2])
    path = f"/v1/buffers/{name}"
    zeroed = ok(http.post(f"{path}/zero", headers=key))
    gone = {KEY: fresh("key ")}
    assert http.delete(path, headers=gone).status_code == 204
    create(http, name, shape=[2])
    ok(http.post(f"{path}/accumulate", json={"gradient": [1, 2]}))
    again = http.post(f"{path}/zero", headers=key)
    assert (ok(again), again.headers[REPLAYED]) == (zeroed, "true")
    assert http.delete(path, headers=gone).headers[REPLAYED] == "true"
    assert metadata(http, name)["count"] == 1


def test_a_repeated_add_without_update_does_not_say_that_it_counted(http: httpx.Client, key: dict[str, str]) -> None:
    name = create(http, shape=[2])
    path, body = f"/v1/buffers/{name}/accumulate", {"gradient": [1, 2]}
    ok(http.post(path, json=body, headers=key, params={"do_update": False}))
    assert http.delete(f"/v1/buffers/{name}").status_code == 204
    create(http, name, shape=[2])
    answer = http.post(path, json=body, headers=key, params={"do_update": False})
    problem = assert_problem(answer, 410, "step_gone", "was made before")
    assert "counted" not in problem["detail"]
