"""`make packages` runs these tests on what it has built: dist/, and the server installed alone in build/server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

collect_ignore_glob = [] if "GRADSERVE_PACKAGES" in os.environ else ["*"]

ROOT = Path(__file__).parents[2]

PACKAGE_OF_ANOTHER = 'print("the service of another")\n'
"""The source of a package `service` that is not ours."""


def built(pattern: str) -> Path:
    """Return the only file of dist/ that matches."""
    (path,) = (ROOT / "dist").glob(pattern)
    return path


@pytest.fixture
def client_wheel() -> Path:
    return built("gradserve_client-*.whl")


@pytest.fixture
def server_wheel() -> Path:
    return built("gradserve-*.whl")


@pytest.fixture
def install(tmp_path: Path) -> Callable[..., str]:
    """Install with pip into a new environment; return its Python."""

    def install(*what: str) -> str:
        subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=120)
        python = str(tmp_path / "venv" / "bin" / "python")
        environment = {**os.environ, "PIP_CONSTRAINT": "", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        command = [python, "-m", "pip", "--quiet", "install", *what]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return python

    return install


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Make a user's project, which has a package `service` of its own."""
    folder = tmp_path / "project"
    (folder / "service").mkdir(parents=True)
    (folder / "service" / "__init__.py").write_text(PACKAGE_OF_ANOTHER)
    return folder
