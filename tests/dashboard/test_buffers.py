"""The view of all buffers: numbers that are the API's, thousands of rows, search, sort, tree and keys."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from gradserve_client._cli import output as client
from gradserve_client._cli.watch import COLUMNS
from gradserve_client.models import BufferInfo
from playwright.sync_api import Page, expect

from tests.dashboard.conftest import PHONE, Open
from tests.serving import delete_buffers, serving, wait_until

RULES = {"quorum": 3, "contributors": ["a", "b", "c"], "deadline_seconds": 600, "keep": 2}

EVIL_ID = "<script>document.title='hacked'</script>"
"""The id of a push that runs as a program if the page takes it for HTML."""

MANY = 5000
"""Buffers of a large model."""

WAITED_FOR = """() => {
    const [{ startTime, duration }] = performance.getEntriesByName('buffers shown');
    const earlier = (each) => each.startTime < startTime + duration && each.name.includes('/v1/');
    return performance.getEntriesByType('resource').filter(earlier).map((each) => new URL(each.name).pathname);
}"""
"""Return the paths that the page asked for before it showed the buffers."""


@pytest.fixture(autouse=True)
def no_buffers(http: httpx.Client) -> Iterator[None]:
    yield
    delete_buffers(http)


def create(http: httpx.Client, names: list[str], **rules: Any) -> None:
    buffers = {name: {"shape": [2, 2], **rules} for name in names}
    http.post("/v1/buffers/create", json={"buffers": buffers}).raise_for_status()


def add(http: httpx.Client, name: str, value: float = 1, **query: Any) -> dict[str, Any]:
    answer = http.post(f"/v1/buffers/{name}/accumulate", params=query, json={"gradient": [[value, 0], [0, 0]]})
    receipt: dict[str, Any] = answer.raise_for_status().json()
    return receipt


def names(page: Page) -> list[str]:
    """Return the full names of the rows in the document, in the order of the reader's screen."""
    program = """() => [...document.querySelectorAll('.rows > .row')]
        .sort((a, b) => a.getAttribute('aria-rowindex') - b.getAttribute('aria-rowindex'))
        .map((row) => row.querySelector('.c-name').title)"""
    found: list[str] = page.evaluate(program)
    return found


def cells(page: Page, name: str) -> dict[str, str]:
    """Return the texts of a row by column, all of one moment."""
    program = """(name) => {
        const cell = [...document.querySelectorAll('.rows .c-name')].find((each) => each.title === name);
        const text = (each) => [each.className.match(/c-(\\w+)/)[1], each.textContent];
        return cell ? Object.fromEntries([...cell.parentElement.children].map(text)) : {};
    }"""
    found: dict[str, str] = page.evaluate(program, name)
    return found


def shows(page: Page, name: str, column: str, text: str) -> None:
    """Wait until the row has this text in a column."""
    row = page.locator(".rows .row", has=page.locator(f'.c-name[title="{name}"]'))
    expect(row.locator(f".c-{column}")).to_have_text(text)


def test_the_numbers_are_those_of_the_api_while_gradients_come(
    open_page: Open, server: str, http: httpx.Client
) -> None:
    create(http, ["layer.weight", "layer.bias"], **RULES)
    page = open_page(f"{server}#/buffers")
    shows(page, "layer.weight", "count", "0 of 3")
    states, stop = {(0, 0)}, threading.Event()

    def train() -> None:
        with httpx.Client(base_url=server) as other:
            for number in range(10_000):
                receipt = add(other, "layer.weight", contributor="abc"[number % 3])
                step, count = receipt["step"], receipt["count"]
                states.update({(step, count), (step + 1, 0)} if receipt["closed"] else {(step, count)})
                if stop.wait(0.02):
                    return

    worker = threading.Thread(target=train)
    worker.start()
    seen = set()
    try:
        wait_until(lambda: seen.add(state(page)) or len(seen) >= 2)  # type: ignore[func-returns-value]
    finally:
        stop.set()
        worker.join()
    assert seen <= states
    info = BufferInfo.of(http.get("/v1/buffers/layer.weight").json())
    shows(page, "layer.weight", "step", str(info.step))  # an earlier step had this count, too
    shows(page, "layer.weight", "count", client.count(info))
    wanted = {
        "shape": client.shape(info.shape),
        "dtype": info.dtype,
        "weight": f"{info.weight:g}",
        "step": str(info.step),
        "size": client.size(info.bytes),
    }
    shown = cells(page, "layer.weight")
    assert {name: shown[name] for name in wanted} == wanted
    known = http.get("/v1/buffers/layer.weight/statistics?closed=true").json()
    shows(page, "layer.weight", "norm", f"{known['norm'] / known['weight']:.4g}")
    shows(page, "layer.weight", "nonfinite", "0")


def state(page: Page) -> tuple[int, int]:
    """Return the step and the count that the page shows."""
    shown = cells(page, "layer.weight")
    return int(shown["step"]), int(shown["count"].split()[0])


def test_the_columns_have_the_words_of_the_client(open_page: Open, server: str, http: httpx.Client) -> None:
    create(http, ["a"], **RULES)
    page = open_page(f"{server}#/buffers")
    heads = page.get_by_role("columnheader")
    expect(heads.first).to_be_visible()
    titles = [title.rstrip(" ↑↓") for title in heads.all_inner_texts()]
    assert {*COLUMNS} - {"adds/s", "state"} <= set(titles)
    http.delete("/v1/buffers/a")
    create(http, ["b"])
    expect(page.get_by_role("columnheader", name="missing")).to_be_hidden()  # no buffer has a value for it
    expect(page.get_by_role("columnheader", name="deadline")).to_be_hidden()


def test_what_is_staged_is_listed(open_page: Open, server: str, http: httpx.Client) -> None:
    create(http, ["a", "b"])
    page = open_page(f"{server}#/buffers")
    shows(page, "a", "count", "0")
    line = page.locator(".staged > summary")
    expect(line).to_be_hidden()

    def stage(push: str, gradient: Any, **more: Any) -> None:
        query = {"push": push, "part": 1, "parts": 3, **more}
        http.post("/v1/buffers/accumulate", params=query, json=gradient)

    stage(EVIL_ID, {"a": 1, "b": [1, 2]}, weight=0.5, step=0, contributor="ann")
    expect(line).to_have_text("Staged: 1 push in parts, 12 B")
    stage("wrong", {"a": [1, 2, 3]})
    expect(line).to_have_text("Staged: 2 pushes in parts, 12 B")
    line.click()
    rows = page.locator(".staged tbody tr")
    expires = http.get("/v1/pushes").json()["pushes"][0]["expires_at"]
    wanted = [EVIL_ID, "1 of 3", "2", "12 B", "0.5", "0", "ann", client.time(expires), ""]
    assert rows.first.locator("td").all_text_contents() == wanted
    expect(rows.nth(1).locator("td").last).to_have_text("shape_mismatch")
    for push in (EVIL_ID, "wrong"):
        http.delete("/v1/pushes", params={"push": push}).raise_for_status()
    expect(line).to_be_hidden()
    assert page.title() != "hacked"


def test_values_that_are_not_finite_are_red_and_said(open_page: Open, server: str, http: httpx.Client) -> None:
    create(http, ["good", "ill"])
    page = open_page(f"{server}#/buffers")
    shows(page, "ill", "nonfinite", "0")
    add(http, "good")
    http.post("/v1/buffers/ill/accumulate", json={"gradient": [["NaN", 1], [1, 1]]}).raise_for_status()
    shows(page, "ill", "nonfinite", "25%")
    expect(page.locator(".c-nonfinite.bad")).to_have_count(1)
    expect(page.locator("#news")).to_have_text("ill has non-finite values")
    expect(page.locator(".summary")).to_contain_text("1 with non-finite values")


def test_a_step_whose_deadline_nears_is_late(open_page: Open, server: str, http: httpx.Client) -> None:
    create(http, ["slow"], quorum=2, min_count=2, deadline_seconds=0.1, contributors=["rank0", "rank1"])
    create(http, ["fine"], quorum=2, deadline_seconds=900)
    add(http, "slow", contributor="rank0")
    add(http, "fine")
    page = open_page(f"{server}#/buffers")
    expect(page.locator(".c-missing.late")).to_contain_text("rank1 for ")
    expect(page.locator(".summary")).to_contain_text("1 late")
    shown = cells(page, "slow")["deadline"], cells(page, "fine")["deadline"]
    assert (shown[0][-4:], shown[1][:3]) == (" ago", "in "), shown


@pytest.fixture
def large() -> Iterator[str]:
    """Yield the URL of a server with many buffers. It ends with them: to delete them one by one takes seconds."""
    names = [f"layers.{layer}.{part}" for layer in range(MANY // 4) for part in ("q", "k", "v", "o")]
    with serving(threads=2) as url, httpx.Client(base_url=url, timeout=30) as http:
        create(http, names, quorum=4)
        yield url


def test_thousands_of_buffers_are_shown_without_a_wait(large: str, open_page: Open) -> None:
    """The page waits for their list alone. It makes rows, and asks for statistics, of those in sight."""
    page = open_page("about:blank")
    with page.expect_request("**/v1/buffers/statistics*") as asked:
        page.goto(f"{large}/#/buffers?list")
    assert len((asked.value.post_data_json or {})["names"]) < 60
    assert page.evaluate(WAITED_FOR) == ["/v1/caller", *["/v1/buffers"] * (MANY // 1000)]
    grid = page.get_by_role("treegrid")
    expect(grid).to_have_attribute("aria-rowcount", str(MANY + 1))
    assert len(names(page)) < 60
    assert names(page)[0] == "layers.0.k"
    grid.press("End")
    expect(page.locator('.c-name[title="layers.1249.v"]')).to_be_in_viewport()
    assert len(names(page)) < 60
    expect(page.locator(".summary")).to_contain_text("5,000 buffers")
    page.goto(f"{large}/#/buffers")
    expect(grid).to_have_attribute("aria-rowcount", "2")  # a tree begins with its groups


def test_search_finds_parts_of_names_and_stays_in_the_address(open_page: Open, server: str, http: httpx.Client) -> None:
    create(http, ["encoder.weight", "encoder.bias", "head.weight"])
    page = open_page(f"{server}#/buffers?list")
    expect(page.locator(".rows .row")).to_have_count(3)
    page.keyboard.press("/")
    page.keyboard.type("WEIGHT")
    expect(page.locator(".rows .row")).to_have_count(2)
    assert names(page) == ["encoder.weight", "head.weight"]
    page.reload()
    expect(page.locator(".rows .row")).to_have_count(2)
    page.get_by_role("searchbox").fill("<img src=x onerror=document.title=1>")
    expect(page.locator(".none")).to_have_text("No buffer has “<img src=x onerror=document.title=1>” in its name.")
    page.keyboard.press("Escape")
    expect(page.locator(".rows .row")).to_have_count(3)


def test_each_column_sorts(open_page: Open, server: str, http: httpx.Client) -> None:
    for number, name in enumerate(["w10", "w9", "w1"]):
        create(http, [name], quorum=2 + number)
        http.post(f"/v1/buffers/{name}/zero")
        for _ in range(number):
            add(http, name, number)
    page = open_page(f"{server}#/buffers?list")
    expect(page.locator(".rows .row")).to_have_count(3)
    assert names(page) == ["w1", "w9", "w10"]
    for title, wanted in [
        ("name", ["w10", "w9", "w1"]),
        ("count", ["w10", "w9", "w1"]),
        ("weight", ["w1", "w9", "w10"]),
        ("norm", ["w1", "w9", "w10"]),
        ("updated", ["w1", "w9", "w10"]),
    ]:
        head = page.get_by_role("columnheader", name=title)
        shows(page, "w1", "norm", "2")
        head.click()
        direction = "descending" if title in ("name", "weight", "norm") else "ascending"
        expect(head).to_have_attribute("aria-sort", direction)
        assert names(page) == wanted, title


def test_dots_in_names_make_a_tree_with_numbers_together(open_page: Open, server: str, http: httpx.Client) -> None:
    create(http, ["net.layers.0.weight", "net.layers.0.bias", "net.layers.1.weight", "head"], quorum=2)
    add(http, "net.layers.0.weight", 3)
    add(http, "net.layers.0.bias", 4)
    page = open_page(f"{server}#/buffers")
    shows(page, "net.layers", "norm", "5")
    shown = cells(page, "net.layers")
    wanted = ("3 buffers", "0 of 2", "48 B")  # the count is that of the buffer that lacks most
    assert (shown["shape"], shown["count"], shown["size"]) == wanted
    assert names(page) == ["head", *(f"net.layers{end}" for end in ("", ".0", ".0.bias", ".0.weight", ".1.weight"))]
    page.locator('.c-name[title="net.layers.0"]').click()
    expect(page.locator(".rows .row")).to_have_count(4)
    page.get_by_role("button", name="Tree").click()
    expect(page.locator(".rows .row")).to_have_count(4)
    assert "net.layers" not in names(page)


def test_keys_walk_the_table(open_page: Open, server: str, http: httpx.Client) -> None:
    create(http, ["a.x", "a.y", "b"])
    page = open_page(f"{server}#/buffers")
    expect(page.locator(".rows .row")).to_have_count(4)
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    page.keyboard.press("/")
    expect(page.get_by_role("searchbox")).to_be_focused()
    page.keyboard.press("ArrowDown")
    grid = page.get_by_role("treegrid")
    expect(grid).to_be_focused()
    page.keyboard.press("ArrowLeft")  # closes the group a
    expect(page.locator(".rows .row")).to_have_count(2)
    page.keyboard.press("ArrowRight")
    expect(page.locator(".rows .row")).to_have_count(4)
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    active = grid.get_attribute("aria-activedescendant")
    assert page.locator(f"#{active} .c-name").get_attribute("title") == "a.y"
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("a.y")
    expect(page.locator("main")).to_be_focused()
    page.keyboard.press("Escape")
    expect(grid).to_be_focused()
    page.keyboard.press("ArrowUp")
    active = grid.get_attribute("aria-activedescendant")
    assert page.locator(f"#{active} .c-name").get_attribute("title") == "a.x"


def test_without_runs_the_page_shows_a_training(open_page: Open, server: str, http: httpx.Client) -> None:
    page = open_page(server)
    lesson = page.locator(".lesson")
    expect(lesson).to_contain_text("No runs yet")
    expect(lesson.get_by_role("link", name="the API")).to_have_attribute("href", "docs")
    python = lesson.get_by_role("group", name="Python").inner_text()
    exec(python, {})
    line = page.get_by_role("row", name="line")
    expect(line).to_contain_text("finished")
    expect(line.locator(".loss")).to_contain_text("falling")
    page.get_by_role("navigation").get_by_role("link", name="Buffers").click()
    expect(page.locator('.c-name[title="line.loss"]')).to_be_visible()
    http.delete("/v1/runs/line").raise_for_status()
    expect(page.locator(".lesson")).to_contain_text("No buffers yet")


def test_a_phone_shows_cards_and_scrolls_only_down(open_page: Open, server: str, http: httpx.Client) -> None:
    create(http, [f"a-very-long-name-of-a-model.layers.{number}.weight" for number in range(30)], **RULES)
    page = open_page(f"{server}#/buffers", PHONE)
    expect(page.locator(".rows .row").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE[0]
    assert page.evaluate("document.querySelector('.grid').scrollWidth") <= PHONE[0]
    page.get_by_label("Sort by").select_option("size")
    expect(page.locator(".rows .row").first).to_be_visible()
