"""The losses of pushes: their weighted mean for every worker, counted once with the gradients."""

from __future__ import annotations

import math
import weakref
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gradserve_client import Client, Conflict, InvalidInput, arrays
from gradserve_client.torch import GradientAccumulator

from tests.clients.torch.training import backward, fill_with, net, one

WEIGHTS = [8, 3, 5]


def worker(server: Client, run: str, rank: int = 0, workers: int = 1, **given: Any) -> tuple[Any, GradientAccumulator]:
    model = net()
    rules: Any = {"quorum": workers, "loss": True, "timeout": 20, **given}
    return model, GradientAccumulator(model, server, run=run, worker=f"rank{rank}", **rules)


def pushed(server: Client, run: str, loss: Any, **given: Any) -> Any:
    """Push this loss as a single worker, and return the mean."""
    model, gradients = worker(server, run, **given)
    fill_with(model, 1.0)
    gradients.push(loss=loss)
    return gradients.pull().loss


@pytest.mark.parametrize("options", [{}, {"request_bytes": 150}, {"reduce": "sum"}])
def test_the_mean_is_that_of_all_pushes_also_after_a_restart(
    one_or_three: Client, run: str, options: dict[str, Any]
) -> None:
    workers = [worker(one_or_three, run, rank, 3, **options) for rank in range(3)]
    states = [gradients.state_dict() for _, gradients in workers]
    for step in range(2):
        losses = [1 / (3 + rank + step) for rank in range(3)]
        for rank in (0, 1, 1, 2):  # rank1 is killed after its push, and makes it again
            if rank == 1:
                workers[1] = worker(one_or_three, run, 1, 3, **options)
                workers[1][1].load_state_dict(states[1])
            model, gradients = workers[rank]
            backward(model, WEIGHTS[rank], 10 * step + rank)
            gradients.push(weight=WEIGHTS[rank], loss=losses[rank])
        found = [gradients.pull() for _, gradients in workers]
        assert {one.count for one in found} == {3}
        mean = sum(weight * loss for weight, loss in zip(WEIGHTS, losses, strict=True)) / 16
        assert found[0].loss == pytest.approx(mean, rel=1e-15)
        assert len({one.loss for one in found}) == 1
        states = [gradients.state_dict() for _, gradients in workers]
    buffer = one_or_three.buffers[f"{run}.loss"]
    info = buffer.info()
    assert (info.shape, info.dtype, info.keep, info.closed_steps) == ((), "float64", 2000, (0, 1))
    assert buffer.value(step=1, reduce="mean") == found[0].loss


@pytest.mark.parametrize(
    "loss",
    [1.5, np.float32(1.5), np.array([1.5]), torch.tensor(1.5, dtype=torch.bfloat16), jnp.array(1.5)],
    ids=lambda loss: type(loss).__name__,
)
def test_a_loss_of_any_kind(server: Client, run: str, loss: Any) -> None:
    assert pushed(server, run, loss) == 1.5


def test_nothing_keeps_the_graph_of_a_loss(server: Client, run: str) -> None:
    model, gradients = worker(server, run)
    loss = model(torch.ones(2, 5)).square().mean()
    loss.backward()
    expected, kept = float(loss.detach()), weakref.ref(loss)
    gradients.push(loss=loss, wait=False)
    del loss
    assert kept() is None
    assert gradients.pull().loss == expected


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (None, r"^loss is missing, but the accumulator has loss=True"),
        ("1", r"^loss is of type str, but must be a number"),
        (True, r"^loss is of type bool"),
        (1j, r"^loss is of type complex"),
        (torch.ones(2), r"^loss is of the shape \(2,\), but must be a number"),
        (10**400, r"^loss cannot be a float"),
    ],
    ids=str,
)
def test_a_push_without_a_loss_changes_nothing(server: Client, run: str, loss: Any, words: str) -> None:
    model, gradients = worker(server, run)
    fill_with(model, 1.0)
    with pytest.raises(InvalidInput, match=words):
        gradients.push(loss=loss)
    assert gradients.push(loss=2).count == 1
    assert gradients.pull().loss == 2


def test_a_push_without_samples_has_no_loss(server: Client, run: str) -> None:
    (one, first), (_, second) = [worker(server, run, rank, 2) for rank in range(2)]
    fill_with(one, 1.0)
    first.push(weight=4, loss=3)
    second.push(weight=0)
    assert (first.pull().loss, second.pull().loss) == (3, 3)
    first.push(weight=0, loss=math.nan)
    second.push(weight=0)
    assert (first.pull().loss, second.pull().loss) == (None, None)


def test_losses_follow_the_rule_of_the_gradients(server: Client, run: str) -> None:
    assert math.isnan(pushed(server, run, math.nan))
    model, gradients = worker(server, f"{run}-strict", nonfinite="reject", max_norm=100.0)
    fill_with(model, 1.0)
    with pytest.raises(InvalidInput, match=r"infinite or NaN.*loss'"):
        gradients.push(loss=math.nan)
    gradients.push(loss=1e6)  # no gradient is as large
    assert gradients.pull().loss == 1e6
    gradients.set_rules(max_norm=50.0)
    fill_with(model, 1.0)
    gradients.push(loss=1e6)
    assert gradients.pull().loss == 1e6


@pytest.mark.parametrize("first", [True, False])
def test_all_workers_have_losses_or_none(server: Client, run: str, first: bool) -> None:
    worker(server, run, loss=first)
    with pytest.raises(Conflict, match=f"loss is {not first} here, and {first} there".lower()):
        worker(server, run, loss=not first)


def test_without_losses_there_are_none(server: Client, run: str) -> None:
    model, gradients = worker(server, run, loss=False)
    fill_with(model, 1.0)
    with pytest.raises(InvalidInput, match=r"^loss is given, but the accumulator has no loss=True"):
        gradients.push(loss=1.0)
    gradients.push()
    assert gradients.pull().loss is None
    assert not server.buffers.list(f"{run}.loss")


def test_a_mistaken_argument_is_refused(server: Client, run: str) -> None:
    mistaken: Any = torch.ones(2)
    with pytest.raises(InvalidInput, match=r"^loss is of type Tensor, but must be True or False"):
        worker(server, run, loss=mistaken)
    model = one(torch.zeros(2))
    model.loss = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(InvalidInput, match=r"loss' is the buffer of a parameter: rename the parameter"):
        GradientAccumulator(model, server, run=run, loss=True)
    assert not server.buffers.list(run)


def test_arrays_and_the_environment_have_it_too(monkeypatch: pytest.MonkeyPatch, server: Client, run: str) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    gradients = arrays.GradientAccumulator.from_env({"w": np.zeros(2)}, server, run=run, loss=True, keep=30)
    gradients.push({"w": np.ones(2)}, loss=0.5)
    gradients.pull()
    assert gradients.pulled is not None
    assert gradients.pulled.loss == 0.5
    assert server.buffers[f"{run}.loss"].info().keep == 2000
