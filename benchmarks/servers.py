"""Servers to measure: processes on free ports of the loopback interface, started and stopped by their handles."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

Connection = http.client.HTTPConnection

ROOT = Path(__file__).parents[1]
START_SECONDS = 60.0
STOP_SECONDS = 60.0


@contextmanager
def serving(command: list[str], port_variable: str, ready: str) -> Iterator[Connection]:
    """A connection to the server `python -m command`, told its port by an environment variable.

    It begins when the path `ready` answers 200, and at its end the server is stopped. Where the server does not get
    ready, this exits with what it logged.
    """
    port = _free_port()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env={**os.environ, port_variable: str(port)},
            stdout=subprocess.DEVNULL,  # a line per request
            stderr=log,
        )
        connection = Connection("127.0.0.1", port, timeout=60)
        try:
            if not _gets_ready(process, connection, ready):
                log.seek(0)
                sys.exit(f"{' '.join(command)} does not get ready. It logged:\n{log.read().decode()}")
            yield connection
        finally:
            connection.close()
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _gets_ready(process: subprocess.Popen[bytes], connection: Connection, path: str) -> bool:
    end = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < end:
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            response.read()
            if response.status == 200:
                return True
        except (OSError, http.client.HTTPException):
            connection.close()
        time.sleep(0.05)
    return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
