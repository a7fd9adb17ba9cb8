"""Which server an example uses."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.examples.running import EXAMPLES
from tests.serving import serving

SHOW = """
import sys, _server
with _server.server(sys.argv[1] or None) as url:
    print(url)
"""


def used(url: str = "", **environment: str) -> str:
    """Return the URL of the server that an example uses."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GRADSERVE_")}
    command = [sys.executable, "-c", SHOW, url]
    done = subprocess.run(
        command, cwd=EXAMPLES, env={**inherited, **environment}, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_an_example_uses_the_named_server() -> None:
    with serving() as url:
        assert used(url, GRADSERVE_URL="http://127.0.0.1:9") == url
        assert used(GRADSERVE_URL=url) == url


def test_an_example_starts_a_server_if_none_is_named() -> None:
    assert used().startswith("http://127.0.0.1:")
