"""The clients: one for programs that wait, one for those that await."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio
import httpx

from gradserve_client import _calls
from gradserve_client._async_buffers import AsyncBuffers
from gradserve_client._async_ops import AsyncOps
from gradserve_client._async_transport import AsyncTransport
from gradserve_client._calls import Input, Into
from gradserve_client._policy import Answer, Call, Closed, Patience, Wait, exchange
from gradserve_client._requests import Settings, joined, through
from gradserve_client._tensors import Array
from gradserve_client._transport import Transport
from gradserve_client.buffers import Buffers
from gradserve_client.errors import GradserveError
from gradserve_client.models import OperatorInfo, Receipt
from gradserve_client.ops import Ops

T = TypeVar("T")


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
        self._settings = Settings(url, api_key, timeout, attempt_timeout, max_retries)
        if transport is None:
            proxy = self._settings.proxy()
            transport = Transport() if proxy is None else through(httpx.HTTPTransport, proxy)
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

        Lists become the dtype that the operator's method in `ops` names first, mostly float32. `outputs` names those to
        compute. `into`, output -> buffer, adds an output to a buffer, with `weight`, and, with `epoch`, only while the
        buffer is in it; its receipt then stands in its place.

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
        self._settings.check_open()
        try:
            self._run(_calls.ready(), self._settings.patience.once())
        except GradserveError:
            return False
        return True

    def close(self) -> None:
        """Close the connections. No call can be made after it."""
        self._settings.closed = True
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, call: Call[T], patience: Patience | None = None) -> T:
        self._settings.check_open()
        request_id = uuid.uuid4().hex
        steps = exchange(call, patience or self._settings.patience, self._settings.echo, request_id)
        done: Answer | httpx.TransportError | None = None
        while True:
            try:
                step = steps.send(done)
            except StopIteration as end:
                result: T = end.value
                return result
            finally:
                done = None  # or an error and this frame would keep each other alive, and with them the call's arrays
            if isinstance(step, Wait):
                time.sleep(step.seconds)
            else:
                done = self._send(self._settings.request(call, request_id, step), step.until)

    def _send(self, request: httpx.Request, until: float) -> Answer | httpx.TransportError:
        if self._settings.closed:
            return Closed()
        body: bytearray | None = None
        try:
            response = self._transport.handle_request(request)
            assert isinstance(response.stream, httpx.SyncByteStream)
            try:
                for piece in response.stream:
                    body = joined(body, piece)
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
        self._settings = Settings(url, api_key, timeout, attempt_timeout, max_retries)
        self._transport = transport or through(AsyncTransport, self._settings.proxy())
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
        self._settings.check_open()
        try:
            await self._run(_calls.ready(), self._settings.patience.once())
        except GradserveError:
            return False
        return True

    async def close(self) -> None:
        """Close the connections. No call can be made after it."""
        self._settings.closed = True
        await self._transport.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, call: Call[T], patience: Patience | None = None) -> T:
        self._settings.check_open()
        request_id = uuid.uuid4().hex
        steps = exchange(call, patience or self._settings.patience, self._settings.echo, request_id)
        done: Answer | httpx.TransportError | None = None
        while True:
            try:
                step = steps.send(done)
            except StopIteration as end:
                result: T = end.value
                return result
            if isinstance(step, Wait):
                await anyio.sleep(step.seconds)
                done = None
            else:
                done = await self._send(self._settings.request(call, request_id, step), step.until)

    async def _send(self, request: httpx.Request, until: float) -> Answer | httpx.TransportError:
        if self._settings.closed:
            return Closed()
        body: bytearray | None = None
        try:
            with anyio.fail_after(max(until - time.monotonic(), 0.001)):
                response = await self._transport.handle_async_request(request)
                assert isinstance(response.stream, httpx.AsyncByteStream)
                try:
                    async for piece in response.stream:
                        body = joined(body, piece)
                finally:
                    await response.stream.aclose()
        except TimeoutError:
            return httpx.ReadTimeout("the answer took too long")
        except httpx.TransportError as error:
            return error
        return Answer(response.status_code, response.headers, body or bytearray())
