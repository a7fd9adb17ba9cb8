"""No program in JavaScript or Go waits in silence: it names the server and the cause, and a refusal ends it."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.documentation import ROOT, blocks
from tests.examples.test_graphs import FOLDER
from tests.faults.servers import PATIENCE
from tests.ports import free_port
from tests.serving import serving

TRAINERS = {"node": "train.mjs", "go": "train.go"}
STARTS = {"node": ("javascript", "main.mjs"), "go": ("go", "main.go")}

pytestmark = pytest.mark.processes


def command(language: str, path: Path, place: Path) -> list[str]:
    """Return the command that runs a program. Go's is built first: `go run` ends without its program."""
    if shutil.which(language) is None:
        pytest.skip(f"{language} is not installed")
    if language == "node":
        return ["node", str(path)]
    subprocess.run(["go", "build", "-o", place / "program", path], check=True)
    return [str(place / "program")]


def trainer(language: str, place: Path, url: str, rank: int, workers: int) -> list[str]:
    """Return the command of a worker, which trains for two steps."""
    files = [str(FOLDER / name) for name in ("mlp.onnx", "digits.json")]
    return [*command(language, FOLDER / TRAINERS[language], place), url, *files, "r", str(rank), str(workers), "2"]


def start(language: str, place: Path, url: str) -> list[str]:
    """Return the command of the program in docs/start-languages.md."""
    name, file = STARTS[language]
    (block,) = (one for one in blocks((ROOT / "docs/start-languages.md").read_text()) if one.language == name)
    (place / file).write_text(block.text.replace("127.0.0.1:8000", url.removeprefix("http://")))
    return command(language, place / file, place)


@contextmanager
def running(command: list[str], place: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield the running program. A timer ends it, so that no line is waited for without an end."""
    given = {"cwd": place, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **given) as process:  # type: ignore[call-overload]
        timer = threading.Timer(PATIENCE, process.kill)
        timer.start()
        try:
            yield process
        finally:
            timer.cancel()
            process.kill()


def said(process: subprocess.Popen[str]) -> str:
    """Return the first line on stderr."""
    assert process.stderr is not None
    return process.stderr.readline()


@pytest.mark.parametrize("language", TRAINERS)
@pytest.mark.parametrize("program", ["trainer", "start"])
def test_a_program_without_a_server_says_so_and_goes_on(language: str, program: str, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    given = start(language, tmp_path, url) if program == "start" else trainer(language, tmp_path, url, 0, 1)
    with running(given, tmp_path) as process:
        line = said(process)
        assert url.removeprefix("http://") in line
        assert "refused" in line.lower()
        assert process.poll() is None


@pytest.mark.parametrize("language", TRAINERS)
def test_a_worker_says_whom_it_waits_for(language: str, tmp_path: Path) -> None:
    with serving() as url, running(trainer(language, tmp_path, url, 0, 2), tmp_path) as process:
        line = said(process)
        assert url in line
        assert "rank1 is missing" in line
        assert process.poll() is None


@pytest.mark.parametrize("language", TRAINERS)
def test_a_run_for_another_number_of_workers_ends_the_program(language: str, tmp_path: Path) -> None:
    with serving() as url:
        with running(trainer(language, tmp_path, url, 0, 1), tmp_path) as process:
            assert process.wait() == 0
        with running(trainer(language, tmp_path, url, 0, 2), tmp_path) as process:
            assert process.wait() == 1
            line = said(process)
            assert "quorum" in line
            assert said(process) == "", "one line, no trace"


@pytest.mark.parametrize("language", TRAINERS)
def test_a_refusal_ends_the_program_of_the_page(language: str, tmp_path: Path) -> None:
    buffer = {"node": "js.w", "go": "go.w"}[language]
    with serving() as url:
        httpx.put(f"{url}/v1/buffers/{buffer}", json={"shape": [4]}).raise_for_status()
        with running(start(language, tmp_path, url), tmp_path) as process:
            assert process.wait() == 1
            line = said(process)
            assert "buffer_exists" in line
            assert "[4]" in line
            assert said(process) == "", "one line, no trace"
