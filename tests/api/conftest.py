from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.serving import delete_buffers, serving

LIMITS = {"store_bytes": 1 << 28, "threads": 2, "max_body_bytes": 4 << 20, "max_tensor_bytes": 1 << 22}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Let a module name the `STORES` that it asks. The API knows only whether a store blocks: PostgreSQL does."""
    if "http" in metafunc.fixturenames and hasattr(metafunc.module, "STORES"):
        metafunc.parametrize("http", metafunc.module.STORES, indirect=True, scope="module")


@pytest.fixture(scope="session")
def lmdb_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(store=f"lmdb:{tmp_path_factory.mktemp('store')}", **LIMITS) as url:
        yield url


@pytest.fixture(scope="session")
def postgres_server(postgres_url: str) -> Iterator[str]:
    with serving(store=postgres_url, postgres_schema="api", **LIMITS) as url:
        yield url


@pytest.fixture(scope="module")
def http(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """Yield a client of a server without buffers of other modules: LMDB's, unless the module says otherwise."""
    url = request.getfixturevalue(f"{getattr(request, 'param', 'lmdb')}_server")
    with httpx.Client(base_url=url, timeout=30) as client:
        delete_buffers(client)
        yield client


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    """Yield threads for concurrent requests."""
    with ThreadPoolExecutor(64) as pool:
        yield pool
