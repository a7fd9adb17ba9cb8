"""Numbers in 8 bits: a code for each number, and a scale for each block of them.

The scale of a block is its largest magnitude / 127, in float32. A code is number / scale in float32, rounded to the
nearest, ties to even, and -127 to 127. Decoded, a number is code * scale. A block of zeros has the scale 0. A block
with a NaN or an infinity has this as its scale, and the codes 0: decoded, all its numbers are NaN. Arrays are flat.
"""

from __future__ import annotations

import numpy as np

from service.dtypes import FLOAT32, INT8, Array

BLOCK_LENGTH = 256
"""Numbers of a block. The last one of an array may have fewer."""

LARGEST_CODE = 127

PIECE_LENGTH = 1 << 16
"""Numbers that are encoded at once, with their quotients: they fit into a cache."""


def block_count(size: int) -> int:
    """Return how many blocks this many numbers have."""
    return -(-size // BLOCK_LENGTH)


def decode(codes: Array, scales: Array) -> Array:
    """Return the numbers of blocks in float32. The last block may be shorter."""
    numbers = codes.astype(FLOAT32)
    whole = codes.size - codes.size % BLOCK_LENGTH
    blocks = numbers[:whole].reshape(-1, BLOCK_LENGTH)
    np.multiply(blocks, scales[: len(blocks), None], out=blocks)
    if whole < codes.size:
        numbers[whole:] *= scales[-1]
    return numbers


def encode(numbers: Array) -> tuple[Array, Array]:
    """Return the codes and the scales of numbers in float32."""
    codes, scales = np.empty(numbers.size, INT8), np.empty(block_count(numbers.size), FLOAT32)
    whole = numbers.size - numbers.size % BLOCK_LENGTH
    for start in (*range(0, whole, PIECE_LENGTH), whole):
        stop = min(start + PIECE_LENGTH, whole) if start < whole else numbers.size
        if start < stop:
            width = min(BLOCK_LENGTH, stop - start)
            of_piece = scales[start // BLOCK_LENGTH : block_count(stop)]
            _encode(numbers[start:stop].reshape(-1, width), codes[start:stop].reshape(-1, width), of_piece)
    return codes, scales


def _encode(blocks: Array, codes: Array, scales: Array) -> None:
    with np.errstate(all="ignore"):
        np.maximum(blocks.max(axis=1), -blocks.min(axis=1), out=scales)
        np.abs(np.divide(scales, FLOAT32.type(LARGEST_CODE), out=scales), out=scales)  # -0 becomes 0
        has_codes = np.isfinite(scales) & (scales > 0)
        quotients = np.divide(blocks, np.where(has_codes, scales, 1)[:, None])
        np.clip(np.rint(quotients, out=quotients), -LARGEST_CODE, LARGEST_CODE, out=quotients)
        np.copyto(codes, quotients, casting="unsafe")
        codes[~has_codes] = 0
