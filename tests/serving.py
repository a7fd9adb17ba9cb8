"""A real uvicorn that runs the service, and checks of its answers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvicorn

from service.api.server import listening, server_config
from service.settings import Settings

R = TypeVar("R")

HOSTS = "a,here,test,x"
"""The names of servers in the heads that tests send. `tests/api/http/test_hosts.py` is about other names."""


@contextmanager
def serving(**settings: Any) -> Iterator[str]:
    """Yield the URL of a server with these settings, on a free port and in a thread of this process.

    With `socket` it listens on this UNIX socket, too. By default this process keeps little of the memory that it frees.
    """
    given = Settings(**{"port": 0, "store": "memory:", "reuse_bytes": 32 << 20, "host_names": HOSTS, **settings})
    config = server_config(given)
    server = uvicorn.Server(config)
    with listening(given) as sockets:
        thread = threading.Thread(target=server.run, args=[sockets])
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive(), "the server did not start"
                time.sleep(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join()


def assert_problem(answer: httpx.Response, status: int, code: str, *words: str) -> dict[str, Any]:
    """Check that `answer` is a problem with this code and that its detail contains `words`. Return the problem."""
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    problem: dict[str, Any] = answer.json()
    assert (answer.status_code, problem["status"], problem["code"]) == (status, status, code), problem
    assert problem["type"] == f"urn:gradserve:problem:{code}"
    assert problem["title"]
    for word in words:
        assert word in problem["detail"], problem["detail"]
    assert "Traceback" not in answer.text
    return problem


def delete_buffers(client: httpx.Client) -> None:
    """Delete every buffer of the server."""
    client.delete("/v1/buffers", params={"all": True}).raise_for_status()


def open_files(process: int | str = "self") -> list[str]:
    """Return the paths of the open files of a process, sorted; behind one without a name stands (deleted)."""
    found = list[str]()
    for number in os.listdir(f"/proc/{process}/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile, as the list's own
            found.append(os.readlink(f"/proc/{process}/fd/{number}"))
    return sorted(found)


def in_flight(url: object, what: str = "") -> float:
    """Return the number of other requests in flight or, with `_bytes`, the bytes in flight."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    (value,) = (line.split()[1] for line in lines if line.startswith(f"gradserve_in_flight{what} "))
    return float(value) - (not what)


def unread(url: object) -> int:
    """Return how many bytes clients have sent that the server has not read, with its connections to be accepted."""
    port, found = f":{httpx.URL(str(url)).port:04X}", 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, here, there, _, queues, *_ = line.split()
        leaving, arrived = (int(queue, 16) for queue in queues.split(":"))
        found += arrived * here.endswith(port) + leaving * there.endswith(port)
    return found


def wait_until(holds: Callable[[], R]) -> R:
    """Return what `holds` returns, once that is true; fail after a minute."""
    end = time.monotonic() + 60
    while not (found := holds()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found
