"""Which server an example uses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving import serving

EXAMPLES = Path(__file__).parents[2] / "examples"

SHOW = """
import sys, _server
_server.RUNNING = sys.argv[1]
with _server.server(sys.argv[2] or None) as url:
    print(url)
"""


def used(running: str, url: str = "", **environment: str) -> str:
    """Return the URL of the server that an example uses."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GRADSERVE_")}
    command = [sys.executable, "-c", SHOW, running, url]
    done = subprocess.run(
        command, cwd=EXAMPLES, env={**inherited, **environment}, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("how", ["option", "environment", "running"])
def test_an_example_uses_the_server_that_is_there(how: str) -> None:
    nothing = "http://127.0.0.1:9"
    with serving() as url:
        if how == "option":
            assert used(nothing, url, GRADSERVE_URL=nothing) == url
        elif how == "environment":
            assert used(nothing, GRADSERVE_URL=url) == url
        else:
            assert used(url) == url


def test_an_example_starts_a_server_if_none_is_there() -> None:
    assert used("http://127.0.0.1:9").startswith("http://127.0.0.1:")
