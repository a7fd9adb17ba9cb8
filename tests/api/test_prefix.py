"""Behind a proxy that takes a prefix off the path, as nginx with `location /grad/ { proxy_pass http://up/; }`."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest

from tests.api.calls import fresh

PREFIX = "/grad/"


class Prefixed(httpx.BaseTransport):
    """Sends requests under the prefix to the server without it. Others meet another server, which knows no path."""

    def __init__(self, url: str) -> None:
        self._url, self._server = httpx.URL(url), httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.raw_path.decode()
        if not path.startswith(PREFIX):
            return httpx.Response(404, request=request)
        inner = self._url.copy_with(raw_path=path.removeprefix(PREFIX[:-1]).encode())
        headers = {**request.headers, "host": inner.netloc.decode()}
        content = request.read()
        return self._server.handle_request(httpx.Request(request.method, inner, headers=headers, content=content))

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def proxy(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url="http://proxy.example/grad/", transport=Prefixed(url)) as client:
        yield client


@pytest.mark.parametrize("path", ["", "docs"])
def test_all_that_a_page_links_to_is_under_the_prefix(proxy: httpx.Client, path: str) -> None:
    page = proxy.get(path)
    assert (page.status_code, str(page.url)) == (200, f"http://proxy.example/grad/{path}")
    linked = [to for to in re.findall(r"""(?:src|href|url)[=:]\s*["']([^"']+)""", page.text) if to[0] != "#"]
    assert len(linked) >= 4
    assert {path: proxy.get(page.url.join(path)).status_code for path in linked} == dict.fromkeys(linked, 200)


def test_the_documentation_asks_the_server_behind_the_prefix(proxy: httpx.Client) -> None:
    """A server's relative URL is beside the schema (OpenAPI 3.1, Server Object)."""
    answer = proxy.get("openapi.json")
    (server,) = answer.json().get("servers", [{"url": "/"}])
    base = answer.url.join(server["url"])
    for path in ("/v1/ops", "/v1/limits", "/v2", "/v2/health/live"):
        assert path in answer.json()["paths"]
        assert proxy.get(f"{base}".rstrip("/") + path).status_code == 200


@pytest.mark.parametrize("name", ["layer.weight", "a:b", "x--", "...", "-"])
def test_the_location_of_a_new_buffer_is_under_the_prefix(proxy: httpx.Client, name: str) -> None:
    name = f"{name}{fresh()}"
    made = proxy.put(f"v1/buffers/{name}", json={"shape": [2]})
    found = proxy.get(made.url.join(made.headers["location"]))
    assert (made.status_code, found.status_code, found.json()["name"]) == (201, 200, name)
