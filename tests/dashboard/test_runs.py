"""The view of all runs, where the page begins, and the view of one: who is in, who is waited for, and how it goes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from playwright.sync_api import Error, Locator, Page, Request, Route, expect

from service.buffers.runs import IDLE_SECONDS
from tests.dashboard.conftest import LOOKS, Faults, Open, asked_by, findings
from tests.serving import delete_buffers, serving

NAMES = ["layers.0.weight", "layers.0.bias", "head.weight"]

WORKERS = ["rank0", "rank1", "rank2"]


@pytest.fixture(autouse=True)
def nothing_left(http: httpx.Client) -> Iterator[None]:
    yield
    for run in http.get("/v1/runs").json()["runs"]:
        http.delete(f"/v1/runs/{run['name']}").raise_for_status()
    delete_buffers(http)


def prefix_of(run: str) -> str:
    """Return the prefix that clients give a run: dots of its name would end the name."""
    return f"{run.replace('.', ':2E')}."


def begin(http: httpx.Client, run: str, *workers: str) -> str:
    """Let workers join a run that has no buffers yet. Return its life."""
    prefix = prefix_of(run)
    for worker in workers or WORKERS:
        body = {"worker": worker, "token": worker, "prefix": prefix, "buffer": f"{prefix}{NAMES[0]}"}
        joined = http.post(f"/v1/runs/{run}/join", json=body).raise_for_status()
    life: str = joined.json()["life"]
    return life


def make(http: httpx.Client, run: str, **rules: Any) -> None:
    """Begin a run of three workers, with its buffers."""
    spec = {"shape": [2], "quorum": 3, "keep": 3, "contributors": WORKERS, "life": begin(http, run), **rules}
    prefix, own = prefix_of(run), ["::state.adam", f"{NAMES[0]}::tally"]
    buffers = {f"{prefix}{name}": spec for name in [*NAMES, *own]} | {f"{prefix}loss": {**spec, "shape": []}}
    http.post("/v1/buffers/create", json={"buffers": buffers}).raise_for_status()


def push(http: httpx.Client, run: str, worker: str, value: float | str = 1.0, loss: float | str | None = None) -> None:
    """Add to all buffers of a run, also to its loss: by default the same value."""
    prefix = prefix_of(run)
    body = {f"{prefix}{name}": value for name in NAMES} | {f"{prefix}loss": value if loss is None else loss}
    query: dict[str, Any] = {"contributor": worker, "weight": 2}
    http.post("/v1/buffers/accumulate", params=query, json=body).raise_for_status()


def step(http: httpx.Client, run: str, value: float | str = 1.0, loss: float | str | None = None) -> None:
    for worker in WORKERS:
        push(http, run, worker, value, loss)


def finish(http: httpx.Client, run: str, error: str | None = None) -> None:
    life = http.get(f"/v1/runs/{run}").json()["life"]
    for worker in WORKERS:
        body = {"worker": worker, "life": life, "outcome": "failed" if error else "finished", "error": error}
        http.post(f"/v1/runs/{run}/finish", json=body).raise_for_status()


def leave(http: httpx.Client, run: str, worker: str) -> None:
    life = http.get(f"/v1/runs/{run}").json()["life"]
    http.post(f"/v1/runs/{run}/leave", json={"worker": worker, "life": life}).raise_for_status()


def age(page: Page, runs: dict[str, float]) -> None:
    """Let the page read of runs what it would read these seconds after their last change, however late it asks."""

    def older(one: dict[str, Any], run: str) -> None:
        earlier = one["updated_at"] - (time.time() - runs[run])
        one |= {name: one[name] and one[name] - earlier for name in ("updated_at", "closed_at") if name in one}
        if one.get("missing_since"):
            one["missing_since"] = {each: at - earlier for each, at in one["missing_since"].items()}
        if one.get("state") and one["ended"] is None and runs[run] > IDLE_SECONDS:
            one["state"] = "idle"

    def answer(route: Route) -> None:
        fetched = route.fetch()
        found = fetched.json()
        for one in [*found.get("runs", ()), *found.get("buffers", ())]:
            if (run := one.get("run", one["name"])) in runs:
                older(one, run)
        route.fulfill(response=fetched, json=found)

    def answered(route: Route) -> None:
        with suppress(Error):  # the page has left the view, or is closed
            answer(route)

    page.route("**/v1/buffers?limit*", answered)
    page.route("**/v1/runs?limit*", answered)


def row(page: Page, run: str) -> Locator:
    return page.locator("table.runs tbody tr", has=page.get_by_role("link", name=run, exact=True))


def names(page: Page) -> list[str]:
    return page.locator("table.runs:visible .name").all_inner_texts()


def test_the_page_begins_with_a_line_for_each_run(open_page: Open, server: str, http: httpx.Client) -> None:
    """Buffers without a run are in it if they sum steps. A run's name keeps its dots."""
    make(http, "exp.1")
    for value in (3, 2, 1):
        step(http, "exp.1", value)
    push(http, "exp.1", "rank0")
    http.put("/v1/buffers/raw.weight", json={"shape": [2], "quorum": 2}).raise_for_status()
    http.put("/v1/buffers/team.a::weight", json={"shape": [2], "quorum": 2}).raise_for_status()
    http.put("/v1/buffers/kept.weight", json={"shape": [2]}).raise_for_status()
    page = open_page(server)
    line = row(page, "exp.1")
    expect(line.locator(".step")).to_have_text("3")
    expect(line.locator(".loss")).to_have_text("1falling")
    expect(line.locator(".loss polyline")).to_have_attribute("points", "1.0,2.0 26.0,8.0 51.0,14.0")
    expect(line.locator(".norm")).to_have_text(f"{6**0.5:.4g}")  # of the mean gradient of all three
    expect(line.locator(".norm polyline")).to_have_attribute("points", "")
    expect(line.locator(".state")).to_have_text("running")
    expect(line.locator(".people li")).to_have_text(["rank0 is in", "rank1 is expected", "rank2 is expected"])
    assert names(page) == ["exp.1", "raw", "team.a"]
    expect(page.locator(".summary")).to_contain_text("3 active runs · 6 buffers")
    line.get_by_role("link", name="exp.1").press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("exp.1")
    page.get_by_role("link", name="Buffers").click()
    expect(page.locator(".c-name.group").first).to_have_text("▾exp.1")


def test_a_run_without_a_loss_has_the_curve_of_its_norm(open_page: Open, server: str, http: httpx.Client) -> None:
    http.put("/v1/buffers/raw.weight", json={"shape": [2], "quorum": 1, "keep": 3}).raise_for_status()
    page = open_page(server)
    line = row(page, "raw")
    expect(line.locator(".step")).to_have_text("0")
    for number in (3, 2, 1):
        http.post("/v1/buffers/raw.weight/accumulate?weight=4", json={"gradient": number}).raise_for_status()
        expect(line.locator(".norm")).to_have_text(f"{number * 2**0.5:.4g}")
    expect(line.locator(".norm polyline")).to_have_attribute("points", "1.0,2.0 26.0,8.0 51.0,14.0")
    expect(line.locator(".loss")).to_have_text("")


@pytest.mark.parametrize(
    ("losses", "word"),
    [
        ([3, 2.5, 2, 1.9], "falling"),
        ([1, 1, 1.2, 1.4], "rising"),
        ([0.5**number for number in range(100)], "falling"),
        ([1, 2, 1, 2, 1], "flat"),
        ([1, 1, 1], "flat"),
        ([2, 1], None),
        ([3, 2, None, 1], None),
    ],
)
def test_a_trend_is_a_word(open_page: Open, server: str, losses: list[float | None], word: str | None) -> None:
    """None stands for NaN here."""
    program = "async (all) => (await import('./page/columns.js')).trend(all.map((each) => each ?? NaN))"
    assert open_page(server).evaluate(program, losses) == word


def test_each_state_is_seen_as_it_comes(open_page: Open, server: str, http: httpx.Client, faults: Faults) -> None:
    faults.statuses.add(404)  # the page may ask for buffers just as the run is deleted
    life = begin(http, "exp1")
    page = open_page(server)
    line = row(page, "exp1")
    expect(line.locator(".state")).to_have_text("joining")
    expect(line.locator(".people li")).to_have_text([f"{worker} is expected" for worker in WORKERS])
    make(http, "exp1")
    push(http, "exp1", "rank0")
    expect(line.locator(".state")).to_contain_text("joining, waiting for rank1 and rank2 for")
    for worker in WORKERS[1:]:
        push(http, "exp1", worker)
    expect(line.locator(".state")).to_have_text("running")
    push(http, "exp1", "rank0")
    expect(line.locator(".state")).to_contain_text("waiting for rank1 and rank2 for")
    leave(http, "exp1", "rank2")
    expect(line.locator(".people .slow")).to_contain_text("rank2 left out")
    push(http, "exp1", "rank1")
    expect(line.locator(".state.late")).to_contain_text("running without rank2 for")
    finish(http, "exp1")
    expect(line.locator(".state.over")).to_contain_text("finished")
    expect(line.locator(".people li")).to_have_text([f"{worker} has left" for worker in WORKERS])
    http.delete("/v1/runs/exp1").raise_for_status()
    assert begin(http, "exp1") != life
    finish(http, "exp1", "ValueError: no data")
    expect(line.locator(".state.bad")).to_have_text("failed on rank2: ValueError: no data")
    expect(page.locator("#news")).to_have_text("exp1: failed on rank2: ValueError: no data")


def test_a_worker_that_is_not_in_is_named_with_its_time(open_page: Open, server: str, http: httpx.Client) -> None:
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
    page.goto(f"{server}#/buffers?only=waiting")
    expect(page.get_by_role("button", name="Only waiting")).to_be_visible()
    expect(page.locator(".c-missing.late").first).to_have_text(re.compile(r"rank2 for 4\d s"))


def test_a_worker_that_steps_close_without_is_named(open_page: Open, server: str, http: httpx.Client) -> None:
    make(http, "exp1", deadline_seconds=0.1)
    step(http, "exp1")
    push(http, "exp1", "rank0")
    page = open_page(server)
    line = row(page, "exp1")
    expect(line.locator(".state.late")).to_contain_text("running without rank1 and rank2 for")
    expect(line.locator(".people .slow")).to_contain_text(["rank1 left out", "rank2 left out"])


def test_values_that_are_not_finite_are_red_and_on_top(open_page: Open, server: str, http: httpx.Client) -> None:
    for run in ("bare", "even", "nan"):
        make(http, run)
    step(http, "bare")
    step(http, "even", loss="Infinity")
    step(http, "nan", 2)
    step(http, "nan", "NaN", loss=1)
    page = open_page(server)
    expect(row(page, "even").locator(".state.bad")).to_have_text("infinite in loss")
    expect(row(page, "even").locator(".loss .bad")).to_have_text("infinite")
    expect(row(page, "nan").locator(".state.bad")).to_have_text("NaN in 3 buffers")
    expect(row(page, "nan").locator(".norm .bad")).to_have_text("NaN")
    assert names(page) == ["even", "nan", "bare"]
    page.goto(f"{server}#/buffers?only=nonfinite")
    expect(page.locator(".summary .bad")).to_have_text("4 with non-finite values")
    expect(page.locator(".c-name.group")).to_have_text(["▾nan", "▾layers.0"])
    page.get_by_role("button", name="Only with non-finite values").click()
    expect(page.locator('.c-name[title="bare.loss"]')).to_be_visible()


RED_AT = """canvas => {
    const { width, height } = canvas;
    const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
    const reds = new Set();
    for (let at = 0; at < data.length; at += 4)
        if (data[at] > 150 && data[at + 1] < 60 && data[at + 3] === 255)
            reds.add(Math.round((10 * ((at / 4) % width)) / width));
    return [...reds];
}"""
"""The tenths of a canvas's width that have red pixels."""


def test_a_step_that_is_not_finite_is_a_mark_in_the_chart(open_page: Open, server: str, http: httpx.Client) -> None:
    make(http, "exp1")
    for loss in (3, "NaN", 1):
        step(http, "exp1", 2, loss)
    gradients = {f"exp1.{name}": [1, "NaN"] if name == "head.weight" else [1, 1] for name in NAMES}
    for worker in WORKERS:
        body = {**gradients, "exp1.loss": "NaN"}
        http.post("/v1/buffers/accumulate", params={"contributor": worker}, json=body).raise_for_status()
    page = open_page(f"{server}#/runs/exp1")
    losses = page.get_by_label("Loss of 3 closed steps; the last is NaN")
    expect(losses).to_be_visible()
    assert losses.locator("canvas").evaluate(RED_AT) == [1, 10]
    norm = page.get_by_label("Norm of 3 closed steps; the last is NaN")
    assert norm.locator("canvas").evaluate(RED_AT) == [10]
    expect(page.locator(".state.bad")).to_have_text("NaN in 2 buffers")
    expect(page.locator(".rows .row", has_text="head.weight").locator(".c-norm .bad")).to_have_text("NaN")
    page.goto(f"{server}#/buffers/exp1.loss")
    expect(page.locator(".values")).to_contain_text("normNaNminNaNmaxNaNmeanNaN")
    expect(page.get_by_label("Norm of 3 closed steps; the last is NaN")).to_be_visible()
    expect(page.get_by_role("region", name="Closed steps").locator(".bad")).to_have_text(["NaN", "NaN"])


def test_all_losses_that_are_kept_are_drawn_in_few_requests(open_page: Open, server: str, http: httpx.Client) -> None:
    make(http, "exp1")
    loss = {"shape": [], "quorum": 1, "keep": 2000, "life": http.get("/v1/runs/exp1").json()["life"]}
    http.put("/v1/buffers/exp1.long_loss", json=loss).raise_for_status()

    def add(count: int) -> None:
        for number in range(count):
            http.post("/v1/buffers/exp1.long_loss/accumulate", json={"gradient": number}).raise_for_status()

    add(300)
    page = open_page("about:blank")
    asked = asked_by(page)
    page.goto(f"{server}#/runs/exp1")
    expect(page.get_by_label("Loss of 300 closed steps; the last is 299")).to_be_visible()
    add(3)
    expect(page.get_by_label("Loss of 303 closed steps; the last is 2")).to_be_visible()
    since = [int(url.partition("since=")[2]) for url in asked if "long_loss/statistics" in url]
    assert since == sorted({*since})
    assert (since[0], {*since[1:]} <= {300, 301, 302}) == (0, True)


def test_runs_that_are_over_are_folded_and_failed_ones_on_top(open_page: Open, server: str, http: httpx.Client) -> None:
    for run in ("broken", "done", "now", "old", "stopped"):
        make(http, run)
        step(http, run)
    finish(http, "broken", "ValueError: no data")
    finish(http, "done")
    push(http, "stopped", "rank0")
    page = open_page("about:blank")
    age(page, {"old": 900, "stopped": 7300, "done": 180})
    page.goto(server)
    expect(row(page, "now")).to_be_visible()
    assert names(page) == ["broken", "now"]
    expect(row(page, "old")).not_to_be_visible()
    page.get_by_text("1 finished run, 2 idle runs").click()
    expect(row(page, "old").locator(".state")).to_have_text("no worker for 15 min")
    expect(row(page, "stopped").locator(".state")).to_have_text("stopped at 1 of 3, no worker for 2 h")
    expect(row(page, "done").locator(".state.over")).to_contain_text("finished")
    page.goto(f"{server}#/runs/done")
    expect(page.locator(".running .tiles > div:visible dt")).to_have_text(["step", "adds/s", "updated"])


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
    mean = f"{8**0.5:.4g}"  # of each weight, and of both together: not of their weighted sums, nor of the loss
    expect(page.locator(".rows .c-norm")).to_have_text([mean, "4", mean, mean, ""])
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


def test_who_is_missing_and_since_when_is_not_cut(open_page: Open, server: str, http: httpx.Client) -> None:
    make(http, "exp1")
    step(http, "exp1")
    push(http, "exp1", "rank1")
    page = open_page("about:blank")
    age(page, {"exp1": 1000})
    page.goto(f"{server}#/buffers")
    for column, text in (("missing", "rank0 and rank2 for 16 min"), ("updated", "16 min ago")):
        cell = page.locator(f".rows .c-{column}").first
        expect(cell).to_have_text(text)
        assert cell.evaluate("cell => cell.scrollWidth <= cell.clientWidth")
    assert page.evaluate("document.querySelector('.grid').scrollWidth <= innerWidth")


def test_a_group_of_several_kinds_has_no_norm(open_page: Open, server: str, http: httpx.Client) -> None:
    make(http, "exp1")
    step(http, "exp1", 2)
    page = open_page(f"{server}#/buffers")
    head = page.locator(".rows .row", has=page.locator(".c-name.group", has_text="exp1"))
    expect(head.locator(".c-nonfinite")).to_have_text("0")
    expect(head.locator(".c-norm")).to_have_text("")
    group = page.locator(".rows .row", has=page.locator(".c-name.group", has_text="layers.0"))
    expect(group.locator(".c-norm")).to_have_text("4")


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
    page = open_page("about:blank", size, color_scheme=scheme)
    asked: list[str] = []

    def note(request: Request) -> None:
        if request.url.endswith("/v1/buffers/statistics?closed=true"):
            asked.extend(json.loads(request.post_data or "")["names"])

    page.on("request", note)
    page.goto(many)
    expect(page.locator("table.runs .name")).to_have_count(50)
    expect(row(page, "run1").locator(".state.bad")).to_be_visible()
    expect(row(page, "run10").locator(".state.late")).to_contain_text("waiting for rank1 and rank2 for")
    assert len({*asked}) <= 250  # of 2,000
    assert names(page)[0] == "run1"
    assert findings(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.get_by_role("link", name="run1", exact=True).click()
    expect(page.locator(".running .people .slow")).to_have_count(2)
    expect(page.locator(".rows .row").first).to_be_visible()
    assert findings(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
