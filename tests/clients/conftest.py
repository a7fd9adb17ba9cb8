from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from gradserve_client import Client
from gradserve_client.cli import main

from tests.clients.both import KINDS, connected
from tests.clients.scripted import Clock, stopped
from tests.clients.terminal import COMMAND, Call, Done, environment
from tests.faults.servers import Server
from tests.serving import serving


@pytest.fixture(scope="session", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of client: sync or async."""
    return str(request.param)


@pytest.fixture
def key() -> str:
    """A new prefix for idempotency keys."""
    return uuid.uuid4().hex


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of both clients, which only waits move."""
    return stopped(monkeypatch)


@pytest.fixture(scope="session")
def one_server(url: str, kind: str) -> Iterator[Any]:
    with connected(kind, url, timeout=20) as server:
        yield server


@pytest.fixture
def server(one_server: Any) -> Iterator[Any]:
    """A client of the server with small limits, without buffers before and after the test."""
    delete_all(one_server)
    yield one_server
    delete_all(one_server)


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """Three servers in processes of their own, each with its store on the disk."""
    place = tmp_path_factory.mktemp("shards")
    servers = [Server(place / str(number)) for number in range(3)]
    with ThreadPoolExecutor(3) as threads, ExitStack() as stack:
        for server in servers:
            stack.callback(server.kill)
        list(threads.map(Server.start, servers))
        yield servers


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Calls the command without a terminal."""

    def called(server: Client | str, *arguments: str | Path, **more: str) -> Done:
        for name, value in environment(server if isinstance(server, str) else server.url, **more).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", [COMMAND, *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        code = end.value.code
        assert isinstance(code, int)
        return Done(code, *capsys.readouterr())

    return called


def delete_all(server: Any) -> None:
    for one in server.buffers.list():
        server.buffers[one.name].delete()


@pytest.fixture(scope="module")
def urls() -> Iterator[list[str]]:
    """Yield the URLs of three servers."""
    with ExitStack() as servers:
        yield [servers.enter_context(serving()) for _ in range(3)]


@pytest.fixture(params=[1, 3], ids=["one server", "three servers"])
def one_or_three(request: pytest.FixtureRequest, kind: str, urls: list[str]) -> Iterator[Any]:
    """A client of one server or of several, without buffers before and after the test."""
    with connected(kind, urls[: request.param] if request.param > 1 else urls[0], timeout=20) as server:
        delete_all(server)
        yield server
        delete_all(server)
