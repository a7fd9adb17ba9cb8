"""Make the archive of a format here with a version that writes it.

    git worktree add ../before 8773f15
    .venv/bin/python -m tests.buffers.formats.make ../before 1

A version that needs other packages has them in its own `.venv`, by `make -C ../before run`.
It has an LMDB store, the export of it, and the tables in PostgreSQL if the version has any. A version refuses calls
that it does not know yet: the output shows the status of each.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tests.ports import free_port
from tests.postgres import binaries, cluster

HERE = Path(__file__).parent


class Call(NamedTuple):
    """A request to `/v1/buffers`, or to another path of `/v1`."""

    method: str
    path: str
    body: Any = None
    key: str | None = None


def _pushed(part: int, gradients: dict[str, Any]) -> Call:
    return Call("POST", f"/accumulate?push=p&part={part}&parts=2&contributor=x", gradients)


_BOTH = {"weight": [1, 2, 3], "bias": [0.5, -0.5]}
_ROWS = {"indices": [0, -1, 0], "rows": [[1, 2], [3, 4], [5, 6]]}

CALLS = [
    Call("PUT", "/weight", {"shape": [3], "quorum": 2, "keep": 2}),
    Call("PUT", "/bias", {"shape": [2], "dtype": "float64"}),
    Call("PUT", "/table", {"shape": [40_000, 2]}),
    Call("PUT", "/passing", {"shape": [1], "ttl_seconds": 10**9}),
    Call("PUT", "/late", {"shape": [1], "deadline_seconds": 10**9, "contributors": ["x", "y"]}),
    *[Call("POST", "/accumulate", _BOTH, key) for key in ("first", "second", "third")],
    Call("POST", "/bias/accumulate", {"gradient": [1, 1]}, "alone"),
    Call("POST", "/table/accumulate", {"gradient": 1}, "whole"),
    Call("POST", "/table/accumulate", {"gradient": _ROWS}, "rows"),
    Call("POST", "/late/accumulate?contributor=x", {"gradient": 2}, "named"),
    Call("POST", "/passing/accumulate", {"gradient": 5}),
    Call("POST", "/take?prefix=pass", key="prefix"),
    _pushed(1, {"bias": [1, 1], "table": 1}),
]
"""What a store of each format is made by. The sum of the table has chunks of its own, and its rows wait for it."""

MODEL = base64.b64decode(
    "CAg6RAoOCgF4CgF3EgF5IgNNdWwSAWcqEQgCEAFCAXdKCAAAAEAAAEBAWg0KAXgSCAoGCAESAgoAYg0KAXkSCAoGCAESAgoAQgQKABAR"
)
"""The model of y = w * x, with the parameter w = [2, 3]."""

GRAPHS = [
    Call("PUT", "/v1/graphs/g?set=parameters:g.p.*", MODEL, "graph"),
    Call("POST", "/v1/ops/SGDOptimizer?from=W:g.p.w&set=NW:g.p.w", {"ETA": 0.5, "G": [1, 1]}, "step"),
]
"""What stores of format 7 and later have besides: a graph, and a step whose small output stays with its key."""

ABSENT = [
    Call("PUT", "/absent", {"shape": [1], "contributors": ["x", "y"]}),
    Call("POST", "/absent/accumulate?contributor=x", {"gradient": 1}),
    Call("POST", "/absent/take"),
    Call("POST", "/absent/accumulate?contributor=y", {"gradient": 1}),
    Call("POST", "/absent/take"),
]
"""What stores of format 8 and later have besides: a contributor that was not in the last step."""

EXTRAS = {7: GRAPHS, 8: ABSENT}
"""What stores of a format and of all later ones have besides."""


def calls_of(format: int) -> list[Call]:
    """Return the calls that have made a store of this format."""
    return CALLS + [call for first, calls in EXTRAS.items() if format >= first for call in calls]


LAST = _pushed(2, {"weight": [1, 1, 1]})
"""The part that completes the push."""


def send(client: httpx.Client, call: Call) -> httpx.Response:
    """Send the same bytes for the same call, whatever the version of the server and of httpx."""
    is_model, path = isinstance(call.body, bytes), call.path if "/v1/" in call.path else f"/v1/buffers{call.path}"
    body = call.body if is_model else b"" if call.body is None else json.dumps(call.body).encode()
    headers = {"Content-Type": "application/octet-stream" if is_model else "application/json"}
    if call.key is not None:
        headers["Idempotency-Key"] = call.key
    return client.request(call.method, path, content=body, headers=headers)


@contextmanager
def _serving(checkout: Path, store: str) -> Iterator[httpx.Client]:
    port = free_port()
    settings = {"GRADSERVE_STORE": store, "GRADSERVE_PORT": str(port), "GRADSERVE_PUSH_SECONDS": "1e9"}
    process = subprocess.Popen(_command(checkout, "serve"), env=_environment(checkout) | settings)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", transport=httpx.HTTPTransport(retries=10)) as client:
            yield client
    finally:
        process.terminate()
        process.wait()


def _command(checkout: Path, *arguments: str) -> list[str]:
    own = checkout.resolve() / ".venv/bin/python"
    return [str(own) if own.exists() else sys.executable, "-P", "-m", "service", *arguments]


def _environment(checkout: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(checkout.resolve())}


def _fill(checkout: Path, store: str) -> None:
    with _serving(checkout, store) as client:
        for call in calls_of(max(EXTRAS)):
            sys.stdout.write(f"{send(client, call).status_code} {call.method} {call.path}\n")
        time.sleep(3)  # for the work after a commit, such as the fold of the large part: no server says when it is done


def _make_lmdb(checkout: Path, made: Path) -> None:
    _fill(checkout, f"lmdb:{made}/store")
    exporting = _command(checkout, "export", f"{made}/export.safetensors", "--store", f"lmdb:{made}/store")
    subprocess.run(exporting, env=_environment(checkout), check=True)
    (made / "store" / "lock.mdb").unlink(missing_ok=True)


def _make_postgres(checkout: Path, made: Path) -> None:
    with cluster() as database:
        _fill(checkout, database.url)
        dump = [
            str(binaries() / "pg_dump"),
            "--dbname",
            database.url,
            "--schema",
            "gradserve",
            "--inserts",
            "--no-owner",
        ]
        done = subprocess.run(dump, check=True, capture_output=True, text=True, cwd="/")
    lines = [line for line in done.stdout.splitlines() if not re.match(r"--|SET |\\|CREATE SCHEMA|.*set_config", line)]
    (made / "tables.sql").write_text("\n".join(filter(None, lines)).replace("gradserve.", ""))


def main() -> None:
    checkout = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as made, tarfile.open(HERE / f"{sys.argv[2]}.tar.xz", "w:xz") as archive:
        _make_lmdb(checkout, Path(made))
        if (checkout / "service/buffers/postgres").is_dir():
            _make_postgres(checkout, Path(made))
        archive.add(made, ".")


if __name__ == "__main__":
    main()
