from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.serving import delete_buffers, serving

LIMITS = {"store_bytes": 1 << 28, "threads": 2, "max_body_bytes": 4 << 20, "max_tensor_bytes": 1 << 22}


@pytest.fixture(scope="session")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Yield the URLs of two servers, one for each kind of store. All modules share them."""
    path = tmp_path_factory.mktemp("store")
    with serving(store="memory:", **LIMITS) as memory, serving(store=f"lmdb:{path}", **LIMITS) as lmdb:
        yield {"memory": memory, "lmdb": lmdb}


@pytest.fixture(scope="module", params=["memory", "lmdb"])
def http(request: pytest.FixtureRequest, stores: dict[str, str]) -> Iterator[httpx.Client]:
    """Yield a client of the server with each kind of store, without buffers of other modules."""
    with httpx.Client(base_url=stores[request.param], timeout=30) as client:
        delete_buffers(client)
        yield client


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    """Yield threads for concurrent requests."""
    with ThreadPoolExecutor(64) as pool:
        yield pool
