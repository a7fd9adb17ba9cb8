from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.mortal import KINDS, Mortal, mortal
from tests.faults.servers import LONG
from tests.postgres import Cluster, cluster


@pytest.fixture(scope="module")
def database() -> Iterator[Cluster]:
    with cluster() as made:
        yield made


@pytest.fixture(scope="module", params=KINDS)
def service(
    request: pytest.FixtureRequest, postgres_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mortal]:
    with mortal(request.param, tmp_path_factory.mktemp(request.param), postgres_url) as service:
        yield service


@pytest.fixture
def place() -> Iterator[Path]:
    """Yield a directory. The long form's is on a disk: its stores and checkpoints are too large for the memory."""
    with tempfile.TemporaryDirectory(dir="/var/tmp" if LONG else None) as directory:
        yield Path(directory)
