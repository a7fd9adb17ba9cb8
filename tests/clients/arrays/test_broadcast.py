"""Trees that one worker sends to all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gradserve_client import Client, InvalidInput, StepOpen
from gradserve_client.arrays import GradientAccumulator

from tests.clients.arrays.training import LIBRARIES, full, gradient, model, same


def everything(value: float) -> dict[str, Any]:
    """Return parameters, the state of an optimizer, and arrays that no one trains."""
    params = model(jnp, seed=int(value))
    return {
        "params": params,
        "optimizer": optax.adam(0.1).init(jax.tree.map(lambda one: one * value, params)),
        "statistics": {
            "count": np.asarray(2**40 + int(value)),
            "mask": jnp.array([value > 1, False]),
            "bytes": np.array([int(value)], np.uint8),
            "half": jnp.full(3, value, jnp.bfloat16),
            "large": np.full((40, 50), value / 3),
            "complex": np.full(2, complex(value, -value)),
            "nobody": None,
        },
    }


def test_one_worker_sends_its_tree_to_all(one_or_three: Client, run: str) -> None:
    def work(number: int) -> Any:
        mine = everything(number + 1.0)
        worker = GradientAccumulator(
            mine["params"], one_or_three, run=run, quorum=3, start="any", timeout=20, request_bytes=3000
        )
        return worker.broadcast_parameters(mine, send=number == 1)

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(work, range(3)))
    for one in found:
        assert jax.tree.structure(one) == jax.tree.structure(everything(2))
        assert same(one, everything(2))


@LIBRARIES
def test_a_late_worker_continues_with_the_others(server: Client, run: str, library: Any) -> None:
    weights = model(library)
    first = GradientAccumulator(weights, server, run=run, quorum=1)
    for seed in range(3):
        first.push(gradient(weights, 4, seed))
        found = first.pull()
        weights = jax.tree.map(lambda one, other: one - other / 10, weights, found)
    late = GradientAccumulator(model(library, seed=1), server, run=run, quorum=1, timeout=20)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(late.broadcast_parameters, model(library, seed=1), send=False)
        assert first.broadcast_parameters(weights, send=True) is weights
        assert same(waiting.result(20), weights)
    assert late.step == first.step == 3
    late.push(gradient(weights, 4, 7))
    assert same(first.pull(), late.pull())


def test_nobody_sends(server: Client, run: str) -> None:
    worker = GradientAccumulator(model(), server, run=run, timeout=0.05)
    with pytest.raises(StepOpen, match="Nobody has sent the parameters of step 0"):
        worker.broadcast_parameters(full(model(), 0), send=False)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.array([2**53 + 1]), "'x' has integers beyond 2"),
        (np.array([2**64 - 1], np.uint64), "'x' has integers beyond 2"),
        (np.array(["a"]), "'x' is <U1, which cannot be sent"),
        (7, "'x' is of type int"),
    ],
)
def test_trees_that_cannot_be_sent(server: Client, run: str, array: Any, words: str) -> None:
    worker = GradientAccumulator(model(), server, run=run)
    with pytest.raises(InvalidInput, match=words):
        worker.broadcast_parameters({"x": array}, send=True)
