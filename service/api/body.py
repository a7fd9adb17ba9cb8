"""Bodies: a request's is read once, into one buffer, within the limit; an answer's goes out in its pieces."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.errors import BodyTooLarge, UnsupportedMediaType, shown

JOINED_BYTES = 1 << 16
"""Up to this size an answer costs less in one piece."""


async def read_body(request: Request, limit: int, allocate: Callable[[int], memoryview]) -> memoryview:
    """The whole body, in memory from `allocate` where its length is announced.

    Raises `BodyTooLarge` as soon as it is known, `UnsupportedMediaType` and `ClientDisconnect`.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise UnsupportedMediaType(f"Content-Encoding is {shown(encoding)}, but the body must be sent as it is")
    announced = request.headers.get("content-length")
    if announced is None:
        body = bytearray()
        async for chunk in _chunks(request):
            if len(body) + len(chunk) > limit:
                raise _too_large(f"The body has more than {len(body)} bytes", limit)
            body += chunk
        return memoryview(body)
    if int(announced) > limit:  # the HTTP parser has seen to it that this is a number
        raise _too_large(f"The body has {announced} bytes", limit)
    whole, size = allocate(int(announced)), 0
    async for chunk in _chunks(request):
        whole[size : size + len(chunk)] = chunk  # nor does it let a client send more or less than it announced
        size += len(chunk)
    return whole


async def _chunks(request: Request) -> AsyncIterator[bytes]:
    # Starlette's own stream() would keep what was read.
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        yield message.get("body", b"")
        more = message.get("more_body", False)


def _too_large(what: str, limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"{what}; the limit is {limit} (GRADSERVE_MAX_BODY_BYTES)", limit=limit)


class PiecesResponse(Response):
    """An answer whose body is `pieces`, which are not joined unless they are small."""

    def __init__(self, pieces: Sequence[bytes], media_type: str) -> None:
        self._pieces = pieces if sum(map(len, pieces)) > JOINED_BYTES else [b"".join(pieces)]
        super().__init__(headers={"Content-Length": str(sum(map(len, pieces)))}, media_type=media_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
