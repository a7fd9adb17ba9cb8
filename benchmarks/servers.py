"""Servers to measure: processes on free ports of the loopback interface."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeAlias

Connection = http.client.HTTPConnection

ROOT = Path(__file__).parents[1]
START_SECONDS = 60.0
STOP_SECONDS = 60.0


Start: TypeAlias = Callable[[int], tuple[list[str], dict[str, str]]]
"""A function that returns command and environment of a server for a port."""


def gradserve(**settings: object) -> Start:
    """Return the start of our server with these settings. The default store is in memory."""
    given = {f"GRADSERVE_{name.upper()}": str(value) for name, value in {"store": "memory:", **settings}.items()}
    return lambda port: (
        [sys.executable, "-m", "service", "serve"],
        {**os.environ, **given, "GRADSERVE_PORT": str(port)},
    )


def uvicorn(*arguments: str) -> Start:
    """Return the start of an application under uvicorn."""
    return lambda port: ([sys.executable, "-m", "uvicorn", *arguments], {**os.environ, "UVICORN_PORT": str(port)})


class Server(NamedTuple):
    """A running server and a connection to that server."""

    connection: Connection
    url: str
    pid: int


@contextmanager
def serving(start: Start, ready: str) -> Iterator[Server]:
    """Yield a server once its path `ready` answers 200, and stop the server at the end.

    Exit with the server's log if the server does not get ready.
    """
    port = _free_port()
    command, environment = start(port)
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,  # one line per request
            stderr=log,
        )
        connection = Connection("127.0.0.1", port, timeout=60)
        try:
            if not _gets_ready(process, connection, ready):
                log.seek(0)
                sys.exit(f"{' '.join(command)} does not get ready. It logged:\n{log.read().decode()}")
            yield Server(connection, f"http://127.0.0.1:{port}", process.pid)
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
