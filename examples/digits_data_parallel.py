"""Four processes train one network on handwritten digits, and share their gradients through the service.

In each step the processes split a batch unevenly. Each process computes the gradients of its rows by calls of backward
operators, adds them to the server's buffers, waits for all four, and takes the same step with the mean. In the end the
losses are compared with those of a single process in plain NumPy.

    python examples/digits_data_parallel.py [--url http://127.0.0.1:8000] [--steps 10]
"""

from __future__ import annotations

import argparse
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any, TypeAlias

import numpy as np
from _server import server as running_server  # type: ignore[import-not-found]  # it lies beside this file
from gradserve_client import Client

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Arrays: TypeAlias = dict[str, Array]

WORKERS = 4
HIDDEN = 64
BATCH = 90  # 22 or 23 rows for each worker
RATE, MOMENTUM = 0.1, 0.9


@dataclass
class Digits:
    """Images of 64 pixels from 0 to 1, and the digit on each. Some images are held out from training."""

    images: Array
    labels: Array
    held_out_images: Array
    held_out_labels: Array

    def batches(self, step: int) -> Iterator[Array]:
        """Yield the rows of each batch. The order differs between steps and is the same in every process."""
        order = np.random.default_rng(step).permutation(len(self.images))
        return (order[start : start + BATCH] for start in range(0, len(order), BATCH))


def load() -> Digits:
    from sklearn.datasets import load_digits  # here, because workers start faster without scikit-learn

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    train, held_out = order[360:], order[:360]
    return Digits(images[train], labels[train], images[held_out], labels[held_out])


def initial() -> Arrays:
    random = np.random.default_rng(0)
    return {
        "W1": random.normal(0, np.sqrt(2 / 64), (64, HIDDEN)).astype(np.float32),
        "b1": np.zeros(HIDDEN, np.float32),
        "W2": random.normal(0, np.sqrt(2 / HIDDEN), (HIDDEN, 10)).astype(np.float32),
        "b2": np.zeros(10, np.float32),
    }


def forward(params: Arrays, X: Array) -> tuple[Array, Array, Array]:
    """Return the input and output of the ReLU, and the logarithms of the digits' probabilities."""
    Z = X @ params["W1"] + params["b1"]
    H = np.maximum(Z, 0)
    logits = H @ params["W2"] + params["b2"]
    logits -= logits.max(axis=1, keepdims=True)
    return Z, H, logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def accuracy(params: Arrays, digits: Digits) -> float:
    """Return the share of held-out digits that are recognized."""
    _, _, Y = forward(params, digits.held_out_images)
    return float(np.mean(Y.argmax(axis=1) == digits.held_out_labels))


def descend(params: Arrays, velocity: Arrays, gradients: Arrays) -> None:
    """Take a step of gradient descent with momentum, in place."""
    for name, gradient in gradients.items():
        velocity[name] = MOMENTUM * velocity[name] + gradient
        params[name] -= RATE * velocity[name]


# ----- through the service -----


def backward(server: Client, params: Arrays, X: Array, labels: Array) -> Arrays:
    """Return the mean loss of these rows and its gradients with respect to the parameters."""
    Z, H, Y = forward(params, X)
    rows = np.arange(len(X))
    dY = np.zeros_like(Y)
    dY[rows, labels] = -1 / len(X)
    dlogits = server.ops.log_softmax_grad_13(dY, Y)
    dZ = server.ops.relu_grad(dlogits @ params["W2"].T, Z)
    return {
        "loss": -Y[rows, labels].mean(),
        "W1": X.T @ dZ,
        "b1": bias_gradient(server, dZ, params["b1"]),
        "W2": H.T @ dlogits,
        "b2": bias_gradient(server, dlogits, params["b2"]),
    }


def bias_gradient(server: Client, gradient: Array, bias: Array) -> Array:
    """Return `gradient`, summed over the axes along which the bias was broadcast."""
    axes = server.ops.broadcast_gradient_args(gradient.shape, bias.shape).B_axes
    summed: Array = gradient.sum(axis=tuple(axes))
    return summed


def all_reduce(server: Client, run: str, gradients: Arrays, rows: int, step: int, worker: str) -> Arrays:
    """Return the mean of the workers' gradients in this step, each weighted by its rows."""
    named = {f"{run}.{name}": gradient for name, gradient in gradients.items()}
    server.buffers.accumulate(named, weight=rows, step=step, contributor=worker)
    means = server.buffers.value(named, step=step, reduce="mean", timeout=60)
    return {name: means[f"{run}.{name}"] for name in gradients}


def work(worker: int, url: str, run: str, digits: Digits, steps: int) -> tuple[list[float], Arrays]:
    """Train as one of the processes; return the loss of every step and the final parameters."""
    params = initial()
    velocity = {name: np.zeros_like(array) for name, array in params.items()}
    losses: list[float] = []
    with Client(url) as server:
        for step in range(steps):
            first = len(losses)
            for batch in digits.batches(step):
                mine = np.array_split(batch, WORKERS)[worker]
                gradients = backward(server, params, digits.images[mine], digits.labels[mine])
                means = all_reduce(server, run, gradients, len(mine), len(losses), f"worker{worker}")
                losses.append(float(means.pop("loss")))
                descend(params, velocity, means)
            if worker == 0:
                loss = np.mean(losses[first:])
                print(f"step {step + 1:2}  loss {loss:.4f}  accuracy {accuracy(params, digits):.1%}", flush=True)
    return losses, params


def train_together(url: str, digits: Digits, steps: int) -> tuple[list[float], Arrays]:
    """Train in all processes; return losses and parameters, after a check that all parameters have the same bits."""
    run = f"digits-{uuid.uuid4().hex[:8]}"
    with Client(url) as server:
        for name, array in {"loss": np.zeros(()), **initial()}.items():
            keep = 20 if name == "loss" else 1  # the page draws the losses that are kept
            server.buffers[f"{run}.{name}"].create(array.shape, quorum=WORKERS, keep=keep, ttl_seconds=600)
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as workers:
        job = partial(work, url=url, run=run, digits=digits, steps=steps)
        (losses, params), *others = workers.map(job, range(WORKERS))
    for _, other in others:
        if any(params[name].tobytes() != other[name].tobytes() for name in params):
            sys.exit("The workers ended with different parameters")
    return losses, params


# ----- without the service -----


def train_alone(digits: Digits, steps: int) -> list[float]:
    """Train in one process with gradients in plain NumPy; return the loss of each step."""
    params = initial()
    velocity = {name: np.zeros_like(array) for name, array in params.items()}
    losses = []
    for step in range(steps):
        for batch in digits.batches(step):
            X, labels = digits.images[batch], digits.labels[batch]
            _, H, Y = forward(params, X)
            losses.append(float(-Y[np.arange(len(X)), labels].mean()))
            dlogits = (np.exp(Y) - np.eye(10, dtype=np.float32)[labels]) / len(X)
            dZ = dlogits @ params["W2"].T * (H > 0)
            gradients = {"W1": X.T @ dZ, "b1": dZ.sum(axis=0), "W2": H.T @ dlogits, "b2": dlogits.sum(axis=0)}
            descend(params, velocity, gradients)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server; by default that at GRADSERVE_URL, or a new one")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    digits = load()
    with running_server(options.url) as url:
        losses, params = train_together(url, digits, options.steps)
    difference = np.abs(np.subtract(losses, train_alone(digits, options.steps))).max()
    print(f"held-out accuracy {accuracy(params, digits):.1%}")
    print(f"largest difference of a loss from that of one process: {difference:.1e}")
    if not difference <= 1e-5:
        sys.exit("The losses are not those of one process")


if __name__ == "__main__":
    main()
