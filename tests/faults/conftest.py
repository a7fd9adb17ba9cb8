from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from _pytest.terminal import TerminalReporter

from tests.faults.mortal import KINDS, Mortal, mortal
from tests.faults.printing import Counted
from tests.faults.servers import LONG
from tests.postgres import Cluster, cluster

COUNTED = "counted"
"""The name of the line that a test gives to the end of the run."""


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


@pytest.fixture
def counted(record_property: Callable[[str, object], None]) -> Counted:
    """Return what keeps the adds that a test has counted. The end of the run shows them."""

    def keep(acknowledged: int, sums: int, faults: str) -> None:
        record_property(COUNTED, f"{acknowledged:,} adds acknowledged, {sums:,} in the sums; {faults}")

    return keep


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    passed = terminalreporter.stats.get("passed", [])
    for line in [value for report in passed for name, value in report.user_properties if name == COUNTED]:
        terminalreporter.write_line(str(line))
