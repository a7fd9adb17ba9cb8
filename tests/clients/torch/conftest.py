from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from gradserve_client import Client


@pytest.fixture(scope="module")
def server(url: str) -> Iterator[Client]:
    with Client(url) as server:
        yield server


@pytest.fixture(params=[1, 3], ids=["one server", "three servers"])
def one_or_three(request: pytest.FixtureRequest, urls: list[str]) -> Iterator[Client]:
    """A client of one server or of several."""
    with Client(urls[: request.param], timeout=20) as server:
        yield server


@pytest.fixture
def run() -> str:
    """A new name of a run."""
    return uuid.uuid4().hex
