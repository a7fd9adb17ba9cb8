"""Each program of the documents that has a run, started again on the same server: it trains, or says why not."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from gradserve_client import Conflict

from tests.documentation import Block
from tests.serving import serving
from tests.test_docs import examples
from tests.trainers import Trainer, is_trainer, last, with_length

PROGRAMS = [
    pytest.param(name, block, output, id=f"{name}-{number}")
    for name, number, block, output in examples()
    if block.language == "python" and re.search(r"run=|\.join\(", block.text)
]

WAY = "Give another run=, or delete this one"

RATES = {r"lr=0\.\d+": "lr=0.02", r"sgd\(0\.\d\)": "sgd(0.02)", r"0\.2 \* mean": "0.02 * mean"}
"""How the programs write their learning rates."""


def test_the_programs_are_found() -> None:
    assert len(PROGRAMS) >= 6


@pytest.mark.processes
@pytest.mark.parametrize(("name", "block", "output"), PROGRAMS)
def test_a_program_runs_twice_and_at_another_rate(name: str, block: Block, output: str, tmp_path: Path) -> None:
    with serving(shared_memory=True) as url:
        code = block.text.replace("127.0.0.1:8000", url.removeprefix("http://"))
        other = code
        for pattern, rate in RATES.items():
            other = re.sub(pattern, rate, other)
        assert outcome(code, name, output, tmp_path) == output.strip()
        for again in (code, other):
            found = outcome(again, name, output, tmp_path)
            assert found == output.strip() or found.startswith(WAY), found


def outcome(code: str, name: str, output: str, directory: Path) -> str:
    """Return what a program prints, or the words of its error."""
    if is_trainer(code):
        return trained(with_length(code, steps=60, rate=0.05), directory, len(output.splitlines()))
    if "import jax" in code:  # absl, which JAX brings, closes pytest's stderr when a later server sets up its log
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
        said = re.findall(r"^gradserve_client\.errors\.Conflict: (.*)$", done.stderr, re.MULTILINE)
        return said[-1] if done.returncode else done.stdout.strip()
    captured = io.StringIO()
    try:
        with contextlib.redirect_stdout(captured):
            exec(compile(code, name, "exec"), {})
    except Conflict as error:
        return error.detail
    return captured.getvalue().strip()


def trained(code: str, directory: Path, workers: int) -> str:
    """Return what all workers print, in the order of their ranks, or the words of an error."""
    started = [Trainer(code, directory, rank, workers) for rank in range(workers)]
    try:
        codes = [trainer.process.wait(100) for trainer in started]
        said = [re.findall(r"Conflict: (.*)", trainer.log.read_text()) for trainer in started]
        return said[0][-1] if any(codes) else "".join(last(trainer.printed()) for trainer in started).strip()
    finally:
        for trainer in started:
            trainer.process.kill()
