"""Real training through the service: softmax regression on scikit-learn's digits, every gradient by HTTP."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
from sklearn.datasets import load_digits

Array = np.ndarray[Any, Any]
Gradient = Callable[[Array, Array], Array]

STEPS = 20
RATE = 0.5


def over_http(client: httpx.Client) -> Gradient:
    """LogSoftmaxGrad_13 by the service."""

    def tensor(array: Array) -> dict[str, Any]:
        data = base64.b64encode(array.astype("<f4").tobytes()).decode()
        return {"dtype": "float32", "shape": array.shape, "base64": data}

    def gradient(dY: Array, Y: Array) -> Array:
        answer = client.post("/v1/ops/LogSoftmaxGrad_13", json={"dY": tensor(dY), "Y": tensor(Y)})
        answer.raise_for_status()
        dX = answer.json()["dX"]
        return np.frombuffer(base64.b64decode(dX["base64"]), np.float32).reshape(dX["shape"])

    return gradient


def in_process(dY: Array, Y: Array) -> Array:
    """The same by NumPy."""
    return np.asarray(dY - np.exp(Y) * dY.sum(-1, keepdims=True))


def train(gradient: Gradient) -> list[float]:
    """The cross-entropy before each step of gradient descent."""
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target
    weights = np.zeros((images.shape[1], 10), np.float32)
    rows, losses = np.arange(len(labels)), []
    for _ in range(STEPS):
        logits = images @ weights
        logits -= logits.max(-1, keepdims=True)
        Y = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        losses.append(float(-Y[rows, labels].mean()))
        dY = np.zeros_like(Y)
        dY[rows, labels] = -1 / len(labels)
        weights -= RATE * images.T @ gradient(dY, Y)
    return losses


def test_training_by_http_follows_training_in_process(client: httpx.Client) -> None:
    expected, losses = train(in_process), train(over_http(client))
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-6)
    assert losses[0] > 2.3
    assert losses[-1] < 1.2
    assert losses == sorted(losses, reverse=True)
