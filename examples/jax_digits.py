"""Three processes train one network in JAX, and share their gradients through the service.

In each step the processes split a batch unevenly. Each process pushes the gradient of its rows, pulls the mean of all
three, and takes the same step of optax's Adam. In the end the parameters are compared with those of a single process
that had all rows.

    python examples/jax_digits.py [--url http://127.0.0.1:8000] [--steps 80]
"""

from __future__ import annotations

import argparse
import sys
import uuid
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _server import server as running_server  # type: ignore[import-not-found]  # it lies beside this file
from digits_data_parallel import Digits, load  # type: ignore[import-not-found]  # it lies beside this file
from gradserve_client import Client
from gradserve_client.arrays import GradientAccumulator

WORKERS = 3
HIDDEN = 64
BATCH = 96
SHARES = (16, 48)  # rows of a batch: 16, 32 and 48 for the workers
RATE = 0.003

LARGEST_DIFFERENCE = 1e-5
"""The difference of a parameter that other orders of float32 sums may make."""


def initial() -> Any:
    """Return a network of two layers, with the same weights in every process."""
    random = np.random.default_rng(0)
    sizes = [(64, HIDDEN), (HIDDEN, 10)]
    return {
        f"dense_{number}": {
            "kernel": jnp.asarray(random.normal(0, np.sqrt(2 / size[0]), size), jnp.float32),
            "bias": jnp.zeros(size[1]),
        }
        for number, size in enumerate(sizes)
    }


def logits(params: Any, images: Any) -> Any:
    first, second = params["dense_0"], params["dense_1"]
    return jax.nn.relu(images @ first["kernel"] + first["bias"]) @ second["kernel"] + second["bias"]


def loss(params: Any, images: Any, labels: Any) -> Any:
    """Return the mean loss of these rows."""
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, images), labels).mean()


def accuracy(params: Any, digits: Digits) -> float:
    """Return the share of held-out digits that are recognized."""
    return float((logits(params, digits.held_out_images).argmax(axis=1) == digits.held_out_labels).mean())


def train(digits: Digits, steps: int, mine: Callable[[Any], Any], average: Callable[[Any, int], Any]) -> Any:
    """Return the parameters after training on `mine` of the rows of each batch, with the `average` of gradients."""
    params, optimizer = initial(), optax.adam(RATE)
    state = optimizer.init(params)
    gradient, update = jax.jit(jax.grad(loss)), jax.jit(optimizer.update)
    for step in range(steps):
        rows = mine(np.random.default_rng(step).permutation(len(digits.images))[:BATCH])
        gradients = average(gradient(params, digits.images[rows], digits.labels[rows]), len(rows))
        updates, state = update(gradients, state)
        params = optax.apply_updates(params, updates)
    return params


def work(rank: int, url: str, run: str, digits: Digits, steps: int) -> Any:
    """Train as one of the processes."""
    with Client(url) as server:
        accumulator = GradientAccumulator(initial(), server, run=run, quorum=WORKERS, worker=f"rank{rank}")

        def average(gradients: Any, rows: int) -> Any:
            accumulator.push(gradients, weight=rows)
            return accumulator.pull()

        params = train(digits, steps, lambda rows: np.split(rows, SHARES)[rank], average)
    return jax.tree.map(np.asarray, params)


def train_together(url: str, digits: Digits, steps: int) -> Any:
    """Train in all processes; return the parameters, after a check that all have the same bits."""
    run = f"jax_digits-{uuid.uuid4().hex[:8]}"
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as workers:
        job = partial(work, url=url, run=run, digits=digits, steps=steps)
        params, *others = workers.map(job, range(WORKERS))
    with Client(url) as server:
        server.buffers.delete(prefix=f"{run}.")
    if not all(jax.tree.all(jax.tree.map(np.array_equal, params, other)) for other in others):
        sys.exit("The workers ended with different parameters")
    return params


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server; by default that at GRADSERVE_URL, or a new one")
    parser.add_argument("--steps", type=int, default=80)
    options = parser.parse_args()
    digits = load()
    with running_server(options.url) as url:
        params = train_together(url, digits, options.steps)
    alone = train(digits, options.steps, lambda rows: rows, lambda gradients, _: gradients)
    difference = max(jax.tree.leaves(jax.tree.map(lambda one, other: float(abs(one - other).max()), params, alone)))
    print(f"held-out accuracy: {accuracy(params, digits):.1%} of three processes, {accuracy(alone, digits):.1%} of one")
    print(f"largest difference of a parameter: {difference:.1e}")
    if not difference <= LARGEST_DIFFERENCE:
        sys.exit("The parameters are not those of one process")


if __name__ == "__main__":
    main()
