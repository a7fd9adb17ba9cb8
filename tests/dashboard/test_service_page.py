"""The view of the service: charts of the last hour that grow, tiles, and the settings in force."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from playwright.sync_api import Locator, Page, Route, expect

from service.api.dashboard import history
from tests.dashboard.conftest import EVIL, LOOKS, Faults, Open, asked_by, findings, sign_in
from tests.serving import serving, wait_until

STEP_SECONDS = 1
"""Shorter steps than a server's own, so that tests wait less."""

HISTORY = "**/v1/service/history?since=*"

CHARTS: dict[str, Callable[[dict[str, Any], str], float | None]] = {
    "requests": lambda sample, name: sample["requests"].get(name, 0),
    "latency": lambda sample, name: sample["seconds"] and sample["seconds"][name],
    "phases": lambda sample, name: sample["phases"].get(name, {}).get("p99"),
    "errors": lambda sample, name: sample["errors"].get(name, 0),
    "bytes": lambda sample, name: sample[f"{name}_bytes"],
    "queue": lambda sample, name: sample[name.replace(" ", "_")],
    "held": lambda sample, name: sample["in_flight_bytes"],
    "commits": lambda sample, name: sample["commits"],
    "store": lambda sample, name: sample["store_bytes"],
    "buffers": lambda sample, name: sample["buffers"],
    "workers": lambda sample, name: sample["workers"],
}
"""The number of a line in a sample, by the chart and the line's name."""

TABLE = """panel => {
  const names = [...panel.querySelectorAll("thead th")].slice(1).map(th => th.textContent);
  return [...panel.querySelectorAll("tbody tr")].map(row => [Number(row.dataset.at), Object.fromEntries(
    [...row.querySelectorAll("td")].map((td, place) => [names[place], td.querySelector("data")?.value ?? null]))]);
}"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history, "STEP_SECONDS", STEP_SECONDS)
        with serving(threads=2, store=f"lmdb:{tmp_path_factory.mktemp('store')}") as url:
            yield url


def work(http: httpx.Client) -> None:
    """Make requests of several routes, with errors."""
    http.put("/v1/buffers/w", json={"shape": [2]})
    for _ in range(5):
        http.post("/v1/ops/ReluGrad", json={"dY": [1, 2], "X": [1, 2]}).raise_for_status()
        http.post("/v1/buffers/w/accumulate", json={"gradient": [1, 2]}).raise_for_status()
    assert http.post("/v1/ops/ReluGrad", json={"dY": [1, 2], "X": [1]}).status_code == 422
    assert http.get("/v1/buffers/nothing").status_code == 404


def samples(http: httpx.Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = http.get("/v1/service/history").raise_for_status().json()["samples"]
    return found


def worked(http: httpx.Client) -> None:
    """Work, and wait for the sample that has its last request. Earlier ones may be in the sample before."""
    before = len(samples(http))
    work(http)
    wait_until(lambda: any(each["errors"].get("unknown_buffer") for each in samples(http)[before:]))


def chart(page: Page, name: str) -> Locator:
    return page.locator(f'[data-chart="{name}"]')


def tile(page: Page, name: str) -> Locator:
    return page.locator(f'[data-tile="{name}"] dd')


def show(open_page: Open, server: str, **options: Any) -> Page:
    page = open_page(f"{server}#/service", **options)
    expect(page.locator(".state")).to_have_text("live")
    expect(chart(page, "commits").locator(".lines data")).to_have_attribute("value", re.compile("."))  # a sample came
    return page


def as_numbers(page: Page) -> None:
    page.get_by_role("button", name="as numbers").evaluate_all("all => all.forEach(each => each.click())")


def rows(page: Page, name: str) -> dict[float, dict[str, float | None]]:
    """Return the table of a chart: its numbers by time and line."""
    table = chart(page, name).evaluate(TABLE)
    return {at: {line: value and float(value) for line, value in row.items()} for at, row in table}


def test_the_charts_show_the_numbers_of_the_api(open_page: Open, server: str, http: httpx.Client) -> None:
    worked(http)
    page = show(open_page, server)
    as_numbers(page)
    tables = {name: rows(page, name) for name in CHARTS}
    known = {each["at"]: each for each in samples(http)}
    for name, number in CHARTS.items():
        assert tables[name]
        for at, row in tables[name].items():
            assert row == {line: number(known[at], line) for line in row}, (name, at)
    lines = {line for row in rows(page, "requests").values() for line in row}
    assert {"ops", "accumulate", "buffers"} <= lines
    assert next(iter(rows(page, "errors").values())).keys() == {"shape_mismatch", "unknown_buffer"}
    assert next(iter(rows(page, "latency").values())).keys() == {"p50", "p95", "p99"}
    assert {"read", "kernel", "store"} <= next(iter(rows(page, "phases").values())).keys()


def test_the_charts_grow_with_each_sample(open_page: Open, server: str, http: httpx.Client) -> None:
    page = show(open_page, server)
    as_numbers(page)
    first = max(rows(page, "commits"))
    expect(chart(page, "commits").locator("tbody tr").first).not_to_have_attribute("data-at", f"{first:g}")
    wait_until(lambda: max(rows(page, "commits")) >= first + 2 * STEP_SECONDS - 0.5)
    shown = set(rows(page, "commits"))
    known = {each["at"] for each in samples(http)}
    assert shown <= known
    assert {at for at in known if first < at <= max(shown)} <= shown


def test_times_are_in_the_zone_of_the_browser(open_page: Open, server: str, http: httpx.Client) -> None:
    worked(http)
    page = show(open_page, server, timezone_id="Asia/Kolkata")
    expect(page.locator(".line.top")).to_contain_text("times are UTC+05:30")
    page.get_by_role("button", name="Commits as numbers").click()
    zone = timezone(timedelta(hours=5.5))
    script = "body => [...body.rows].map((row) => [Number(row.dataset.at), row.cells[0].textContent])"
    shown = chart(page, "commits").locator("tbody").evaluate(script)
    assert shown
    assert shown == [[at, f"{datetime.fromtimestamp(int(at), zone):%H:%M:%S}"] for at, _ in shown]


def test_the_tiles(open_page: Open, server: str, http: httpx.Client) -> None:
    worked(http)
    page = show(open_page, server)
    about = http.get("/v1/service").json()
    expect(tile(page, "version")).to_have_text(about["version"])
    expect(tile(page, "workers")).to_have_text("1")
    expect(page.locator("[data-tile=workers] dt")).to_have_text("process")
    expect(chart(page, "workers").locator("h2")).to_contain_text("Processes")
    expect(tile(page, "store")).to_contain_text("kB, <0.1%")
    expect(tile(page, "errors")).not_to_have_text("0")
    rate = tile(page, "requests").inner_text()
    rates = [{**each["requests"], "page": 0.0} for each in samples(http)]
    assert rate in {f"{sum(each.values()):.3g}/s" for each in rates}
    expect(tile(page, "uptime")).to_contain_text(" s")


def test_a_chart_without_a_picture(open_page: Open, server: str, http: httpx.Client) -> None:
    worked(http)
    page = show(open_page, server)
    last = samples(http)[-1]
    label = chart(page, "buffers").get_by_role("img")
    expect(label).to_have_accessible_name(f"Buffers, now: buffers {last['buffers']}")
    assert "shape_mismatch" in str(chart(page, "errors").get_by_role("img").get_attribute("aria-label"))


def test_the_settings_and_limits_in_force_can_be_searched(open_page: Open, server: str, http: httpx.Client) -> None:
    page = show(open_page, server)
    about = http.get("/v1/service").json()
    folded = page.get_by_role("group", name="Settings and limits in force")
    expect(folded).to_be_hidden()
    page.locator("summary").press("Enter")
    table = folded.get_by_role("row")
    expect(table).to_have_count(1 + len(about["settings"]) + len(about["limits"]))
    texts = table.evaluate_all("rows => rows.map(row => [...row.cells].map(cell => cell.textContent))")
    meanings = {name: meaning for name, _, meaning in texts}
    for name, setting in (about["settings"] | about["limits"]).items():
        assert setting["meaning"] in meanings[name]
    expect(table.filter(has_text="max_json_members")).to_contain_text("4,096")
    expect(table.filter(has_text="max_json_members")).to_contain_text("Members of a JSON object, at most")
    page.get_by_role("searchbox").fill("seconds KEEP_alive")
    expect(table.filter(visible=True)).to_contain_text(["name", "GRADSERVE_KEEP_ALIVE"])
    page.goto(f"{server}#/service?settings=max_tensor_bytes")  # a link opens it
    expect(table.filter(visible=True)).to_contain_text(["name", "GRADSERVE_MAX_TENSOR_BYTES"])


def test_settings_have_units(open_page: Open, server: str, http: httpx.Client) -> None:
    page = open_page("about:blank")
    about = http.get("/v1/service").json()
    amounts = {3 << 29: "1,536 MiB", 1 << 30: "1 GiB", 24_000_000: "24 MB", 1_000_001: "1,000,001 B", 0: "0 B"}
    about["settings"] = {f"S{value}": {"value": value, "meaning": "Bytes of S."} for value in amounts}
    about["limits"] = {"GRADSERVE_PORT": {"value": 65000, "meaning": "Port."}}
    about["limits"]["days"] = {"value": 86400.0, "meaning": "Seconds of days."}
    page.route("**/v1/service", lambda route: route.fulfill(json=about))
    page.goto(f"{server}#/service?settings=")
    values = page.locator(".settings td:nth-child(2) code")
    expect(values).to_have_text([*amounts.values(), "65000", "86,400 s"])
    assert [each.get_attribute("title") for each in values.all()[:2]] == ["1,610,612,736 bytes", "1,073,741,824 bytes"]


def test_a_server_that_is_away_for_a_while_leaves_no_gap(
    open_page: Open, server: str, http: httpx.Client, faults: Faults
) -> None:
    faults.statuses = {502}
    page = show(open_page, server)
    as_numbers(page)
    page.route(HISTORY, lambda route: route.fulfill(status=502))
    expect(page.locator(".state")).to_have_text("waiting for the server")
    lost = max(rows(page, "commits"))
    wait_until(lambda: samples(http)[-1]["at"] > lost + STEP_SECONDS)
    page.unroute(HISTORY)
    expect(page.locator(".state")).to_have_text("live")
    wait_until(lambda: max(rows(page, "commits")) > lost)
    newest = max(rows(page, "commits"))
    assert {each["at"] for each in samples(http) if lost < each["at"] <= newest} <= set(rows(page, "commits"))


def test_a_key_that_loses_its_scope_learns_so(open_page: Open, server: str, faults: Faults) -> None:
    faults.statuses = {403}
    page = show(open_page, server)
    problem = {"title": "API key lacks a scope", "detail": "It needs admin", "code": "forbidden", "scope": "admin"}
    page.route(HISTORY, lambda route: route.fulfill(status=403, json=problem))
    expect(page.get_by_role("alert")).to_contain_text("It needs admin")


def hide(page: Page, state: str) -> None:
    """Hide or show the page. It is hidden just after it drew an answer, when no request is on its way."""
    page.evaluate(
        """async state => {
             const main = document.querySelector("main"), parts = { childList: true, subtree: true };
             if (state === "hidden") await new Promise(drawn => new MutationObserver(drawn).observe(main, parts));
             Object.defineProperty(document, "visibilityState", { value: state, configurable: true });
             document.dispatchEvent(new Event("visibilitychange")); }""",
        state,
    )


def test_a_hidden_tab_reads_nothing_and_catches_up(open_page: Open, server: str, http: httpx.Client) -> None:
    page = show(open_page, server)
    as_numbers(page)
    asked: list[str] = []
    hide(page, "hidden")
    page.on("request", lambda request: asked.append(request.url.removeprefix(f"{server}/")))
    last = max(rows(page, "commits"))
    wait_until(lambda: samples(http)[-1]["at"] > last + 2 * STEP_SECONDS)
    assert (asked, max(rows(page, "commits"))) == ([], last)
    hide(page, "visible")
    wait_until(lambda: max(rows(page, "commits")) > last)
    newest = max(rows(page, "commits"))
    assert {each["at"] for each in samples(http) if last < each["at"] <= newest} <= set(rows(page, "commits"))
    assert asked[0].startswith("v1/service/history?since=")


def made(at: float, **members: Any) -> dict[str, Any]:
    """Return a sample of nothing, with these members."""
    empty = {"requests": {}, "errors": {}, "received_bytes": 0, "sent_bytes": 0, "seconds": None, "phases": {}}
    numbers = {"in_flight": 0, "in_flight_bytes": 0, "waiting": 0, "commits": 0, "buffers": 0, "workers": 1}
    return {"at": at, **empty, **numbers, "store_bytes": 0, "store_limit_bytes": 1000, "database": {}, **members}


def faked(open_page: Open, server: str, found: list[dict[str, Any]], **options: Any) -> Page:
    """Open the view with samples of our own."""

    def answer(route: Route) -> None:
        since = float(parse_qs(urlsplit(route.request.url).query)["since"][0])
        later = [each for each in found if each["at"] > since]
        route.fulfill(json={"step_seconds": 2, "samples": later})

    page = open_page("about:blank", **options)
    page.route(HISTORY, answer)
    page.goto(f"{server}#/service")
    expect(chart(page, "commits").locator("data")).to_have_attribute("value", str(found[-1]["commits"]))
    return page


def test_the_measures_of_a_database_a_full_store_and_many_codes(open_page: Open, server: str) -> None:
    codes = {f"code_{number}": float(number) for number in range(1, 11)}
    database = {"connections": 7, "connections_limit": 100, "lag_bytes": 2048}
    now = time.time()
    large = {"requests": {"ops": 1390.4}, "buffers": 100_000}
    last = made(now, errors={**codes, EVIL: 20.0}, database=database, store_bytes=900, commits=5, **large)
    page = faked(open_page, server, [made(now - 2), last])
    as_numbers(page)
    assert rows(page, "database")[now] == {"connections": 7, "connections limit": 100}
    assert rows(page, "database-bytes")[now] == {"lag": 2048}
    assert rows(page, "store")[now] == {"used": 900, "limit": 1000}
    expect(tile(page, "requests")).to_have_text("1,390/s")
    expect(chart(page, "buffers").locator(".lines data")).to_have_text("100,000")
    shown = rows(page, "errors")[now]
    assert shown == {EVIL: 20, **{f"code_{number}": number for number in range(5, 11)}, "4 others": 10}
    assert page.locator("img[src=x], main script").count() == 0
    assert page.title() == "Service – gradserve"


def test_the_errors_of_the_last_minute_and_a_store_that_is_nearly_full(open_page: Open, server: str) -> None:
    now = time.time()
    rates = {64: 50, 62: 50, 58: 1.5, 4: 0, 2: 0.5, 0: 1}  # per second, by the seconds since
    full = {"store_bytes": 950, "requests": {"ops": 1.5, "value": 0.25, "page": 40}}
    found = [
        made(now - ago, errors={"busy": rate / 2, "conflict": rate / 2}, commits=1, **full)
        for ago, rate in rates.items()
    ]
    page = faked(open_page, server, found)
    expect(tile(page, "errors")).to_have_text("9")  # 4 s of 1.5, 2 s of 0.5 and 2 s of 1
    expect(tile(page, "errors")).to_have_class("late")
    expect(tile(page, "store")).to_have_text("950 B, 95%")
    expect(page.locator('[data-tile="store"] .track')).to_have_class("track slow")
    expect(tile(page, "requests")).to_have_text("1.75/s")  # without the page's own files
    expect(tile(page, "p99")).to_have_text("–")


def test_a_chart_of_nothing_says_so(open_page: Open, server: str) -> None:
    page = faked(open_page, server, [made(time.time(), commits=2)])
    expect(chart(page, "errors").locator(".lines")).to_have_text("none in this time")
    expect(chart(page, "errors").get_by_role("img")).to_have_accessible_name("Errors, now: none")
    expect(chart(page, "latency").get_by_role("img")).to_have_accessible_name(
        "Latency, now: p50 unknown, p95 unknown, p99 unknown"
    )
    as_numbers(page)
    assert rows(page, "errors") == {}


def test_a_server_without_a_database_has_no_charts_of_it(open_page: Open, server: str) -> None:
    page = show(open_page, server)
    expect(chart(page, "commits")).to_be_visible()
    expect(chart(page, "database")).to_be_hidden()


def test_the_percentile_of_the_phases_can_be_chosen(open_page: Open, server: str) -> None:
    now = time.time()
    page = faked(
        open_page, server, [made(now, phases={"kernel": {"p50": 0.00042, "p95": 0.0031, "p99": 1.25}}, commits=3)]
    )
    number = chart(page, "phases").locator(".lines data")
    for percentile, text in [("p50", "420 µs"), ("p95", "3.1 ms"), ("p99", "1.25 s")]:
        page.get_by_label("Time by phase: percentile").select_option(percentile)
        expect(number).to_have_text(text)


def test_the_cursor_of_one_chart_shows_in_all(open_page: Open, server: str) -> None:
    now = time.time()
    page = faked(
        open_page, server, [made(now - 100 + 2 * step, commits=step, buffers=100 + step) for step in range(51)]
    )
    chart(page, "buffers").scroll_into_view_if_needed()
    box = chart(page, "buffers").locator(".u-over").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
    expect(chart(page, "buffers").locator(".lines data")).to_have_attribute("value", "125")
    expect(chart(page, "commits").locator(".lines data")).to_have_attribute("value", "25")
    page.mouse.move(5, 5)
    expect(chart(page, "commits").locator(".lines data")).to_have_attribute("value", "50")


def test_the_time_shown_can_be_chosen(open_page: Open, server: str) -> None:
    now = time.time()
    found = [
        made(now - 3000, errors={"old": 1}),
        made(now - 600, errors={"recent": 1}),
        made(now, errors={"new": 1}, commits=1),
    ]
    page = faked(open_page, server, found)
    lines = chart(page, "errors").locator(".lines li span:not(.swatch)")
    expect(lines).to_have_text(["new", "recent"])
    page.get_by_role("button", name="1 h", exact=True).click()
    expect(lines).to_have_text(["new", "old", "recent"])
    page.get_by_role("button", name="5 min", exact=True).click()
    expect(lines).to_have_text(["new"])
    expect(page.get_by_role("button", name="5 min", exact=True)).to_have_attribute("aria-pressed", "true")


def test_a_time_without_the_server_is_a_gap_in_the_lines(open_page: Open, server: str) -> None:
    page = open_page(f"{server}#/graphs")
    times = page.evaluate(
        """async () => { const { withGaps } = await import("./page/live.js");
             const rows = withGaps([0, 2, 4, 60, 62].map(at => ({ at })), 2);
             return rows.map(({ at, sample }) => [at, sample !== null]); }"""
    )
    assert times == [[2, True], [4, True], [6, False], [60, True], [62, True]]


def test_the_page_keeps_an_hour(open_page: Open, server: str) -> None:
    found = [{"at": float(at)} for at in range(0, 4000, 2)]
    page = open_page(f"{server}#/graphs")
    kept = page.evaluate(
        """async found => {
             const { follow } = await import("./page/live.js"), ended = new AbortController(), kept = [], asked = [];
             const answers = [found, [4000, 4002].map(at => ({ at }))];
             const get = async path => { asked.push(path); return { step_seconds: 0, samples: answers.shift() }; };
             await follow(kept, { api: { get }, signal: ended.signal, changed: () => answers.length || ended.abort() });
             return [asked, kept.length, kept[0].at, kept.at(-1).at];
           }""",
        found,
    )
    paths = ["v1/service/history?since=0", "v1/service/history?since=3998"]
    assert kept == [paths, 1800, 404, 4002]


@pytest.mark.parametrize("who", ["admin", "visitor"])
def test_only_an_admin_sees_the_service(
    open_page: Open, locked: str, keys: dict[str, str], faults: Faults, who: str
) -> None:
    faults.statuses = {401}
    page = open_page(f"{locked}#/service")
    asked = asked_by(page)
    sign_in(page, keys[who])
    if who == "admin":
        expect(page.locator(".state")).to_have_text("live")
    else:
        expect(page.get_by_role("main")).to_contain_text("This view needs the scope admin")
        expect(page.get_by_role("main")).to_contain_text("Your API key has buffers:read, ops.")
    assert any("/v1/service" in url for url in asked) == (who == "admin")
    assert not [url for url in [*asked, page.url] if "gs_" in url]


@LOOKS
def test_axe_finds_nothing(open_page: Open, server: str, scheme: str, size: tuple[int, int]) -> None:
    """Every chart has lines, and the store is nearly full."""
    now, times = time.time(), {"p50": 0.001, "p95": 0.01, "p99": 1.5}
    some = {"requests": {"ops": 5, "page": 1}, "errors": {"busy": 1}, "seconds": times, "phases": {"kernel": times}}
    database = {"connections": 7, "connections_limit": 100, "lag_bytes": 2048}
    last = made(now, **some, database=database, store_bytes=950, commits=5, buffers=3)
    page = faked(open_page, server, [made(now - 2), last], size=size, color_scheme=scheme)
    expect(chart(page, "requests").locator(".lines li").first).to_be_visible()
    assert findings(page) == []
    as_numbers(page)
    page.get_by_text("Settings and limits in force").click()
    expect(chart(page, "requests").locator("tbody tr").first).to_be_visible()
    assert findings(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
