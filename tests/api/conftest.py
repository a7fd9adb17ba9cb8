from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.serving import serving


@pytest.fixture(scope="module", params=["memory", "lmdb"])
def http(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a server with each store."""
    store = "memory:" if request.param == "memory" else f"lmdb:{tmp_path_factory.mktemp('store')}"
    with (
        serving(store=store, store_bytes=1 << 28, threads=2, max_body_bytes=4 << 20, max_tensor_bytes=1 << 22) as url,
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for requests that are made at the same time."""
    with ThreadPoolExecutor(64) as pool:
        yield pool
