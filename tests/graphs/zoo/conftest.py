from __future__ import annotations

from collections.abc import Iterator

import pytest
from gradserve_client import Client

from tests.serving import serving


@pytest.fixture(scope="package")
def server() -> Iterator[Client]:
    """A client of a server that all models of the zoo share."""
    with serving() as url, Client(url, timeout=60) as client:
        yield client
