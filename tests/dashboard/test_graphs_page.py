"""The views of graphs: a table of all, and of one its nodes, parameters, and runs."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from playwright.sync_api import Route, expect

from tests.api.models import DOUBTS, doubtful, linear
from tests.dashboard.conftest import DESK, EVIL, LOOKS, Faults, Open, asked_by, findings
from tests.dashboard.test_runs import age

PARAMETERS = {"w": [[2], [3]], "b": [1]}
RULES: dict[str, Any] = {"quorum": 2, "contributors": ["ann", "bob"], "keep": 2}


@pytest.fixture(scope="module")
def run(server: str, http: httpx.Client) -> str:
    """Return the URL of a server with a graph, and with a run of it: one step is closed, with a mean loss of 1.75.

    The run has begun with a checkpoint of 1,000 steps.
    """
    life = joined(http, "exp.1")
    query = {"loss": "MSELoss", "set": "parameters:exp.1.p.*", "life": life}
    http.put("/v1/graphs/net", content=linear(), params=query).raise_for_status()
    rules = {**RULES, "life": life}
    gradients = {f"exp.1.g.{name}": {"shape": [2, 1] if name == "w" else [1], **rules} for name in PARAMETERS}
    buffers = {**gradients, "exp.1.loss": {"shape": [], **rules}, "exp.1.::first": {"shape": [], "life": life}}
    http.post("/v1/buffers/create", json={"buffers": buffers}).raise_for_status()
    http.post("/v1/buffers/exp.1.::first/accumulate", json={"gradient": 1000}).raise_for_status()
    micro_batch(http, "ann", 31, 1)
    micro_batch(http, "bob", 32, 3)
    step(http)
    return server


def joined(http: httpx.Client, run: str) -> str:
    """Let both workers join a run, as the client does. Return its life."""
    for worker in RULES["contributors"]:
        body = {"worker": worker, "token": worker, "prefix": f"{run}.", "buffer": f"{run}.loss"}
        answer = http.post(f"/v1/runs/{run}/join", json=body).raise_for_status()
    life: str = answer.json()["life"]
    return life


def micro_batch(http: httpx.Client, contributor: str, target: float, weight: float) -> None:
    """Run the graph, which says 33: the loss is (33 - target)**2."""
    into = ["gradients:exp.1.g.*", "loss:exp.1.loss"]
    query: dict[str, Any] = {"from": "parameters:exp.1.p.*", "into": into, "weight": weight, "contributor": contributor}
    body = {"x": [[1, 10]], "target": [[target]]}
    http.post("/v1/graphs/net", params=query, json=body).raise_for_status()


def step(http: httpx.Client) -> None:
    """Write all parameters, as the step of an optimizer does."""
    body = {f"exp.1.p.{name}": value for name, value in PARAMETERS.items()}
    http.post("/v1/buffers/accumulate?overwrite=true", json=body).raise_for_status()


def test_a_server_without_graphs_says_how_to_upload_one(open_page: Open, server: str, http: httpx.Client) -> None:
    assert http.get("/v1/graphs").json()["graphs"] == []
    page = open_page(f"{server}#/graphs")
    said = "No graphs yet: PUT v1/graphs/NAME uploads an ONNX model, if the server has gradserve[graphs]."
    expect(page.get_by_role("main")).to_contain_text(said)


def test_a_graph_is_listed_and_its_run_is_followed(open_page: Open, run: str, http: httpx.Client) -> None:
    page = open_page(f"{run}#/graphs")
    expect(page.get_by_role("row", name="net training 2 2")).to_contain_text("ago")
    assert findings(page) == []
    page.get_by_role("navigation").get_by_role("link", name="Operators").click()
    expect(page.locator(".family", has_text="Graphs")).to_contain_text("net")
    page.get_by_role("link", name="net", exact=True).press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("net")
    expect(page.locator(".title")).to_contain_text("trainingloss MSELoss2 nodes2 parameters")
    nodes, tensors = (page.get_by_role("group", name=name) for name in ("Nodes by kind", "Inputs and outputs"))
    expect(nodes.get_by_role("row")).to_have_text(["kindnodes", "MatMul1", "Add1"])
    expect(tensors.get_by_role("row", name="x float32 [?, 2]")).to_be_visible()
    expect(tensors.get_by_role("row", name="gradients.* 2 tensors")).to_be_visible()
    parameters = page.get_by_role("group", name="Parameters")
    expect(parameters.get_by_role("row", name="w float32 [2, 1]")).to_be_visible()
    run_of_it = page.locator("table.runs tbody tr")
    expect(run_of_it.locator(".loss")).to_have_text("1.75")
    expect(run_of_it.locator(".state")).to_have_text("running")
    expect(run_of_it.locator(".step")).to_have_text("1,001")
    expect(run_of_it.locator(".people li")).to_have_text(["ann is expected", "bob is expected"])
    run_of_it.get_by_role("link", name="exp.1").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("exp.1")
    expect(page.get_by_label("Loss of 1 closed step; the last is 1.75")).to_be_visible()
    running = page.locator(".running")
    expect(running).to_contain_text("step1,001")
    expect(page.locator(".rows .c-name")).to_have_text(["▾g", "b", "w", "loss", "▾p", "b", "w"])
    micro_batch(http, "ann", 33, 1)
    expect(running).to_contain_text("1 of 2")
    expect(running.locator(".people .in")).to_have_text("ann is in")
    asked = asked_by(page)
    http.post("/v1/buffers/exp.1.loss/accumulate?contributor=bob", json={"gradient": -9}).raise_for_status()
    step(http)
    expect(page.get_by_label("Loss of 2 closed steps; the last is -4.5")).to_be_visible()
    expect(running).to_contain_text("step1,002")
    ends = {url.rpartition("/")[2].partition("?")[0] for url in asked}
    assert ends == {"runs", "buffers", "statistics"}


def test_a_run_of_a_graph_that_is_over_is_not_folded(open_page: Open, run: str) -> None:
    page = open_page("about:blank")
    age(page, {"exp.1": 900})
    page.goto(f"{run}#/graphs/net")
    expect(page.locator("table.runs tbody tr:visible")).to_contain_text("no worker for 15 min")
    page.get_by_text("1 idle run").press("Enter")  # a click may miss while the page fills
    expect(page.locator("table.runs tbody tr:visible")).to_have_count(0)


@LOOKS
def test_runs_with_all_parameters_of_a_graph_are_its_own(
    open_page: Open, run: str, http: httpx.Client, scheme: str, size: Any
) -> None:
    life = joined(http, "other")
    specs = {f"other.p.{name}": {"shape": [2, 1] if name == "w" else [1], "life": life} for name in PARAMETERS}
    specs["other.loss"] = {"shape": [], "life": life}
    wrong = {
        "wrong.p.w": {"shape": [3]},
        "wrong.p.b": {"shape": [1]},
        "part.p.w": {"shape": [2, 1]},
        "p.b": {"shape": [1]},
    }
    http.post("/v1/buffers/create", json={"buffers": {**specs, **wrong}}).raise_for_status()
    page = open_page(f"{run}#/graphs/net", (390, 740) if size != DESK else size, color_scheme=scheme)
    expect(page.locator("table.runs .name")).to_have_text(["exp.1", "other"])
    expect(page.locator("table.runs .loss").first).not_to_have_text("")
    assert findings(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_names_of_a_model_are_text_and_a_key_may_lack_a_scope(
    open_page: Open, run: str, http: httpx.Client, faults: Faults
) -> None:
    """The server's answers stand in here for those of a model with such names, and of a server without onnx."""
    faults.statuses = {501}
    described = http.get("/v1/graphs/net").json()
    tensor = {"dtype": "float32", "shape": None}
    evil = {**described, "inputs": {EVIL: tensor}, "parameters": {EVIL: tensor}, "nodes": {EVIL: 1, "Add": 3}}
    caller = {**http.get("/v1/caller").json(), "scopes": ["ops"]}

    def answer(body: Any, status: int = 200) -> Any:
        text = json.dumps(body)
        return lambda route: Route.fulfill(route, status=status, content_type="application/json", body=text)

    page = open_page(run)
    page.route("**/v1/caller", answer(caller))
    page.route("**/v1/graphs/net", answer(evil))
    page.goto(f"{run}?again#/graphs/net")
    expect(page.get_by_role("main")).to_contain_text("Runs are buffers: your API key lacks buffers:read.")
    expect(page.get_by_role("row", name=EVIL)).to_have_count(3)
    expect(page.locator(".title")).to_contain_text("4 nodes")
    assert page.title() == "net – gradserve"
    page.route("**/v1/graphs/net", answer({"title": "Graphs", "detail": "This server lacks the package onnx"}, 501))
    page.goto(f"{run}?list#/graphs")
    expect(page.get_by_role("status").filter(has_text="lacks the package onnx")).to_be_visible()
    page.goto(f"{run}?one#/graphs/net")
    expect(page.get_by_role("alert")).to_contain_text("lacks the package onnx")


def test_doubts_are_above_the_graph(open_page: Open, server: str, http: httpx.Client) -> None:
    http.put("/v1/graphs/twice", content=doubtful(), params={"loss": "MSELoss"}).raise_for_status()
    page = open_page(f"{server}#/graphs/twice")
    panel = page.locator(".panel", has=page.get_by_role("heading", name="Doubts"))
    expect(panel.get_by_role("listitem")).to_have_text(DOUBTS)
    expect(panel).to_contain_text("torch.onnx.export(net, args, path, dynamo=True, optimize=False) keeps them")
    assert findings(page) == []
    http.delete("/v1/graphs/twice").raise_for_status()
