"""Train softmax regression and a GRU on scikit-learn's digits, with every gradient over HTTP."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Protocol

import httpx
import numpy as np

from service.dtypes import Array
from tests.kernels.gru_reference import gru, gru_gradient

forward: Any = gru  # the type checker cannot follow dictionary arguments
backward: Any = gru_gradient

STEPS = 20
RATE = 0.5
IMAGES = 64  # for the GRU
HIDDEN = 8


def loaded() -> Any:
    """Return scikit-learn's digits. Its import takes as long as the test, and each process collects this module."""
    from sklearn.datasets import load_digits

    return load_digits()


class Call(Protocol):
    """A function that runs an operator and returns its outputs, name -> array."""

    def __call__(self, operator: str, tensors: Mapping[str, Array], /, **attributes: Any) -> dict[str, Array]: ...


def over_http(client: httpx.Client) -> Call:
    """Return a call that runs operators on the service in float32."""

    def tensor(array: Array) -> dict[str, Any]:
        data = base64.b64encode(array.astype("<f4").tobytes()).decode()
        return {"dtype": "float32", "shape": array.shape, "base64": data}

    def call(operator: str, tensors: Mapping[str, Array], /, **attributes: Any) -> dict[str, Array]:
        body = {name: tensor(array) for name, array in tensors.items()}
        answer = client.post(f"/v1/ops/{operator}", params=attributes, json=body)
        made = answer.raise_for_status().json()
        return {
            name: np.frombuffer(base64.b64decode(form["base64"]), form["dtype"]).reshape(form["shape"])
            for name, form in made.items()
        }

    return call


def in_process(operator: str, tensors: Mapping[str, Array], /, **attributes: Any) -> dict[str, Array]:
    """Run the operator in this process."""
    if operator == "GRUTraining":
        return dict(zip(("HAll", "HFinal", "ZRH"), forward(**tensors, **attributes), strict=True))
    if operator == "GRUGrad":
        made = backward(**tensors, SL=None, H0=None, **attributes)
        return dict(zip(("dX", "dW", "dR", "dB", "dH0"), made, strict=True))
    assert operator == "LogSoftmaxGrad_13"
    dY, Y = tensors["dY"], tensors["Y"]
    return {"dX": dY - np.exp(Y) * dY.sum(-1, keepdims=True)}


def head(call: Call, logits: Array, labels: Array) -> tuple[float, Array]:
    """Return the mean cross-entropy and its gradient with respect to the logits."""
    shifted = logits - logits.max(-1, keepdims=True)
    Y = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    rows, dY = np.arange(len(labels)), np.zeros_like(Y)
    dY[rows, labels] = -1 / len(labels)
    return float(-Y[rows, labels].mean()), call("LogSoftmaxGrad_13", {"dY": dY, "Y": Y})["dX"]


def train(call: Call) -> list[float]:
    """Return the cross-entropy before each step of gradient descent."""
    digits = loaded()
    images = (digits.data / 16).astype(np.float32)
    weights, losses = np.zeros((images.shape[1], 10), np.float32), []
    for _ in range(STEPS):
        loss, gradient = head(call, images @ weights, digits.target)
        losses.append(loss)
        weights -= RATE * images.T @ gradient
    return losses


def train_gru(call: Call, dtype: type[np.floating[Any]]) -> list[float]:
    """Return the cross-entropy before each step for a bidirectional GRU that reads an image row by row.

    The classifier reads the GRU's last and mean states.
    """
    digits, random = loaded(), np.random.default_rng(0)
    X = (digits.images[:IMAGES] / 16).swapaxes(0, 1).astype(dtype)
    shapes = {"W": (2, 3 * HIDDEN, 8), "R": (2, 3 * HIDDEN, HIDDEN), "B": (2, 6 * HIDDEN)}
    weights = {name: random.normal(0, 0.3, shape).astype(dtype) for name, shape in shapes.items()}
    top = random.normal(0, 0.3, (2, HIDDEN, 10)).astype(dtype)
    attributes, losses = {"direction": "bidirectional", "linear_before_reset": 1}, []
    for _ in range(STEPS):
        made = call("GRUTraining", {"X": X, **weights}, **attributes)
        HAll, HFinal, ZRH = made["HAll"], made["HFinal"], made["ZRH"]
        features = HFinal + HAll.mean(0)
        loss, gradient = head(call, np.einsum("dnh,dhk->nk", features, top), digits.target[:IMAGES])
        losses.append(loss)
        grad_Ht = np.einsum("nk,dhk->dnh", gradient, top)
        grad_HAll = np.broadcast_to(grad_Ht / len(X), HAll.shape)
        states = {"HAll": HAll, "ZRH": ZRH, "grad_HAll": grad_HAll, "grad_Ht": grad_Ht}
        slopes = call("GRUGrad", {"X": X, **weights, **states}, **attributes)
        top -= RATE * np.einsum("dnh,nk->dhk", features, gradient)
        for name, weight in weights.items():
            weight -= RATE * slopes[f"d{name}"]
    return losses


def test_training_by_http_follows_training_in_process(client: httpx.Client) -> None:
    expected, losses = train(in_process), train(over_http(client))
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-6)
    assert losses[0] > 2.3
    assert losses[-1] < 1.2
    assert losses == sorted(losses, reverse=True)


def test_training_a_gru_by_http_follows_training_in_float64(client: httpx.Client) -> None:
    expected, losses = train_gru(in_process, np.float64), train_gru(over_http(client), np.float32)
    # A loss of 2.7 is rounded by 1.2e-7 in float32, as are the ten numbers that it is made of.
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-6)
    assert losses[0] > 2.3
    assert losses[-1] < 1.9
    assert losses == sorted(losses, reverse=True)
