"""Optimizer steps over HTTP under kills: each happens once for all workers, and no two write over each other."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Barrier
from typing import Any

import httpx
import numpy as np

from service.buffers.postgres.schema import ROW_BYTES
from service.dtypes import Array
from service.kernels.accumulate import converted
from service.kernels.optimizers import adamw_optimizer
from tests.faults.mortal import Mortal
from tests.faults.servers import LONG, PATIENCE, Client, new_key, tensors
from tests.serving import assert_problem

WORKERS = 3

SHAPES: dict[str, tuple[int, ...]] = {"small": (2, 3), "large": (ROW_BYTES // 8 + 1,)}
"""The parameters. PostgreSQL stages the new values of the large one, LMDB has them outside its pages."""

GROUPS = {"weights": "p", "gradients": "g", "momentums_1": "m", "momentums_2": "v"}


class Run:
    """A training run whose buffers have a prefix of their own, and the same run in this process."""

    def __init__(self, client: Client) -> None:
        self.prefix, self.steps = f"{new_key()}.", 0
        for letter in GROUPS.values():
            rules: dict[str, Any] = {"quorum": WORKERS} if letter == "g" else {}
            for name, shape in SHAPES.items():
                client.create(f"{self.prefix}{letter}.{name}", shape, **rules)
        self._own = {letter: {name: np.zeros(shape) for name, shape in SHAPES.items()} for letter in "pmv"}

    def add(self, client: Client, worker: int) -> None:
        """Add a worker's gradients for the next step."""
        gradients = {f"{self.prefix}g.{name}": each for name, each in _gradients(worker, self.steps).items()}
        client.done(
            "POST", "/v1/buffers/accumulate", key=new_key(), params={"step": self.steps}, **tensors(**gradients)
        )

    def request(self, step: int) -> dict[str, Any]:
        """Return the request for a step, which counts from 0: the same of every worker."""
        p = self.prefix
        sources = [f"{group}:{p}{letter}.*{f'@{step}' * (letter == 'g')}" for group, letter in GROUPS.items()]
        targets = [f"updated_{group}:{p}{letter}.*" for group, letter in GROUPS.items() if letter != "g"]
        query = [*(("from", each) for each in sources), *(("set", each) for each in targets)]
        more = {"reduce": "mean", "timeout": "30", "beta": "0.99"}
        body = {"lr": {"dtype": "float64", "data": 0.01}, "step": step + 1}
        path = "/v1/ops/AdamWOptimizer"
        return {"method": "POST", "path": path, "params": [*query, *more.items()], "json": body, "key": f"{p}{step}"}

    def step(self) -> None:
        """Make the next step in this process, too."""
        totals = [_gradients(worker, self.steps) for worker in range(WORKERS)]
        means = {
            name: converted(np.sum([each[name] for each in totals], 0), np.dtype(float), WORKERS) for name in SHAPES
        }
        self.steps += 1
        _, *new = adamw_optimizer(
            np.array(0.01), np.array(self.steps), self._own["p"], means, self._own["m"], self._own["v"], beta=0.99
        )
        self._own = {letter: dict(group) for letter, group in zip("pmv", new, strict=True)}

    def check(self, client: Client) -> None:
        """Check that the buffers have the values of the run in this process, to the bit, after as many steps."""
        for letter, group in self._own.items():
            names = {f"{self.prefix}{letter}.{name}": value for name, value in group.items()}
            receipts, values = client.values(*names)
            for name, value in names.items():
                assert values[name].tobytes() == value.tobytes(), name
                assert receipts[name]["version"] == self.steps


def _gradients(worker: int, step: int) -> dict[str, Array]:
    """Return integers, whose sums are the same in every order."""
    chance = np.random.default_rng((worker, step))
    return {name: chance.integers(-99, 99, shape).astype(np.float64) for name, shape in SHAPES.items()}


def replayed(answers: Sequence[httpx.Response]) -> int:
    """Return how many answers are replays, after a check that all say the same."""
    assert {answer.status_code for answer in answers} == {200}, [answer.text for answer in answers]
    assert len({answer.content for answer in answers}) == 1
    return sum("Idempotency-Replayed" in answer.headers for answer in answers)


def at_once(client: Client, ready: Barrier, request: dict[str, Any]) -> httpx.Response:
    ready.wait(PATIENCE)
    return client.send(**request)


def points_of(service: Mortal) -> list[str]:
    """Return the points at which a step dies. PostgreSQL stages large values before the commit."""
    return [*["computed", "staged"][: 1 + (service.kind == "postgres")], *service.points]


def test_a_step_that_all_workers_ask_for_happens_once(service: Mortal) -> None:
    """A server dies while two workers ask it for a step; the third asks later, perhaps another server."""
    urls = [service.server.url] * 2 + [(service.other or service.server).url]
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(url)) for url in urls]
        threads = stack.enter_context(ThreadPoolExecutor(WORKERS))
        run = Run(clients[0])
        first: list[bytes] = []
        for point in [None, *points_of(service)]:
            for worker, client in enumerate(clients):
                run.add(client, worker)
            request = run.request(run.steps)
            if point is None:
                ready = Barrier(WORKERS)
                asking = [threads.submit(at_once, client, ready, request) for client in clients]
                assert replayed([one.result(PATIENCE) for one in asking]) == WORKERS - 1
            else:
                service.order(point)
                asking = [threads.submit(client.send, **request) for client in clients[:2]]
                service.await_death()
                asking.append(threads.submit(clients[2].send, **request))
                service.revive()
                assert replayed([one.result(PATIENCE) for one in asking]) == WORKERS - (point != "committed")
            run.step()
            run.check(clients[2])
            first.append(clients[0].send(**request).content)
        for number, content in enumerate(first):
            answer = clients[number % WORKERS].send(**run.request(number))
            assert (answer.content, answer.headers["Idempotency-Replayed"]) == (content, "true")
        run.check(clients[0])


CLIENTS = 4
DOUBLINGS = 100 if LONG else 10


def doubling(name: str, key: str) -> dict[str, Any]:
    """Return the request for a step that doubles a buffer."""
    query = [("from", f"input:{name}"), ("set", f"output:{name}")]
    return {"method": "POST", "path": "/v1/ops/Scale", "params": query, "json": {"scale": 2}, "key": key}


def double(client: Client, name: str) -> int:
    """Double a buffer, also if others change it all the time. Return the version of the receipt."""
    request = doubling(name, new_key())
    while (answer := client.send(**request)).status_code == 409:
        assert_problem(answer, 409, "source_changed", name)
    version: int = answer.json()["output"]["version"]
    assert client.send(**request).json() == answer.json()
    return version


def doubled(client: Client, name: str) -> list[int]:
    return [double(client, name) for _ in range(DOUBLINGS)]


def test_steps_at_once_do_not_write_over_each_other(service: Mortal) -> None:
    urls = [service.server.url, (service.other or service.server).url] * (CLIENTS // 2)
    name = new_key()
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(url)) for url in urls]
        threads = stack.enter_context(ThreadPoolExecutor(CLIENTS))
        clients[0].create(name, (2,))
        clients[0].add(name, np.ones(2))
        running = [threads.submit(doubled, client, name) for client in clients]
        for point in ["computed", *service.points] if LONG else ["computed"]:
            with service.dying(point, 3):
                pass
        versions = [version for one in running for version in one.result(2 * PATIENCE)]
        total = CLIENTS * DOUBLINGS
        assert sorted(versions) == [*range(2, total + 2)]
        assert clients[1].value(name).tolist() == [2.0**total] * 2
        assert clients[1].metadata(name)["version"] == total + 1
