from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.both import KINDS, connected


@pytest.fixture(scope="session", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of client: sync or async."""
    return str(request.param)


@pytest.fixture
def key() -> str:
    """A new prefix for idempotency keys."""
    return uuid.uuid4().hex


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


def delete_all(server: Any) -> None:
    for one in server.buffers.list():
        server.buffers[one.name].delete()
