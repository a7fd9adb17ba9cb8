"""`/v1/buffers` over real HTTP, with each store: what ends a step, contributors, and changes of rules."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save

from tests.api.calls import PATIENCE, add, create, etag, fresh, get, metadata, naming, ok, post, value
from tests.api.headers import KEY, REPLAYED, SAFE
from tests.serving import assert_problem, serving

SOON = 0.15
"""Seconds of a deadline that a test waits for."""


def patch(http: httpx.Client, name: str, headers: Any = None, **rules: Any) -> httpx.Response:
    return http.patch(f"/v1/buffers/{name}", json=rules, headers=headers)


@pytest.mark.parametrize("path", ["/v1/buffers/{name}", "/v1/buffers?prefix={name}"])
def test_rules_may_come_as_a_merge_patch(http: httpx.Client, path: str) -> None:
    """PATCH means what RFC 7396 says."""
    name = create(http, quorum=3, keep=4)
    headers = {"Content-Type": "application/merge-patch+json; charset=utf-8"}
    ok(http.patch(path.format(name=name), content=b'{"quorum": null}', headers=headers))
    assert (metadata(http, name)["quorum"], metadata(http, name)["keep"]) == (None, 4)


@pytest.mark.parametrize("path", ["/v1/buffers/{name}", "/v1/buffers?prefix={name}"])
@pytest.mark.parametrize("sent", ["text/plain", "application/json-patch+json", SAFE["Content-Type"]])
def test_another_patch_is_answered_with_the_types_of_a_patch(http: httpx.Client, path: str, sent: str) -> None:
    answer = http.patch(path.format(name=create(http)), content=b"{}", headers={"Content-Type": sent})
    assert_problem(answer, 415, "unsupported_media_type", sent, "application/json or application/merge-patch+json")
    for field in ("accept", "accept-patch"):
        assert answer.headers[field] == "application/json, application/merge-patch+json"


def test_a_merge_patch_is_for_rules_only(http: httpx.Client) -> None:
    headers = {"Content-Type": "application/merge-patch+json"}
    answer = http.put(f"/v1/buffers/{fresh()}", content=b'{"shape": [1]}', headers=headers)
    assert_problem(answer, 415, "unsupported_media_type")


def receipt(http: httpx.Client, name: str, step: int = 0, **params: Any) -> Any:
    return ok(http.get(f"/v1/buffers/{name}", params={"step": step, **params}))


# ----- deadlines -----


@pytest.mark.parametrize("what", ["receipt", "value", "values"])
def test_a_deadline_wakes_those_who_wait(http: httpx.Client, what: str) -> None:
    """No other request comes: the store closes the step by itself."""
    name = create(http, deadline_seconds=SOON, quorum=3)
    began = time.monotonic()
    add(http, name, [1, 2], contributor="x")
    wanted = {"step": 0, "timeout": 20}
    if what == "receipt":
        answer = receipt(http, name, **wanted)
        assert (answer["closed"], answer["closed_by"], answer["contributors"]) == (True, "deadline", {"x": 1})
    elif what == "value":
        assert value(http, name, **wanted) == [1, 2]
    else:
        found = ok(http.post("/v1/buffers/value", json=naming(name), params=wanted))["buffers"][name]
        assert (found["closed_by"], found["value"]["data"]) == ("deadline", [1, 2])
    assert time.monotonic() - began >= SOON
    known = metadata(http, name)
    assert (known["step"], known["version"], known["closed_steps"]) == (1, 2, [0])


def test_a_read_after_the_deadline_sees_the_step_closed(http: httpx.Client) -> None:
    """At once, however long the store's own thread takes."""
    names = [create(http, deadline_seconds=0.05) for _ in range(5)]
    for name in names:
        add(http, name, [1, 2])
    time.sleep(0.06)  # the deadline, by any clock: the machine's may be set while the store's runs on
    for name in names:
        assert value(http, name, step=0) == [1, 2]
        assert receipt(http, name)["closed_by"] == "deadline"


def test_metadata_have_the_deadline(http: httpx.Client) -> None:
    name = create(http, deadline_seconds=1000, min_count=2, quorum_weight=7.5)
    assert metadata(http, name)["deadline_at"] is None
    add(http, name, [1, 2])
    known = metadata(http, name)
    assert known["deadline_at"] == known["updated_at"] + 1000
    assert (known["deadline_seconds"], known["min_count"], known["quorum_weight"]) == (1000, 2, 7.5)
    assert ok(add(http, name, [1, 2], weight=6.5))["closed_by"] == "quorum"


def test_many_workers_wait_for_one_deadline(http: httpx.Client) -> None:
    name = create(http, deadline_seconds=SOON)
    add(http, name, [1, 2])
    with ThreadPoolExecutor(4) as threads:
        found = [*threads.map(lambda _: receipt(http, name, timeout=20), range(4))]
    assert found == [found[0]] * 4


# ----- receipts -----


def test_the_receipt_of_a_closed_step(http: httpx.Client) -> None:
    name = create(http, quorum=2)
    assert_problem(http.get(f"/v1/buffers/{name}?step=0"), 409, "step_open", name)
    add(http, name, [1, 2], contributor="a b/ü")
    closed = ok(add(http, name, [1, 2], contributor="rank1"))
    assert closed["contributors"] == {"a b/ü": 1, "rank1": 1}
    answer = http.get(f"/v1/buffers/{name}?step=0")
    assert ok(answer) == {**closed, "updated": False}
    same = http.get(f"/v1/buffers/{name}?step=0", headers={"If-None-Match": answer.headers["etag"]})
    assert same.status_code == 304
    assert_problem(http.get(f"/v1/buffers/{name}?step=1"), 409, "step_open", name)
    post(http, name, "take")
    assert_problem(http.get(f"/v1/buffers/{name}?step=0"), 410, "step_gone", name)
    assert receipt(http, name, 1)["closed_by"] == "take"


def test_a_step_of_weight_0_has_a_receipt(http: httpx.Client) -> None:
    """The mean says that there is none, and which step has none; the next step goes on."""
    name = create(http, quorum=2)
    for number in range(2):
        closed = ok(add(http, name, [1, 2], weight=0, step=0, contributor=f"rank{number}"))
    expected = {**closed, "updated": False}
    problem = assert_problem(get(http, name, step=0, reduce="mean"), 409, "nothing_to_average", name)
    assert problem["receipt"] == expected
    many = http.post("/v1/buffers/value", json=naming(name), params={"step": 0, "reduce": "mean"})
    assert assert_problem(many, 409, "nothing_to_average", name)["receipt"] == expected
    assert receipt(http, name) == expected
    assert ok(add(http, name, [1, 2], step=1))["step"] == 1


def test_an_open_step_names_the_missing(http: httpx.Client) -> None:
    ranks = [f"rank{number}" for number in range(8)]
    name = create(http, quorum=8, contributors=ranks)
    problem = assert_problem(get(http, name, step=0), 409, "step_open", "rank0, rank1, rank2 and 5 more are missing")
    assert problem["missing"] == ranks
    for rank in {*ranks} - {"rank3", "rank7"}:
        add(http, name, [1, 2], contributor=rank)
    problem = assert_problem(get(http, name, step=0), 409, "step_open", "; rank3 and rank7 are missing")
    assert problem["missing"] == ["rank3", "rank7"]
    many = http.post("/v1/buffers/value", json=naming(name), params={"step": 0})
    assert assert_problem(many, 409, "step_open", name)["missing"] == ["rank3", "rank7"]
    known = metadata(http, name)
    assert (known["missing"], len(known["contributors_in"])) == (["rank3", "rank7"], 6)


RANKS = ("rank0", "rank1", "rank2")


def test_without_a_list_a_worker_that_stopped_is_missing(http: httpx.Client) -> None:
    name = create(http, quorum=3)
    assert (metadata(http, name)["missing"], metadata(http, name)["missing_since"]) == (None, None)
    for rank in RANKS:
        add(http, name, [1, 2], contributor=rank)
        assert metadata(http, name)["missing"] == ([*RANKS] if rank == "rank2" else None)
    closed_at = metadata(http, name)["updated_at"]
    for rank in RANKS[:2]:
        add(http, name, [1, 2], contributor=rank)
    known = metadata(http, name)
    assert (known["missing"], known["missing_since"]) == (["rank2"], {"rank2": closed_at})
    assert time.time() - PATIENCE < closed_at < known["updated_at"]
    problem = assert_problem(get(http, name, step=1), 409, "step_open", "count is 2 of 3; rank2 is missing")
    assert problem["missing"] == ["rank2"]
    (listed,) = ok(http.get("/v1/buffers", params={"prefix": name}))["buffers"]
    assert listed == known


def test_who_is_missing_is_not_known_if_others_come_in_each_step(http: httpx.Client) -> None:
    name = create(http, quorum=2)
    for number in range(3):
        add(http, name, [1, 2], contributor=f"client{2 * number}")
        assert (metadata(http, name)["missing"], metadata(http, name)["missing_since"]) == (None, None)
        problem = assert_problem(get(http, name, step=number), 409, "step_open")
        assert "missing" not in problem
        assert problem["detail"].endswith("whose count is 1 of 2")
        add(http, name, [1, 2], contributor=f"client{2 * number + 1}")


def test_a_worker_is_missing_since_the_last_step_that_it_was_in(tmp_path: Path) -> None:
    """It stays away for several steps, which their deadline closes, and through a restart of the server."""
    rules = {"deadline_seconds": SOON, "contributors": [*RANKS, "never"], "quorum": 4}
    with serving(store=f"lmdb:{tmp_path}") as url, httpx.Client(base_url=url, timeout=30) as http:
        for name in ("declared", "other"):
            create(http, name, **(rules if name == "declared" else {"quorum": 3}))
            for rank in RANKS:
                add(http, name, [1, 2], contributor=rank)
        receipt(http, "declared", 0, timeout=30)
        left = metadata(http, "declared")["updated_at"]
        for step in (1, 2, 3):
            for rank in RANKS[:2]:
                add(http, "declared", [1, 2], contributor=rank)
            closed = receipt(http, "declared", step, timeout=30)
            assert (closed["closed_by"], closed["contributors"].keys()) == ("deadline", {*RANKS[:2]})
        before = [metadata(http, name) for name in ("declared", "other")]
        assert before[0]["missing_since"] == {
            **dict.fromkeys(RANKS[:2], before[0]["updated_at"]),
            "rank2": left,
            "never": before[0]["created_at"],
        }
        assert before[1]["missing_since"] == dict.fromkeys(RANKS, before[1]["updated_at"])
    with serving(store=f"lmdb:{tmp_path}") as url, httpx.Client(base_url=url, timeout=30) as http:
        assert [metadata(http, name) for name in ("declared", "other")] == before
        add(http, "declared", [1, 2], contributor="rank2")
        receipt(http, "declared", 4, timeout=30)
        known = metadata(http, "declared")
        assert known["missing_since"] == {**before[0]["missing_since"], "rank2": known["updated_at"]}


# ----- contributors -----


def adds(http: httpx.Client, name: str, contributor: str) -> dict[str, httpx.Response]:
    """Return the answers to adds of one contributor, by each endpoint that adds."""
    wanted = {"contributor": contributor}
    into = {"into": f"dX:{name}", **wanted}
    inputs = [{"name": each, "shape": [2], "datatype": "FP32", "data": [1.0, 2.0]} for each in ("dY", "X")]
    body = save({"gradient": np.ones(2, np.float32)})
    safe = {**SAFE, "Accept": "application/json"}
    return {
        "accumulate": add(http, name, [1, 2], **wanted),
        "safetensors": http.post(f"/v1/buffers/{name}/accumulate", content=body, headers=safe, params=wanted),
        "many": http.post("/v1/buffers/accumulate", json={name: [1, 2]}, params=wanted),
        "operator": http.post("/v1/ops/ReluGrad", json={"dY": [1, 2], "X": [1, 2]}, params=into),
        "model": http.post("/v2/models/ReluGrad/infer", json={"parameters": into, "inputs": inputs}),
    }


def test_every_add_has_a_contributor(http: httpx.Client) -> None:
    name = create(http, per_contributor=5)
    for answer in adds(http, name, "x").values():
        ok(answer)
    assert metadata(http, name)["contributors_in"] == {"x": 5}
    for kind, answer in adds(http, name, "x").items():
        if kind == "model":
            assert (answer.status_code, "'x' has added 5" in answer.json()["error"]) == (409, True)
        else:
            problem = assert_problem(answer, 409, "duplicate_contributor", "'x'", "5 gradients to step 0", name)
            assert problem["buffer"] == name
    assert metadata(http, name)["count"] == 5


@pytest.mark.parametrize("contributor", ["", "a\n", "x" * 101, "\x00"])
def test_a_bad_name_of_a_contributor_is_refused(http: httpx.Client, contributor: str) -> None:
    name = create(http)
    for kind, answer in adds(http, name, contributor).items():
        assert answer.status_code == (400 if kind == "model" else 422), kind
        assert "contributor" in answer.text
    assert metadata(http, name)["count"] == 0


def test_a_contributor_needs_a_buffer(http: httpx.Client) -> None:
    answer = http.post("/v1/ops/ReluGrad", json={"dY": [1, 2], "X": [1, 2]}, params={"contributor": "x"})
    assert assert_problem(answer, 422, "invalid_parameter", "contributor", "into")["parameter"] == "contributor"


BAD_RULES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no deadline": ({"deadline_seconds": 0}, ("deadline_seconds", "0")),
    "a text for a deadline": ({"deadline_seconds": "5"}, ("deadline_seconds", "'5'")),
    "no gradients": ({"min_count": 0}, ("min_count", "0")),
    "null for a count": ({"min_count": None}, ("min_count", "null")),
    "no weight": ({"quorum_weight": 0}, ("quorum_weight", "0")),
    "nobody": ({"contributors": []}, ("contributors",)),
    "a number for a name": ({"contributors": [3]}, ("contributors.0", "3")),
    "an empty name": ({"contributors": ["a", ""]}, ("contributors", "''")),
    "a long name": ({"contributors": ["x" * 101]}, ("contributors", "100")),
    "a name twice": ({"contributors": ["a", "b", "a"]}, ("contributors", "'a' 2 times")),
    "too many names": ({"contributors": [str(number) for number in range(1001)]}, ("contributors", "1000")),
    "a count without a deadline": ({"min_count": 2}, ("min_count", "2", "deadline")),
    "a count above the quorum": ({"min_count": 5, "quorum": 2, "deadline_seconds": 9}, ("min_count", "5", "2")),
    "more than the contributors": ({"quorum": 3, "contributors": ["a", "b"]}, ("quorum", "3", "2 of them, 1 each")),
    "not even one": ({"per_contributor": 0}, ("per_contributor", "0")),
}


@pytest.mark.parametrize("case", BAD_RULES)
def test_a_bad_rule_is_named(http: httpx.Client, case: str) -> None:
    rules, words = BAD_RULES[case]
    answer = http.put(f"/v1/buffers/{fresh()}", json={"shape": [2], **rules})
    assert assert_problem(answer, 422, "invalid_parameter", *words)["parameter"] == words[0]
    name = create(http)
    assert assert_problem(patch(http, name, **rules), 422, "invalid_parameter", *words)["parameter"] == words[0]
    assert metadata(http, name)["version"] == 0


# ----- new rules -----


def test_rules_are_changed(http: httpx.Client) -> None:
    name = create(http, quorum=5)
    add(http, name, [1, 2])
    answer = patch(http, name, quorum=4, contributors=["x"], per_contributor=4, ttl_seconds=500)
    known = ok(answer)
    assert known == metadata(http, name)
    assert (known["quorum"], known["contributors"], known["ttl_seconds"], known["count"]) == (4, ["x"], 500, 1)
    assert answer.headers["etag"] == '"0-2"'
    assert ok(patch(http, name, contributors=None))["contributors"] is None
    assert ok(patch(http, name))["version"] == 3


def test_a_rule_that_is_fulfilled_already_closes_the_step(http: httpx.Client) -> None:
    name = create(http, quorum=5)
    add(http, name, [1, 2], weight=3)
    add(http, name, [1, 2], weight=3)
    answer = patch(http, name, quorum=2)
    assert (ok(answer)["step"], answer.headers["etag"]) == (1, '"1-3"')
    assert receipt(http, name)["closed_by"] == "quorum"
    assert value(http, name, step=0) == [6, 12]


def test_rules_are_changed_under_conditions(http: httpx.Client) -> None:
    name = create(http)
    tag = etag(http, name)
    add(http, name, [1, 2])
    assert_problem(patch(http, name, {"If-Match": tag}, quorum=2), 412, "precondition_failed", name)
    assert metadata(http, name)["quorum"] is None
    ok(patch(http, name, {"If-Match": etag(http, name)}, quorum=2))
    assert_problem(patch(http, name, {"If-None-Match": "*"}, quorum=3), 422, "invalid_parameter")
    assert_problem(patch(http, fresh(), quorum=3), 404, "unknown_buffer")


def test_rules_are_changed_once(http: httpx.Client) -> None:
    name, headers = create(http), {KEY: fresh("key")}
    first = patch(http, name, headers, quorum=2)
    ok(patch(http, name, quorum=7))
    again = patch(http, name, headers, quorum=2)
    assert (ok(again), again.headers[REPLAYED]) == (ok(first), "true")
    assert metadata(http, name)["quorum"] == 7
    assert_problem(patch(http, name, headers, quorum=3), 422, "idempotency_key_reused")


@pytest.mark.parametrize("rules", [{"shape": [3]}, {"keep": 2}, {"dtype": "float16"}, {"nonfinite": "reject"}])
def test_what_values_depend_on_cannot_change(http: httpx.Client, rules: dict[str, Any]) -> None:
    (name,) = rules
    assert_problem(patch(http, create(http), **rules), 422, "unknown_parameter", name, "quorum, ttl_seconds")
