"""Hosts of a server without API keys: a page whose name leads here (DNS rebinding) reads and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from service.keys import add
from tests.api.test_body import Connection
from tests.serving import assert_problem, serving

KNOWN = [
    "localhost",
    "LocalHost:8000",
    "a.localhost",
    "localhost.",
    "127.0.0.1:8000",
    "192.0.2.1",
    "[::1]:8000",
    "[fe80::1%25eth0]",
    "",
    ":80",
]
UNKNOWN = ["evil.example", "EVIL.example:8000", "localhost.evil.example", "evillocalhost", "127.0.0.1.evil.example"]
UNKNOWN += ["gradserve:8000", "x.127.0.0.1", "1.2.3.4x", "*"]

CLOSED = [
    ("GET", "/v1/limits"),
    ("HEAD", "/v1/buffers"),
    ("GET", "/v2"),
    ("GET", "/v1/caller"),
    ("GET", "/metrics"),
    ("GET", "/nothing"),
    ("PUT", "/v1/buffers/b"),
    ("DELETE", "/v1/buffers?all=true"),
    ("POST", "/v2/models/ReluGrad/infer"),
]
OPEN = ["/", "/docs", "/openapi.json", "/v2/health/live", "/v2/health/ready"]

SETTING = "GRADSERVE_HOST_NAMES"


def headers(host: str) -> list[tuple[str, str]]:
    """Return what a browser sends from a page of this host."""
    return [("Host", host), ("Origin", f"http://{host}"), ("Sec-Fetch-Site", "same-origin")]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(host_names="") as url:
        httpx.put(f"{url}/v1/buffers/a", json={"shape": [2]}).raise_for_status()
        yield url


@pytest.mark.parametrize(("method", "path"), CLOSED)
@pytest.mark.parametrize("host", UNKNOWN)
def test_an_unknown_host_is_refused(url: str, host: str, method: str, path: str) -> None:
    answer = httpx.request(method, url + path, headers=headers(host))
    assert answer.status_code == 403
    if method != "HEAD":
        assert repr(host) in answer.text
        assert SETTING in answer.text
    assert [one["name"] for one in httpx.get(f"{url}/v1/buffers").json()["buffers"]] == ["a"]


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://evil.example/v1/limits", "localhost", 403),
        ("HTTPS://evil.example:80/v1/limits?a=1", "localhost", 403),
        ("http://localhost/v1/limits", "evil.example", 200),
        ("http://127.0.0.1:8000/v1/limits", "evil.example", 200),
        ("http://[::1]/v1/limits", "evil.example", 200),
        ("http://localhost@evil.example/v1/limits", "localhost", 400),
        ("http:///v1/limits", "localhost", 400),
        ("/http://evil.example/v1/limits", "localhost", 404),
        ("/v1/limits?http://localhost/", "evil.example", 403),
    ],
)
def test_the_host_of_an_absolute_target_replaces_host(
    url: str, target: str, host: str, status: int, version: bytes
) -> None:
    """RFC 9112, 3.2.2."""
    with Connection(url) as connection:
        connection.send(b"GET %b HTTP/%b\r\nHost: %b\r\n\r\n" % (target.encode(), version, host.encode()))
        assert connection.answer().status == status


def test_an_absolute_target_needs_no_host_in_http_1_0_and_host_in_http_1_1(url: str) -> None:
    for host, statuses in ((b"localhost", (200, 400)), (b"evil.example", (403, 400))):
        for version, status in zip((b"1.0", b"1.1"), statuses, strict=True):
            with Connection(url) as connection:
                connection.send(b"GET http://%b/v1/limits HTTP/%b\r\n\r\n" % (host, version))
                assert connection.answer().status == status


@pytest.mark.parametrize("host", KNOWN)
def test_localhost_and_addresses_are_known(url: str, host: str) -> None:
    assert httpx.get(f"{url}/v1/limits", headers=headers(host)).status_code == 200


@pytest.mark.parametrize("path", OPEN)
@pytest.mark.parametrize("host", UNKNOWN[:2])
def test_what_is_open_to_all_is_open_by_any_name(url: str, host: str, path: str) -> None:
    """A probe asks by the name of the service. These paths need no key on a server with keys, either."""
    answer = httpx.get(url + path, timeout=60, headers=[*headers(host)[:2], ("Sec-Fetch-Site", "cross-site")])
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("names", "known", "unknown"),
    [
        ("gradserve", "gradserve:8000", "gradserve.example"),
        ("gradserve, gpu-7.example", "GPU-7.example", "gpu-7xexample"),
        ("*.svc.cluster.local,gradserve", "gradserve.ml.svc.cluster.local:80", "svc.cluster.local.example"),
        ("*", "evil.example", None),
    ],
)
def test_other_names_are_known_from_the_settings(names: str, known: str, unknown: str | None) -> None:
    with serving(host_names=names) as url:
        for path in ("/v1/limits", "/metrics"):
            assert httpx.get(url + path, headers=headers(known)).status_code == 200
        if unknown is not None:
            assert_problem(httpx.get(f"{url}/v1/limits", headers=headers(unknown)), 403, "forbidden", SETTING)


def test_the_name_to_listen_on_is_known() -> None:
    with serving(host="localhost", host_names="") as url:
        assert httpx.get(f"{url}/v1/limits", headers=headers("localhost")).status_code == 200


def test_with_keys_any_host_will_do(tmp_path: Path) -> None:
    key = ("Authorization", f"Bearer {add(tmp_path / 'keys', 'one', ['ops'])}")
    with serving(keys=tmp_path / "keys", host_names="") as url:
        for host in UNKNOWN:
            assert httpx.get(f"{url}/v1/limits", headers=[*headers(host), key]).status_code == 200
            assert httpx.get(f"{url}/metrics", headers=[("Host", host)]).status_code == 200


def test_over_a_socket_any_host_will_do(tmp_path: Path) -> None:
    """No browser opens a socket, but a proxy does."""
    with serving(socket=tmp_path / "s", host_names="") as url:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(tmp_path / "s"))) as client:
            for host in ("evil.example", "gradserve"):
                assert client.get(f"http://{host}/v1/limits").status_code == 200
                forwarded = client.get(f"http://{host}/v1/limits", headers={"X-Forwarded-For": "192.0.2.1"})
                assert forwarded.status_code == 403
        assert httpx.get(f"{url}/v1/limits", headers={"Host": "gradserve"}).status_code == 403
