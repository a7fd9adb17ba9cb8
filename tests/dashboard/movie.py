"""Make docs/images/training.gif again, minutes of a real training in ten seconds: python -m tests.dashboard.movie.

Three processes run examples/train.py. One is killed, and started again once the others go on without it. Above is the
page in a browser. Below is a terminal with what is typed and what the processes print.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib import get_data_path
from PIL import Image, ImageDraw, ImageFont
from playwright.sync_api import Page, ViewportSize

from tests.dashboard.screenshots import IMAGES, ROOT, WORKERS, chromium, flattened, pixels
from tests.serving import serving, wait_until

PICTURE = IMAGES / "training.gif"
START, RUN = "#/runs", "#/runs/line"

COMMAND = f"RANK={{}} WORLD_SIZE={WORKERS} python train.py"

WINDOW = ViewportSize(width=900, height=535)
"""The browser's window in CSS pixels, about as wide as a README on GitHub."""

SCALE = 1.5
"""Pixels of the picture for each CSS pixel."""

FRAME_MILLISECONDS, LAST_MILLISECONDS = 200, 1400

TYPED = 9
"""Characters that are typed from one frame to the next."""

ROW, MARGIN = round(18 * SCALE), round(12 * SCALE)
"""Pixels from one line of the terminal to the next, and around a pane."""

ROWS = 5
"""Lines of a worker's pane below its title."""

PROMPT, KILLED = "$ ", "Killed"
NIGHT, EDGE, DIM, INK = "#14181f", "#333b46", "#8b949e", "#e1e4e8"
WORDS = {PROMPT: "#7ee2a8", KILLED: "#ff8f85", f"{WORKERS - 1} of {WORKERS} in": "#f0b84c"}
"""The words of the terminal that have a colour."""

FONT, BOLD = (
    ImageFont.truetype(Path(get_data_path(), "fonts", "ttf", f"DejaVuSansMono{kind}.ttf"), round(12.5 * SCALE))
    for kind in ("", "-Bold")
)


class Pane:
    """A part of a terminal: what is typed there, and what a process prints."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.write(PROMPT)

    def write(self, text: str) -> None:
        with self._path.open("a") as file:
            file.write(text)

    def text(self) -> str:
        return self._path.read_text()

    def draw(self, draw: ImageDraw.ImageDraw, left: int, top: int, rows: int) -> None:
        """Draw the last lines."""
        for number, line in enumerate(self.text().removesuffix("\n").split("\n")[-rows:]):
            font, right = BOLD if line.startswith(PROMPT) else FONT, float(left)
            for part in re.split(f"({'|'.join(map(re.escape, WORDS))})", line):
                draw.text((right, top + number * ROW), part, WORDS.get(part, INK), font)
                right += font.getlength(part)


class Worker(Pane):
    """A pane with a worker of the training."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(folder / f"out{rank}")
        self._folder, self._rank = folder, rank
        self.command = COMMAND.format(rank)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        given = {"RANK": str(self._rank), "WORLD_SIZE": str(WORKERS), "OMP_NUM_THREADS": "1"}
        command, environment = [sys.executable, "train.py"], {**os.environ, **given}
        with self._path.open("a") as out:
            self.process = subprocess.Popen(command, cwd=self._folder, env=environment, stdout=out)

    def wait(self) -> None:
        """Return when the worker has ended a step since its start."""
        wait_until(lambda: "step" in self.text().rpartition(PROMPT)[2])

    def kill(self) -> None:
        """Kill -9 the process, and say what the shell says then."""
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None
            self.write(f"{KILLED}\n{PROMPT}")

    def draw(self, draw: ImageDraw.ImageDraw, left: int, top: int, rows: int) -> None:
        process = f"  process {self.process.pid}" if self.process else ""
        draw.text((left, top), f"rank{self._rank}{process}", DIM, FONT)
        super().draw(draw, left, top + ROW, rows - 1)


class Film:
    """The frames of the picture, one after the other: above the page, below the terminal."""

    def __init__(self, page: Page, shell: Pane, workers: Sequence[Worker]) -> None:
        self._page, self._shell, self._workers = page, shell, workers
        self._frames: list[Image.Image] = []

    def shoot(self) -> None:
        """Add a frame of what is seen now."""
        page = pixels(self._page)
        width, top = page.width, page.height + MARGIN
        bottom = top + (ROWS + 1) * ROW + MARGIN
        frame = Image.new("RGB", (width, bottom + ROW + MARGIN), NIGHT)
        frame.paste(page)
        draw = ImageDraw.Draw(frame)
        for place, worker in enumerate(self._workers):
            worker.draw(draw, MARGIN + place * width // WORKERS, top, ROWS + 1)
        draw.line([(0, bottom - MARGIN // 2), (width, bottom - MARGIN // 2)], EDGE)
        self._shell.draw(draw, MARGIN, bottom, 1)
        self._frames.append(frame)

    def type(self, lines: Mapping[Pane, str]) -> None:
        """Type a line into each of these panes, in all of them at once."""
        for start in range(0, max(map(len, lines.values())), TYPED):
            for pane, line in lines.items():
                pane.write(line[start : start + TYPED])
            self.shoot()
        for pane in lines:
            pane.write("\n")

    def watch(self, frames: int, seconds: float) -> None:
        """Add frames, this long after each other."""
        begun = time.monotonic()
        for number in range(1, frames + 1):
            self.shoot()
            self._page.wait_for_timeout(max(0, begun + number * seconds - time.monotonic()) * 1000)

    def save(self, path: Path) -> None:
        first, *others = flattened(self._frames, WORDS.values())
        durations = [FRAME_MILLISECONDS] * len(others) + [LAST_MILLISECONDS]
        first.save(path, save_all=True, append_images=others, duration=durations, loop=0)


def play(film: Film, page: Page, url: str, shell: Pane, workers: Sequence[Worker]) -> None:
    """Let three workers train, kill one, and start it again. The times while processes start are left out."""
    film.type({worker: worker.command for worker in workers})
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.wait()
    page.goto(f"{url}/{RUN}")
    film.watch(13, 1)
    lost = workers[-1]
    assert lost.process
    film.type({shell: f"kill -9 {lost.process.pid}"})
    lost.kill()
    film.watch(15, 9.2)  # two minutes until the deadline, and some seconds behind it
    film.type({lost: lost.command})
    lost.start()
    lost.wait()
    film.watch(13, 1)


def main() -> None:
    with serving() as url, chromium() as browser, tempfile.TemporaryDirectory() as folder:
        page = browser.new_page(viewport=WINDOW, device_scale_factor=SCALE, color_scheme="light")
        page.goto(f"{url}/{START}")
        page.wait_for_timeout(1000)
        program = (ROOT / "examples" / "train.py").read_text()
        Path(folder, "train.py").write_text(program.replace("http://127.0.0.1:8000", url))
        shell, workers = Pane(Path(folder, "shell")), [Worker(Path(folder), rank) for rank in range(WORKERS)]
        film = Film(page, shell, workers)
        try:
            play(film, page, url, shell, workers)
        finally:
            for worker in workers:
                worker.kill()
        film.save(PICTURE)


if __name__ == "__main__":
    main()
