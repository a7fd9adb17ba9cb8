"""Each view in light and dark, judged by axe."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from playwright.sync_api import expect

from tests.dashboard.conftest import LOOKS, Faults, Open, findings, sign_in
from tests.serving import serving, wait_until


@pytest.fixture(scope="module")
def full(server: str, http: httpx.Client) -> str:
    """Return the URL of a server with buffers in every state: late, with closed steps, with infinities."""
    rules = {"shape": [2, 2], "quorum": 2, "contributors": ["rank0", "rank1"], "keep": 2}
    http.put("/v1/buffers/net.late", json={**rules, "min_count": 2, "deadline_seconds": 0.01}).raise_for_status()
    http.put("/v1/buffers/net.ill", json=rules).raise_for_status()
    for name, rank in [("late", 0), ("ill", 0), ("ill", 1), ("ill", 0)]:
        path, body = f"/v1/buffers/net.{name}/accumulate", {"gradient": [[1, "Infinity"], [2, 0]]}
        http.post(path, params={"contributor": f"rank{rank}"}, json=body).raise_for_status()
    staged: dict[str, Any] = {"push": "step-17", "part": 1, "parts": 3, "contributor": "rank7"}
    http.post("/v1/buffers/accumulate", params=staged, json={"net.late": 1}).raise_for_status()
    return server


@LOOKS
def test_the_buffers(open_page: Open, full: str, scheme: str, size: tuple[int, int]) -> None:
    page = open_page(f"{full}#/buffers", size, color_scheme=scheme)
    expect(page.locator(".rows .c-nonfinite.bad").first).to_be_visible()
    expect(page.locator(".rows .c-missing.late").first).to_be_visible()
    page.get_by_text("Staged: 1 push in parts").click()
    expect(page.get_by_role("cell", name="step-17")).to_be_visible()
    page.get_by_role("treegrid").focus()
    assert findings(page) == []


@LOOKS
def test_a_buffer_and_a_question(open_page: Open, full: str, scheme: str, size: tuple[int, int]) -> None:
    page = open_page("about:blank", size, color_scheme=scheme)
    for name in ("net.ill", "net.late"):
        page.goto(f"{full}#/buffers/{name}")
        expect(page.get_by_role("heading", level=1)).to_have_text(name)
        expect(page.get_by_role("img", name="Heat map")).to_be_visible()
        assert findings(page) == [], name
    page.get_by_role("button", name="Delete").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    assert findings(page) == []


@LOOKS
def test_the_sign_in_form(open_page: Open, locked: str, faults: Faults, scheme: str, size: tuple[int, int]) -> None:
    faults.statuses = {401}
    page = open_page(locked, size, color_scheme=scheme)
    sign_in(page, "gs_wrong")
    expect(page.get_by_role("alert")).to_contain_text("unknown")
    assert findings(page) == []


@LOOKS
def test_the_lesson_before_there_are_buffers(open_page: Open, scheme: str, size: tuple[int, int]) -> None:
    with serving() as url:
        page = open_page(url, size, color_scheme=scheme)
        expect(page.locator(".lesson")).to_be_visible()
        assert findings(page) == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.close()


def test_the_button_for_the_theme_has_three_states_and_is_remembered(open_page: Open, full: str) -> None:
    page = open_page(full, color_scheme="dark")
    count = "window.drawn = 0; addEventListener('theme', () => (window.drawn += 1))"  # as the charts listen
    page.evaluate(count)
    button = page.get_by_role("button", name="Theme: ")

    def is_dark() -> bool:
        ground: str = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        return int(ground.split("(")[1].split(",")[0]) < 128

    for name, dark in [("system", True), ("light", False), ("dark", True), ("system", True), ("light", False)]:
        expect(button).to_have_accessible_name(f"Theme: {name}")
        expect(button).to_have_text(name)
        assert is_dark() == dark
        button.press("Enter")
    assert page.evaluate("drawn") == 5
    page.reload()
    page.evaluate(count)
    expect(button).to_have_accessible_name("Theme: dark")
    button.click()
    page.emulate_media(color_scheme="light")
    wait_until(lambda: page.evaluate("drawn") == 2)  # the reader's change, and then the system's
    assert not is_dark()
