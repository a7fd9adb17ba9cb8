"""Gradients in 8 bits whose sum in float32 is known to the bit: that of one client, in the order of its adds."""

from __future__ import annotations

import numpy as np

from service.dtypes import Array

BLOCKS = 60
"""Blocks of a client's row: its codes take 15 KB, and its sum 60 KB."""

SHAPE = (BLOCKS, 256)


def gradient(row: int, number: int, rows: int) -> dict[str, Array]:
    """Return a gradient for the buffer `coded` of all rows, which has zeros in the others.

    The first number of the row is 1, so it counts the adds.
    """
    chance = np.random.default_rng((row, number))
    codes, scales = np.zeros((rows, *SHAPE), np.int8), np.zeros((rows, BLOCKS), np.float32)
    codes[row] = chance.integers(-127, 128, SHAPE)
    scales[row] = chance.random(BLOCKS, np.float32)
    codes[row, 0, 0], scales[row, 0] = 1, 1
    return {"coded/codes": codes, "coded/scales": scales.reshape(-1)}


class Sum:
    """The sum of the first gradients of a client."""

    def __init__(self, row: int, rows: int) -> None:
        self._row, self._rows, self._count = row, rows, 0
        self._sum, self._exact, self._magnitude = np.zeros(SHAPE, np.float32), np.zeros(SHAPE), np.zeros(SHAPE)

    def count(self, found: Array) -> int:
        """Return how many adds are in the row, after a check of its bits."""
        for number in range(self._count + 1, int(found[0, 0]) + 1):
            parts = gradient(self._row, number, self._rows).values()
            codes, scales = (one.reshape(self._rows, BLOCKS, -1)[self._row] for one in parts)
            self._sum += codes * scales
            exact = codes * scales.astype(np.float64)
            self._exact += exact
            self._magnitude += np.abs(exact)
            self._count = number
        assert found.tobytes() == self._sum.tobytes()
        assert (np.abs(found - self._exact) <= 2.0**-24 * self._count * self._magnitude).all()
        return self._count
