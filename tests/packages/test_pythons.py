"""Everything that the packages need has wheels for the newest Python, on the systems that they are for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packages.conftest import built

LINUX = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
SYSTEMS = {
    "linux": LINUX,
    "linux-arm": tuple(name.replace("x86_64", "aarch64") for name in LINUX),
    "macos": ("macosx_14_0_arm64", "macosx_11_0_arm64"),
    "windows": ("win_amd64",),
}
"""Names of systems, and the platforms whose wheels they take."""

NEWEST = "3.14"
"""The newest Python that has wheels of everything. No test has run there, so it has no classifier."""


@pytest.mark.parametrize(
    ("package", "system"),
    [("gradserve", "linux"), ("gradserve", "linux-arm"), ("gradserve", "macos"), ("gradserve_client", "windows")],
)
def test_every_dependency_has_a_wheel(package: str, system: str, tmp_path: Path) -> None:
    wheel = str(built(f"{package}-*.whl")) + "[graphs]" * (package == "gradserve")
    platforms = [f"--platform={name}" for name in SYSTEMS[system]]
    pip = [sys.executable, "-m", "pip", "--quiet", "install", "--dry-run", "--ignore-installed", f"--target={tmp_path}"]
    done = subprocess.run(
        [*pip, "--only-binary=:all:", f"--python-version={NEWEST}", *platforms, wheel],
        env={**os.environ, "PIP_CONSTRAINT": "", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
