"""An answer whose pieces come over time: an asynchronous iterator makes them, and each is sent at once."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol, Self

from starlette.requests import ClientDisconnect

from service.api.http.answer import Answer
from service.api.http.call import Call
from service.api.http.offload import while_connected


class Pieces(Protocol):
    """The pieces of a stream. `aclose` releases what they hold; it is called however the stream ends."""

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> bytes: ...

    async def aclose(self) -> None: ...


class Stream(Answer):
    """An answer that is sent in pieces until they end, the client leaves, or the server stops.

    `reply` sends the head. Then the request has ended for metrics, log and trace: its time is that of the head, and it
    is not in flight. `follow` sends the pieces, as fast as the client reads.
    """

    def __init__(self, pieces: Pieces, media_type: str, fields: Mapping[str, str]) -> None:
        super().__init__((), media_type, fields)
        self._stream = pieces

    @property
    def raw_headers(self) -> list[tuple[bytes, bytes]]:  # type: ignore[override]
        return [header for header in super().raw_headers if header[0] != b"content-length"]

    async def reply(self, call: Call) -> None:
        began = time.perf_counter_ns()
        call.status, headers = self.status_code, self.raw_headers
        if call.request_id is not None:
            headers.append((b"x-request-id", call.request_id.encode()))
        try:
            if call.exchange is None:
                lowered = [(name.lower(), value) for name, value in headers]
                await call.send({"type": "http.response.start", "status": self.status_code, "headers": lowered})
            else:
                chunked = call.connection["http_version"] == "1.1"
                await call.exchange.begin(self.status_code, headers, chunked=chunked)
        except BaseException:
            await self._stream.aclose()
            raise
        call.spent["write"] = time.perf_counter_ns() - began

    async def follow(self, call: Call) -> None:
        """Send the pieces after the head, and end the answer."""
        exchange = call.exchange
        receive = call.receive if exchange is None else exchange.receive_while_open
        try:
            if call.method != "HEAD":
                await while_connected(receive, self._send_pieces(call))
        except ClientDisconnect:
            pass
        finally:
            await self._stream.aclose()
        if exchange is None:
            await call.send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            exchange.finish()

    async def _send_pieces(self, call: Call) -> None:
        async for piece in self._stream:
            if call.exchange is None:
                await call.send({"type": "http.response.body", "body": piece, "more_body": True})
            else:
                await call.exchange.add(piece)
