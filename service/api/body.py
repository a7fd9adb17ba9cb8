"""Bodies: a request's is read once, into one buffer, within the limit; an answer's goes out in its pieces."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.api.admission import SMALL_BYTES, hold
from service.api.context import context_of, settings_of
from service.api.http.exchange import Exchange, exchange_of
from service.api.http.receiver import LEAST_RATE
from service.errors import BodyTooLarge, MalformedBody, RequestTimeout, UnsupportedMediaType, shown

Headers: TypeAlias = Mapping[bytes, bytes]
"""A request's headers, their names in lower case."""

JOINED_BYTES = 1 << 16
"""Up to this size an answer costs less in one piece."""

DIRECT_BYTES = 1 << 16
"""Up to this size of a body it costs less to let uvicorn collect it."""

ALIGNMENT = 16
"""What the address of every element's size divides, and NumPy's memory begins at a multiple of."""

_WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""zlib's names of the content codings."""


async def read_body(scope: Scope, receive: Receive, allocate: Callable[[int], memoryview], head: int = 0) -> memoryview:
    """The whole body: if it is large and its length announced, in memory from `allocate`.

    What stands `head` bytes from its beginning is then aligned for NumPy. Raises `BodyTooLarge` as soon as it is known,
    `RequestTimeout` when nothing comes for too long, `MalformedBody` for a transfer coding that is not read, and
    `ClientDisconnect`.
    """
    context, settings = context_of(scope), settings_of(scope)
    limit, patience = settings.max_body_bytes, settings.request_timeout
    if b"transfer-encoding" in context.headers:
        _check_chunked(scope)
    began, exchange = time.perf_counter_ns(), exchange_of(scope)
    at_hand = None if exchange is None else exchange.body_at_hand()
    if at_hand is None:
        body = await _read(scope, receive, exchange, allocate, head, limit, patience)
    elif len(at_hand) <= limit:
        body = memoryview(at_hand)
    else:
        raise _too_large(f"The body has {len(at_hand)} bytes", limit)
    context.spent["read"] = time.perf_counter_ns() - began
    context.received = len(body)
    return body


def _check_chunked(scope: Scope) -> None:
    """Raise `MalformedBody` for a transfer coding other than chunked: nothing here would undo it."""
    lines = [value for name, value in scope["headers"] if name == b"transfer-encoding"]
    coding = b", ".join(lines).decode("latin-1")
    if coding.strip().lower() != "chunked":
        raise MalformedBody(
            f"Transfer-Encoding is {shown(coding)}, but must be chunked; a body is compressed by Content-Encoding"
        )


async def _read(
    scope: Scope,
    receive: Receive,
    exchange: Exchange | None,
    allocate: Callable[[int], memoryview],
    head: int,
    limit: int,
    patience: float,
) -> memoryview:
    length = context_of(scope).headers.get(b"content-length")
    announced = None if length is None else int(length)  # the HTTP parser has seen to it that this is a number
    if announced is not None and announced > limit:
        raise _too_large(f"The body has {announced} bytes", limit)
    try:
        if announced is None or announced <= DIRECT_BYTES or exchange is None:
            return await _grown(scope, receive, limit, patience)
        shift = -head % ALIGNMENT
        whole = allocate(announced + shift)[shift:]
        if not await exchange.receive_into(whole, patience):
            raise ClientDisconnect
        return whole
    except TimeoutError:
        raise RequestTimeout(
            f"The body is not complete, but nothing came for {patience:g} seconds (GRADSERVE_REQUEST_TIMEOUT), or less"
            f" than {LEAST_RATE} bytes a second",
            limit=patience,
        ) from None


async def _grown(scope: Scope, receive: Receive, limit: int, patience: float) -> memoryview:
    """A body that is small, of unknown length, or comes under another server."""
    body, more, held = bytearray(), True, 0
    chunked = b"content-length" not in context_of(scope).headers
    clock = asyncio.get_running_loop().time
    began = clock()
    async with asyncio.timeout(patience) as timeout:
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunk, more = message.get("body", b""), message.get("more_body", False)
            if len(body) + len(chunk) > limit:
                raise _too_large(f"The body has more than {limit} bytes", limit)
            body += chunk
            if chunked and len(body) - held > SMALL_BYTES:
                hold(scope, len(body) - held)
                held = len(body)
            if more and len(body) + SMALL_BYTES >= LEAST_RATE * (clock() - began - patience):
                timeout.reschedule(clock() + patience)
    return memoryview(body)


def _too_large(what: str, limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"{what}; the limit is {limit} (GRADSERVE_MAX_BODY_BYTES)", limit=limit)


def coding_of(headers: Headers) -> str | None:
    """The coding that the body came in, gzip or deflate; None for neither. Raises `UnsupportedMediaType`."""
    if b"content-encoding" not in headers:
        return None
    coding = headers[b"content-encoding"].decode("latin-1").strip().lower()
    if coding != "identity" and coding not in _WINDOWS:
        raise UnsupportedMediaType(f"Content-Encoding is {shown(coding)}, but must be one of identity, gzip, deflate")
    return None if coding == "identity" else coding


def wanted_coding(headers: Headers) -> str | None:
    """The coding that the answer is to go out in: the only one that Accept-Encoding names.

    HTTP libraries offer several with every request. To compress tensors takes far longer than to send them, so that is
    done for those only who ask for nothing else.
    """
    if b"accept-encoding" not in headers:
        return None
    accepted = headers[b"accept-encoding"].decode("latin-1").strip().lower()
    return accepted if accepted in _WINDOWS else None


def inflate(body: memoryview, coding: str, limit: int) -> memoryview:
    """The body as it was before its coding. Raises `MalformedBody`, and `BodyTooLarge` beyond `limit` bytes."""
    if not len(body):
        return body
    stream = zlib.decompressobj(_WINDOWS[coding])
    try:
        whole = stream.decompress(body, limit + 1)
    except zlib.error as error:
        raise MalformedBody(f"The body is not what its Content-Encoding, {coding}, says: {error}") from None
    if len(whole) > limit:
        raise BodyTooLarge(
            f"The body has more than {limit} bytes once it is inflated; that is the limit"
            " (GRADSERVE_MAX_INFLATED_BYTES)",
            limit=limit,
        )
    if not stream.eof or stream.unused_data:
        what = "has more behind its end: one stream is read, not several in a row" if stream.eof else "ends too early"
        raise MalformedBody(f"The body's {coding} stream {what}")
    return memoryview(whole)


def _deflated(pieces: Sequence[Any], coding: str) -> list[bytes]:
    """In a coding, fast rather than small."""
    stream = zlib.compressobj(1, wbits=_WINDOWS[coding])
    return [*map(stream.compress, pieces), stream.flush()]


class Answer(NamedTuple):
    """What goes out: `pieces`, which are not joined unless they are small."""

    pieces: Sequence[bytes | memoryview]
    media_type: str
    headers: Mapping[str, str] = {}

    def coded(self, coding: str | None) -> Answer:
        """The same in a content coding, or, with None, as it is."""
        if coding is None:
            return self
        return Answer(_deflated(self.pieces, coding), self.media_type, {**self.headers, "Content-Encoding": coding})

    async def send(self, scope: Scope, send: Send) -> None:
        """Send it, as the answer to the request of this scope."""
        context, started = context_of(scope), time.perf_counter_ns()
        size = sum(map(len, self.pieces))
        pieces = self.pieces if size > JOINED_BYTES else [b"".join(self.pieces)]
        headers = {"content-type": self.media_type, "content-length": str(size), **self.headers}
        exchange = exchange_of(scope)
        if exchange is not None:
            if context.request_id is not None:
                headers["x-request-id"] = context.request_id
            context.status = 200
            lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
            context.sent = await exchange.send_at_once(lines, pieces, size)
        else:  # under another server
            head = [(name.encode(), value.encode()) for name, value in headers.items()]
            await send({"type": "http.response.start", "status": 200, "headers": head})
            for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            context.sent = size
        context.spent["write"] = time.perf_counter_ns() - started


class AnswerResponse(Response):
    """An answer as FastAPI wants it."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        super().__init__()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer.send(scope, send)
