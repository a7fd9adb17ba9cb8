"""The body of a request: it is read once, into one buffer, within the limits. And its content coding."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from service.api.http.admission import SMALL_BYTES, STEP_BYTES
from service.api.http.endings import MIN_BYTES_PER_SECOND, is_slow
from service.api.http.exchange import Exchange
from service.errors import BodyTooLarge, MalformedBody, RequestTimeout, UnsupportedMediaType, shown

Headers: TypeAlias = Mapping[bytes, bytes]
"""The headers of a request, their names in lower case."""

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

SAMPLE_BYTES = 1 << 16
"""The first bytes of an answer, which show whether it shrinks. To compress them takes 1 ms."""

MAX_SHARE = 0.55
"""The part of the sample that may be left. JSON lists shrink to 50%, but random float32 tensors to 93%.

A tensor with half zeros shrinks to 59%, at 66 MB/s: that pays only on networks below 220 Mbit/s, so it goes plain.
"""


class Limits(NamedTuple):
    """The limits of a body: its size, and the seconds without progress."""

    max_bytes: int
    patience_seconds: float


async def read_body(
    exchange: Exchange | None,
    receive: Receive,
    headers: Headers,
    limits: Limits,
    allocate: Callable[[int], memoryview],
    reserve: Callable[[int], None],
    head: int,
) -> memoryview:
    """Read the whole body. A large body with a Content-Length goes into memory from `allocate`.

    Its byte at `head` is then aligned for NumPy. The body reserves memory as it comes: the system provides memory when
    it is written to first. Raises `BodyTooLarge` as soon as the size is known, `RequestTimeout`, `Busy` and
    `ClientDisconnect`.
    """
    at_hand = None if exchange is None else exchange.body_at_hand()
    if at_hand is not None:
        if len(at_hand) > limits.max_bytes:
            raise _too_large(f"The body has {len(at_hand)} bytes", limits.max_bytes)
        reserve(len(at_hand))
        return memoryview(at_hand)
    length = headers.get(b"content-length")
    announced = None if length is None else int(length)  # the HTTP parser accepts only a number
    if announced is not None and announced > limits.max_bytes:
        raise _too_large(f"The body has {announced} bytes", limits.max_bytes)
    try:
        if announced is None or announced <= DIRECT_BYTES or exchange is None:
            return await _collected(receive, limits, reserve)
        shift = -head % ALIGNMENT_BYTES
        whole = allocate(announced + shift)[shift:]
        if not await exchange.receive_into(whole, limits.patience_seconds, _by_steps(announced, reserve)):
            raise ClientDisconnect
        return whole
    except TimeoutError:
        raise RequestTimeout(
            f"The body is incomplete: nothing came for {limits.patience_seconds:g} seconds"
            f" (GRADSERVE_REQUEST_TIMEOUT), or less than {MIN_BYTES_PER_SECOND} bytes a second",
            limit=limits.patience_seconds,
        ) from None


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


async def _collected(receive: Receive, limits: Limits, reserve: Callable[[int], None]) -> memoryview:
    """Collect a body that is small, has no Content-Length, or comes through another server."""
    body, more, hold = bytearray(), True, _holder(reserve)
    clock = asyncio.get_running_loop().time
    began, patience = clock(), limits.patience_seconds
    async with asyncio.timeout(patience) as timeout:
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunk, more = message.get("body", b""), message.get("more_body", False)
            if len(body) + len(chunk) > limits.max_bytes:
                raise _too_large(f"The body has more than {limits.max_bytes} bytes", limits.max_bytes)
            body += chunk
            hold(len(body))
            if more and not is_slow(len(body) + SMALL_BYTES, clock() - began, patience):
                timeout.reschedule(clock() + patience)
    return memoryview(body)


def _too_large(fault: str, limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"{fault}; the limit is {limit} (GRADSERVE_MAX_BODY_BYTES)", limit=limit)


def check_transfer_coding(lines: Sequence[bytes]) -> None:
    """Raise `MalformedBody` for a transfer coding other than chunked."""
    coding = b", ".join(lines).decode("latin-1")
    if coding.strip().lower() != "chunked":
        raise MalformedBody(
            f"Transfer-Encoding is {shown(coding)}, but must be chunked; to compress a body, use Content-Encoding"
        )


def coding_of(lines: Sequence[bytes]) -> str | None:
    """Return the coding of the body, gzip or deflate; None without a coding. Raises `UnsupportedMediaType`."""
    coding = b", ".join(lines).decode("latin-1").strip().lower()
    if coding != "identity" and coding not in CODINGS:
        accepted = "identity, gzip, deflate"
        raise UnsupportedMediaType(
            f"Content-Encoding is {shown(coding)}, but must be one of {accepted}", {"Accept-Encoding": accepted}
        )
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


def deflated(pieces: Sequence[Any], coding: str) -> list[bytes] | None:
    """Compress the pieces as one stream, at zlib's fastest level; None if their first 64 KB do not shrink well."""
    stream, sample, rest = zlib.compressobj(1, wbits=CODINGS[coding]), [], []
    left = SAMPLE_BYTES
    for piece in pieces:
        sample.append(memoryview(piece)[:left])
        rest.append(memoryview(piece)[left:])
        left -= len(sample[-1])
    begin = [*map(stream.compress, sample), stream.flush(zlib.Z_SYNC_FLUSH)]
    if sum(map(len, begin)) > MAX_SHARE * (SAMPLE_BYTES - left):
        return None
    return [*begin, *map(stream.compress, rest), stream.flush()]
