"""The view of one buffer, and what can be done to it."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy
from gradserve_client._cli import output as client
from gradserve_client.models import BufferInfo
from playwright.sync_api import Page, Request, expect

from tests.dashboard.conftest import PHONE, Faults, Open
from tests.serving import delete_buffers

NAME = "layers.0.weight"
RULES = {"shape": [2, 3], "quorum": 2, "contributors": ["rank0", "rank1"], "keep": 3, "deadline_seconds": 900}
GRADIENT: list[list[float]] = [[1, -2, 0], [0.5, 4, 0]]


@pytest.fixture
def buffer(http: httpx.Client) -> str:
    """Return the path of a new buffer with two closed steps and a gradient in the third."""
    delete_buffers(http)
    path = f"/v1/buffers/{NAME}"
    http.put(path, json=RULES).raise_for_status()
    for rank in ("rank0", "rank1", "rank0", "rank1", "rank0"):
        add(http, path, rank)
    return path


def add(http: httpx.Client, path: str, contributor: str) -> None:
    answer = http.post(f"{path}/accumulate", params={"contributor": contributor}, json={"gradient": GRADIENT})
    answer.raise_for_status()


def facts(page: Page, where: str) -> dict[str, str]:
    """Return the names and the texts of a description list."""
    pairs = "(list) => [...list.querySelectorAll('dt')].map((each) => [each.textContent, each.parentElement"
    pairs += ".querySelector('dd').textContent])"
    if where.endswith(".facts"):
        pairs = "(list) => [...list.querySelectorAll('dt')].map((each) => [each.textContent,"
        pairs += " each.nextElementSibling.textContent])"
    return dict(page.locator(where).evaluate(pairs))


def test_it_shows_the_state_and_the_statistics_of_the_api(
    open_page: Open, server: str, http: httpx.Client, buffer: str
) -> None:
    page = open_page(f"{server}#/buffers/{NAME}")
    expect(page.get_by_role("heading", level=1)).to_have_text(NAME)
    expect(page.get_by_role("heading", name="Step 2")).to_be_visible()
    info = BufferInfo.of(http.get(buffer).json())
    running = facts(page, ".running .tiles")
    assert (running["count"], running["weight"]) == (client.count(info), "1")
    assert running["deadline"].startswith("in 1")
    expect(page.locator(".people .in")).to_contain_text("rank0")
    expect(page.locator(".people .soon")).to_contain_text("rank1")
    closed = http.get(f"{buffer}/statistics?step=1").json()
    expect(page.get_by_label("Values of")).to_contain_text("step 1, closed last")
    expect(page.locator(".values dd").first).to_have_text(f"{closed['norm']:.4g}")
    page.get_by_label("Values of").select_option("the running sum")
    known = http.get(f"{buffer}/statistics").json()
    expect(page.locator(".values dd").first).to_have_text(f"{known['norm']:.4g}")
    values = facts(page, ".values")
    assert {name: values[name] for name in ("norm", "min", "max", "mean")} == {
        name: f"{known[name]:.4g}" for name in ("norm", "min", "max", "mean")
    }
    assert math.isclose(known["norm"], np.linalg.norm(GRADIENT), rel_tol=1e-6)
    assert (values["non-finite"], values["zeros"]) == ("0", "33.3%")
    state = facts(page, ".panel .facts")
    assert state["contributors"] == "rank0; up to 1 of each"
    assert (state["missing"], state["keep"]) == ("rank1", "3")


def test_it_shows_closed_steps_charts_and_a_heat_map(open_page: Open, server: str, buffer: str) -> None:
    page = open_page(f"{server}#/buffers/{NAME}")
    rows = page.get_by_role("region", name="Closed steps").locator("tbody tr")
    expect(rows).to_have_count(2)
    assert rows.first.locator("td").all_inner_texts()[:3] == ["1", "2", "2"]
    expect(rows.first).to_contain_text("rank0, rank1")  # from its receipt, which comes after the statistics
    assert rows.first.locator("td").all_inner_texts()[4:6] == ["quorum", "rank0, rank1"]
    expect(page.get_by_role("img", name="Heat map of 2 by 3 cells")).to_be_visible()
    expect(page.get_by_role("img", name="Magnitudes of 4 elements")).to_be_visible()
    expect(page.get_by_role("img", name="Norm of 2 closed steps")).to_be_visible()
    page.locator(".u-over").hover(position={"x": 1, "y": 20})
    expect(page.locator(".reading")).to_have_text(f"step 0   norm {2 * np.linalg.norm(GRADIENT):.4g}")
    page.mouse.move(5, 5)
    expect(page.locator(".reading")).to_contain_text("step 1   norm ")  # the last one


def test_it_follows_the_buffer(open_page: Open, server: str, http: httpx.Client, buffer: str) -> None:
    page = open_page(f"{server}#/buffers/{NAME}")
    expect(page.get_by_role("heading", name="Step 2")).to_be_visible()
    add(http, buffer, "rank1")
    expect(page.get_by_role("heading", name="Step 3")).to_be_visible()
    expect(page.locator(".running dd").first).to_have_text("0 of 2")


def test_it_remembers_the_norms_of_steps_that_are_no_longer_kept(
    open_page: Open, server: str, http: httpx.Client, buffer: str, faults: Faults
) -> None:
    faults.statuses = {404, 409, 410}
    page = open_page(f"{server}#/buffers/{NAME}")
    for closed in range(2, 6):
        expect(page.get_by_role("img", name=f"Norm of {closed} closed steps")).to_be_visible()
        add(http, buffer, "rank1")
        add(http, buffer, "rank0")
    assert http.get(buffer).json()["closed_steps"] == [3, 4, 5]
    http.delete(buffer).raise_for_status()
    http.put(buffer, json=RULES).raise_for_status()
    expect(page.get_by_text("No step has closed yet.")).to_be_visible()
    expect(page.locator(".values dd").first).to_have_text("0")


def test_steps_that_close_fast_are_followed_without_an_error(
    open_page: Open, server: str, http: httpx.Client, faults: Faults
) -> None:
    faults.statuses = {410}  # a slow page may ask for a step that is gone meanwhile: it asks again
    path, stop = f"/v1/buffers/{NAME}", threading.Event()
    delete_buffers(http)
    http.put(path, json={"shape": [2, 3], "quorum": 1, "keep": 1}).raise_for_status()

    def train() -> None:
        with httpx.Client(base_url=server) as other:
            while not stop.wait(0.01):
                add(other, path, "rank0")

    worker = threading.Thread(target=train)
    worker.start()
    try:
        page = open_page(f"{server}#/buffers/{NAME}")
        for _ in range(10):
            page.wait_for_event("response", lambda answer: f"/buffers/{NAME}" in answer.url)
        expect(page.get_by_label("Values of")).to_contain_text("closed last")
        norm = f"{np.linalg.norm(GRADIENT):.4g}"
        expect(page.locator(".values dd").first).to_have_text(norm)
        expect(page.get_by_role("region", name="Closed steps").locator("tbody tr").first).to_contain_text(norm)
        expect(page.get_by_role("alert")).to_have_count(0)
    finally:
        stop.set()
        worker.join()


def test_a_buffer_that_is_gone_says_so(open_page: Open, server: str, faults: Faults) -> None:
    faults.statuses = {404}
    page = open_page(f"{server}#/buffers/nothing")
    expect(page.get_by_role("alert")).to_contain_text("No buffer is called nothing")


def dialog(page: Page, button: str) -> None:
    page.locator(".actions").get_by_role("button", name=button).click()
    expect(page.get_by_role("dialog")).to_be_visible()


def sent(page: Page, method: str) -> list[Request]:
    """Return the list that the page's requests with this method come to."""
    requests: list[Request] = []
    page.on("request", lambda request: requests.append(request) if request.method == method else None)
    return requests


def test_zero_asks_first_and_sends_the_state_that_was_seen(
    open_page: Open, server: str, http: httpx.Client, buffer: str
) -> None:
    page = open_page(f"{server}#/buffers/{NAME}")
    requests = sent(page, "POST")
    tag = http.get(buffer).headers["etag"]
    dialog(page, "Zero")
    expect(page.get_by_role("dialog")).to_contain_text("The sum of 1 gradient in step 2 is discarded")
    expect(page.get_by_role("button", name="Cancel")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.get_by_role("button", name="Zero")).to_be_focused()
    assert http.get(buffer).json()["step"] == 2
    dialog(page, "Zero")
    page.get_by_role("dialog").get_by_role("button", name="Zero").click()
    expect(page.get_by_role("heading", name="Step 3")).to_be_visible()
    (request,) = requests
    headers = request.all_headers()
    assert (headers["if-match"], len(headers["idempotency-key"])) == (tag, 32)
    assert (http.get(buffer).json()["step"], http.get(buffer).json()["count"]) == (3, 0)


def test_a_buffer_that_changed_meanwhile_is_shown_before_it_is_zeroed(
    open_page: Open, server: str, http: httpx.Client, buffer: str, faults: Faults
) -> None:
    faults.statuses = {412}
    page = open_page(f"{server}#/buffers/{NAME}")
    requests = sent(page, "POST")
    dialog(page, "Zero")
    add(http, buffer, "rank1")
    page.get_by_role("dialog").get_by_role("button", name="Zero").click()
    alert = page.get_by_role("dialog").get_by_role("alert")
    expect(alert).to_have_text("The buffer has changed since you looked: step 3, count 0 of 2.")
    assert http.get(buffer).json()["step"] == 3
    page.get_by_role("button", name="Zero anyway").click()
    expect(page.get_by_role("heading", name="Step 4")).to_be_visible()
    keys = [request.all_headers()["idempotency-key"] for request in requests]
    assert len(set(keys)) == 2


def test_a_lost_answer_to_zero_is_asked_for_again_with_its_key(
    open_page: Open, server: str, http: httpx.Client, buffer: str, faults: Faults
) -> None:
    page = open_page(f"{server}#/buffers/{NAME}")
    requests = sent(page, "POST")

    def lose(route: Any) -> None:
        route.fetch()
        route.abort()

    page.route("**/zero", lose, times=1)
    dialog(page, "Zero")
    button = page.get_by_role("dialog").get_by_role("button", name="Zero")
    button.click()
    expect(page.get_by_role("dialog").get_by_role("alert")).to_have_text("The server does not answer")
    button.click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    first, second = (request.all_headers()["idempotency-key"] for request in requests)
    assert first == second
    assert http.get(buffer).json()["step"] == 3
    faults.found = [fault for fault in faults.found if "ERR_FAILED" not in fault]


def test_delete_wants_the_name(open_page: Open, server: str, http: httpx.Client, buffer: str, faults: Faults) -> None:
    faults.statuses = {404}  # the page may read the buffer while it is deleted
    page = open_page(f"{server}#/buffers/{NAME}")
    requests = sent(page, "DELETE")
    dialog(page, "Delete")
    button = page.get_by_role("dialog").get_by_role("button", name="Delete")
    expect(button).to_be_disabled()
    page.keyboard.type("layers.0")
    page.keyboard.press("Enter")
    expect(button).to_be_disabled()
    page.keyboard.type(".weight")
    expect(button).to_be_enabled()
    button.click()
    expect(page.get_by_role("heading", level=1)).to_have_text("No buffers yet")
    assert http.get(buffer).status_code == 404
    assert {"if-match", "idempotency-key"} <= set(requests[0].all_headers())


def test_a_value_is_downloaded(open_page: Open, server: str, buffer: str) -> None:
    page = open_page(f"{server}#/buffers/{NAME}")
    for form, suffix in (("safetensors", "safetensors"), ("JSON", "json")):
        page.get_by_role("button", name="Download step 1").click()
        page.get_by_label("format").select_option(form)
        page.get_by_label("as", exact=True).select_option("mean")
        with page.expect_download() as started:
            page.get_by_role("dialog").get_by_role("button", name="Download").click()
        assert started.value.suggested_filename == f"{NAME}.step-1.{suffix}"
        content = Path(started.value.path()).read_bytes()
        tensors: dict[str, Any] = safetensors.numpy.load(content) if suffix == "safetensors" else json.loads(content)
        value = tensors["value"]
        np.testing.assert_array_equal(value if suffix == "safetensors" else value["data"], GRADIENT)
        expect(page.get_by_role("dialog")).to_have_count(0)


def test_a_click_during_a_reading_is_not_lost(open_page: Open, server: str, buffer: str) -> None:
    page = open_page(f"{server}#/buffers/{NAME}")
    page.get_by_role("button", name="Download step 1").hover()
    page.mouse.down()
    for _ in range(2):  # what the first has read is shown before the second is asked for
        with page.expect_response(lambda answer: answer.request.url.endswith(f"/v1/buffers/{NAME}")):
            pass
    page.mouse.up()
    expect(page.get_by_role("dialog")).to_be_visible()


def test_a_phone_shows_it_without_scrolling_to_the_side(open_page: Open, server: str, buffer: str) -> None:
    page = open_page(f"{server}#/buffers/{NAME}", PHONE)
    expect(page.get_by_role("img", name="Norm of 2 closed steps")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE[0]
