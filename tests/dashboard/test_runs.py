"""The view of all runs, where the page begins, and the view of one: who is in, who is waited for, and how it goes."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from playwright.sync_api import Error, Locator, Page, Route, expect

from tests.dashboard.conftest import LOOKS, Open, findings
from tests.serving import delete_buffers, serving

NAMES = ["layers.0.weight", "layers.0.bias", "head.weight"]

OWN = ["::start", "layers.0.weight::tally"]
"""The bookkeeping of a run."""


@pytest.fixture(autouse=True)
def no_buffers(http: httpx.Client) -> Iterator[None]:
    yield
    delete_buffers(http)


def make(http: httpx.Client, run: str, **rules: Any) -> None:
    spec = {"shape": [2], "quorum": 3, "keep": 3, **rules}
    buffers = {f"{run}.{name}": spec for name in [*NAMES, *OWN]} | {f"{run}.loss": {**spec, "shape": []}}
    http.post("/v1/buffers/create", json={"buffers": buffers}).raise_for_status()


def push(http: httpx.Client, run: str, worker: str, value: float | str = 1.0) -> None:
    body = {f"{run}.{name}": value for name in [*NAMES, "loss"]}
    query: dict[str, Any] = {"contributor": worker, "weight": 2}
    http.post("/v1/buffers/accumulate", params=query, json=body).raise_for_status()


def step(http: httpx.Client, run: str, value: float | str = 1.0) -> None:
    for worker in ("rank0", "rank1", "rank2"):
        push(http, run, worker, value)


def age(page: Page, runs: dict[str, float]) -> None:
    """Let the page read of runs what it would read these seconds after their last change, however late it asks."""

    def answer(route: Route) -> None:
        fetched = route.fetch()
        found = fetched.json()
        for info in found["buffers"]:
            run = info["name"].partition(".")[0]
            if run in runs:
                earlier = info["updated_at"] - (time.time() - runs[run])
                for name in ("updated_at", "closed_at"):
                    info[name] = info[name] and info[name] - earlier
                info["missing_since"] = {each: at - earlier for each, at in (info["missing_since"] or {}).items()}
        route.fulfill(response=fetched, json=found)

    def answered(route: Route) -> None:
        with suppress(Error):  # the page has left the view, or is closed
            answer(route)

    page.route("**/v1/buffers?limit*", answered)


def row(page: Page, run: str) -> Locator:
    return page.locator("table.runs tbody tr", has=page.get_by_role("link", name=run, exact=True))


def names(page: Page) -> list[str]:
    return page.locator("table.runs:visible .name").all_inner_texts()


def test_the_page_begins_with_a_line_for_each_run(open_page: Open, server: str, http: httpx.Client) -> None:
    make(http, "exp1")
    for value in (3, 2, 1):
        step(http, "exp1", value)
    push(http, "exp1", "rank0")
    http.put("/v1/buffers/team.a::weight", json={"shape": [2]}).raise_for_status()
    http.put("/v1/buffers/team.b::weight", json={"shape": [2]}).raise_for_status()
    page = open_page(server)
    line = row(page, "exp1")
    expect(line.locator(".step")).to_have_text("3")
    expect(line.locator(".loss")).to_have_text("1")
    expect(line.locator(".norm")).to_have_text(f"{6**0.5:.4g}")  # of the mean gradient of all three
    expect(line.locator(".state")).to_have_text("running")
    expect(line.locator(".people li")).to_have_text(["rank0 is in", "rank1 is expected", "rank2 is expected"])
    assert names(page) == ["exp1", "team.a", "team.b"]
    expect(page.locator(".summary")).to_contain_text("3 active runs · 6 buffers")
    line.get_by_role("link", name="exp1").press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("exp1")


def test_a_worker_that_is_not_in_is_named_with_its_time(open_page: Open, server: str, http: httpx.Client) -> None:
    """The buffers name nobody: who is missing follows from the last closed step."""
    for run in ("calm", "dead", "zeal"):
        make(http, run)
        step(http, run)
    push(http, "dead", "rank0")
    push(http, "dead", "rank1")
    page = open_page("about:blank")
    age(page, {"dead": 10})
    page.goto(server)
    line = row(page, "dead")
    expect(line.locator(".state")).to_have_text(re.compile(r"waiting for rank2 for 1\d s"))
    expect(line.locator(".out")).to_have_text(re.compile(r"rank2 1\d s is not in yet, since that time"))
    assert names(page) == ["calm", "dead", "zeal"]
    age(page, {"dead": 40})
    expect(line.locator(".state.late")).to_have_text(re.compile(r"waiting for rank2 for 4\d s"))
    expect(line.locator(".out.slow")).to_have_text(re.compile(r"rank2 4\d s is missing, since that time"))
    assert names(page) == ["dead", "calm", "zeal"]
    expect(page.locator("#news")).to_contain_text("dead: waiting for rank2 for 4")
    line.get_by_role("link", name="waiting for rank2").click()
    expect(page.get_by_role("button", name="Only waiting")).to_be_visible()
    expect(page.locator(".c-missing.late").first).to_have_text(re.compile(r"rank2 for 4\d s"))


def test_a_worker_that_steps_close_without_is_named(open_page: Open, server: str, http: httpx.Client) -> None:
    make(http, "exp1", contributors=["rank0", "rank1", "rank2"], deadline_seconds=900)
    step(http, "exp1")
    names = [f"exp1.{name}" for name in [*NAMES, "loss"]]
    for _ in range(2):
        push(http, "exp1", "rank0")
        http.post("/v1/buffers/take", json={"names": names}).raise_for_status()
    page = open_page(server)
    line = row(page, "exp1")
    expect(line.locator(".state.late")).to_contain_text("without rank1 and rank2 for")
    expect(line.locator(".people .slow")).to_have_count(2)


def test_values_that_are_not_finite_are_red_and_a_link_filters(
    open_page: Open, server: str, http: httpx.Client
) -> None:
    make(http, "exp1")
    make(http, "fine")
    step(http, "exp1", "NaN")
    step(http, "fine")
    page = open_page(server)
    expect(row(page, "exp1").locator(".state.bad")).to_have_text("4 buffers with non-finite values")
    assert names(page) == ["exp1", "fine"]
    page.get_by_role("link", name="4 buffers with non-finite values").click()
    expect(page.locator(".summary .bad")).to_have_text("4 with non-finite values")
    expect(page.locator(".c-name.group")).to_have_text(["▾exp1", "▾layers.0"])
    page.get_by_role("button", name="Only with non-finite values").click()
    page.get_by_role("searchbox").fill("")
    expect(page.locator('.c-name[title="fine"]')).to_be_visible()


def test_runs_that_nobody_adds_to_are_folded(open_page: Open, server: str, http: httpx.Client) -> None:
    for run in ("now", "old", "stopped"):
        make(http, run)
        step(http, run)
    push(http, "stopped", "rank0")
    page = open_page("about:blank")
    age(page, {"old": 900})
    page.goto(server)
    expect(row(page, "now")).to_be_visible()
    expect(row(page, "old")).not_to_be_visible()
    page.get_by_text("1 idle run").click()
    expect(row(page, "old").locator(".state")).to_have_text("idle for 15 min")
    age(page, {"stopped": 7300})
    expect(row(page, "stopped").locator(".state")).to_have_text("stopped at 1 of 3, idle for 2 h")


def test_a_run_has_its_workers_its_curves_and_its_buffers_as_a_tree(
    open_page: Open, server: str, http: httpx.Client
) -> None:
    make(http, "exp1")
    for value in (3, 2):
        step(http, "exp1", value)
    push(http, "exp1", "rank1")
    page = open_page(f"{server}#/runs/exp1")
    expect(page.get_by_label("Loss of 2 closed steps; the last is 2")).to_be_visible()
    expect(page.get_by_label(f"Norm of 2 closed steps; the last is {24**0.5:.4g}")).to_be_visible()
    tiles = page.locator(".running .tiles > div")
    expect(tiles.filter(has_text="count")).to_contain_text("1 of 3")
    expect(page.locator(".running .people")).to_contain_text("rank1 is in")
    shown = page.locator(".rows .c-name")
    expect(shown).to_have_text(["head.weight", "▾layers.0", "bias", "weight", "loss"])
    heads = [title.rstrip(" ↑↓") for title in page.get_by_role("columnheader").all_inner_texts()]
    assert heads == ["name", "shape", "size", "norm", "non-finite"]  # the run's head says what is equal in all rows
    page.get_by_role("treegrid").press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("exp1.head.weight")
    expect(page.get_by_role("link", name="exp1", exact=True)).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("treegrid")).to_be_focused()
    page.get_by_role("treegrid").press("Escape")
    expect(page).to_have_url(f"{server}/#/runs")
    page.goto(f"{server}#/runs/none")
    expect(page.get_by_role("alert")).to_contain_text("No run is called none")


@pytest.fixture(scope="module")
def many() -> Iterator[str]:
    """Yield the URL of a server with fifty runs. Workers of eleven are late, and one of these has NaN."""
    rules = {"quorum": 3, "contributors": ["rank0", "rank1", "rank2"], "deadline_seconds": 0.01, "min_count": 2}
    buffers = {f"run{run}.layers.{layer}.w": {"shape": [2], **rules} for run in range(50) for layer in range(40)}
    first = {name: "NaN" if "run1." in name else 1 for name in buffers if name.startswith("run1")}
    with serving(threads=2) as url, httpx.Client(base_url=url, timeout=30) as http:
        http.post("/v1/buffers/create", json={"buffers": buffers}).raise_for_status()
        http.post("/v1/buffers/accumulate?contributor=rank0", json=first).raise_for_status()
        yield url


@LOOKS
def test_fifty_runs_and_two_thousand_buffers_are_accessible(
    open_page: Open, many: str, scheme: str, size: tuple[int, int]
) -> None:
    page = open_page(many, size, color_scheme=scheme)
    expect(page.locator("table.runs .name")).to_have_count(50)
    expect(row(page, "run1").locator(".state.bad")).to_be_visible()
    expect(row(page, "run10").locator(".state.late")).to_have_text("late: rank1 and rank2")
    assert names(page)[0] == "run1"
    assert findings(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.get_by_role("link", name="run1", exact=True).click()
    expect(page.locator(".running .people .slow")).to_have_count(2)
    expect(page.locator(".rows .row").first).to_be_visible()
    assert findings(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
