"""Numbers in 8 bits: a code for each number, and a scale for each block of them.

The scale of a block is its largest magnitude / 127, in float32. A code is number / scale in float32, rounded to the
nearest, ties to even. Decoded, a number is code * scale. A block of zeros has the scale 0. A block with a NaN or an
infinity has this as its scale, and the codes 0: decoded, all its numbers are NaN. All arrays are flat.
"""

from __future__ import annotations

import numpy as np

from service.dtypes import FLOAT32, Array

BLOCK_LENGTH = 256
"""Numbers of a block. The last one of an array may have fewer."""

LARGEST_CODE = 127


def block_count(size: int) -> int:
    """Return how many blocks this many numbers have."""
    return -(-size // BLOCK_LENGTH)


def decode(codes: Array, scales: Array) -> Array:
    """Return the numbers of whole blocks, the last of which may be shorter, in float32."""
    numbers = codes.astype(FLOAT32)
    whole = codes.size - codes.size % BLOCK_LENGTH
    blocks = numbers[:whole].reshape(-1, BLOCK_LENGTH)
    np.multiply(blocks, scales[: len(blocks), None], out=blocks)
    if whole < codes.size:
        numbers[whole:] *= scales[-1]
    return numbers
