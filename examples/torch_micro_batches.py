"""A PyTorch model accumulates its gradients on the server, over a network that loses, delays and repeats requests.

Each step has four micro-batches of different sizes. A proxy between the client and the server harms one request in
five. The same model, trained with PyTorch's own accumulation, still gets the same gradients: every push counts once.

    python examples/torch_micro_batches.py [--url http://127.0.0.1:8000] [--short]
"""

from __future__ import annotations

import argparse
import copy
import itertools
import random
import re
import socket
import socketserver
import struct
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from typing import Any
from urllib.parse import urlsplit

import torch
from _server import server as running_server  # type: ignore[import-not-found]  # it lies beside this file
from gradserve_client import Client
from gradserve_client.torch import GradientAccumulator
from torch.nn import functional

MICRO_BATCHES = 4
LARGEST_DIFFERENCE = 1e-6

ATTEMPT_SECONDS = 0.3
"""Seconds after which the client retries. Some delayed requests arrive later, after their successors."""

HARM = {
    "cut off on its way": "connection reset in the middle of the request",
    "without an answer": "connection reset after the server has done it",
    "with half an answer": "connection reset in the middle of the answer",
    "delayed": "sent on later, some after the client has sent it again",
    "duplicated": "sent on twice, and the second answer sent back",
}


class Proxy(socketserver.ThreadingTCPServer):
    """A proxy on loopback before the server at `url` that harms one request in five."""

    def __init__(self, url: str) -> None:
        super().__init__(("127.0.0.1", 0), Connection)
        there = urlsplit(url)
        if there.scheme != "http" or there.hostname is None:
            sys.exit(f"The proxy speaks http only, not {url}")
        self.upstream = (there.hostname, there.port or 80)
        self.url = f"http://127.0.0.1:{self.server_address[1]}{there.path}"
        self.requests = 0
        self.harm: Counter[str] = Counter()
        self.chance = random.Random(0)
        self._kinds = itertools.cycle(HARM)
        self._victim = 0
        self._lock = threading.Lock()

    def fate(self) -> str | None:
        """Return the harm of the next request, or None: one random request of each five in a row is harmed."""
        with self._lock:
            place = self.requests % 5
            self.requests += 1
            if place == 0:
                self._victim = self.chance.randrange(5)
            if place != self._victim:
                return None
            harm = next(self._kinds)
            self.harm[harm] += 1
            return harm

    def ask(self, request: bytes) -> bytes:
        """Return the server's answer."""
        with socket.create_connection(self.upstream, 60) as connection, connection.makefile("rb") as stream:
            connection.sendall(request)
            return read_message(stream)


class Connection(socketserver.StreamRequestHandler):
    """A connection from the client that carries one request after another."""

    server: Proxy

    def handle(self) -> None:
        try:
            while request := read_message(self.rfile):
                answer = self.answer(request, self.server.fate())
                if answer is None:
                    reset(self.connection)
                    return
                self.wfile.write(answer)
        except OSError:
            pass  # the client has given up

    def answer(self, request: bytes, harm: str | None) -> bytes | None:
        """Return the bytes to send back, or None to end the connection."""
        if harm == "cut off on its way":
            with socket.create_connection(self.server.upstream, 60) as connection:
                connection.sendall(request[: len(request) // 2])
                reset(connection)
            return None
        if harm == "delayed":
            time.sleep(self.server.chance.uniform(0, 2 * ATTEMPT_SECONDS))
        if harm == "duplicated":
            self.server.ask(request)
        answer = self.server.ask(request)
        if harm == "with half an answer":
            self.wfile.write(answer[: len(answer) // 2])
        return None if harm in ("without an answer", "with half an answer") else answer


def read_message(stream: BufferedIOBase) -> bytes:
    """Return the next request or answer with head and body, or no bytes at the end of the stream."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        line = stream.readline()
        if not line:
            return b""
        head += line
    length = re.search(rb"\r\ncontent-length: *(\d+)", head.lower())
    size = int(length[1]) if length else 0
    body = stream.read(size)
    return head + body if len(body) == size else b""


def reset(connection: socket.socket) -> None:
    """End the connection with a reset, as a broken network does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@contextmanager
def proxy_to(url: str) -> Iterator[Proxy]:
    """Yield a proxy that runs in threads of this process."""
    with Proxy(url) as proxy:  # the exit waits for the threads
        thread = threading.Thread(target=proxy.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()


def micro_batch() -> tuple[Any, Any]:
    """Return points in the plane and the class of each, which depends on its quadrant."""
    samples = torch.randn(int(torch.randint(1, 33, ())), 2)
    return samples, (samples > 0).long() @ torch.tensor([1, 2])


def largest(differences: Iterator[Any]) -> float:
    return max(float(one.abs().max()) for one in differences)


def train(server: Client, run: str, steps: int) -> float:
    """Train two models alike, one through the server. Return the largest difference of gradients or parameters."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    own = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    own_optimizer = torch.optim.SGD(own.parameters(), lr=0.5)
    gradients = GradientAccumulator(model, server, run=run)

    worst = 0.0
    for step in range(steps):
        batches = [micro_batch() for _ in range(MICRO_BATCHES)]
        total = sum(len(labels) for _, labels in batches)

        loss = 0.0
        for samples, labels in batches:
            own_loss = functional.cross_entropy(own(samples), labels) * len(labels) / total
            own_loss.backward()
            loss += own_loss.item()

        for samples, labels in batches:
            functional.cross_entropy(model(samples), labels).backward()
            gradients.push(weight=len(labels))
        gradients.pull()

        pairs = list(zip(model.parameters(), own.parameters(), strict=True))
        difference = largest(one.grad - other.grad for one, other in pairs)
        optimizer.step()
        own_optimizer.step()
        difference = max(difference, largest(one.detach() - other.detach() for one, other in pairs))
        worst = max(worst, difference)
        optimizer.zero_grad()
        own_optimizer.zero_grad()
        if (step + 1) % 10 == 0 or step + 1 == steps:
            print(f"step {step + 1:2}  loss {loss:.4f}  difference {difference:.1e}", flush=True)
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server; by default that at GRADSERVE_URL, or a new one")
    parser.add_argument("--short", action="store_true", help="6 steps in place of 50")
    options = parser.parse_args()
    run = f"torch_micro_batches-{uuid.uuid4().hex[:8]}"
    with running_server(options.url) as url, proxy_to(url) as proxy:
        with Client(proxy.url, attempt_timeout=ATTEMPT_SECONDS) as server:
            worst = train(server, run, steps=6 if options.short else 50)
            for buffer in server.buffers.list(f"{run}."):
                server.buffers[buffer.name].delete()
    print(f"The proxy saw {proxy.requests} requests, and did harm to {proxy.harm.total()}:")
    for harm, meaning in HARM.items():
        print(f"{proxy.harm[harm]:4} {harm} ({meaning})")
    print(f"largest difference from PyTorch's own accumulation: {worst:.1e}")
    if not worst <= LARGEST_DIFFERENCE:
        sys.exit(f"The difference is beyond {LARGEST_DIFFERENCE:.0e}")


if __name__ == "__main__":
    main()
