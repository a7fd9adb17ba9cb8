"""A TCP proxy that imitates a bad network: some requests meet a fault."""

from __future__ import annotations

import itertools
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Self

FAULTS = ("refused", "cut request", "lost answer", "cut answer", "twice", "twice and lost", "stall")
PATIENCE = 30.0


class Listening:
    """A server of bytes on a free port: `_serve` has each connection, in a thread of its own."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)  # which wakes accept
        self._listening.close()
        self._thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            connection.settimeout(PATIENCE)
            threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        raise NotImplementedError


class Proxy(Listening):
    """A proxy of the server at `port`. Every `one_in`th request meets the next of the faults, in turn."""

    def __init__(self, port: int, *, faults: Sequence[str] = FAULTS, one_in: int = 3) -> None:
        super().__init__()
        self.met: Counter[str] = Counter()
        self._port, self._one_in = port, one_in
        self._faults, self._requests = itertools.cycle(faults), itertools.count(1)
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        super().__exit__()

    def _serve(self, client: socket.socket) -> None:
        upstream: list[socket.socket] = []
        try:
            while request := _message(client):
                if self._ended.is_set() or not self._pass_on(request, client, upstream):
                    return
        except OSError:
            return _reset(client)
        finally:
            for one in (client, *upstream):
                one.close()

    def _pass_on(self, request: bytes, client: socket.socket, upstream: list[socket.socket]) -> bool:
        """Pass the request on, with or without a fault. Returns whether the connection lives."""
        fault = self._next_fault()
        if fault == "stall":
            self._ended.wait(PATIENCE)
            return False
        if fault == "refused":
            _reset(client)
            return False
        if not upstream:
            upstream.append(socket.create_connection(("127.0.0.1", self._port), PATIENCE))
        if fault == "cut request":
            upstream[0].sendall(request[: len(request) // 2])
            _reset(client)
            return False
        for _ in range(2 if fault.startswith("twice") else 1):
            upstream[0].sendall(request)
            answer = _message(upstream[0])
        if fault.endswith("lost") or fault == "lost answer" or not answer:
            _reset(client)
            return False
        if fault == "cut answer":
            client.sendall(answer[: len(answer) - 3])
            return False
        client.sendall(answer)
        return b"connection: close" not in answer.lower()

    def _next_fault(self) -> str:
        with self._lock:
            fault = "" if next(self._requests) % self._one_in else next(self._faults)
            self.met[fault] += 1
            return fault


def _message(source: socket.socket) -> bytes:
    """Read a whole request or answer with a Content-Length. Returns b"" at the end."""
    data = b""
    while b"\r\n\r\n" not in data:
        if not (more := source.recv(1 << 16)):
            return b""
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    lengths = [int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    while len(body) < sum(lengths):
        if not (more := source.recv(1 << 16)):
            return b""
        body += more
    return head + b"\r\n\r\n" + body


def _reset(connection: socket.socket) -> None:
    """Close the connection with RST instead of FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


class Talker(Listening):
    """A server of bytes: it calls `talk` with each connection and each whole request."""

    def __init__(self, talk: Callable[[socket.socket, bytes], object]) -> None:
        super().__init__()
        self._talk = talk
        self.requests: list[bytes] = []

    def _serve(self, client: socket.socket) -> None:
        with client:
            try:
                while request := _message(client):
                    self.requests.append(request)
                    self._talk(client, request)
            except OSError:
                pass
