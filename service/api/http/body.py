"""The body of a request: it is read once, into one buffer, within the limits. And its content coding."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable, Sequence

from starlette.requests import ClientDisconnect

from service.api.http.admission import SMALL_BYTES, STEP_BYTES
from service.api.http.call import Call
from service.api.http.offload import INLINE_TEXT_BYTES
from service.api.http.wire import MIN_BYTES_PER_SECOND, is_slow
from service.errors import BodyTooLarge, MalformedBody, RequestTimeout, UnsupportedMediaType, shown

DIRECT_BYTES = 1 << 16
"""A larger body goes directly into its memory; up to 64 KiB it costs less if the connection collects it."""

ALIGNMENT_BYTES = 16
"""A multiple of the size of every element; NumPy's memory is aligned to it."""

CODINGS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""The content codings, and zlib's number for each."""

_GZIP = b"\x1f\x8b"
"""The first bytes of each gzip member."""

MAX_MEMBERS = 1 << 16
"""Members of a gzip body. Each takes 1.3 us: in 256 MB, the smallest would keep a thread for 17 s."""

INFLATED_BYTES = 1 << 14
"""Bytes to decompress at once: at most 16 MB come out before they are counted."""


INLINE_MEMBERS = 64
"""Members of objects in such a text: each may be a tensor or a buffer of its own, which takes 20 us."""


async def read_body(call: Call, head: int = 0) -> memoryview:
    """Read the whole body once, and decompress it. In a large body the byte at `head` is aligned for NumPy.

    The body reserves memory as it comes: the system provides memory when it is written to first. Raises `BodyTooLarge`
    as soon as the size is known, `RequestTimeout`, `MalformedBody`, `UnsupportedMediaType`, `Busy` and
    `ClientDisconnect`.
    """
    began = time.perf_counter_ns()
    coding = _coding_of(call) if b"content-encoding" in call.headers else None
    if b"transfer-encoding" in call.headers:
        _check_transfer_coding(call)
    body = call.exchange.body_at_hand()
    whole = await _received(call, head) if body is None else memoryview(body)
    size = len(whole)
    _check_size(call, size)
    if body is not None and size > SMALL_BYTES:
        call.reserve(size)
    call.spent["read"] = time.perf_counter_ns() - began
    call.received = size
    if coding is None:
        return whole
    return await call.offload(False, inflate, whole, coding, call.settings.max_inflated_bytes, call.reserve)


async def _received(call: Call, head: int) -> memoryview:
    """Receive the body. If it is large and has a Content-Length, it goes directly into the engine's memory."""
    length, patience = call.headers.get(b"content-length"), call.settings.request_timeout
    announced = None if length is None else int(length)  # the HTTP parser accepts only a number
    if announced is not None:
        _check_size(call, announced)
    try:
        if announced is None or announced <= DIRECT_BYTES:
            return await _collected(call, patience)
        shift = -head % ALIGNMENT_BYTES
        whole = call.engine.buffer(announced + shift)[shift:]
        if not await call.exchange.receive_into(whole, patience, _by_steps(announced, call.reserve)):
            raise ClientDisconnect
        return whole
    except TimeoutError:
        raise RequestTimeout(
            f"The body is incomplete: nothing came for {patience:g} seconds"
            f" (GRADSERVE_REQUEST_TIMEOUT), or less than {MIN_BYTES_PER_SECOND} bytes a second",
            limit=patience,
        ) from None


def _check_size(call: Call, size: int) -> None:
    if size > call.settings.max_body_bytes:
        raise _too_large(call, f"The body has {size} bytes")


def _too_large(call: Call, fault: str) -> BodyTooLarge:
    limit = call.settings.max_body_bytes
    return BodyTooLarge(f"{fault}; the limit is {limit} (GRADSERVE_MAX_BODY_BYTES)", limit=limit)


def _holder(reserve: Callable[[int], None]) -> Callable[[int], None]:
    """Return a function that takes how large the memory has grown, and reserves more of it after each 64 KB."""
    reserved = 0

    def hold(size: int) -> None:
        nonlocal reserved
        if size - reserved > SMALL_BYTES:
            reserve(size - reserved)
            reserved = size

    return hold


def _by_steps(size: int, reserve: Callable[[int], None]) -> Callable[[int], None]:
    """Return a function that takes how many of `size` bytes have come, and reserves them up to the next step."""
    reserved = 0

    def hold(come: int) -> None:
        nonlocal reserved
        if come > reserved:
            step = min(come + STEP_BYTES, size) - reserved
            reserve(step)
            reserved += step

    return hold


async def _collected(call: Call, patience: float) -> memoryview:
    """Collect a body that is small, or has no Content-Length."""
    body, more, hold = bytearray(), True, _holder(call.reserve)
    clock = asyncio.get_running_loop().time
    began, most = clock(), call.settings.max_body_bytes
    async with asyncio.timeout(patience) as timeout:
        while more:
            chunk = await call.exchange.receive()
            if chunk is None:
                raise ClientDisconnect
            more = call.exchange.more_body
            if len(body) + len(chunk) > most:
                raise _too_large(call, f"The body has more than {most} bytes")
            body += chunk
            hold(len(body))
            if more and not is_slow(len(body) + SMALL_BYTES, clock() - began, patience):
                timeout.reschedule(clock() + patience)
    return memoryview(body)


def _check_transfer_coding(call: Call) -> None:
    """Raise `MalformedBody` for a transfer coding other than chunked."""
    coding = call.joined(b"transfer-encoding")
    if coding.strip().lower() != "chunked":
        raise MalformedBody(
            f"Transfer-Encoding is {shown(coding)}, but must be chunked; to compress a body, use Content-Encoding"
        )


def _coding_of(call: Call) -> str | None:
    """Return the coding of the body, gzip or deflate; None without a coding. Raises `UnsupportedMediaType`."""
    coding = call.joined(b"content-encoding").strip().lower()
    if coding != "identity" and coding not in CODINGS:
        accepted = "identity, gzip, deflate"
        problem = f"Content-Encoding is {shown(coding)}, but must be one of {accepted}"
        raise UnsupportedMediaType(problem, {"Accept-Encoding": accepted})
    return None if coding == "identity" else coding


def inflate(body: memoryview, coding: str, limit: int, reserve: Callable[[int], None]) -> memoryview:
    """Decompress the body; in gzip, all of its members in a row (RFC 1952, 2.2). It reserves memory as it grows.

    Raises `MalformedBody`, `BodyTooLarge` beyond `limit` bytes, and `Busy`.
    """
    whole, at, members, hold = bytearray(), 0, 0, _holder(reserve)
    while at < len(body):
        if members and (coding == "deflate" or body[at : at + len(_GZIP)] != _GZIP):
            raise MalformedBody(f"The body's {coding} stream has bytes after its end")
        if members == MAX_MEMBERS:
            raise MalformedBody(f"The body has more than {MAX_MEMBERS} gzip members, the limit")
        at = _inflate_member(body, at, coding, whole, limit, hold)
        members += 1
    return memoryview(whole)


def _inflate_member(
    body: memoryview, at: int, coding: str, whole: bytearray, limit: int, hold: Callable[[int], None]
) -> int:
    """Decompress the member that begins at `at`, and add it to `whole`. Return where the next member begins."""
    stream = zlib.decompressobj(CODINGS[coding])
    while not stream.eof:
        if at == len(body):
            raise MalformedBody(f"The body's {coding} stream ends too early")
        piece = body[at : at + INFLATED_BYTES]
        try:
            whole += stream.decompress(piece, limit + 1 - len(whole))
        except zlib.error as error:
            raise MalformedBody(f"Content-Encoding is {coding}, but the body is not {coding}: {error}") from None
        if len(whole) > limit:
            raise BodyTooLarge(
                f"The body has more than {limit} bytes once it is decompressed; that is the limit"
                " (GRADSERVE_MAX_INFLATED_BYTES)",
                limit=limit,
            )
        hold(len(whole))
        at += len(piece) - len(stream.unused_data)
    return at


def deflated(pieces: Sequence[bytes | memoryview], coding: str) -> list[bytes]:
    """Compress the pieces as one stream, at zlib's fastest level."""
    stream = zlib.compressobj(1, wbits=CODINGS[coding])
    return [*map(stream.compress, pieces), stream.flush()]


def is_quick(text: memoryview, is_header: bool = False, has_groups: bool = False) -> bool:
    """Return whether the event loop may decode a body whose JSON is `text`; in a header each member is quick.

    If it may have groups, each item of a list may be a tensor.
    """
    if len(text) > INLINE_TEXT_BYTES:
        return False
    raw = b"" if is_header else bytes(text)
    return raw.count(b":") <= INLINE_MEMBERS and (not has_groups or raw.count(b",") <= INLINE_MEMBERS)


def header_of(body: memoryview) -> memoryview:
    """Return the header of a safetensors file, the only part of it that takes time to decode."""
    return body[8 : 8 + int.from_bytes(body[:8], "little")]
