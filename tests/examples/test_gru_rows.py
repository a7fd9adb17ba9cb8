"""The example that trains a GRU through the service, run as a user runs it."""

from __future__ import annotations

import re

import httpx

from tests.examples.running import run
from tests.serving import serving


def printed_by(*options: str) -> str:
    """Run the example and return its output."""
    done = run("gru_rows", *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_learns_the_digits_alike_with_any_server() -> None:
    printed = printed_by("--steps", "7")
    accuracies = [float(one) for one in re.findall(r"accuracy (.*)%", printed)]
    assert len(accuracies) == 7
    assert accuracies[0] < 80
    assert accuracies[-1] > 90
    with serving() as url:
        again = printed_by("--steps", "1", "--url", url)
        asked = httpx.get(f"{url}/v2/models/GRUGrad/stats").json()["model_stats"][0]["inference_count"]
    assert again == printed[: printed.index("\n") + 1]
    assert asked == 23  # batches
