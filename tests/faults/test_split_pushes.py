"""Kill -9 between the requests of a split push: it goes on with the same keys, and counts once in each group."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from gradserve_client import Client, ConnectionFailed
from gradserve_client.torch import GradientAccumulator

from tests.faults import servers
from tests.faults.cluster import replicas
from tests.faults.mortal import Mortal
from tests.faults.servers import LONG, new_key
from tests.postgres import cluster

REQUESTS = 6
"""Requests of a push, with one parameter each."""

ELEMENTS = 1 << 14
"""Elements of a parameter: PostgreSQL stages its gradient, and LMDB keeps it outside its pages."""

DEATHS = [(point, place) for point in ("made", "committed") for place in range(1, REQUESTS + 1)]
"""Where the server dies: the request, and whether before or after its commit."""

CRASHES = 10 if LONG else 1


def worker_of(server: Client, run: str, name: str) -> tuple[Any, GradientAccumulator]:
    """Return a model with gradients of a worker, whose push takes several requests."""
    model = torch.nn.ParameterList([torch.zeros(ELEMENTS) for _ in range(REQUESTS)])
    own: dict[str, Any] = {"quorum": 2, "worker": name, "run": run, "timeout": 60, "request_bytes": 5 * ELEMENTS}
    accumulator = GradientAccumulator(model, server, **own)
    fill(model, name)
    return model, accumulator


def fill(model: Any, name: str) -> None:
    for number, parameter in enumerate(model):
        parameter.grad = torch.full_like(parameter, number + 100.0 * int(name))


def check_counted_once(url: str, prefix: str) -> None:
    """Check the receipts of all buffers: each has both workers, once."""
    with servers.Client(url) as client:
        listed = client.done("GET", "/v1/buffers", params={"prefix": prefix, "limit": 100})["buffers"]
        buffers = [one for one in listed if not one["name"].endswith("::start")]
        assert len(buffers) == 2 * REQUESTS  # each request has a sum and its tally
        for one in buffers:
            receipt = client.done("GET", f"/v1/buffers/{one['name']}", params={"step": 0})
            assert (receipt["count"], receipt["version"], receipt["weight"]) == (2, 2, 4.0)
            assert (receipt["closed_by"], receipt["contributors"]) == ("quorum", {"0": 1, "1": 1})
            assert (one["step"], one["version"], one["count"]) == (1, 2, 0)


def check_means(*workers: tuple[Any, GradientAccumulator]) -> None:
    for model, accumulator in workers:
        assert accumulator.pull().contributors == {"0": 1, "1": 1}
        for number, parameter in enumerate(model):
            assert parameter.grad.eq(number + 75.0).all()  # the weights are 1 and 3


@pytest.mark.parametrize("client_dies", [False, True], ids=["the client retries", "the client dies, too"])
def test_a_kill_between_the_requests(service: Mortal, client_dies: bool) -> None:
    chance = random.Random(f"{service.kind} {client_dies}")
    for point, place in DEATHS if LONG else [chance.choice(DEATHS)]:
        run = new_key()
        with Client(service.server.url, timeout=120) as server:
            first = worker_of(server, run, "0")
            first[1].push(weight=1)
            if client_dies:
                second = pushed_by_another(service, server, run, point, place)
            else:
                second = worker_of(server, run, "1")
                service.order(point, place)
                second[1].push(weight=3, wait=False)
                service.await_death()
                service.revive()
            check_means(first, second)
            check_counted_once(service.server.url, first[1].prefix)


def pushed_by_another(
    service: Mortal, server: Client, run: str, point: str, place: int
) -> tuple[Any, GradientAccumulator]:
    """Return a worker that goes on with the push of one which died with the server."""
    with Client(service.server.url, max_retries=0) as impatient:
        _, accumulator = worker_of(impatient, run, "1")
        state = accumulator.state_dict()
        with service.dying(point, place), pytest.raises(ConnectionFailed):
            accumulator.push(weight=3)
    model, accumulator = worker_of(server, run, "1")
    accumulator.load_state_dict(state)
    fill(model, "1")
    pushed = accumulator.push(weight=3)
    assert (pushed.count, pushed.closed) == (2, True)
    return model, accumulator


def test_a_crash_of_the_database_between_the_requests(tmp_path: Path) -> None:
    chance = random.Random(1)
    with cluster() as database, replicas(1, tmp_path, database.url) as (process,), Client(process.url) as server:
        for _ in range(CRASHES):
            run = new_key()
            first, second = (worker_of(server, run, name) for name in ("0", "1"))
            first[1].push(weight=1)
            before = sum(info.version for info in server.buffers.list(first[1].prefix))
            second[1].push(weight=3, wait=False)
            wanted = before + 2 * chance.randrange(REQUESTS)
            while sum(info.version for info in server.buffers.list(first[1].prefix)) < wanted:
                pass
            database.stop(signal.SIGKILL)
            database.start()
            check_means(first, second)
            check_counted_once(process.url, first[1].prefix)
