"""Make the screenshots of docs/images again, of real trainings: python -m tests.dashboard.screenshots [NAME ...].

Three run: one misses a worker and waits, one misses a worker and goes on, and one is whole.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import httpx
import numpy as np
from PIL import Image, ImageColor
from playwright.sync_api import Browser, Page, sync_playwright

from tests.serving import serving, wait_until

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
EXAMPLE = ("examples/digits_data_parallel.py", "--steps", "1000")
TRAINING = Path(__file__).with_name("train.py")

WORKERS = 3
"""The workers of each training but the example."""

WAITING = {"RUN": "exp1", "DEADLINE": "120"}
GOING_ON = {"RUN": "exp2"}
"""The trainings that lose a worker."""

SECONDS_BEFORE = 20
"""Seconds that the views are open before workers are killed, so that the charts have a past."""

SECONDS_AFTER = 45
"""Seconds from then to the screenshots: a step that does not move is amber after 30."""

COLOURS = 240
"""Colours of a picture at most: a palette has 256."""


class Shot(NamedTuple):
    """A screenshot: the address of its view, and how it is seen."""

    address: str
    scheme: Literal["light", "dark"] = "light"
    size: tuple[int, int] = (1360, 800)


SHOTS = {
    "runs": Shot("#/runs", size=(1360, 420)),
    "run": Shot("#/runs/exp1", size=(1360, 900)),
    "buffers": Shot("#/buffers"),
    "buffer": Shot("#/buffers/{name}", size=(1360, 1050)),
    "operator": Shot("#/operators/ReluGrad", size=(1360, 900)),
    "service": Shot("#/service", "dark", (1360, 1050)),
}


@contextmanager
def chromium() -> Iterator[Browser]:
    """Yield Debian's Chromium."""
    found = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium"))), None)
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=options)
        yield browser
        browser.close()


def started(url: str, folder: Path, rank: int, out: IO[str], **variables: str) -> subprocess.Popen[bytes]:
    """Start a worker of a training, which keeps its checkpoint in the folder."""
    given = {"GRADSERVE_URL": url, "RANK": str(rank), "WORLD_SIZE": str(WORKERS), **variables}
    return subprocess.Popen([sys.executable, TRAINING], cwd=folder, env={**os.environ, **given}, stdout=out)


@contextmanager
def training(url: str, **variables: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Yield the workers of a training. They are killed in the end."""
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as out:
        workers = [started(url, Path(folder), rank, out, **variables) for rank in range(WORKERS)]
        try:
            yield workers
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()


@contextmanager
def example(url: str) -> Iterator[None]:
    """Let the example train."""
    process = subprocess.Popen([sys.executable, *EXAMPLE, "--url", url], cwd=ROOT, start_new_session=True)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)  # its workers, too, or they keep their connections open
        process.wait()


def shown(browser: Browser, url: str, shot: Shot) -> Page:
    """Return an open view."""
    page = browser.new_page(viewport={"width": shot.size[0], "height": shot.size[1]}, color_scheme=shot.scheme)
    names = [one["name"] for one in httpx.get(f"{url}/v1/buffers").json()["buffers"]]
    page.goto(f"{url}/{shot.address.format(name=next(each for each in names if each.endswith('W1')))}")
    return page


def pixels(page: Page) -> Image.Image:
    """Return what is seen of a page."""
    return Image.open(io.BytesIO(page.screenshot())).convert("RGB")


def flattened(pictures: Sequence[Image.Image], colours: Iterable[str] = ()) -> list[Image.Image]:
    """Return the pictures in few colours, alike in all: these, and those that most pixels have."""
    counts: Counter[Any] = Counter()
    for picture in pictures:
        counts.update({colour: count for count, colour in picture.getcolors(picture.width * picture.height) or ()})
    common = [colour for colour, _ in counts.most_common(COLOURS)]
    palette = np.array([*map(ImageColor.getrgb, colours), *common])
    return [nearest(picture, palette) for picture in pictures]


def nearest(picture: Image.Image, palette: np.ndarray[Any, Any]) -> Image.Image:
    """Return the picture in the nearest colours of the palette. Pillow's own search would miss exact colours."""
    bits = np.array([16, 8, 0])
    pixels = np.asarray(picture, int) @ (1 << bits)
    found, places = np.unique(pixels, return_inverse=True)
    channels = found[:, np.newaxis] >> bits & 255
    numbers = ((channels[:, np.newaxis] - palette) ** 2).sum(axis=2).argmin(axis=1)
    drawn = Image.fromarray(numbers[places].reshape(pixels.shape).astype(np.uint8))
    drawn.putpalette(palette.astype(np.uint8).tobytes())
    return drawn


def steps(url: str) -> list[int]:
    """Return the steps of all losses."""
    return [one["step"] for one in httpx.get(f"{url}/v1/buffers").json()["buffers"] if one["name"].endswith("loss")]


def main() -> None:
    chosen = sys.argv[1:] or [*SHOTS]
    with serving() as url, chromium() as browser, training(url, **WAITING) as waiting:
        wait_until(lambda: any(steps(url)))
        with training(url, **GOING_ON) as going_on, example(url):
            wait_until(lambda: [*map(bool, steps(url))] == [True] * 3)
            pages = {name: shown(browser, url, SHOTS[name]) for name in chosen}
            time.sleep(SECONDS_BEFORE)
            waiting[2].kill()
            going_on[1].kill()
            time.sleep(SECONDS_AFTER)
            for name, page in pages.items():
                (picture,) = flattened([pixels(page)])
                picture.save(IMAGES / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
