from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from scipy.special import expit, log_softmax, softmax

from service.dtypes import Array
from service.kernels.activations import leaky_relu_grad, quick_gelu_grad, relu_grad, sigmoid_grad, tanh_grad
from service.kernels.gather import gather_grad
from service.kernels.softmax import log_softmax_grad, log_softmax_grad_13, softmax_grad, softmax_grad_13
from tests.kernels.gradcheck import check_gradient

SHAPES = [(), (7,), (2, 3, 4), (0, 3)]


def smooth(shape: tuple[int, ...]) -> Array:
    """Random numbers that are not near 0, where a rectifier has no gradient."""
    random = np.random.default_rng(3)
    return np.asarray(random.uniform(0.1, 3, shape) * random.choice([-1, 1], shape))


@pytest.mark.parametrize("alpha", [0.01, 0.5, 0.0, 1.5])
@pytest.mark.parametrize("shape", SHAPES)
def test_leaky_relu(shape: tuple[int, ...], alpha: float) -> None:
    def forward(X: Array) -> Array:
        return np.where(X > 0, X, alpha * X)

    check_gradient(forward, lambda dY, X: leaky_relu_grad(dY, forward(X), alpha=alpha), smooth(shape))


ACTIVATIONS: dict[str, tuple[Callable[[Array], Array], Callable[[Array, Array], Array]]] = {
    "relu": (lambda X: np.maximum(X, 0), relu_grad),
    "sigmoid": (expit, lambda dY, X: sigmoid_grad(dY, np.asarray(expit(X)))),
    "tanh": (np.tanh, lambda dY, X: tanh_grad(dY, np.asarray(np.tanh(X)))),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_activation(activation: str, shape: tuple[int, ...]) -> None:
    check_gradient(*ACTIVATIONS[activation], smooth(shape))


@pytest.mark.parametrize("alpha", [1.702, 1.0, -1.702, 0.3, 0.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_quick_gelu(shape: tuple[int, ...], alpha: float) -> None:
    check_gradient(lambda X: X * expit(alpha * X), lambda dY, X: quick_gelu_grad(dY, X, alpha=alpha), smooth(shape))


Softmax = Callable[..., Array]
FORWARD_SHAPES: Sequence[tuple[int, ...]] = [(5,), (3, 4), (3, 4, 5), (2, 3, 1, 2)]
ON_EVERY_AXIS = [(shape, axis) for shape in FORWARD_SHAPES for axis in range(-len(shape), len(shape))]


@pytest.mark.parametrize(("shape", "axis"), ON_EVERY_AXIS)
@pytest.mark.parametrize(
    ("forward", "gradient"),
    [
        (softmax, softmax_grad_13),
        (log_softmax, log_softmax_grad_13),
        (softmax, softmax_grad),
        (log_softmax, log_softmax_grad),
    ],
)
def test_softmax(forward: Softmax, gradient: Softmax, shape: tuple[int, ...], axis: int) -> None:
    """Along one axis, or, in the first generation, from an axis on."""
    one = gradient in (softmax_grad_13, log_softmax_grad_13)
    over = axis if one else tuple(range(axis % len(shape), len(shape)))
    check_gradient(
        lambda X: forward(X, axis=over), lambda dY, X: gradient(dY, forward(X, axis=over), axis=axis), smooth(shape)
    )


@pytest.mark.parametrize(
    ("shape", "indices", "axis"),
    [
        ((4, 2, 3, 2), [2, 0], 0),
        ((4, 2, 3, 2), [3, 0, 2, 3, 3, 1, 0, 3], 0),
        ((4, 2, 3, 2), [1, 0, 1], 1),
        ((4, 2, 3, 2), [[0, 1, 1], [2, 3, 0]], 0),
        ((4, 2), [-1, 0, -2], 0),
        ((4, 2, 3), 2, -1),
        ((4, 3), [[0], [2]], -1),
    ],
)
def test_gather(shape: tuple[int, ...], indices: object, axis: int) -> None:
    places = np.array(indices)
    check_gradient(
        lambda X: np.take(X, places, axis),
        lambda dY, X: gather_grad(np.array(shape), places, dY, axis=axis),
        smooth(shape),
    )


def slightly_wrong(dY: Array, X: Array) -> Array:
    return np.asarray(dY * np.cos(X) * (1 + 1e-6))


def wrong_in_one_place(dY: Array, X: Array) -> Array:
    dX = dY * np.cos(X)
    dX[1, 2] *= -1
    return np.asarray(dX)


@pytest.mark.parametrize(
    "gradient",
    [
        slightly_wrong,
        wrong_in_one_place,
        lambda dY, X: dY,
        lambda dY, X: np.cos(X),
        lambda dY, X: (dY * np.cos(X)).ravel(),
        lambda dY, X: (dY * np.cos(X)).astype(np.float32),
        lambda dY, X: np.full_like(X, np.nan),
    ],
    ids=["slightly", "in one place", "no slope", "no dY", "shape", "dtype", "NaN"],
)
def test_the_check_rejects_a_wrong_gradient(gradient: Callable[[Array, Array], Array]) -> None:
    with pytest.raises(AssertionError):
        check_gradient(np.sin, gradient, smooth((2, 3)))


def test_the_check_accepts_a_right_gradient() -> None:
    check_gradient(np.sin, lambda dY, X: np.asarray(dY * np.cos(X)), smooth((2, 3)))
