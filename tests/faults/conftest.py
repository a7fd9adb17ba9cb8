from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.mortal import KINDS, Mortal, mortal
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
