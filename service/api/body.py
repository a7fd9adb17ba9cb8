"""Reading a request's body: once, into one buffer, within the limit."""

from __future__ import annotations

from starlette.requests import ClientDisconnect, Request

from service.errors import BodyTooLarge, MalformedBody, UnsupportedMediaType


async def read_body(request: Request, limit: int) -> bytearray:
    """The whole body. Raises `BodyTooLarge` as soon as it is known, and `ClientDisconnect`."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise UnsupportedMediaType(f"Content-Encoding {encoding!r} is not supported; send the body as it is")
    announced = request.headers.get("content-length")
    if announced is not None and int(announced) > limit:  # the HTTP parser has seen to it that this is a number
        raise _too_large(f"The body has {announced} bytes", limit)
    body = bytearray(0 if announced is None else int(announced))
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk = message.get("body", b"")
        if size + len(chunk) > limit:
            raise _too_large("The body is longer", limit)
        body[size : size + len(chunk)] = chunk
        size += len(chunk)
        if not message.get("more_body", False):
            break
    if size != len(body):  # a server that does not hold the client to its word
        raise MalformedBody(f"The body has {size} bytes, but Content-Length says {announced}")
    return body


def _too_large(what: str, limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"{what}; the limit is {limit} (GRADSERVE_MAX_BODY_BYTES)", limit=limit)
