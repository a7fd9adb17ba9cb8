"""The clients: one for programs that wait, one for those that await."""

from __future__ import annotations

import os
import time
import urllib.request
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlencode

import anyio
import httpx

from gradserve_client import _calls
from gradserve_client._async_buffers import AsyncBuffers
from gradserve_client._async_ops import AsyncOps
from gradserve_client._calls import Input, Into
from gradserve_client._policy import Answer, Call, Patience, Send, Wait, exchange
from gradserve_client._tensors import Array
from gradserve_client._transport import MOST_IDLE, Transport
from gradserve_client.buffers import Buffers
from gradserve_client.errors import GradserveError, InvalidInput, ServerFailed
from gradserve_client.models import OperatorInfo, Receipt
from gradserve_client.ops import Ops

T = TypeVar("T")

DEFAULT_URL = "http://127.0.0.1:8000"

_PIECE = 1 << 20
"""Bytes that the asynchronous client hands over at once."""

_FOREVER = 1e8
"""Seconds, three years."""

_UNLIMITED = httpx.Limits(max_keepalive_connections=MOST_IDLE)
"""Many calls may wait for an epoch at once; one that would close it must not wait until they are through."""


class _Settings:
    """What both clients are made with."""

    def __init__(
        self,
        url: str | None,
        api_key: str | None,
        timeout: float,
        attempt_timeout: float,
        max_retries: int | None,
    ) -> None:
        url = url or os.environ.get("GRADSERVE_URL") or DEFAULT_URL
        try:
            self.url = httpx.URL(url.rstrip("/"))
        except httpx.InvalidURL as error:
            raise InvalidInput(f"The URL is {url!r}: {error}") from error
        if self.url.scheme not in ("http", "https") or not self.url.host:
            raise InvalidInput(f"The URL is {url!r}, but must begin with http:// or https:// and a host")
        if self.url.userinfo:
            raise InvalidInput("The URL has a user or a password, which a gradserve server does not know; see api_key")
        for name, seconds in {"timeout": timeout, "attempt_timeout": attempt_timeout}.items():
            if not (isinstance(seconds, (int, float)) and seconds > 0):
                raise InvalidInput(f"{name} is {seconds!r}, but must be a number of seconds above 0")
        if not (max_retries is None or (isinstance(max_retries, int) and max_retries >= 0)):
            raise InvalidInput(f"max_retries is {max_retries!r}, but must be None or an integer from 0 up")
        # A socket's clock ends somewhere, too.
        self.patience = Patience(min(timeout, _FOREVER), min(attempt_timeout, _FOREVER), max_retries)
        api_key = (api_key or os.environ.get("GRADSERVE_API_KEY") or "").strip()  # a file of it ends with a line break
        if not (api_key.isascii() and api_key.isprintable()):
            raise InvalidInput("The API key has characters that no API key has")  # which ones nobody's log must know
        self.headers = {
            "Host": self.url.netloc.decode("ascii"),
            "User-Agent": f"gradserve-client/{version('gradserve-client')}",
            **({"Authorization": f"Bearer {api_key}"} if api_key else {}),
        }

    def request(self, call: Call[Any], request_id: str, send: Send) -> httpx.Request:
        """What is sent for the call."""
        headers = {**self.headers, **call.headers, "X-Request-ID": request_id, "Request-Timeout": f"{send.silence:.3f}"}
        if call.key is not None:
            headers["Idempotency-Key"] = call.key
        size = sum(len(piece) for piece in call.body)
        if size or call.method in ("POST", "PUT"):
            headers["Content-Length"] = str(size)
        query = {**call.query, "timeout": call.poll} if call.wait else call.query
        target = f"{call.path}?{urlencode(query, doseq=True)}".rstrip("?")
        url = self.url.copy_with(raw_path=self.url.raw_path.partition(b"?")[0].rstrip(b"/") + target.encode())
        seconds = min(send.silence, self.patience.attempt_timeout)
        timeouts = {"connect": seconds, "write": seconds, "pool": seconds, "read": send.silence}
        try:
            return httpx.Request(
                call.method,
                url,
                headers=headers,
                stream=_Pieces(call.body),
                extensions={"timeout": timeouts, "until": send.until},
            )
        except (UnicodeEncodeError, httpx.InvalidURL) as error:
            raise InvalidInput(f"The request cannot be sent: {error}") from error

    def proxy(self) -> str | None:
        """The proxy that the environment names for the server."""
        if urllib.request.proxy_bypass(self.url.host):
            return None
        proxy = urllib.request.getproxies().get(self.url.scheme)
        return proxy if proxy is None or "://" in proxy else f"http://{proxy}"


def _through(transport: Callable[..., T], proxy: str | None) -> T:
    """An httpx transport, by the proxy that the environment names. Raises `InvalidInput` if there is no such way."""
    try:
        return transport(proxy=proxy, limits=_UNLIMITED)
    except (ImportError, ValueError) as error:
        raise InvalidInput(f"The proxy of the environment is {proxy!r}: {error}") from error


class _Pieces(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body in pieces, which can be sent any number of times."""

    def __init__(self, pieces: Sequence[bytes | memoryview]) -> None:
        self._pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        yield from self._pieces  # type: ignore[misc]  # a view is as good as bytes to a socket

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            view = memoryview(piece)
            for start in range(0, len(view), _PIECE):
                yield view[start : start + _PIECE]  # type: ignore[misc]


def _read(call: Call[T], answer: Answer, request_id: str) -> T:
    try:
        return call.read(answer)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ServerFailed(
            f"The answer cannot be read; is this a gradserve server? {type(error).__name__}: {error}",
            status=answer.status,
            request_id=answer.headers.get("x-request-id", request_id),
            idempotency_key=call.key,
        ) from error


class Client:
    """A connection to a server. Threads may share it.

    `url` and `api_key` are by default those of the environment, GRADSERVE_URL and GRADSERVE_API_KEY, or else
    http://127.0.0.1:8000 and none.

    A call is tried again when the connection fails, when nothing comes for `attempt_timeout` seconds, and when the
    server is busy or away, for `timeout` seconds altogether and at most `max_retries` times, if that is given. A call
    that changes something has a key that stays the same, so that it counts once. Where a call waits for an epoch, the
    time of that is not counted.

    `transport` is another way to the server, such as `httpx.HTTPTransport(verify=..., proxy=...)`.

    >>> from gradserve_client import Client
    >>> with Client(url) as server:
    ...     server.ops.relu_grad([1, 2], [0.5, -1])
    array([1., 0.], dtype=float32)
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        timeout: float = 60.0,
        attempt_timeout: float = 20.0,
        max_retries: int | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._settings = _Settings(url, api_key, timeout, attempt_timeout, max_retries)
        if transport is None:
            proxy = self._settings.proxy()
            transport = Transport() if proxy is None else _through(httpx.HTTPTransport, proxy)
        self._transport = transport
        self.ops = Ops(self)
        """The operators, a method each."""
        self.buffers = Buffers(self)
        """The buffers, by name."""

    @property
    def url(self) -> str:
        """The server's URL."""
        return str(self._settings.url)

    def run(
        self,
        op: str,
        tensors: Mapping[str, Input],
        attributes: Mapping[str, Any] | None = None,
        *,
        outputs: Sequence[str] | None = None,
        into: Mapping[str, Into] | None = None,
        weight: float | None = None,
        epoch: int | None = None,
        idempotency_key: str | None = None,
    ) -> dict[str, Array | Receipt]:
        """Run any operator that the server has, by its ONNX name: the outputs by name.

        Lists become float32. `outputs` names those to compute. `into`, output -> buffer, adds an output to a buffer,
        with `weight`, and, with `epoch`, only while the buffer is in it; its receipt then stands in its place.

        >>> server.run("LeakyReluGrad", {"dY": [1, 2], "Y": [3, -4]}, {"alpha": 0.5})
        {'dX': array([1., 1.], dtype=float32)}
        """
        return self._run(
            _calls.run(
                op,
                tensors,
                attributes or {},
                outputs=outputs,
                into=into,
                weight=weight,
                epoch=epoch,
                idempotency_key=idempotency_key,
            )
        )

    def operators(self) -> list[OperatorInfo]:
        """What the server can run.

        >>> next(one.formula for one in server.operators() if one.name == "TanhGrad")
        'dX = dY * (1 - Y * Y).'
        """
        return self._run(_calls.operators())

    def is_ready(self) -> bool:
        """Whether the server takes requests, asked once.

        >>> server.is_ready()
        True
        """
        try:
            self._run(_calls.ready(), self._settings.patience.once())
        except GradserveError:
            return False
        return True

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, call: Call[T], patience: Patience | None = None) -> T:
        request_id = uuid.uuid4().hex
        steps = exchange(call, patience or self._settings.patience, request_id)
        done: Answer | httpx.TransportError | None = None
        while True:
            try:
                step = steps.send(done)
            except StopIteration as end:
                return _read(call, end.value, request_id)
            finally:
                done = None  # or an error and this frame would keep each other alive, and with them the call's arrays
            if isinstance(step, Wait):
                time.sleep(step.seconds)
            else:
                done = self._send(self._settings.request(call, request_id, step), step.until)

    def _send(self, request: httpx.Request, until: float) -> Answer | httpx.TransportError:
        body: bytearray | None = None
        try:
            response = self._transport.handle_request(request)
            assert isinstance(response.stream, httpx.SyncByteStream)
            try:
                for piece in response.stream:
                    body = _joined(body, piece)
                    if time.monotonic() > until:
                        return httpx.ReadTimeout("the answer took too long")
            finally:
                response.stream.close()
        except httpx.TransportError as error:
            return error
        return Answer(response.status_code, response.headers, body or bytearray())


class AsyncClient:
    """The same as `Client`, awaited: `async with AsyncClient(url) as server: dX = await server.ops.relu_grad(dY, X)`.

    Its methods have the same arguments and results, and the same patience. It belongs to the event loop in which it is
    first used.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        timeout: float = 60.0,
        attempt_timeout: float = 20.0,
        max_retries: int | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._settings = _Settings(url, api_key, timeout, attempt_timeout, max_retries)
        self._transport = transport or _through(httpx.AsyncHTTPTransport, self._settings.proxy())
        self.ops = AsyncOps(self)
        """The operators, a method each."""
        self.buffers = AsyncBuffers(self)
        """The buffers, by name."""

    @property
    def url(self) -> str:
        """The server's URL."""
        return str(self._settings.url)

    async def run(
        self,
        op: str,
        tensors: Mapping[str, Input],
        attributes: Mapping[str, Any] | None = None,
        *,
        outputs: Sequence[str] | None = None,
        into: Mapping[str, Into] | None = None,
        weight: float | None = None,
        epoch: int | None = None,
        idempotency_key: str | None = None,
    ) -> dict[str, Array | Receipt]:
        """Run any operator that the server has, by its ONNX name; see `Client.run`."""
        return await self._run(
            _calls.run(
                op,
                tensors,
                attributes or {},
                outputs=outputs,
                into=into,
                weight=weight,
                epoch=epoch,
                idempotency_key=idempotency_key,
            )
        )

    async def operators(self) -> list[OperatorInfo]:
        """What the server can run."""
        return await self._run(_calls.operators())

    async def is_ready(self) -> bool:
        """Whether the server takes requests, asked once."""
        try:
            await self._run(_calls.ready(), self._settings.patience.once())
        except GradserveError:
            return False
        return True

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, call: Call[T], patience: Patience | None = None) -> T:
        request_id = uuid.uuid4().hex
        steps = exchange(call, patience or self._settings.patience, request_id)
        done: Answer | httpx.TransportError | None = None
        while True:
            try:
                step = steps.send(done)
            except StopIteration as end:
                return _read(call, end.value, request_id)
            if isinstance(step, Wait):
                await anyio.sleep(step.seconds)
                done = None
            else:
                done = await self._send(self._settings.request(call, request_id, step), step.until)

    async def _send(self, request: httpx.Request, until: float) -> Answer | httpx.TransportError:
        body: bytearray | None = None
        try:
            with anyio.fail_after(max(until - time.monotonic(), 0.001)):
                response = await self._transport.handle_async_request(request)
                assert isinstance(response.stream, httpx.AsyncByteStream)
                try:
                    async for piece in response.stream:
                        body = _joined(body, piece)
                finally:
                    await response.stream.aclose()
        except TimeoutError:
            return httpx.ReadTimeout("the answer took too long")
        except httpx.TransportError as error:
            return error
        return Answer(response.status_code, response.headers, body or bytearray())


def _joined(body: bytearray | None, piece: bytes) -> bytearray:
    """The body so far and what came: a body that comes whole, in memory of its own, is not copied."""
    if body is None:
        return piece if isinstance(piece, bytearray) else bytearray(piece)
    body += piece
    return body
