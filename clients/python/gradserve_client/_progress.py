"""How far large bodies are, on the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import httpx
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from gradserve_client._transport import Transport

LARGE = 1_000_000
"""Bytes from which on a body has a bar."""

_PIECE = 1 << 18
"""Bytes that are sent between two looks at the bar."""


class ShowsProgress(httpx.BaseTransport):
    """Another transport, with a bar on stderr for each large body that it sends or receives."""

    def __init__(self, inner: httpx.BaseTransport) -> None:
        self._inner = inner
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        if isinstance(inner, Transport):
            inner.received = lambda done, size: self._show("receiving", done, size)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request, and show it. The bars are gone when this returns."""
        request.stream = _Watched(cast(httpx.SyncByteStream, request.stream), request, self)
        try:
            return self._inner.handle_request(request)
        finally:
            if self._bars is not None:
                self._bars.stop()
            self._bars, self._tasks = None, {}

    def close(self) -> None:
        """Close the connections."""
        self._inner.close()

    def _show(self, what: str, done: int, size: int) -> None:
        if size < LARGE:
            return
        if self._bars is None:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._bars = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bars.start()
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=size)
        self._bars.update(self._tasks[what], completed=done)


class _Watched(httpx.SyncByteStream):
    """A body that is sent in pieces, and says how far it is."""

    def __init__(self, inner: httpx.SyncByteStream, request: httpx.Request, shown: ShowsProgress) -> None:
        self._inner = inner
        self._size = int(request.headers.get("content-length", 0))
        self._shown = shown

    def __iter__(self) -> Iterator[bytes]:
        done = 0
        for piece in self._inner:
            view = memoryview(piece)
            for start in range(0, len(view), _PIECE):
                part = view[start : start + _PIECE]
                yield part  # type: ignore[misc]  # as good as bytes to a socket
                done += len(part)
                self._shown._show("sending", done, self._size)
