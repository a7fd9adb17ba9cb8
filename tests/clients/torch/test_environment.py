"""Accumulators whose arguments follow from the variables that torchrun sets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gradserve_client import Client, InvalidInput, arrays
from gradserve_client.torch import GradientAccumulator

from tests.clients.torch.training import backward, net


def made(monkeypatch: pytest.MonkeyPatch, server: Client, run: str, rank: int, workers: int, **given: Any) -> Any:
    """Return the accumulator of a worker, and the metadata of a buffer."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(workers))
    gradients = GradientAccumulator.from_env(net(), server, run=run, **given)
    return gradients, server.buffers[f"{run}.0.weight"].info()


@pytest.mark.parametrize(("workers", "least"), [(1, 1), (2, 1), (3, 2), (8, 4)])
def test_rules_follow_from_the_number_of_workers(
    monkeypatch: pytest.MonkeyPatch, server: Client, run: str, workers: int, least: int
) -> None:
    names = tuple(f"rank{rank}" for rank in range(workers))
    for rank in range(workers):
        gradients, info = made(monkeypatch, server, run, rank, workers)
        assert repr(gradients).startswith(f"GradientAccumulator('rank{rank}', ")
    assert (info.quorum, info.contributors, info.deadline_seconds, info.min_count) == (workers, names, 120, least)


def test_workers_of_the_environment_make_steps(monkeypatch: pytest.MonkeyPatch, server: Client, run: str) -> None:
    workers = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "3")
        model = net()
        backward(model, 4, rank)
        workers.append(GradientAccumulator.from_env(model, server, run=run, deadline_seconds=0.3))
    for worker in workers:
        worker.push(weight=0)
    for worker in workers[:2]:
        assert worker.pull().closed_by == "quorum"
    for worker in workers[:2]:
        worker.push(weight=0)
    pulled = workers[0].pull()
    assert (pulled.closed_by, pulled.contributors) == ("deadline", {"rank0": 1, "rank1": 1})


@pytest.mark.parametrize(
    ("given", "rules"),
    [
        ({"quorum": 12}, (12, 120, 6, True)),
        ({"deadline_seconds": None}, (4, None, 1, True)),
        ({"min_count": 3, "deadline_seconds": 5}, (4, 5, 3, True)),
        ({"quorum": None, "quorum_weight": 64}, (None, 120, 2, True)),
        ({"contributors": None, "worker": "another"}, (4, 120, 2, False)),
    ],
)
def test_what_is_given_counts(
    monkeypatch: pytest.MonkeyPatch, server: Client, run: str, given: dict[str, Any], rules: tuple[Any, ...]
) -> None:
    _, info = made(monkeypatch, server, run, 1, 4, **given)
    assert (info.quorum, info.deadline_seconds, info.min_count, info.contributors is not None) == rules


@pytest.mark.parametrize(
    ("rank", "workers", "words"),
    [
        (None, "2", "RANK is not set: start the workers with torchrun, or set RANK and WORLD_SIZE"),
        ("0", None, "WORLD_SIZE is not set"),
        ("0", "", "WORLD_SIZE is not set"),
        ("-1", "2", "RANK is '-1', but must be a whole number from 0 on"),
        ("one", "2", "RANK is 'one'"),
        ("0", "0", "WORLD_SIZE is '0', but must be a whole number from 1 on"),
        ("2", "2", "RANK is 2, but must be below WORLD_SIZE, which is 2"),
    ],
)
def test_variables_that_are_missing_or_wrong(
    monkeypatch: pytest.MonkeyPatch, server: Client, run: str, rank: str | None, workers: str | None, words: str
) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", workers)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(InvalidInput, match=words):
        GradientAccumulator.from_env(net(), server, run=run)
    assert not server.buffers.list(run)


def test_arrays_have_it_too(monkeypatch: pytest.MonkeyPatch, server: Client, run: str) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    gradients = arrays.GradientAccumulator.from_env({"w": np.zeros(2)}, server, run=run)
    gradients.push({"w": np.ones(2)})
    assert gradients.pull()["w"].tolist() == [1, 1]
