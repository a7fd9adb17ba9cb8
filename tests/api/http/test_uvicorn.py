"""The parts of uvicorn that the service uses: a failing test says which part a new release changed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import uvicorn
from uvicorn.supervisors import Multiprocess

from tests.serving import serving

CHANGED = "uvicorn has changed: service/api/{} relies on {}"


class Recorded(asyncio.Protocol):
    """A protocol that uvicorn's `http=` accepts."""

    made: list[Recorded] = []

    def __init__(self, **given: Any) -> None:
        self.given, self.stopped = given, False
        self.made.append(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.given["server_state"].connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.given["server_state"].connections.discard(self)

    def shutdown(self) -> None:
        self.stopped = True


async def application(scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
    while (message := await receive())["type"] != "lifespan.shutdown":
        await send({"type": f"{message['type']}.complete"})
    await send({"type": "lifespan.shutdown.complete"})


def test_uvicorn_makes_and_stops_connections_as_ours_expects() -> None:
    async def connect() -> Recorded:
        server = uvicorn.Server(
            uvicorn.Config(application, port=0, http=Recorded, ws="none", proxy_headers=False, log_config=None)
        )
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        with socket.create_connection(server.servers[0].sockets[0].getsockname()):
            while not server.server_state.connections:
                await asyncio.sleep(0.01)
            server.should_exit = True
            while not Recorded.made[0].stopped:
                await asyncio.sleep(0.01)
        await serving
        return Recorded.made[0]

    given = asyncio.run(asyncio.wait_for(connect(), 20)).given
    expected = {"config", "server_state", "app_state", "_loop"}
    assert given.keys() == expected, CHANGED.format("http/connection.py", f"the arguments {expected}")
    assert given["config"].loaded_app is application, CHANGED.format("http/connection.py", "Config.loaded_app")
    assert given["config"].timeout_keep_alive == 5, CHANGED.format("http/connection.py", "Config.timeout_keep_alive")
    state = given["server_state"]
    for name, kind in {"connections": set, "tasks": set, "total_requests": int, "default_headers": list}.items():
        assert isinstance(getattr(state, name, None), kind), CHANGED.format("http/wire.py", f"ServerState.{name}")
    assert [name for name, _ in state.default_headers] == [b"date", b"server"]


USED = [
    *("run", "signal_queue", "should_exit", "sockets", "processes", "keep_subprocess_alive"),
    *(f"handle_{name}" for name in ("ttin", "ttou", "hup", "int", "quit", "term")),
]


@pytest.mark.parametrize("name", USED)
def test_uvicorn_has_the_members_that_the_supervisor_uses(name: str) -> None:
    source = "\n".join(map(str, (*vars(Multiprocess), *Multiprocess.__init__.__code__.co_names)))
    if name != "handle_quit":  # our class adds handle_quit
        assert name in source, CHANGED.format("server.py", f"Multiprocess.{name}")


def test_every_answer_has_a_date_and_no_server_header() -> None:
    with serving() as url:
        headers = httpx.get(f"{url}/v2/health/live").headers
    assert ("date" in headers, "server" in headers) == (True, False)
