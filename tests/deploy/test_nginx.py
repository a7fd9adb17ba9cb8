"""A real nginx in front of a real server, with deploy/nginx.conf and with the lines of docs/http.md."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from service.errors import HeadTooLarge
from service.keys import add
from tests.api.test_body import Connection
from tests.integration.stack import ROOT
from tests.ports import free_port
from tests.serving import assert_problem, serving, wait_until

NGINX = shutil.which("nginx", path=os.environ["PATH"] + ":/usr/sbin")
HAPROXY = shutil.which("haproxy", path=os.environ["PATH"] + ":/usr/sbin")

pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is missing; on Debian: apt-get install nginx")

RELU = {"dY": [1.0], "X": [1.0]}

BARE = """
pid nginx.pid;
error_log stderr warn;
events {}
http {
    access_log off;
    client_body_temp_path client_body; proxy_temp_path proxy;
    fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi; scgi_temp_path scgi;
    MAP
    server { listen 127.0.0.1:8080; location / { LINES } }
}
"""
"""As little as nginx needs beside the lines of the documentation."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder whose path is short enough for that of a UNIX socket."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@contextmanager
def nginx(folder: Path, text: str) -> Iterator[str]:
    """Yield the URL of nginx with this configuration, in which it listens on 8080."""
    port = free_port()
    (folder / "nginx.conf").write_text(re.sub(r"listen (127\.0\.0\.1:)?8080", f"listen 127.0.0.1:{port}", text))
    options = "daemon off;" + (" user root;" if os.geteuid() == 0 else "")  # its workers may then open the socket
    command: list[str | Path] = [str(NGINX), "-p", folder, "-e", "stderr", "-c", folder / "nginx.conf", "-g", options]
    with running(command, folder / "nginx.log", port):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def running(command: list[str | Path], log: Path, port: int) -> Iterator[None]:
    """Run the program, which listens on the port."""
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            wait_until(lambda: listens(port) or process.poll() is not None)
            assert process.poll() is None, log.read_text()
            yield
        finally:
            process.terminate()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def deployed(folder: Path) -> Iterator[str]:
    """Yield the URL of nginx with deploy/nginx.conf, before a server without keys."""
    with serving(host_names="gpu-box") as url:
        (folder / "service.conf").write_text(f"server {url.removeprefix('http://')} max_fails=0;\n")
        text = (ROOT / "deploy/nginx.conf").read_text()
        with nginx(folder, text.replace("/tmp/", f"{folder}/").replace("/etc/nginx/", f"{folder}/")) as proxy:
            yield proxy


@pytest.mark.parametrize("target", [b"/v2/health/ready", b"http://gpu-box/v2/health/ready"])
def test_http_1_0_needs_no_host(deployed: str, target: bytes) -> None:
    with Connection(deployed) as connection:
        connection.send(b"GET %b HTTP/1.0\r\n\r\n" % target)
        answer = connection.answer()
        assert (answer.status, answer.body) == (200, b'{"ready":true}')


def test_the_port_of_the_host_is_passed_on(deployed: str) -> None:
    """A browser of the page at / sends this origin."""
    headers = {"Host": "localhost:8080", "Origin": "http://localhost:8080"}
    assert httpx.post(f"{deployed}/v1/ops/ReluGrad", json=RELU, headers=headers).status_code == 200


def test_an_unknown_host_is_refused_through_nginx(deployed: str) -> None:
    answer = httpx.get(f"{deployed}/v1/limits", headers={"Host": "evil.example"})
    assert_problem(answer, 403, "forbidden", "'evil.example'", "GRADSERVE_HOST_NAMES")


LARGE_LINE = b" HTTP/1.1\r\nHost: gpu-box\r\nX-Large: " + b"x" * 70_000


@pytest.mark.parametrize(
    ("path", "more"), [("/v1/ops", b"?" + b"x" * 70_000), ("/v1/ops", LARGE_LINE), ("/v2", LARGE_LINE)]
)
def test_nginx_refuses_a_large_head_as_the_service_does(deployed: str, path: str, more: bytes) -> None:
    with Connection(deployed) as connection:
        connection.send(b"GET %b%b" % (path.encode(), more))
        answer = connection.answer()
    assert (answer.status, answer.headers["x-content-type-options"]) == (431, "nosniff")
    problem = json.loads(answer.body)
    if path == "/v1/ops":
        assert (problem["code"], problem["title"]) == ("head_too_large", HeadTooLarge.title())
    else:
        assert "64 KB" in problem["error"]


@pytest.mark.skipif(HAPROXY is None, reason="HAProxy is missing; on Debian: apt-get install haproxy")
@pytest.mark.parametrize("check", ["option httpchk", "option httpchk GET /v2/health/ready"])
def test_haproxy_finds_the_server_up(deployed: str, folder: Path, check: str) -> None:
    port, control = free_port(), folder / "control"
    (folder / "haproxy.cfg").write_text(f"""
global
    stats socket {control}
defaults
    mode http
    timeout connect 5s
    timeout client 30s
    timeout server 30s
    timeout check 30s
listen front
    bind 127.0.0.1:{port}
    {check}
    server one {deployed.removeprefix("http://")} check inter 50
""")

    def status() -> dict[str, str]:
        with socket.socket(socket.AF_UNIX) as stats:
            if stats.connect_ex(str(control)):  # HAProxy may listen on its port first
                return {"check_status": ""}
            stats.sendall(b"show stat front 4 -1\n")
            names, values = stats.makefile().read().splitlines()[:2]
        return dict(zip(names.split(","), values.split(","), strict=True))

    with running([str(HAPROXY), "-f", folder / "haproxy.cfg"], folder / "haproxy.log", port):
        wait_until(lambda: status()["check_status"].startswith("L7"))
        assert (status()["check_status"], status()["status"]) == ("L7OK", "UP")
        assert httpx.post(f"http://127.0.0.1:{port}/v1/ops/ReluGrad", json=RELU).status_code == 200


# ----- the lines of docs/http.md for a UNIX socket -----


@pytest.fixture
def text(folder: Path) -> str:
    """Return a configuration with the lines for nginx, for a socket in the folder."""
    section = (ROOT / "docs/http.md").read_text().partition("\n## UNIX socket\n")[2].partition("\n## ")[0]
    maps, lines = (re.findall(f"`({start}[^`]+[;}}])`", section) for start in ("map", "proxy_"))
    assert (len(maps), len(lines)) == (1, 3)
    here = [line.replace("/run/gradserve/http.sock", str(folder / "s")) for line in lines]
    return BARE.replace("MAP", maps[0]).replace("LINES", " ".join(here))


@pytest.mark.parametrize("version", ["", "proxy_http_version 1.1;"])
def test_http_1_0_needs_no_host_through_the_documented_lines(folder: Path, text: str, version: str) -> None:
    """nginx calls the service in the second version if it keeps connections alive."""
    with serving(socket=folder / "s"), nginx(folder, text.replace("location / {", "location / {" + version)) as proxy:
        for target in (b"/v2/health/ready", b"/v1/limits"):
            with Connection(proxy) as connection:
                connection.send(b"GET %b HTTP/1.0\r\n\r\n" % target)
                assert connection.answer().status == 200


def test_the_page_posts_through_the_documented_lines(folder: Path, text: str) -> None:
    with serving(socket=folder / "s"), nginx(folder, text) as proxy:
        headers = {"Host": "localhost:8080", "Origin": "http://localhost:8080"}
        assert httpx.post(f"{proxy}/v1/ops/ReluGrad", json=RELU, headers=headers).status_code == 200
        foreign = {**headers, "Origin": "http://other.example"}
        assert httpx.post(f"{proxy}/v1/ops/ReluGrad", json=RELU, headers=foreign).status_code == 403


def test_the_documented_lines_do_not_open_the_metrics(folder: Path, text: str) -> None:
    path, keys = folder / "s", folder / "keys"
    secret = add(keys, "ann", ["admin"])
    with serving(socket=path, keys=keys), nginx(folder, text) as proxy:
        assert httpx.get(f"{proxy}/metrics").status_code == 401
        assert httpx.get(f"{proxy}/metrics", headers={"Authorization": f"Bearer {secret}"}).status_code == 200
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://localhost") as near:
            assert near.get("/metrics").status_code == 200
