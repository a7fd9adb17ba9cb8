"""What a graph holds is what it says, and reading it claims what it takes, and asks often whether anybody waits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.graphs.held import SHAPES

ROOT = Path(__file__).parent.parent.parent

SMALL_BYTES = 1 << 18
"""What the process may take besides, while it keeps two graphs."""

READING_BYTES = 1 << 23
"""What reading may take beyond its claims: a claim comes after a batch of small ones."""

SECONDS = 1.0
"""Processor time without a claim, at most: the most that a client that has left costs."""


@pytest.mark.parametrize("shape", SHAPES)
def test_a_graph_holds_what_it_says(shape: str) -> None:
    command = [sys.executable, "-m", "tests.graphs.held", shape]
    found = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
    assert found["held"] < 1.5 * found["nbytes"] + SMALL_BYTES
    assert found["nbytes"] < 1.5 * found["held"] + SMALL_BYTES
    assert found["peak"] < found["claimed"] + READING_BYTES
    assert found["gap"] < SECONDS
