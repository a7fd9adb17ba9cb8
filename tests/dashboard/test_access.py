"""Sign-in, scopes and namespaces; the end and the return of the server; and text that tries to be HTML."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from playwright.sync_api import expect

from service.keys import remove
from tests.dashboard.conftest import EVIL, Faults, Open, asked_by, sign_in
from tests.ports import free_port
from tests.serving import serving


@pytest.fixture(autouse=True)
def statuses(faults: Faults) -> None:
    faults.statuses = {401, 403}


def test_a_key_signs_in_for_this_tab_only(open_page: Open, locked: str, keys: dict[str, str]) -> None:
    page = open_page(f"{locked}#/buffers")
    asked = asked_by(page)
    expect(page.get_by_label("API key")).to_be_focused()
    sign_in(page, "gs_wrong")
    expect(page.get_by_role("alert")).to_have_text("This API key is unknown, was removed, or has expired")
    assert page.evaluate("sessionStorage.length") == 0
    sign_in(page, keys["ann"])
    expect(page.locator('.c-name[title="ann.weight"]')).to_be_visible()
    expect(page.locator("#caller")).to_contain_text("ann")
    assert page.evaluate("Object.values(sessionStorage)") == [keys["ann"]]
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
    page.reload()
    expect(page.locator('.c-name[title="ann.weight"]')).to_be_visible()
    assert not [url for url in [*asked, page.url] if "gs_" in url]
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("API key")).to_be_visible()
    assert page.evaluate("sessionStorage.length") == 0


def test_a_key_sees_only_its_namespace(open_page: Open, locked: str, keys: dict[str, str]) -> None:
    page = open_page(f"{locked}#/buffers")
    sign_in(page, keys["bob"])
    expect(page.locator(".rows .row")).to_have_count(1)
    expect(page.locator(".rows .c-name")).to_have_attribute("title", "bob.weight")
    expect(page.locator("#caller")).to_contain_text("namespace bob")


def test_a_key_without_scope_learns_which_scope_it_lacks(open_page: Open, locked: str, keys: dict[str, str]) -> None:
    page = open_page(f"{locked}#/buffers")
    sign_in(page, keys["ops"])
    expect(page.get_by_role("alert")).to_contain_text("the request needs buffers:read")


def test_a_reader_gets_no_buttons_that_change(open_page: Open, locked: str, keys: dict[str, str]) -> None:
    page = open_page(f"{locked}#/buffers/ann.weight")
    sign_in(page, keys["reader"])
    expect(page.get_by_role("button", name="Download")).to_be_visible()
    expect(page.locator(".actions")).to_contain_text("Read only: this key lacks buffers:write")
    assert page.get_by_role("button", name="Zero").count() == page.get_by_role("button", name="Delete").count() == 0


def test_a_key_that_is_removed_leads_back_to_the_form(
    open_page: Open, locked: str, key_file: Path, keys: dict[str, str]
) -> None:
    page = open_page(f"{locked}#/buffers")
    sign_in(page, keys["gone"])
    expect(page.locator(".rows .row")).to_have_count(1)
    remove(key_file, "gone")
    expect(page.get_by_label("API key")).to_be_visible()
    expect(page.get_by_role("alert")).to_contain_text("removed")


def test_the_page_says_that_the_server_is_gone_and_returns_with_it(open_page: Open, faults: Faults) -> None:
    port = free_port()
    with serving(port=port) as url:
        httpx.put(f"{url}/v1/buffers/a", json={"shape": [2]}).raise_for_status()
        page = open_page(f"{url}#/buffers")
        expect(page.locator(".rows .row")).to_have_count(1)
    expect(page.locator("#banner")).to_contain_text("The server does not answer")
    expect(page.locator(".rows .row")).to_have_count(1)
    with serving(port=port) as url:
        httpx.put(f"{url}/v1/buffers/b", json={"shape": [2]}).raise_for_status()
        expect(page.locator("#banner")).to_be_hidden(timeout=15_000)
        expect(page.locator('.c-name[title="b"]')).to_be_visible()
    page.close()
    faults.found = [fault for fault in faults.found if "net::ERR_" not in fault]


def test_no_text_of_a_client_becomes_html(open_page: Open, server: str, http: httpx.Client, faults: Faults) -> None:
    faults.statuses = {404, 422}
    rules = {"shape": [2], "contributors": [EVIL, f"{EVIL}2"], "quorum": 2, "keep": 3}
    http.put("/v1/buffers/evil", json=rules).raise_for_status()
    for name in (EVIL, f"{EVIL}2", EVIL):
        added = http.post("/v1/buffers/evil/accumulate", params={"contributor": name}, json={"gradient": [1, 2]})
        added.raise_for_status()
    page = open_page(f"{server}#/buffers")
    expect(page.locator(".rows .c-missing").first).to_contain_text(f"{EVIL}2 for ")
    page.goto(f"{server}#/buffers/evil")
    expect(page.locator(".people .in")).to_contain_text(EVIL)
    expect(page.get_by_role("region", name="Closed steps")).to_contain_text(f"{EVIL}, {EVIL}2")
    page.goto(f"{server}#/buffers/{EVIL}")
    expect(page.get_by_role("alert")).to_contain_text("name")
    page.goto(f"{server}#/buffers?search={EVIL}")
    expect(page.get_by_role("searchbox")).to_have_value(EVIL)
    page.goto(f"{server}#/runs/{EVIL}")
    expect(page.get_by_role("alert")).to_contain_text(f"No run is called {EVIL}")
    page.goto(f"{server}#/{EVIL}")
    expect(page.get_by_role("row", name="evil")).to_contain_text(EVIL)
    assert page.locator("img[src=x], main script").count() == 0
    assert "hacked" not in page.title().split("'")[0]


def test_no_text_of_the_server_becomes_html(open_page: Open, server: str, faults: Faults) -> None:
    faults.statuses = {500}
    page = open_page(server)
    caller = {"name": EVIL, "namespace": EVIL, "scopes": [], "keys": True}
    page.route("**/v1/caller", lambda route: route.fulfill(json=caller))
    problem = {"title": EVIL, "status": 500, "detail": EVIL, "code": EVIL}
    page.route("**/v1/buffers?**", lambda route: route.fulfill(status=500, json=problem))
    page.reload()
    expect(page.locator("#caller")).to_contain_text(EVIL)
    expect(page.get_by_role("alert")).to_contain_text(EVIL)
    assert page.locator("img[src=x], main script").count() == 0
