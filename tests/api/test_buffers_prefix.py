"""`/v1/buffers?prefix=` over real HTTP, with each store: deletes and changes of rules of all buffers with a prefix."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.api.calls import add, create, fresh, metadata, ok, state
from tests.api.headers import KEY, REPLAYED
from tests.serving import assert_problem

RULES = {"quorum": 3}


def request(http: httpx.Client, method: str, headers: Any = None, **query: Any) -> httpx.Response:
    """Send a DELETE, or a PATCH with rules."""
    body: dict[str, Any] = {"json": RULES} if method == "PATCH" else {}
    return http.request(method, "/v1/buffers", params=query, headers=headers, **body)


def listed(http: httpx.Client, prefix: str) -> list[str]:
    return [one["name"] for one in ok(http.get("/v1/buffers", params={"prefix": prefix}))["buffers"]]


def test_delete_removes_all_buffers_with_a_prefix(http: httpx.Client) -> None:
    run = fresh("run")
    names = [create(http, f"{run}.{part}") for part in ("a", "b:c")]
    other = create(http, f"{run}-other")
    add(http, names[0], [1, 2])
    receipts = ok(request(http, "DELETE", prefix=f"{run}."))["buffers"]
    assert [(name, one["updated"], one["count"]) for name, one in receipts.items()] == [
        (names[0], True, 1),
        (names[1], True, 0),
    ]
    assert listed(http, run) == [other]
    assert ok(request(http, "DELETE", prefix=f"{run}.")) == {"buffers": {}}


def test_patch_changes_the_rules_of_all_buffers_with_a_prefix(http: httpx.Client) -> None:
    run = fresh("run")
    names = [create(http, f"{run}.{part}", quorum=4) for part in "abc"]
    other = create(http, f"{run}-other", quorum=4)
    for _ in range(3):
        add(http, names[0], [1, 2])
    receipts = ok(request(http, "PATCH", prefix=f"{run}."))["buffers"]
    assert [receipts[name].get("closed_by") for name in names] == ["quorum", None, None]
    assert [metadata(http, name)["quorum"] for name in (*names, other)] == [3, 3, 3, 4]
    assert [metadata(http, name)["step"] for name in names] == [1, 0, 0]


def test_rules_change_in_all_buffers_or_in_none(http: httpx.Client) -> None:
    run = fresh("run")
    names = [create(http, f"{run}.a"), create(http, f"{run}.b", contributors=["x"]), create(http, f"{run}.c")]
    before = state(http, *names)
    answer = http.patch("/v1/buffers", params={"prefix": f"{run}."}, json={"quorum": 2})
    assert_problem(answer, 422, "invalid_parameter", names[1], "quorum is 2")
    assert state(http, *names) == before
    http.delete("/v1/buffers", params={"prefix": f"{run}."}).raise_for_status()


@pytest.mark.parametrize("method", ["DELETE", "PATCH"])
def test_a_repeated_request_answers_the_same(http: httpx.Client, method: str) -> None:
    run, keyed = fresh("run"), {KEY: fresh("key")}
    create(http, f"{run}.a")
    first = request(http, method, keyed, prefix=f"{run}.")
    names = [create(http, f"{run}.{part}") for part in ("b", *(["a"] if method == "DELETE" else []))]
    before = state(http, *names)
    again = request(http, method, keyed, prefix=f"{run}.")
    assert (ok(again), again.headers[REPLAYED]) == (ok(first), "true")
    assert REPLAYED not in first.headers
    assert state(http, *names) == before
    assert_problem(request(http, method, keyed, prefix=run), 422, "idempotency_key_reused")


@pytest.mark.parametrize("method", ["DELETE", "PATCH"])
@pytest.mark.parametrize("query", [{}, {"prefix": ""}, {"all": "false"}, {"prefix": "", "all": "no"}])
def test_no_prefix_is_refused(http: httpx.Client, method: str, query: dict[str, str]) -> None:
    """An unset variable in a script must not delete everything."""
    name = create(http)
    before = state(http, name)
    problem = assert_problem(request(http, method, **query), 422, "invalid_parameter", "prefix", "all=true")
    assert problem["parameter"] == "prefix"
    assert state(http, name) == before


def test_everything_can_be_asked_for_plainly(http: httpx.Client) -> None:
    name = create(http)
    assert_problem(request(http, "DELETE", prefix=name, all="true"), 422, "invalid_parameter", "only one")
    assert name in ok(request(http, "PATCH", all="true"))["buffers"]
    assert metadata(http, name)["quorum"] == 3
    assert name in ok(request(http, "DELETE", all="true"))["buffers"]
    assert listed(http, "") == []


def test_rules_of_no_buffer_are_an_error(http: httpx.Client) -> None:
    """A prefix that is misspelt must not pass for a change. A delete of none is done already."""
    run = fresh("none.")
    assert_problem(request(http, "PATCH", prefix=run), 404, "unknown_buffer", f"begins with '{run}'")
    assert ok(request(http, "DELETE", prefix=run)) == {"buffers": {}}


def test_rules_of_named_buffers_change(http: httpx.Client) -> None:
    a, b, c = (create(http) for _ in "abc")
    receipts = ok(http.patch("/v1/buffers", json={"names": [c, a], **RULES}))["buffers"]
    assert list(receipts) == [c, a]
    assert [metadata(http, name)["quorum"] for name in (a, b, c)] == [3, None, 3]
    before = state(http, a, b)
    for body, query, code, word in (
        ({"names": [a, "no.such"], "quorum": 4}, {}, "unknown_buffer", "no.such"),
        ({"names": [a, b, a], "quorum": 4}, {}, "invalid_request", "2 times"),
        ({"names": [], "quorum": 4}, {}, "invalid_parameter", "names"),
        ({"names": [a], "quorum": 4}, {"prefix": b}, "invalid_request", "only one"),
        ({"names": [a], "quorum": 4}, {"all": "true"}, "invalid_request", "only one"),
        ({"names": [a], "keep": 4}, {}, "unknown_parameter", "keep"),
    ):
        answer = http.patch("/v1/buffers", json=body, params=query)
        assert_problem(answer, 404 if code == "unknown_buffer" else 422, code, word)
    assert state(http, a, b) == before


@pytest.mark.parametrize("method", ["DELETE", "PATCH"])
def test_what_would_be_ignored_is_refused(http: httpx.Client, method: str) -> None:
    name = create(http)
    answer = request(http, method, {"If-Match": "*"}, prefix=name)
    assert_problem(answer, 422, "invalid_parameter", "If-Match")
    assert_problem(request(http, method, names=name, prefix=name), 422, "unknown_parameter", "names")
    answer = http.request(method, "/v1/buffers", params={"prefix": name}, json={"names": [name], **RULES})
    assert answer.status_code == 422
    assert listed(http, name) == [name]


def test_a_buffer_that_is_created_meanwhile_is_deleted_or_stays_whole(http: httpx.Client) -> None:
    """A client that creates buffers in their order never keeps an earlier buffer without a later one being deleted."""
    run, stop = fresh("run") + ".", threading.Event()

    def fill() -> int:
        number = 0
        with httpx.Client(base_url=http.base_url) as other:
            while not stop.is_set():
                create(other, f"{run}{number:06}")
                number += 1
        return number

    with ThreadPoolExecutor(1) as pool:
        filling = pool.submit(fill)
        deleted: list[str] = []
        try:
            for _ in range(30):
                deleted += ok(request(http, "DELETE", prefix=run))["buffers"]
        finally:
            stop.set()
        made = filling.result()
    assert deleted + listed(http, run) == [f"{run}{number:06}" for number in range(made)]
    request(http, "DELETE", prefix=run)
