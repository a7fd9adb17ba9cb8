"""A transport with a script, and a clock that only waits move, so that tests of retries take no time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from gradserve_client._async import channels as async_channels
from gradserve_client._async import runner as async_runner
from gradserve_client._http import channels, log, outcomes, policy, runner

from tests.clients.both import connected


class Clock:
    """Replaces the module `time`. Only sleeping moves it."""

    def __init__(self) -> None:
        self.now, self.waits = time.monotonic(), list[float]()
        self._start = self.now

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        """Return the seconds since 1970, as if 1970 began 1000 seconds ago."""
        return 1000 + self.now - self._start

    def sleep(self, seconds: float) -> None:
        assert len(self.waits) < 1000, "this goes on forever"
        self.waits.append(seconds)
        self.now += seconds

    async def sleep_async(self, seconds: float) -> None:
        self.sleep(seconds)


def stopped(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return a clock that both clients use."""
    clock = Clock()
    for module in (policy, log, outcomes, runner, channels, async_channels):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(async_runner, "anyio", SimpleNamespace(sleep=clock.sleep_async))
    return clock


Answering = Callable[[], httpx.Response]
Step = Callable[[Answering], httpx.Response]


def never_sent(send: Answering) -> httpx.Response:
    raise httpx.ConnectError("refused")


def answer_lost(send: Answering) -> httpx.Response:
    send()
    raise httpx.ReadError("reset")


def answer_cut(send: Answering) -> httpx.Response:
    send()
    raise httpx.RemoteProtocolError("peer closed connection without sending complete message body")


def mangled(send: Answering) -> httpx.Response:
    answer = send()
    return _but(answer, answer.content[:-3])


def refusal_mangled(send: Answering) -> httpx.Response:
    return httpx.Response(409, headers=_but(send(), b"").headers, content=b'{"code":"epo')


def sent_on(send: Answering) -> httpx.Response:
    return send()


def renamed(send: Answering) -> httpx.Response:
    answer = send()
    answer.headers["X-Request-ID"] = "the proxy's own"
    return answer


def stray(send: Answering) -> httpx.Response:
    """Return the answer to an earlier request on the same connection."""
    return httpx.Response(200, headers={"X-Request-ID": "another"}, json={"name": "scripted", "count": 777})


def _but(answer: httpx.Response, body: bytes) -> httpx.Response:
    headers = {name: one for name, one in answer.headers.items() if name != "content-length"}
    return httpx.Response(answer.status_code, headers=headers, content=body)


def silent(send: Answering) -> httpx.Response:
    raise httpx.ReadTimeout("silent")


def late(send: Answering) -> httpx.Response:
    send()
    raise httpx.ReadTimeout("silent")


def unreachable(send: Answering) -> httpx.Response:
    raise httpx.ConnectTimeout("no route")


def says(
    status: int,
    *,
    code: str | None = None,
    body: str = "<html>Bad Gateway</html>",
    receipts: Any = None,
    **headers: str,
) -> Step:
    """Return the answer of a proxy, or with a `code`, of the server."""
    problem = {"code": code, "detail": f"it is {code}", "status": status}
    if receipts is not None:
        problem["receipts"] = receipts
    names = {name.replace("_", "-"): value for name, value in headers.items()}

    def step(send: Answering) -> httpx.Response:
        if code is None:
            return httpx.Response(status, headers=names, text=body)
        return httpx.Response(status, headers=names, json=problem)

    return step


class Scripted(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Follows the script, a step for each request, and then lets the server answer. `seen` has the requests."""

    def __init__(self, *script: Step, forever: Step | None = None) -> None:
        self._script, self._forever = list(script), forever
        self._inner = httpx.HTTPTransport()
        self.seen: list[httpx.Request] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        assert isinstance(request.stream, httpx.SyncByteStream)
        body = b"".join(request.stream)
        copy = httpx.Request(request.method, request.url, headers=request.headers, content=body)
        copy.extensions = {"timeout": request.extensions["timeout"]}
        self.seen.append(copy)
        assert len(self.seen) < 1000, "this goes on forever"

        def send() -> httpx.Response:
            answer = self._inner.handle_request(copy)
            return httpx.Response(answer.status_code, headers=answer.headers, content=answer.read())

        step = self._script.pop(0) if self._script else self._forever
        return send() if step is None else step(send)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return self.handle_request(request)

    def close(self) -> None:
        self._inner.close()

    async def aclose(self) -> None:
        self._inner.close()


@contextmanager
def through(kind: str, url: str, transport: Scripted, **settings: Any) -> Iterator[Any]:
    """Yield a client with this transport, and an empty buffer `scripted` of shape (2,)."""
    with connected("sync", url) as plain:
        plain.buffers["scripted"].create((2,))
        try:
            with connected(kind, url, transport=transport, **settings) as server:
                yield server
        finally:
            plain.buffers["scripted"].delete()
