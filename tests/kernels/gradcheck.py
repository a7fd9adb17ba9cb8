"""Gradients against central differences of the function that they are the gradient of."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from service.dtypes import Array

STEP = 1e-5
TOLERANCE = 1e-8
"""The truncation error of a step of 1e-5 is about 1e-10, the rounding error of float64 about 1e-11."""


def check_gradient(
    forward: Callable[[Array], npt.ArrayLike], gradient: Callable[[Array, Array], Array], X: Array
) -> None:
    """Raise `AssertionError` unless `gradient(dY, X)` is that of `sum(dY * forward(X))` for a random `dY`.

    `X` is float64, and `forward` must be smooth within a step of it. A gradient has the shape and dtype of `X`.
    """
    assert X.dtype == np.float64
    dY = np.random.default_rng(7).normal(size=np.shape(forward(X)))
    dX = gradient(np.asarray(dY), X)
    assert (dX.shape, dX.dtype) == (X.shape, X.dtype), f"the gradient is {dX.dtype} of shape {dX.shape}"
    np.testing.assert_allclose(dX, _differences(forward, dY, X), rtol=TOLERANCE, atol=TOLERANCE)


def _differences(forward: Callable[[Array], npt.ArrayLike], dY: Array, X: Array) -> Array:
    """For each element of `X`, how fast `sum(dY * forward(X))` grows with it."""
    slopes = np.empty_like(X)
    for place in np.ndindex(X.shape):
        above, below = X.copy(), X.copy()
        above[place] += STEP
        below[place] -= STEP
        slopes[place] = np.sum(dY * (np.asarray(forward(above)) - np.asarray(forward(below)))) / (2 * STEP)
    return slopes
