"""Runs over HTTP: joined, described, left, finished and deleted."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.api.models import linear
from tests.serving import assert_problem, serving

FORM = {"line.w": "float32[2]", "loss": "MSELoss"}

RULES: Any = {"quorum": 2, "contributors": ["x", "y"], "deadline_seconds": 60, "min_count": 1, "per_contributor": 9}


@pytest.fixture
def client(http: httpx.Client) -> Iterator[httpx.Client]:
    """Yield a client of a server without runs and buffers."""
    yield http
    for one in http.get("/v1/runs").json()["runs"]:
        assert http.delete(f"/v1/runs/{one['name']}").status_code == 204
    http.delete("/v1/buffers?all=true")


def asked(client: httpx.Client, worker: str | None = "x", run: str = "line", **more: Any) -> httpx.Response:
    body = {"worker": worker, "token": f"of {worker}", "prefix": "line.", "buffer": "line.w", "form": FORM, **more}
    return client.post(f"/v1/runs/{run}/join", json=body)


def joined(client: httpx.Client, worker: str | None = "x", **more: Any) -> dict[str, Any]:
    answer = asked(client, worker, **more)
    assert answer.status_code in (200, 201), answer.text
    found: dict[str, Any] = answer.json()
    return found


def begun(client: httpx.Client) -> str:
    """Begin a run of two workers with a buffer. Return its life."""
    life: str = [joined(client, worker) for worker in ("x", "y")][0]["life"]
    created = client.put("/v1/buffers/line.w", json={"shape": [2], "life": life, **RULES})
    assert (created.status_code, created.json()["run"], created.json()["life"]) == (201, "line", life)
    return life


def push(client: httpx.Client, worker: str, life: str | None = None, **query: Any) -> httpx.Response:
    query = {"contributor": worker, "life": life, **query}
    given = {name: value for name, value in query.items() if value is not None}
    return client.post("/v1/buffers/line.w/accumulate", json={"gradient": [1, 2]}, params=given)


def described(client: httpx.Client, run: str = "line") -> dict[str, Any]:
    found: dict[str, Any] = client.get(f"/v1/runs/{run}").json()
    return found


def test_a_run_begins_with_its_first_worker(client: httpx.Client) -> None:
    answer = asked(client, start={"weights": "abc"})
    found = answer.json()
    assert (answer.status_code, found["state"], found["step"], found["members"]) == (201, "joining", 0, ["x"])
    assert (found["prefix"], found["buffer"], found["form"], found["ended"]) == ("line.", "line.w", FORM, None)
    assert found["life"].startswith("line@")
    again = asked(client)
    assert (again.status_code, again.json()["life"], again.json()["members"]) == (200, found["life"], ["x"])
    (listed,) = client.get("/v1/runs").json()["runs"]
    assert {**listed, "form": FORM, "start": {"weights": "abc"}} == again.json()


def test_a_run_is_followed_from_its_begin_to_its_end(client: httpx.Client) -> None:
    life = begun(client)
    assert described(client)["missing"] == ["x", "y"]
    push(client, "x", life)
    assert (described(client)["state"], described(client)["missing"]) == ("joining", ["y"])
    assert push(client, "y", life).json()["closed_by"] == "quorum"
    assert (described(client)["state"], described(client)["step"]) == ("running", 1)
    push(client, "x", life)
    assert described(client)["state"] == "waiting"
    left = client.post("/v1/runs/line/leave", json={"worker": "y", "life": life}).json()
    assert (left["state"], left["step"], left["members"], left["left_out"]) == ("running", 2, ["x"], ["y"])
    assert push(client, "x", life).json()["closed_by"] == "members"
    assert joined(client, "y")["members"] == ["x", "y"]
    for worker in "xy":
        body = {"worker": worker, "life": life, "outcome": "failed" if worker == "y" else "finished", "error": "E: 1"}
        ended = client.post("/v1/runs/line/finish", json=body).json()
    assert (ended["state"], ended["ended"]["worker"], ended["ended"]["error"]) == ("failed", "y", "E: 1")
    problem = assert_problem(asked(client, "y"), 409, "run_ended", "'line' has failed")
    assert problem["run"] == "line"


def test_a_finished_worker_of_a_run_without_names(client: httpx.Client) -> None:
    life = joined(client, None)["life"]
    assert client.post("/v1/runs/line/finish", json={"life": life}).json()["state"] == "finished"


def test_another_form_is_refused_before_anything_is_made(client: httpx.Client) -> None:
    begun(client)
    before = client.get("/v1/buffers").json(), described(client)
    words = "'line' of another form: line.v is 'float32[3]' here, and null there; line.w is null here", "'float32[2]'"
    assert_problem(asked(client, form={"line.v": "float32[3]", "loss": "MSELoss"}), 409, "run_exists", *words)
    assert_problem(asked(client, prefix="li"), 409, "run_exists", "with the prefix 'line.', not 'li'")
    assert before == (client.get("/v1/buffers").json(), described(client))


@pytest.mark.parametrize("member", ["form", "start"])
@pytest.mark.parametrize("number", ["1e999", "18446744073709551616", "-9223372036854775809", '[{}, {"a": 1e400}]'])
def test_a_number_that_a_run_would_not_give_back(client: httpx.Client, member: str, number: str) -> None:
    body = f'{{"token": "t", "prefix": "line.", "buffer": "line.w", "{member}": {{"lr": {number}}}}}'
    answer = client.post("/v1/runs/line/join", content=body, headers={"Content-Type": "application/json"})
    words = f"{member} is {{'lr': ", "but must have finite numbers and integers of 64 bits alone"
    assert_problem(answer, 422, "invalid_parameter", *words)
    assert client.get("/v1/runs").json()["runs"] == []
    begins: Any = {member: {"lr": -0.1, "seed": (1 << 64) - 1, "least": -(1 << 63), "text": "\0 ü"}}
    assert joined(client, "x", **begins)[member] == begins[member]


def test_a_deleted_run_takes_nothing_of_its_workers(client: httpx.Client) -> None:
    life = begun(client)
    push(client, "x", life)
    client.put("/v1/buffers/line.other", json={"shape": [2]})
    assert client.delete("/v1/runs/line").status_code == 204
    assert [one["name"] for one in client.get("/v1/buffers").json()["buffers"]] == ["line.other"]
    assert_problem(push(client, "x", life), 409, "run_replaced", "'line' of this request was deleted")
    assert_problem(asked(client, life=life, again=True), 409, "run_replaced")
    new = begun(client)
    assert new != life
    push(client, "x", new)
    for refused in (
        push(client, "y", life, step=0),
        client.post("/v1/buffers/line.w/take", params={"life": life}),
        client.post("/v1/buffers/accumulate", params={"life": life}, json={"line.w": [1, 1]}),
        client.post(
            "/v1/buffers/accumulate", params={"life": life, "push": "p", "part": 1, "parts": 2}, json={"line.w": [1, 1]}
        ),
        client.post("/v1/ops/ReluGrad", params={"into": "dX:line.w", "life": life}, json={"dY": [1, 1], "X": [1, 1]}),
        client.post("/v1/ops/ReluGrad", params={"set": "dX:line.w", "life": life}, json={"dY": [1, 1], "X": [1, 1]}),
        client.post(
            "/v2/models/ReluGrad/infer",
            json={
                "inputs": [{"name": name, "shape": [2], "datatype": "FP32", "data": [1, 1]} for name in ("dY", "X")],
                "parameters": {"into": "dX:line.w", "life": life},
            },
        ),
        client.post("/v1/runs/line/finish", json={"worker": "x", "life": life}),
        client.post("/v1/runs/line/leave", json={"worker": "x", "life": life}),
        client.put("/v1/buffers/line.w", json={"shape": [2], "life": life, **RULES}),
        client.put("/v1/buffers/line.v", json={"shape": [2], "life": life, **RULES}),
    ):
        assert refused.status_code == 409, refused.text
        assert "deleted since, or replaced" in refused.text
    assert client.get("/v1/buffers/line.w").json()["count"] == 1
    assert [one["staged"] for one in client.get("/v1/pushes").json()["pushes"]] == [[]], "the push was refused"


def test_graphs_and_operators_make_buffers_of_a_run(client: httpx.Client) -> None:
    life = joined(client)["life"]
    put = client.put("/v1/graphs/g", content=linear(), params={"set": "parameters:line.p.*", "life": life})
    assert put.status_code == 201, put.text
    query = {"set": "dX:line.a", "life": life}
    made = client.post("/v1/ops/ReluGrad", params=query, json={"dY": [1, 1], "X": [1, 1]})
    assert made.status_code == 200, made.text
    assert {one["run"] for one in client.get("/v1/buffers").json()["buffers"]} == {"line"}
    client.delete("/v1/graphs/g")
    client.delete("/v1/runs/line")
    assert client.get("/v1/buffers").json()["buffers"] == []
    assert_problem(
        client.put("/v1/graphs/g", content=linear(), params={"set": "parameters:line.p.*", "life": life}),
        409,
        "run_replaced",
    )
    assert client.get("/v1/graphs").json()["graphs"] == []


def test_two_processes_of_one_worker(client: httpx.Client) -> None:
    life = joined(client)["life"]
    joined(client, token="new")
    words = "Another process has joined the run 'line' as 'x' since", "a name of its own"
    assert_problem(asked(client, life=life, again=True), 409, "worker_replaced", *words)
    assert joined(client, token="new", life=life, again=True)["life"] == life


def test_a_large_run_is_deleted_in_turns(client: httpx.Client) -> None:
    life = joined(client)["life"]
    for start in range(0, 2100, 700):
        specs = {f"line.{number}": {"shape": [1], "life": life} for number in range(start, start + 700)}
        assert client.post("/v1/buffers/create", json={"buffers": specs}).status_code == 200
    assert client.delete("/v1/runs/line").status_code == 204
    assert client.get("/v1/buffers").json()["buffers"] == []
    assert_problem(client.get("/v1/runs/line"), 404, "unknown_run", "POST /v1/runs/{run}/join begins one")


def test_a_run_is_deleted_beside_pushes(client: httpx.Client, pool: ThreadPoolExecutor) -> None:
    """No push counts in a run that is gone, and none fails in another way."""
    for _ in range(5):
        life = begun(client)
        pushes = [pool.submit(push, client, "xy"[number % 2], life) for number in range(12)]
        client.delete("/v1/runs/line").raise_for_status()
        answers = [one.result() for one in pushes]
        assert {one.json().get("code", "counted") for one in answers} <= {"counted", "run_replaced"}
        assert client.get("/v1/buffers").json()["buffers"] == []


def test_runs_are_paged(client: httpx.Client) -> None:
    for name in "cab":
        joined(client, run=name)
    page = client.get("/v1/runs", params={"limit": 2}).json()
    assert ([one["name"] for one in page["runs"]], page["next_cursor"]) == (["a", "b"], "b")
    (last,) = client.get("/v1/runs", params={"limit": 2, "cursor": "b"}).json()["runs"]
    assert (last["name"], last["step"]) == ("c", 0)


@pytest.mark.parametrize(
    ("path", "body", "code", "words"),
    [
        ("join", {"token": "t", "prefix": "p.", "buffer": "q.w"}, "invalid_parameter", "must begin with the prefix"),
        ("join", {"prefix": "p.", "buffer": "p.w"}, "invalid_parameter", "token is missing"),
        ("join", {"token": "t", "prefix": "/", "buffer": "/w"}, "invalid_parameter", "prefix"),
        ("join", {"token": "t", "prefix": "p", "buffer": "p", "life": "x@0"}, "invalid_parameter", "life"),
        ("join", {"token": "t", "prefix": "p", "buffer": "p", "again": True}, "invalid_parameter", "life is missing"),
        ("join", {"token": "t", "prefix": "p", "buffer": "p", "steps": 3}, "unknown_parameter", "steps"),
        ("leave", {"worker": "x", "life": f"other@{'0' * 16}"}, "invalid_parameter", "one of the run 'line'"),
        ("leave", {"worker": "x", "life": f"line@{'0' * 16}"}, "unknown_run", "There is no run 'line'"),
        ("finish", {"life": f"line@{'0' * 16}", "outcome": "odd"}, "invalid_parameter", "outcome"),
    ],
)
def test_wrong_requests_name_the_fault(client: httpx.Client, path: str, body: Any, code: str, words: str) -> None:
    answer = client.post(f"/v1/runs/line/{path}", json=body)
    assert answer.json()["code"] == code, answer.text
    assert words in answer.json()["detail"]
    assert client.get("/v1/runs").json()["runs"] == []


def test_a_run_has_at_most_as_many_buffers_as_a_request_may_change() -> None:
    with serving(max_tensors=2) as url, httpx.Client(base_url=url) as client:
        for name in ("line.a", "line.b"):
            client.put(f"/v1/buffers/{name}", json={"shape": [2]}).raise_for_status()
        assert asked(client).status_code == 201
        client.put("/v1/buffers/line.c", json={"shape": [2]}).raise_for_status()
        assert_problem(asked(client, "y"), 413, "too_many_tensors", "more than 2 buffers", "GRADSERVE_MAX_TENSORS")
        assert described(client)["members"] == ["x"]
