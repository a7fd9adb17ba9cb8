"""The wheel has the package and nothing else, and works without the server's packages."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "clients" / "python"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    source.mkdir()
    names = ("pyproject.toml", "README.md", "LICENSE")
    for path in [*(SOURCE / name for name in names), *sorted((SOURCE / "gradserve_client").glob("*"))]:
        if path.is_file():
            target = source / path.relative_to(SOURCE)
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(path.read_bytes())
    pip(sys.executable, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(place), str(source))
    (made,) = place.glob("*.whl")
    return made


def pip(python: str, *arguments: str) -> None:
    environment = {**os.environ, "PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    command = [python, "-m", "pip", "--quiet", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_it_has_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    package = {name for name in names if ".dist-info/" not in name}
    wanted = {f"gradserve_client/{path.name}" for path in (SOURCE / "gradserve_client").glob("*.py")}
    assert package == {*wanted, "gradserve_client/py.typed"}
    metadata = next(name for name in names if name.endswith("METADATA"))
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    required = [line for line in text.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert not [line for line in required if "fastapi" in line or "torch" in line or "rich" in line]


def test_it_carries_the_licence(wheel: Path) -> None:
    (folder,) = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" in name}
    assert zipfile.ZipFile(wheel).read(f"{folder}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    lines = zipfile.ZipFile(wheel).read(f"{folder}/METADATA").decode().splitlines()
    assert {"License-Expression: Apache-2.0", "License-File: LICENSE"} <= set(lines)


def test_the_server_has_the_same_licence() -> None:
    server, client = (tomllib.loads((place / "pyproject.toml").read_text())["project"] for place in (ROOT, SOURCE))
    assert (server["license"], server["license-files"]) == (client["license"], client["license-files"])


def test_it_works_where_there_is_no_server(wheel: Path, url: str, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "empty"], check=True, timeout=120)
    python = str(tmp_path / "empty" / "bin" / "python")
    pip(python, "install", str(wheel))
    program = f"""
import importlib.util
from gradserve_client import Client

for absent in ("fastapi", "service", "uvicorn", "starlette", "pydantic", "torch", "rich", "typer"):
    assert importlib.util.find_spec(absent) is None, absent
with Client({url!r}) as server:
    print(server.ops.relu_grad([1, 2], [0.5, -1]).tolist())
"""
    done = subprocess.run(
        [python, "-W", "error", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("[1.0, 0.0]\n", "")
