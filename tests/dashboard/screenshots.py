"""Make the screenshots of docs/images again, of a real training: python -m tests.dashboard.screenshots [NAME ...]."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import httpx
from playwright.sync_api import Browser, sync_playwright

from tests.serving import serving

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
TRAINING = ("examples/digits_data_parallel.py", "--epochs", "200")

SECONDS_BEFORE = 8
"""Seconds of training before the first screenshot, so that the charts have a past."""

SECONDS_SHOWN = 5
"""Seconds that a view is open before its screenshot: it reads the server every two seconds."""


class Shot(NamedTuple):
    """A screenshot: the address of its view, and how it is seen."""

    address: str
    scheme: Literal["light", "dark"] = "light"
    size: tuple[int, int] = (1360, 800)


SHOTS = {
    "runs": Shot("#/runs", size=(1360, 420)),
    "run": Shot("#/runs/{run}", size=(1360, 900)),
    "buffers": Shot("#/buffers"),
    "buffer": Shot("#/buffers/{name}", size=(1360, 1050)),
    "operator": Shot("#/operators/ReluGrad", size=(1360, 900)),
    "service": Shot("#/service", "dark", (1360, 1050)),
}


@contextmanager
def chromium() -> Iterator[Browser]:
    """Yield Debian's Chromium."""
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=options)
        yield browser
        browser.close()


def take(browser: Browser, url: str, name: str, shot: Shot) -> None:
    """Take a screenshot of a view."""
    page = browser.new_page(viewport={"width": shot.size[0], "height": shot.size[1]}, color_scheme=shot.scheme)
    buffers = [one["name"] for one in httpx.get(f"{url}/v1/buffers").json()["buffers"]]
    shown = next(each for each in buffers if each.endswith("W1"))
    page.goto(f"{url}/{shot.address.format(name=shown, run=shown.partition('.')[0])}")
    page.wait_for_timeout(SECONDS_SHOWN * 1000)
    IMAGES.mkdir(exist_ok=True)
    page.screenshot(path=IMAGES / f"{name}.png")
    page.close()


def main() -> None:
    chosen = sys.argv[1:] or [*SHOTS]
    with serving() as url, chromium() as browser:
        training = subprocess.Popen([sys.executable, *TRAINING, "--url", url], cwd=ROOT, start_new_session=True)
        time.sleep(SECONDS_BEFORE)
        for name in chosen:
            take(browser, url, name, SHOTS[name])
        os.killpg(training.pid, signal.SIGTERM)  # its workers, too, or they keep their connections open
        training.wait()


if __name__ == "__main__":
    main()
