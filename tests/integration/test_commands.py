"""The commands of docs/operations.md and of the README, as they stand there, with this engine for `docker`."""

from __future__ import annotations

import re
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
import yaml
from gradserve_client import Client

from tests.integration.stack import COMMANDS, PROJECT, ROOT, Stack
from tests.ports import free_port
from tests.serving import wait_until

GRAFANA: str = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["grafana"]["image"]


@pytest.fixture(autouse=True)
def _runs(stack: Stack) -> Iterator[None]:
    stack.wait()
    yield
    stack.wait()


@pytest.fixture
def server(stack: Stack) -> Iterator[Client]:
    with Client(stack.url, api_key=stack.secret, timeout=90) as server:
        yield server


def run(stack: Stack, to: str, folder: Path, **variables: str) -> str:
    """Run the commands of a row; return the output of all."""
    return "".join(stack.shell(line, folder, **variables) for line in COMMANDS[to])


def test_a_backup_restores_what_was_deleted(stack: Stack, server: Client, tmp_path: Path) -> None:
    name = uuid4().hex
    server.buffers[name].create((3,))
    server.buffers[name].accumulate([1, 2, 3])
    run(stack, "back", tmp_path)
    for buffer in server.buffers.list():
        server.buffers[buffer.name].delete()
    run(stack, "restore,", tmp_path)
    assert server.buffers[name].value().tolist() == [1, 2, 3]
    assert "no problems found" in run(stack, "look", tmp_path)


def test_no_backup_lands_in_the_volume_of_the_data(stack: Stack) -> None:
    for path, status in {"backup": 1, "/data/backup": 2, "/tmp/backup": 0}.items():
        stack.exec("gradserve", "gradserve", "export", path, status=status)
    assert "backup" not in stack.exec("gradserve", "ls", "/data")


def test_an_upgrade_keeps_buffers_and_keys(stack: Stack, server: Client, tmp_path: Path) -> None:
    name = uuid4().hex
    server.buffers[name].create((1,))
    server.buffers[name].accumulate([7])
    before = stack.container("gradserve")
    printed = run(stack, "upgrade,", tmp_path)
    assert f"gradserve is ready at {stack.url}" in printed
    assert "gs_" not in printed.replace("gs_...", "")
    assert stack.container("gradserve") != before
    assert server.buffers[name].value().tolist() == [7]


def test_a_key_is_rotated(stack: Stack, tmp_path: Path) -> None:
    old = stack.keys("add", "trainer", "--namespace", "trainers")
    with Client(stack.url, api_key=old) as server:
        server.buffers["w"].create((1,))
    adding, removing = COMMANDS["rotate"]
    new = stack.shell(adding, tmp_path).strip()
    for secret in (old, new):
        assert status(stack, secret) == 200
    stack.shell(removing, tmp_path)
    assert (status(stack, old), status(stack, new)) == (401, 200)
    with Client(stack.url, api_key=new) as server:
        server.buffers["w"].delete()  # which is in the same namespace
    stack.keys("rm", "trainer-2")


def status(stack: Stack, secret: str) -> int:
    head = {"Authorization": f"Bearer {secret}"}
    return httpx.get(f"{stack.url}/v1/buffers", headers=head, trust_env=False).status_code


def test_https_is_served(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder, port = tmp_path_factory.mktemp("tls"), free_port()
    files = {"-out": folder / "tls_certificate", "-keyout": folder / "tls_key"}
    subject = "-x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    places = [str(part) for item in files.items() for part in item]
    subprocess.run(["openssl", "req", *subject.split(), *places], check=True, capture_output=True)
    files["-keyout"].chmod(0o644)
    variables = {
        "GRADSERVE_LISTEN_TLS": f"127.0.0.1:{port}",
        "GRADSERVE_TLS_CERTIFICATE_FILE": str(files["-out"]),
        "GRADSERVE_TLS_KEY_FILE": str(files["-keyout"]),
    }
    try:
        run(stack, "serve", folder, **variables)
        stack.wait()
        trust = ssl.create_default_context(cafile=files["-out"])
        with httpx.Client(verify=trust, trust_env=False) as server:
            assert server.get(f"https://127.0.0.1:{port}/v2/health/ready").status_code == 200
    finally:
        stack.engine("compose", "down")
        stack.up()


def test_the_readmes_container_serves_this_machine_without_keys(stack: Stack) -> None:
    pattern = r"^\$ docker build -t gradserve \. &&\n    docker run (.*) -p (127\.0\.0\.1):8000:8000 (.*) gradserve$"
    ((before, address, after),) = re.findall(pattern, (ROOT / "README.md").read_text(), re.MULTILINE)
    place = f"{address}:{free_port()}"
    command = ("run", "--detach", *before.split(), "-p", f"{place}:8000", *after.split(), PROJECT)
    container = stack.engine(*command).strip()
    try:
        wait_until(lambda: is_ready(f"http://{place}"))
        for host, expected in {place: 200, "localhost": 200, "other.example": 403}.items():
            answer = httpx.get(f"http://{place}/v1/buffers", headers={"Host": host}, trust_env=False)
            assert answer.status_code == expected
    finally:
        stack.engine("stop", container)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v2/health/ready", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


ASK = """
import http.client, socket
connection = http.client.HTTPConnection("localhost")
connection.sock = socket.socket(socket.AF_UNIX)
connection.sock.connect("/run/gradserve/http.sock")
connection.request("GET", "/v1/ops")
print(connection.getresponse().status)
"""
"""A trainer without an API key."""


def test_the_socket_is_shared_with_a_container(stack: Stack, tmp_path: Path) -> None:
    try:
        run(stack, "share", tmp_path)
        stack.wait()
        assert stack.health() == 0
        volume = f"{PROJECT}_socket:/run/gradserve:ro"
        trainer = ("run", "--rm", "--network", "none", "--user", "12345", "--volume", volume, "--entrypoint", "python")
        assert stack.engine(*trainer, PROJECT, "-c", ASK).strip() == "401"
    finally:
        stack.engine("compose", "down")
        stack.up()


def test_metrics_are_collected(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder, port = tmp_path_factory.mktemp("metrics"), free_port()
    variables = {
        "GRADSERVE_LISTEN_PROMETHEUS": f"127.0.0.1:{port}",
        "GRADSERVE_METRICS_KEY_FILE": f"{folder}/gradserve_metrics_key",
    }
    # Grafana's image cannot be had everywhere, and Debian has no package of it to make a stand-in of.
    only = "" if stack.can_pull(GRAFANA) else " prometheus"
    try:
        for line in COMMANDS["collect"]:
            stack.shell(line.replace("up -d", f"up -d{only}"), folder, **variables)
        assert re.search(r"prometheus.*Up|Up.*prometheus", run(stack, "see", folder, **variables))
        wait_for_workers(f"http://127.0.0.1:{port}/api/v1/query?query=gradserve_workers")
    finally:
        stack.engine("rm", "--force", "--volumes", stack.container("prometheus"))
        stack.keys("rm", "prometheus")


def wait_for_workers(url: str) -> None:
    """Wait until Prometheus has scraped the metric, at one of its rounds of 15 seconds."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            if httpx.get(url, trust_env=False).json()["data"]["result"]:
                return
        except httpx.HTTPError:
            pass  # Prometheus is starting
        time.sleep(0.2)
    raise AssertionError("Prometheus does not know the workers")
