"""A GRU reads handwritten digits row by row, and learns them with the service's forward and backward passes.

python examples/gru_rows.py [--url http://127.0.0.1:8000] [--steps 10]
"""

from __future__ import annotations

import argparse
from typing import Any, TypeAlias

import numpy as np
from _server import server as running_server  # type: ignore[import-not-found]  # it lies beside this file
from gradserve_client import Client
from sklearn.datasets import load_digits

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Arrays: TypeAlias = dict[str, Array]

HIDDEN = 64
BATCH = 64
HELD_OUT = 360


def load() -> tuple[Array, Array]:
    """Return the rows of all images, [8, images, 8 pixels], shuffled, and the digit on each image."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    rows = (digits.images[order] / 16).astype(np.float32).swapaxes(0, 1)
    return rows, digits.target[order]


def initial(random: np.random.Generator) -> Arrays:
    """Return the GRU's parameters for one direction in ONNX's layout, and the classifier's parameters V and c."""
    shapes = {
        "W": (1, 3 * HIDDEN, 8),
        "R": (1, 3 * HIDDEN, HIDDEN),
        "B": (1, 6 * HIDDEN),
        "V": (HIDDEN, 10),
        "c": (10,),
    }
    bound = HIDDEN**-0.5
    return {name: random.uniform(-bound, bound, shape).astype(np.float32) for name, shape in shapes.items()}


def log_softmax(logits: Array) -> Array:
    logits = logits - logits.max(axis=-1, keepdims=True)
    Y: Array = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return Y


def backward(server: Client, params: Arrays, X: Array, labels: Array) -> tuple[float, Arrays]:
    """Return the mean loss of these sequences and its gradients."""
    W, R, B, V, c = params.values()
    HAll, HFinal, ZRH = server.ops.gru_training(X, W, R, B)
    H = HFinal[0]
    Y = log_softmax(H @ V + c)

    sequences = np.arange(len(labels))
    loss = -Y[sequences, labels].mean()
    dY = np.zeros_like(Y)
    dY[sequences, labels] = -1 / len(labels)
    dlogits = server.ops.log_softmax_grad_13(dY, Y)
    dH = dlogits @ V.T
    gru = server.ops.gru_grad(
        X, W, R, B, SL=None, H0=None, HAll=HAll, ZRH=ZRH, grad_Ht=dH[np.newaxis], outputs=("dW", "dR", "dB")
    )
    gradients = {"W": gru["dW"], "R": gru["dR"], "B": gru["dB"], "V": H.T @ dlogits, "c": dlogits.sum(axis=0)}
    return float(loss), gradients


def accuracy(server: Client, params: Arrays, X: Array, labels: Array) -> float:
    """Return the share of digits that are recognized."""
    W, R, B, V, c = params.values()
    logits = server.ops.gru_training(X, W, R, B).HFinal[0] @ V + c
    return float(np.mean(logits.argmax(axis=-1) == labels))


class Adam:
    """Adam with its usual constants; updates parameters in place."""

    def __init__(self, params: Arrays, rate: float) -> None:
        self.params, self.rate, self.step = params, rate, 0
        self.means = {name: np.zeros_like(array) for name, array in params.items()}
        self.squares = {name: np.zeros_like(array) for name, array in params.items()}

    def descend(self, gradients: Arrays) -> None:
        self.step += 1
        rate = self.rate * np.sqrt(1 - 0.999**self.step) / (1 - 0.9**self.step)
        for name, gradient in gradients.items():
            self.means[name] += 0.1 * (gradient - self.means[name])
            self.squares[name] += 0.001 * (gradient**2 - self.squares[name])
            self.params[name] -= rate * self.means[name] / (np.sqrt(self.squares[name]) + 1e-8)


def train(server: Client, steps: int) -> None:
    rows, labels = load()
    held_out, held_out_labels = rows[:, :HELD_OUT], labels[:HELD_OUT]
    rows, labels = rows[:, HELD_OUT:], labels[HELD_OUT:]
    random = np.random.default_rng(0)
    params = initial(random)
    adam = Adam(params, rate=0.01)
    for step in range(steps):
        losses = []
        order = random.permutation(len(labels))
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            loss, gradients = backward(server, params, rows[:, batch], labels[batch])
            adam.descend(gradients)
            losses.append(loss)
        right = accuracy(server, params, held_out, held_out_labels)
        print(f"step {step + 1:2}  loss {np.mean(losses):.4f}  held-out accuracy {right:.1%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server; by default that at GRADSERVE_URL, or a new one")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    with running_server(options.url) as url, Client(url) as server:
        train(server, options.steps)


if __name__ == "__main__":
    main()
