"""The server of an example: the server at `--url`, or a new server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gradserve_client import Client

ROOT = Path(__file__).resolve().parents[1]

START_SECONDS = 60.0
STOP_SECONDS = 60.0


@contextmanager
def server(url: str | None) -> Iterator[str]:
    """Yield `url`, else `GRADSERVE_URL`, else the URL of a new server on loopback. It keeps nothing after the end."""
    if url := url or os.environ.get("GRADSERVE_URL"):
        yield url
        return
    port = _free_port()
    with tempfile.TemporaryDirectory() as directory, open(f"{directory}/log", "w+") as log:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("GRADSERVE_")}
        settings = {"GRADSERVE_PORT": str(port), "GRADSERVE_STORE": f"lmdb:{directory}/store"}
        process = subprocess.Popen(
            [sys.executable, "-m", "service", "serve"], cwd=ROOT, env={**inherited, **settings}, stdout=log, stderr=log
        )
        try:
            url = f"http://127.0.0.1:{port}"
            if not _gets_ready(process, url):
                log.seek(0)
                sys.exit(f"The server does not get ready. It logged:\n{log.read()}")
            yield url
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _gets_ready(process: subprocess.Popen[bytes], url: str) -> bool:
    end = time.monotonic() + START_SECONDS
    with Client(url) as client:
        while process.poll() is None and time.monotonic() < end:
            if client.is_ready():
                return True
            time.sleep(0.05)
    return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
