"""A network between a server and its database, which tests cut and stall: a proxy of TCP connections."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Literal, Self

Side = Literal["request", "answer"]
SIDES: tuple[Side, Side] = ("request", "answer")
MOST_BYTES = 1 << 16

_CHANGE = b"insert into keys"
"""A part of each transaction that makes requests."""

_COMMIT = b"commit\0"


class Network:
    """A proxy of the database at `port` of the loopback interface, in front of which clients use `url`."""

    def __init__(self, port: int) -> None:
        self.target = port
        """Where new connections lead."""
        self._flows = threading.Event()
        self._flows.set()
        self.to_hold = 0
        """New connections whose first bytes do not arrive."""
        self._lose: Side | None = None
        self._lost = threading.Event()
        self._open: set[socket.socket] = set()
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listening.getsockname()[1]
        self.url = f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()
        self._flows.set()

    def lose_commit(self, side: Side) -> threading.Event:
        """Cut the connection that commits requests next: before its request arrives, or before its answer does.

        Return an event that is set once that has happened.
        """
        self._lost.clear()
        self._lose = side
        return self._lost

    def cut(self) -> None:
        """Cut all connections."""
        for one in list(self._open):
            _close(one)

    def stall(self) -> None:
        """Hold all that comes, on every connection, old and new, without an error."""
        self._flows.clear()

    def flow(self) -> None:
        """Let everything through, also what was held."""
        self._flows.set()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self.target), 5)
                    server.settimeout(None)
                except OSError:
                    _close(client)
                    continue
                self._open |= {client, server}
                if self.to_hold:
                    self.to_hold -= 1
                    continue
                for pair in ((client, server, True), (server, client, False)):
                    threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, to: socket.socket, is_request: bool) -> None:
        is_change = False
        with suppress(OSError):
            while data := source.recv(MOST_BYTES):
                self._flows.wait()
                is_change = is_request and (is_change or _CHANGE in data)
                if is_change and _COMMIT in data:
                    is_change = False
                    if self._lose is not None:
                        self._lose_now(source, to, data)
                        break
                to.sendall(data)
        for one in (source, to):
            _close(one)
            self._open.discard(one)

    def _lose_now(self, client: socket.socket, server: socket.socket, data: bytes) -> None:
        side, self._lose = self._lose, None
        _close(client)
        self._lost.set()
        if side == "answer":
            server.sendall(data)
            with suppress(OSError):
                server.recv(1, socket.MSG_PEEK)


def _close(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
