"""Several servers that share a PostgreSQL, and clients that add through all of them while something fails."""

from __future__ import annotations

import itertools
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import numpy as np
import pytest

from service.dtypes import Array
from tests.faults import coded
from tests.faults.servers import LONG, PATIENCE, Client, Server, new_key
from tests.postgres import Cluster

CLIENTS = 8
REPEATS = 500
"""Times that the large buffer repeats the small buffer: its gradients of 96 KB are staged."""


class Balanced(Client):
    """A client that sends each request to the next of several servers, as a load balancer does."""

    def __init__(self, urls: Sequence[str], *, patience: float = 2 * PATIENCE) -> None:
        super().__init__(urls[0], patience=patience)
        self._others = [httpx.Client(base_url=url, timeout=40) for url in urls]
        self._turn = random.randrange(len(urls))

    def __exit__(self, *_: object) -> None:
        for one in (self._http, *self._others):
            one.close()

    def once(self, method: str, path: str, *, key: str | None = None, **rest: Any) -> httpx.Response:
        self._turn += 1
        self._http = self._others[self._turn % len(self._others)]
        answer = super().once(method, path, key=key, **rest)
        if answer.status_code == 507:
            raise httpx.TransportError(answer.text)  # the client sends it again: the test makes room
        return answer


@contextmanager
def replicas(count: int, place: Path, store: str, **settings: Any) -> Iterator[list[Server]]:
    """Yield servers that share the store, in a schema of their own."""
    own = {"store": store, "postgres_schema": f"s{uuid4().hex}", **settings}
    with ExitStack() as stack:
        servers = [Server(place / f"replica{number}", **own) for number in range(count)]
        servers[0].start()
        for server in servers[1:]:
            server.launch()
        for server in servers:
            stack.callback(server.kill)
        for server in servers[1:]:
            wait(server.is_ready, "a replica does not get ready")
        yield servers


@contextmanager
def one_dies(database: Cluster, place: Path, order: Path) -> Iterator[tuple[Server, Server]]:
    """Yield two servers that share the database. The first kills itself at the point that the file `order` names."""
    own: dict[str, Any] = {"store": database.url, "postgres_schema": "killed"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADSERVE_TEST_KILL", str(order))
        with (
            Server(place / "mortal", module="tests.faults.killing", **own) as mortal,
            Server(place / "other", **own) as other,
        ):
            yield mortal, other


def wait(is_so: Callable[[], object], what: str, seconds: float = 2 * PATIENCE) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, what
        time.sleep(0.01)


class Adder:
    """A client that adds 1, n and the square of n to its own row, for n = 1, 2, 3, ..., and keeps the receipts.

    It adds to three buffers at once, the third one in 8 bits. Every second client pushes in parts, a part for each.
    """

    def __init__(self, urls: Sequence[str], row: int) -> None:
        self._urls, self._row = urls, row
        self.started = self.answered = 0
        self._sent: list[tuple[str, Any]] = []

    def run(self, stop: threading.Event) -> None:
        with Balanced(self._urls) as client:
            while not stop.is_set():
                key = new_key()
                self.started += 1
                receipts = self._add(client, self.started, key)
                self.answered += 1
                self._sent.append((key, receipts))

    def repeat(self, most: int) -> None:
        """Send some gradients of all times again with their keys, and check that the receipts are the same."""
        with Balanced(self._urls) as client:
            for number, (key, receipts) in [*enumerate(self._sent, 1)][:: 1 + len(self._sent) // most]:
                assert self._add(client, number, key) == receipts

    def _add(self, client: Client, number: int, key: str) -> Any:
        gradients = self._gradients(number)
        return client.push(gradients, push=key) if self._row % 2 else client.add_many(gradients, key=key)

    def _gradients(self, number: int) -> dict[str, Array]:
        small = np.zeros((CLIENTS, 3))
        small[self._row] = 1, number, number**2
        large = np.broadcast_to(small, (REPEATS, CLIENTS, 3))
        return {"small": small, "large": large, **coded.gradient(self._row, number, CLIENTS)}


class Reader:
    """A client that reads. No answer may be of an earlier moment than the answer before, also after a failover."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls

    def run(self, stop: threading.Event) -> None:
        counts = [0]
        with Balanced(self._urls) as client:
            ways: list[Callable[[], Any]] = [
                lambda: client.metadata("small"),
                lambda: client.done("GET", "/v1/buffers/small/value"),
                lambda: client.values("small")[0]["small"],
                lambda: client.done("GET", "/v1/buffers", params={"prefix": "small"})["buffers"][0],
            ]
            for read in itertools.cycle(ways):
                if stop.wait(0.01):
                    return
                counts.append(read()["count"])
                assert counts[-1] >= counts[-2], counts[-3:]


class Load:
    """Eight clients that add, and one that reads, until the context is left. Then every add must be there, once."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        self.adders = [Adder(urls, row) for row in range(CLIENTS)]
        self._stop = threading.Event()
        self._threads = ThreadPoolExecutor(CLIENTS + 1)
        self._running: list[Future[None]] = []
        self._there: list[int] = []
        self._coded = [coded.Sum(row, CLIENTS) for row in range(CLIENTS)]

    def counts(self) -> tuple[int, int]:
        """Return the adds that were acknowledged, and those in the sums, after the end."""
        return sum(one.answered for one in self.adders), sum(self._there)

    def __enter__(self) -> Load:
        with Balanced(self._urls) as client:
            client.create("small", (CLIENTS, 3))
            client.create("large", (REPEATS, CLIENTS, 3))
            client.create("coded", (CLIENTS, *coded.SHAPE), "float32")
        runners: list[Adder | Reader] = [*self.adders, Reader(self._urls)]
        self._running = [self._threads.submit(one.run, self._stop) for one in runners]
        self.go_on()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        with self._threads:
            for one in self._running:
                one.result(3 * PATIENCE) if error is None else one.exception(3 * PATIENCE)
            if error is None:
                self._there = there = self.check()
                assert there == [one.started for one in self.adders]
                for repeated in [self._threads.submit(one.repeat, 20 if LONG else 5) for one in self.adders]:
                    repeated.result(PATIENCE)
                assert self.check() == there

    def go_on(self) -> None:
        """Wait until every client has two more answers: the second was sent after this call."""
        before = [one.answered for one in self.adders]
        wait(
            lambda: (
                all(one.answered > least + 1 for one, least in zip(self.adders, before, strict=True))
                or any(one.done() for one in self._running)
            ),
            "the clients do not go on",
        )
        for one in self._running:
            if one.done():
                one.result()

    def check(self) -> list[int]:
        """Check that all acknowledged adds are there, and at most one more of each client. Return their counts."""
        answered = [one.answered for one in self.adders]
        with Balanced(self._urls) as client:
            receipts, values = client.values("small", "large", "coded")
        started = [one.started for one in self.adders]
        assert (values["large"] == values["small"]).all()
        there = [int(row[0]) for row in values["small"]]
        for row, n in zip(values["small"], there, strict=True):
            assert row.tolist() == [n, n * (n + 1) // 2, n * (n + 1) * (2 * n + 1) // 6]
        assert [one.count(row) for one, row in zip(self._coded, values["coded"], strict=True)] == there
        for least, found, most in zip(answered, there, started, strict=True):
            assert least <= found <= most
        assert {receipt["count"] for receipt in receipts.values()} == {sum(there)}
        return there


class Pair:
    """A primary and its synchronous standby."""

    def __init__(self, place: Path) -> None:
        place.chmod(0o755)
        self.primary, self.standby = Cluster(place / "one"), Cluster(place / "two")
        self.primary.create()
        self.primary.start()
        self.standby.follow(self.primary)
        self.url = self.url_of(self.primary, self.standby)
        """The URL with both hosts, whichever of them is the primary."""

    @staticmethod
    def url_of(*hosts: Cluster) -> str:
        """Return the URL with these hosts, which are tried in their order."""
        places = ",".join(f"127.0.0.1:{one.port}" for one in hosts)
        return f"postgresql://postgres@{places}/postgres?target_session_attrs=read-write"

    def promote(self) -> None:
        """Make the standby the primary. The other is dead."""
        self.primary, self.standby = self.standby, self.primary
        self.primary.promote()

    def fail_over(self) -> None:
        """Kill the primary, promote the standby, and copy the other from it as the next standby."""
        self.primary.stop(signal.SIGKILL)
        if self.standby.process is None:
            self.standby.start()
        self.promote()
        self.standby.follow(self.primary)

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.standby.stop()
        self.primary.stop()
