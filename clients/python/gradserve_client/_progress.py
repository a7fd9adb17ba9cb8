"""Progress bars for large bodies, on the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import httpx
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from gradserve_client import _wire
from gradserve_client._channels import channel
from gradserve_client._outcomes import Answer
from gradserve_client._sender import Sender

LARGE_BYTES = 1_000_000
"""Bytes of the smallest body with a bar. Smaller bodies are there before a bar could be read."""

_PIECE_BYTES = 1 << 18
"""Bytes sent between two updates of a bar: at 100 MB/s, some 400 updates a second."""


class ShowsProgress:
    """A channel with a bar on stderr for each large body that it sends or receives."""

    def __init__(self, sender: Sender) -> None:
        self._channel = channel(sender, None, partial(self._show, "receiving"))
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def send(self, request: httpx.Request, until: float) -> Answer:
        """Send the request and read the answer; see `Channel`. No bar is left afterwards."""
        assert isinstance(request.stream, httpx.SyncByteStream)
        size = int(request.headers.get("content-length", 0))
        request.stream = _Watched(request.stream, size, partial(self._show, "sending"))
        try:
            return self._channel.send(request, until)
        finally:
            if self._bars is not None:
                self._bars.stop()
            self._bars, self._tasks = None, {}

    def close(self) -> None:
        """Close the connections."""
        self._channel.close()

    def _show(self, action: str, done: int, size: int) -> None:
        if size < LARGE_BYTES:
            return
        if self._bars is None:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._bars = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bars.start()
        if action not in self._tasks:
            self._tasks[action] = self._bars.add_task(action, total=size)
        self._bars.update(self._tasks[action], completed=done)


class _Watched(httpx.SyncByteStream):
    """A body that reports each piece once it is sent."""

    def __init__(self, stream: httpx.SyncByteStream, size: int, progress: _wire.Progress) -> None:
        self._stream, self._size, self._progress = stream, size, progress

    def __iter__(self) -> Iterator[bytes]:
        done = 0
        for piece in self._stream:
            view = memoryview(piece)
            for start in range(0, len(view), _PIECE_BYTES):
                part = view[start : start + _PIECE_BYTES]
                yield part  # type: ignore[misc]  # sockets take a view as well as bytes
                done += len(part)
                self._progress(done, self._size)
