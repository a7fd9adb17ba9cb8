"""The image's health check against servers with the settings of the image."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import httpx

from tests.serving import serving

SCRIPT = Path(__file__).parents[2] / "deploy" / "healthcheck.py"


def is_healthy(url: str, **environment: str) -> bool:
    """Return whether the script reports the server at `url` as healthy."""
    environment = {**os.environ, "GRADSERVE_PORT": str(httpx.URL(url).port), **environment}
    return subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True).returncode == 0


def test_a_server_is_healthy_once_it_is_ready() -> None:
    with serving() as url:
        assert is_healthy(url)
        assert not is_healthy(url, GRADSERVE_TLS_CERTIFICATE="/certificate.pem"), "it does not speak HTTPS"


def test_a_server_with_https_is_healthy_once_it_is_ready(certificate: tuple[Path, Path]) -> None:
    made, key = certificate
    with serving(tls_certificate=made, tls_key=key) as url:
        assert is_healthy(url, GRADSERVE_TLS_CERTIFICATE=str(made))
        assert not is_healthy(url)


def test_a_port_without_a_server_is_not_healthy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        port = there.getsockname()[1]
    assert not is_healthy(f"http://127.0.0.1:{port}")


def test_a_server_is_asked_over_its_socket(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    """The socket has no TLS, and the port need not be set."""
    made, key = certificate
    path = tmp_path / "s"
    given = {"GRADSERVE_SOCKET": str(path), "GRADSERVE_PORT": "", "GRADSERVE_TLS_CERTIFICATE": str(made)}
    with serving(socket=path, tls_certificate=made, tls_key=key) as url:
        assert is_healthy(url, **given)
    assert not is_healthy(url, **given)
