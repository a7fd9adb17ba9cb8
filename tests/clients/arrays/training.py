"""What the tests train: a linear model in NumPy or JAX, and its own gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gradserve_client import Client
from gradserve_client.arrays import GradientAccumulator

LIBRARIES = pytest.mark.parametrize("library", [np, jnp], ids=["numpy", "jax"])


def model(library: Any = np, seed: int = 0) -> Any:
    """Return weights in a nest."""
    random = np.random.default_rng(seed)
    weights = {"kernel": random.normal(size=(5, 3)), "bias": random.normal(size=3)}
    return {"dense": {name: library.asarray(one, np.float32) for name, one in weights.items()}}


def batch(size: int, seed: int) -> tuple[Any, Any]:
    random = np.random.default_rng(seed)
    return random.normal(size=(size, 5)).astype(np.float32), random.normal(size=(size, 3)).astype(np.float32)


def gradient(weights: Any, size: int, seed: int) -> Any:
    """Return the gradient of the mean squared error of a batch, in the library of the weights."""
    samples, targets = batch(size, seed)
    dense = weights["dense"]
    errors = (samples @ dense["kernel"] + dense["bias"] - targets) * (2 / size)
    return {"dense": {"kernel": samples.T @ errors, "bias": errors.sum(axis=0)}}


def mean(gradients: Sequence[Any], sizes: Sequence[float]) -> Any:
    """Return the weighted mean of gradients."""
    return jax.tree.map(
        lambda *ones: sum(np.asarray(one) * size for one, size in zip(ones, sizes, strict=True)) / sum(sizes),
        *gradients,
    )


def full(tree: Any, value: float) -> Any:
    return jax.tree.map(lambda one: np.full_like(one, value), tree)


def assert_close(found: Any, expected: Any, atol: float = 1e-6) -> None:
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=0, atol=atol), found, expected)


def same(found: Any, expected: Any) -> bool:
    """Return whether trees have the same arrays, bit by bit."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return all(
        type(one) is type(other) and one.dtype == other.dtype and np.array_equal(one, other) for one, other in pairs
    )


def exchange(tree: Any, gradients: Any, server: Client, run: str, **options: Any) -> Any:
    """Push these gradients as a single worker, and pull them."""
    worker = GradientAccumulator(tree, server, run=run, **options)
    worker.push(gradients)
    return worker.pull()
