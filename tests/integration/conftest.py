"""`make test-compose` runs these tests against new containers or the server at GRADSERVE_URL."""

from __future__ import annotations

import os
from collections.abc import Iterator

import httpx
import pytest

from tests.integration.stack import Cluster, Stack
from tests.ports import free_port

URL = os.environ.get("GRADSERVE_URL")

collect_ignore_glob = ["*"] if "GRADSERVE_INTEGRATION" not in os.environ else ["test_c*.py"] if URL else []


def client(url: str, secret: str | None) -> httpx.Client:
    """Return a client of the server with this API key."""
    headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
    return httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False)


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Start the containers of compose.yaml on another port, with new keys and data."""
    stack = Stack(free_port(), tmp_path_factory.mktemp("keys") / "gradserve_keys")
    try:
        stack.build()
        stack.secret = stack.keys("add", "tests")
        stack.up()
        yield stack
    finally:
        stack.down()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start the containers of compose.yaml's profile `cluster`, with new keys and data."""
    cluster = Cluster(free_port(), tmp_path_factory.mktemp("cluster"))
    try:
        cluster.build()
        cluster.secret = cluster.keys("add", "tests")
        cluster.up()
        yield cluster
    finally:
        cluster.down()


@pytest.fixture(scope="session", params=["given"] if URL else ["stack", "cluster"])
def served(request: pytest.FixtureRequest) -> tuple[str, str | None]:
    """Return the URL and an API key of nginx before one server or before three, or those that GRADSERVE_URL gives."""
    if URL:
        return URL, os.environ.get("GRADSERVE_API_KEY")
    stack = request.getfixturevalue(request.param)
    return stack.url, stack.secret


@pytest.fixture(scope="session")
def url(served: tuple[str, str | None]) -> str:
    return served[0]


@pytest.fixture(scope="session")
def secret(served: tuple[str, str | None]) -> str | None:
    """Return an API key, or None if the server at GRADSERVE_URL needs none."""
    return served[1]


@pytest.fixture(scope="session")
def server(url: str, secret: str | None) -> Iterator[httpx.Client]:
    """Yield a client of the server with a key."""
    with client(url, secret) as server:
        yield server
