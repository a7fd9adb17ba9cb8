"""The line that says where the server is, and the only other one, when it stops."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from service.api.start_line import start_line
from service.buffers.changes import Create
from service.buffers.perform import Request
from service.buffers.record import Spec
from service.buffers.url import open_store
from service.settings import Settings
from tests.faults.servers import PATIENCE, Server
from tests.serving import wait_until


def filled(store: Path, buffers: int) -> Path:
    """Return the directory of a store with this many buffers."""
    opened = open_store(f"lmdb:{store}", max_bytes=1 << 26, key_seconds=1e5)
    for number in range(buffers):
        opened.submit(Request([Create(name=f"{number}", spec=Spec((1,), np.dtype("float32")))])).result()
    opened.close()
    return store


def told(server: Server) -> list[str]:
    """Return the lines of the log without warnings: on a slow machine a worker may be replaced before it starts."""
    return [line for line in server.log.read_text().splitlines(keepends=True) if " WARNING: " not in line]


@pytest.mark.parametrize(
    ("workers", "threads"), [(1, "3 threads"), (2, "2 workers with 3 threads each")], ids=["one process", "workers"]
)
def test_a_server_says_once_where_it_is_and_what_it_has(workers: int, threads: str, tmp_path: Path) -> None:
    with Server(filled(tmp_path / "store", 2), workers=workers, threads=3) as server:
        wait_until(lambda: told(server) != [])
        (line,) = told(server)
        server.process.terminate()
        assert server.process.wait(PATIENCE) == 0
        lines = told(server)
    assert line.endswith(
        f"Z INFO: gradserve {version('gradserve')} at {server.url}, page at /, docs at /docs,"
        f" store {tmp_path}/store (2 buffers), {threads}\n"
    )
    assert len(lines) == 2
    assert lines[1].endswith("Z INFO: gradserve stops; requests in flight have 30 seconds to finish\n")


def test_the_paths_of_the_line_answer(url: str) -> None:
    for path in start_line(Settings(store="memory:"), 1, 0).split(" at ")[2:]:
        assert httpx.get(url + path.split(",")[0], follow_redirects=True).status_code == 200


DATABASE = {"store": "postgresql://ann:s3cret@db/g", "threads": 1, "workers": 8, "host": "::1"}
HTTPS = {"store": "memory:", "threads": 2, "tls_certificate": Path("c"), "host": "0.0.0.0"}


@pytest.mark.parametrize(
    ("given", "address", "store", "threads"),
    [
        ({"store": "memory:", "threads": 1}, "http://127.0.0.1:80", "in memory (1 buffer)", "1 thread"),
        ({"store": "lmdb:./a", "threads": 2}, "http://127.0.0.1:80", f"{Path.cwd()}/a (1 buffer)", "2 threads"),
        (DATABASE, "http://[::1]:80", "postgresql://ann:***@db/g (1 buffer)", "8 workers with 1 thread each"),
        (HTTPS, "https://0.0.0.0:80", "in memory (1 buffer)", "2 threads"),
    ],
    ids=["memory", "relative path", "database", "https"],
)
def test_the_line_fits_the_settings(given: dict[str, Any], address: str, store: str, threads: str) -> None:
    line = start_line(Settings(**given), 80, 1)
    assert line.partition(" at ")[2] == f"{address}, page at /, docs at /docs, store {store}, {threads}"
