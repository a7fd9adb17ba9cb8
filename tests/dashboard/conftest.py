"""A browser, Debian's Chromium, and pages of it that report what no page may do."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request, sync_playwright

from service.keys import add
from tests.serving import serving

AXE = Path(__file__).parent / "vendor" / "axe.min.js"

DESK, PHONE = (1360, 800), (360, 740)
"""Sizes of a window, in pixels."""

EVIL = "<img src=x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script>"
"""Text of a client that runs as a program if the page takes it for HTML."""

LOOKS = pytest.mark.parametrize(("scheme", "size"), [("light", DESK), ("dark", PHONE)], ids=["light", "dark"])

_HURRY = "{ const wait = setTimeout; window.setTimeout = (work, ms, ...given) => wait(work, ms / 8, ...given); }"
"""Shorten the page's pauses: it asks the server every quarter of a second in place of every two seconds."""


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Yield a browser. The package shares one, and no other: its event loop would be in the way of other tests."""
    chromium = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "chromium-browser"))), None)
    if chromium is None:
        pytest.skip("needs Chromium: apt-get install chromium-headless-shell")
    options = ["--renderer-process-limit=1"]  # the windows of a context share a process
    if os.geteuid() == 0:
        options.append("--no-sandbox")  # Chromium's sandbox refuses root
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=options)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def context(browser: Browser) -> BrowserContext:
    """Return what windows share. Its blank window keeps their process: a new one takes as long as a page."""
    context = browser.new_context()
    context.new_page()
    return context


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving(threads=2) as url:
        yield url


@pytest.fixture(scope="module")
def http(server: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server, timeout=30) as client:
        yield client


@pytest.fixture(scope="package")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.json"


@pytest.fixture(scope="package")
def keys(key_file: Path) -> dict[str, str]:
    """Return keys by their names."""
    both = ["buffers:read", "buffers:write"]
    return {
        "ann": add(key_file, "ann", both, "ann"),
        "bob": add(key_file, "bob", both, "bob"),
        "gone": add(key_file, "gone", both, "ann"),
        "reader": add(key_file, "reader", ["buffers:read"], "ann"),
        "visitor": add(key_file, "visitor", ["buffers:read", "ops"]),
        "ops": add(key_file, "ops", ["ops"], "ann"),
        "admin": add(key_file, "admin", ["admin"]),
    }


@pytest.fixture(scope="package")
def locked(key_file: Path, keys: dict[str, str]) -> Iterator[str]:
    """Yield the URL of a server that wants these keys. The buffers of Ann and of Bob have their names."""
    with serving(keys=key_file, threads=2) as url:
        for name in ("ann", "bob"):
            head = {"Authorization": f"Bearer {keys[name]}"}
            httpx.put(f"{url}/v1/buffers/{name}.weight", headers=head, json={"shape": [2]}).raise_for_status()
        yield url


def sign_in(page: Page, key: str) -> None:
    page.get_by_label("API key").fill(key)
    page.keyboard.press("Enter")


def asked_by(page: Page) -> list[str]:
    """Return the list that the URLs of the page's later requests come to."""
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    return asked


class Faults:
    """What a page did that none may do: errors, requests to other hosts, and violations of its policy."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.statuses: set[int] = set()
        """The statuses of answers that the test expects: Chromium calls each an error."""

    def watch(self, page: Page) -> None:
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.found.append(f"{error.name}: {error.message} {error.stack}"))
        page.on("request", lambda request: self._asked(page, request))

    def _said(self, message: ConsoleMessage) -> None:
        expected = any(f"status of {status}" in message.text for status in self.statuses)
        if message.type in ("error", "warning") and not expected:
            self.found.append(f"{message.type}: {message.text}")

    def _asked(self, page: Page, request: Request) -> None:
        asked, shown = urlsplit(request.url), urlsplit(page.url)
        if asked.scheme in ("http", "https") and shown.netloc and asked.netloc != shown.netloc:
            self.found.append(f"a request to {request.url}")


Open = Callable[..., Page]


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def open_page(browser: Browser, context: BrowserContext, faults: Faults) -> Iterator[Open]:
    """Yield a function that opens an address in a new window. The test fails if a page did what none may do.

    A window with further options has a context of its own.
    """
    pages = []

    def opened(url: str, size: tuple[int, int] = DESK, color_scheme: Any = "light", **options: Any) -> Page:
        page = browser.new_page(**options) if options else context.new_page()
        pages.append(page)
        page.set_viewport_size({"width": size[0], "height": size[1]})
        page.emulate_media(color_scheme=color_scheme)
        page.add_init_script(_HURRY)
        page.set_default_timeout(15_000)
        faults.watch(page)
        page.goto(url)
        return page

    yield opened
    for page in pages:
        if not page.is_closed():
            page.evaluate("localStorage.clear()")  # windows share it; each has its own sessionStorage
            page.close()
    assert faults.found == []


def findings(page: Page) -> list[str]:
    """Return the findings of axe."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE.read_text())  # by the debugger, past the page's policy
    wanted = "found => found.violations.map(each => `${each.id}: ${each.help}: ${each.nodes[0].html}`)"
    found: list[str] = page.evaluate(f"axe.run({{ resultTypes: ['violations'] }}).then({wanted})")
    return found
