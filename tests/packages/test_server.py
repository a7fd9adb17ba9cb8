"""The server, installed alone, in the folder of a project that has a package `service` of its own."""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, STDOUT

import httpx
import pytest

from service import __version__
from tests.packages.conftest import ROOT
from tests.ports import free_port

BIN = ROOT / "build" / "server" / "bin"


def said(*command: str, cwd: Path, **variables: str) -> tuple[int, str, str]:
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [str(BIN / command[0]), *command[1:]], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout, done.stderr


def test_its_command_is_immune(project: Path) -> None:
    assert said("gradserve", "--version", cwd=project) == (0, f"gradserve {__version__}\n", "")


@pytest.mark.parametrize("command", [("gradserve", "serve"), ("python", "-m", "gradserve", "serve")])
def test_a_service_that_comes_first_is_named(command: tuple[str, ...], project: Path) -> None:
    status, printed, error = said(*command, cwd=project, PYTHONPATH=str(project))
    assert (status, printed) == (1, "")
    assert f"another package named service, at {project / 'service' / '__init__.py'}," in error


def test_its_workers_are_immune(project: Path, tmp_path: Path) -> None:
    port = free_port()
    settings = {"GRADSERVE_PORT": str(port), "GRADSERVE_WORKERS": "2", "GRADSERVE_STORE": f"lmdb:{tmp_path / 'store'}"}
    command = [str(BIN / "gradserve"), "serve"]
    with (
        subprocess.Popen(
            command, cwd=project, env={**os.environ, **settings}, stdout=PIPE, stderr=STDOUT, text=True
        ) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
    ):
        try:
            until_ready(client, server)
            answer = client.post("/v1/ops/ReluGrad", json={"dY": [1, 2], "X": [0.5, -1]})
        finally:
            server.terminate()
        log, _ = server.communicate(timeout=60)
    assert answer.json()["dX"]["data"] == [1, 0]
    assert "the service of another" not in log


def until_ready(client: httpx.Client, server: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end and server.poll() is None:
        with suppress(httpx.TransportError):
            if client.get("/v2/health/ready").status_code == 200:
                return
        time.sleep(0.05)
    raise AssertionError("the server does not get ready")
