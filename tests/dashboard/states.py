"""Make docs/images/states.webp again, each state of the page on one sheet: python -m tests.dashboard.states."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx
from matplotlib import get_data_path
from PIL import Image, ImageDraw, ImageFont
from playwright.sync_api import Browser

from tests.api.models import linear
from tests.dashboard.screenshots import IMAGES, chromium
from tests.dashboard.test_runs import age, begin, finish, leave, make, push, step
from tests.serving import serving

COLUMNS, WIDTH, MARGIN, CAPTION = 3, 620, 16, 26
"""Columns of the sheet, and pixels of a picture's width, between pictures, and of a caption."""

QUALITY = 80
"""Of the sheet: small, and its words can be read."""

DESK, PHONE = (1240, 760), (390, 760)

WAITS: dict[str, float] = {"dead": 40, "slow": 5, "old": 900}
"""Seconds that runs have not moved: the sheet need not wait for them."""


class State(NamedTuple):
    """A state: its caption, the address of its view, and how it is seen."""

    caption: str
    address: str
    size: tuple[int, int] = DESK
    scheme: Any = "light"
    click: str | None = None


EMPTY = State("before there are buffers", "#/runs")

STATES = [
    State("all runs: failed, NaN, waiting, without a worker, quiet, running, over", "#/runs", click="1 finished run"),
    State("all runs, dark", "#/runs", scheme="dark"),
    State("all runs on a phone", "#/runs", PHONE),
    State("a run that waits for a worker", "#/runs/dead"),
    State("a run, dark, on a phone", "#/runs/live", PHONE, "dark"),
    State("no such run", "#/runs/none"),
    State("all buffers: what is equal stands in the run's head", "#/buffers"),
    State("only the buffers that wait", "#/buffers?only=waiting"),
    State("only non-finite values, on a phone", "#/buffers?only=nonfinite", PHONE),
    State("a buffer", "#/buffers/live.head.weight"),
    State("a buffer, dark", "#/buffers/dead.head.weight", scheme="dark"),
    State("no such buffer", "#/buffers/none"),
    State("operators by family", "#/operators"),
    State("what is not served", "#/operators", click="Not served"),
    State("an operator", "#/operators/ReluGrad"),
    State("graphs", "#/graphs"),
    State("a graph and its runs", "#/graphs/net"),
    State("the service: charts first", "#/service"),
    State("its settings, folded at first", "#/service?settings=store", scheme="dark", click="GRADSERVE_STORE_BYTES"),
]


def prepare(http: httpx.Client) -> None:
    """Make runs in every state, and a graph with a run."""
    for run in ("live", "dead", "slow", "nan", "old", "done", "failed"):
        make(http, run, keep=20)
        for number in range(8):
            step(http, run, 3 / (1 + number))
    for run in ("dead", "slow"):
        push(http, run, "rank0")
        push(http, run, "rank1")
    push(http, "live", "rank0")
    step(http, "nan", "NaN")
    finish(http, "done")
    finish(http, "failed", "ValueError: no data")
    make(http, "left")
    step(http, "left")
    leave(http, "left", "rank2")
    life = begin(http, "mlp")
    query = {"loss": "MSELoss", "set": "parameters:mlp.p.*", "life": life}
    http.put("/v1/graphs/net", content=linear(), params=query).raise_for_status()
    specs = {"mlp.g.w": {"shape": [2, 1], "life": life}, "mlp.loss": {"shape": [], "life": life}}
    http.post("/v1/buffers/create", json={"buffers": specs}).raise_for_status()


def go_on(http: httpx.Client) -> None:
    for worker in ("rank1", "rank2", "rank0"):
        push(http, "live", worker, 0.3)


def shot(browser: Browser, url: str, state: State, move: Callable[[], None] = lambda: None) -> Image.Image:
    """Return a picture of a state. `move()` lets the run that is live go on meanwhile."""
    size = {"width": state.size[0], "height": state.size[1]}
    page = browser.new_page(viewport=size, color_scheme=state.scheme)  # type: ignore[arg-type]
    age(page, WAITS)
    page.goto(f"{url}/{state.address}")
    for _ in range(3):
        move()
        page.wait_for_timeout(2000)
    if state.click is not None:
        page.get_by_text(state.click).first.click()
        page.wait_for_timeout(3000)
    picture = Image.open(io.BytesIO(page.screenshot()))
    page.close()
    return picture.convert("RGB")


def sheet(pictures: list[tuple[str, Image.Image]]) -> Image.Image:
    """Return pictures with captions, in columns. A phone's picture keeps its size beside the others'."""
    font = ImageFont.truetype(f"{get_data_path()}/fonts/ttf/DejaVuSans.ttf", 14)
    height = WIDTH * DESK[1] // DESK[0]
    rows = -(-len(pictures) // COLUMNS)
    whole = (MARGIN + COLUMNS * (WIDTH + MARGIN), MARGIN + rows * (height + CAPTION + MARGIN))
    result = Image.new("RGB", whole, "#d9dbe0")
    draw = ImageDraw.Draw(result)
    for number, (caption, picture) in enumerate(pictures):
        left = MARGIN + number % COLUMNS * (WIDTH + MARGIN)
        top = MARGIN + number // COLUMNS * (height + CAPTION + MARGIN)
        picture.thumbnail((WIDTH, height), Image.Resampling.LANCZOS)
        draw.text((left, top), caption, "#1a1c1f", font)
        result.paste(picture, (left + (WIDTH - picture.width) // 2, top + CAPTION))
    return result


def main() -> None:
    with chromium() as browser, serving(threads=2) as url, httpx.Client(base_url=url, timeout=30) as http:
        pictures = [(EMPTY.caption, shot(browser, url, EMPTY))]
        prepare(http)
        pictures += [(state.caption, shot(browser, url, state, lambda: go_on(http))) for state in STATES]
    sheet(pictures).save(IMAGES / "states.webp", quality=QUALITY, method=6)


if __name__ == "__main__":
    main()
