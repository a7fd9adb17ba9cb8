"""scipy's private loop that GatherGrad uses: a sentence says what to do when scipy changes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy

ADVICE = (
    f"scipy {scipy.__version__} has changed scipy.sparse._sparsetools.csc_matvecs, a private function that"
    " service/kernels/_scatter.py calls: adapt the call there, or keep scipy below this version in pyproject.toml"
)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_csc_matvecs_adds_rows_in_their_order_into_existing_memory(dtype: Any) -> None:
    targets = np.array([2, 0, 2, 2])
    rows = np.array([[1, 2, 3], [4, 5, 6], [1e30, 1e30, 1e30], [-1e30, -1e30, 1]], dtype)
    sums = np.full((4, 3), 10, dtype)
    expected = sums.copy()
    for target, row in zip(targets, rows, strict=True):
        expected[target] += row
    try:
        from scipy.sparse._sparsetools import csc_matvecs

        csc_matvecs(4, 4, 3, np.arange(5), targets, np.ones(4, dtype), rows.reshape(-1), sums.reshape(-1))
    except Exception as error:
        pytest.fail(f"{ADVICE} ({type(error).__name__}: {error})")
    assert sums.tobytes() == expected.tobytes(), ADVICE
