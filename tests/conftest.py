from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.serving import serving


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """The URL of a server with small limits, so that they can be reached."""
    with serving(max_body_bytes=2 << 20, max_inflated_bytes=2 << 20, max_tensor_bytes=1 << 20, threads=2) as url:
        yield url


@pytest.fixture(scope="session")
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=30) as client:
        yield client
