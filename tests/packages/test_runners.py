"""pipx and uvx run the command from the wheel, with nothing installed before."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 300
"""Seconds for a download of all packages."""


@pytest.fixture(scope="module")
def wheel() -> Path:
    (found,) = (ROOT / "dist").glob("gradserve-*.whl")
    return found


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the commands pipx and uvx."""
    folder = tmp_path_factory.mktemp("tools")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=SECONDS)
    pip = [str(folder / "bin/pip"), "install", "--quiet", "pipx", "uv"]
    subprocess.run(pip, env={**os.environ, "PIP_CONSTRAINT": ""}, check=True, timeout=SECONDS)
    return folder / "bin"


@pytest.fixture(params=["pipx", "uvx"])
def command(request: pytest.FixtureRequest, tools: Path, wheel: Path) -> list[str]:
    """Return the command line that runs `gradserve` from the wheel."""
    given = {"pipx": ["run", "--spec"], "uvx": ["--from"]}[request.param]
    return [str(tools / request.param), *given, str(wheel), "gradserve"]


def test_the_wheel_serves_where_nothing_is_installed(command: list[str], wheel: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRADSERVE_")}
    environment |= {"PIPX_HOME": str(tmp_path / "pipx"), "UV_CACHE_DIR": str(tmp_path / "uv"), "GRADSERVE_PORT": "0"}
    environment["UV_CONSTRAINT"] = environment["PIP_CONSTRAINT"] = str(ROOT / "constraints.txt")
    done = subprocess.run(
        [*command, "--version"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    version = wheel.name.split("-")[1]
    assert (done.returncode, done.stdout) == (0, f"gradserve {version}\n"), done.stderr
    with subprocess.Popen(
        [*command, "serve"], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stderr is not None
        try:
            line = next(line for line in server.stderr if " INFO: gradserve " in line)
            said = re.search(r"gradserve (\S+) at (\S+), .* store (\S+) \(0 buffers\)", line)
            assert said is not None, line
            assert said.group(1, 3) == (version, f"{tmp_path}/gradserve-data")
            answer = httpx.post(f"{said[2]}/v1/ops/ReluGrad", json={"dY": [1, 2], "X": [1, -1]}, trust_env=False)
            assert answer.json()["dX"]["data"] == [1.0, 0.0]
        finally:
            server.terminate()
        assert server.wait(60) == 0
