"""The start of the command where it cannot run: beside another package `service`, and on Windows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import service

ROOT = Path(__file__).parent.parent

HIDES = "gradserve: another package named service, at {}, hides that of gradserve. Install gradserve by itself"


def run(*arguments: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run(arguments, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Make a folder with a package `service` that is not ours."""
    (tmp_path / "service").mkdir()
    (tmp_path / "service" / "__init__.py").write_text("raise SystemExit('it ran')\n")
    return tmp_path


def test_another_service_is_named(project: Path) -> None:
    for variables, command in (
        ({}, (sys.executable, "-m", "gradserve", "ops")),
        ({"PYTHONPATH": str(project)}, (Path(sys.executable).with_name("gradserve"), "ops")),
    ):
        done = run(*command, cwd=project, **variables)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(HIDES.format(project / "service" / "__init__.py"))
        assert len(done.stderr.splitlines()) == 1


def test_the_command_is_immune_to_a_service_in_its_folder(project: Path) -> None:
    done = run(Path(sys.executable).with_name("gradserve"), "--version", cwd=project)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"gradserve {service.__version__}\n", "")


def test_another_service_put_over_ours_is_named(project: Path) -> None:
    (project / "gradserve.py").write_bytes((ROOT / "gradserve.py").read_bytes())
    done = run(sys.executable, "-m", "gradserve", "ops", cwd=project)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(HIDES.format(project / "service" / "__init__.py"))


def test_a_start_imports_nothing_that_most_servers_never_use() -> None:
    """Its processor time is that of imports, for the most part."""
    command = [sys.executable, "-X", "importtime", "-m", "gradserve", "serve", "--port", "0"]
    environment = {**os.environ, "GRADSERVE_STORE": "memory:"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        lines = []
        for line in server.stderr:
            lines.append(line)
            if " at http://" in line:
                server.terminate()
    names = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    assert {"numpy", "service.api.app", "service.kernels._op", "service.kernels._scatter"} <= names
    unused = [
        "gradserve_client",
        "onnx",
        "opentelemetry.exporter",
        "opentelemetry.sdk",
        "psycopg",
        "psycopg_c",
        "scipy",
    ]
    unused += ["service.api.telemetry.tracing", "service.buffers.postgres", "service.graphs"]
    assert [name for name in names if f"{name}.".startswith(tuple(f"{one}." for one in unused))] == []


@pytest.mark.parametrize("module", ["gradserve", "service"])
def test_on_windows_it_says_where_it_runs(module: str, tmp_path: Path) -> None:
    program = f"""
import runpy, sys

sys.modules.update(dict.fromkeys(["fcntl", "resource", "termios"]))
sys.platform = "win32"
sys.argv = ["gradserve", "serve"]
runpy.run_module({module!r}, run_name="__main__")
"""
    done = run(sys.executable, "-c", program, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "gradserve: the server does not run on Windows. Start it in WSL or in its container;"
        " gradserve-client runs here, too\n"
    )


@pytest.mark.parametrize(
    ("parameters", "words"), [("port=1", "Connection refused"), ("port=99999", 'invalid port number: "99999"')]
)
def test_a_start_says_at_once_what_it_waits_for(parameters: str, words: str, postgres_url: str, tmp_path: Path) -> None:
    environment = {**os.environ, "GRADSERVE_STORE": f"{postgres_url}?{parameters}&password=s3cret"}
    environment |= {"GRADSERVE_PORT": "0", "GRADSERVE_POSTGRES_SCHEMA": "nowhere"}
    command = [sys.executable, "-m", "gradserve", "serve"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        process.terminate()
        rest = process.stderr.read()
    assert line.startswith("Waiting for the database, 30 seconds at most: ")
    assert words in line
    assert (rest, "s3cret" in line) == ("", False)
