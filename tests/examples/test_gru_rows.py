"""The example that trains a GRU through the service, run as a user runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import httpx

from tests.serving import serving

ROOT = Path(__file__).parents[2]


def run(*options: str) -> str:
    """Run the example and return its output."""
    command = [sys.executable, "-W", "error", "examples/gru_rows.py", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_learns_the_digits_alike_with_any_server() -> None:
    printed = run("--epochs", "7")
    accuracies = [float(one) for one in re.findall(r"accuracy (.*)%", printed)]
    assert len(accuracies) == 7
    assert accuracies[0] < 80
    assert accuracies[-1] > 90
    with serving() as url:
        again = run("--epochs", "1", "--url", url)
        asked = httpx.get(f"{url}/v2/models/GRUGrad/stats").json()["model_stats"][0]["inference_count"]
    assert again == printed[: printed.index("\n") + 1]
    assert asked == 23  # batches
