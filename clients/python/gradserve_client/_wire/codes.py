"""Numbers in 8 bits, by the rule of docs/buffers.md, which all clients and the server share.

The scale of a block of 256 numbers is its largest magnitude / 127, in float32. A code is number / scale in float32,
rounded to the nearest, ties to even, and -127 to 127. A block with a NaN or an infinity has the codes 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from gradserve_client._wire.tensors import Array

BLOCK = 256
"""Numbers with one scale. The last block of an array may have fewer."""

LARGEST = 127

FEWEST = 1024
"""Numbers of the smallest array that is worth encoding."""

PIECE = 1 << 16
"""Numbers that are encoded at once: with what is computed of them, they fit into a cache."""


class Coded:
    """Codes of the shape of the numbers, int8, and the scale of each block of the flat codes, float32."""

    def __init__(self, codes: Array, scales: Array) -> None:
        self.codes, self.scales = codes, scales

    @property
    def nbytes(self) -> int:
        """The bytes of both arrays."""
        return self.codes.nbytes + self.scales.nbytes

    @property
    def is_finite(self) -> bool:
        """Whether all numbers were finite: a block with another has no codes."""
        return bool(np.isfinite(self.scales).all())


def encoded(numbers: Array) -> Coded:
    """Return numbers in 8 bits."""
    flat = numbers.reshape(-1)
    codes, scales = _empty(flat.size)
    for part, blocks in _pieces(flat.size):
        codes[part] = _codes(flat[part].astype(np.float32, copy=False), scales[blocks])
    return Coded(codes.reshape(numbers.shape), scales)


def encoded_with(kept: Array | None, numbers: Array, factor: float) -> tuple[Coded, Array]:
    """Return `numbers + kept / factor` in 8 bits, and what rounding cuts off them, flat and times `factor`.

    `kept` is what an earlier call has cut off, None for nothing.
    """
    flat, scale = numbers.reshape(-1), np.float32(factor)
    codes, scales = _empty(flat.size)
    cut = np.empty(flat.size, np.float32)
    for part, blocks in _pieces(flat.size):
        piece = np.array(flat[part], np.float32)
        with np.errstate(all="ignore"):
            if kept is not None:
                piece += kept[part] / scale
            codes[part] = _codes(piece, scales[blocks])
            piece -= _numbers(codes[part], scales[blocks])
            np.multiply(piece, scale, out=cut[part])
    return Coded(codes.reshape(numbers.shape), scales), cut


def decoded(coded: Coded) -> Array:
    """Return the numbers of codes in float32."""
    return _numbers(coded.codes.reshape(-1), coded.scales).reshape(coded.codes.shape)


def whole(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Return the tensors of an answer, with the numbers of NAME/codes and NAME/scales as NAME."""
    found = {name: array for name, array in tensors.items() if not name.endswith(("/codes", "/scales"))}
    for place in tensors.keys() - found.keys():
        name, _, part = place.rpartition("/")
        if part == "codes":
            found[name] = decoded(Coded(tensors[place], tensors[f"{name}/scales"]))
    return found


def _empty(size: int) -> tuple[Array, Array]:
    return np.empty(size, np.int8), np.empty(-(-size // BLOCK), np.float32)


def _pieces(size: int) -> Iterator[tuple[slice, slice]]:
    """Yield the places of pieces of this many numbers, and of their scales."""
    for start in range(0, size, PIECE):
        yield slice(start, start + PIECE), slice(start // BLOCK, (start + PIECE) // BLOCK)


def _blocks(flat: Array) -> list[Array]:
    """Return the whole blocks as rows, and the rest, if there is one, as another row."""
    end = flat.size - flat.size % BLOCK
    return [one.reshape(-1, width) for one, width in ((flat[:end], BLOCK), (flat[end:], flat.size - end)) if one.size]


@np.errstate(all="ignore")
def _codes(flat: Array, scales: Array) -> Array:
    """Return the codes of float32 numbers, and write their scales."""
    codes, first = np.empty(flat.size, np.int8), 0
    for rows, target in zip(_blocks(flat), _blocks(codes), strict=True):
        own = scales[first : first + len(rows)]
        np.maximum(rows.max(axis=1), -rows.min(axis=1), out=own)
        np.abs(np.divide(own, np.float32(LARGEST), out=own), out=own)  # -0 becomes 0
        has_codes = np.isfinite(own) & (own > 0)
        quotients = np.divide(rows, np.where(has_codes, own, 1)[:, None])
        np.clip(np.rint(quotients, out=quotients), -LARGEST, LARGEST, out=quotients)
        np.copyto(target, quotients, casting="unsafe")
        target[~has_codes] = 0
        first += len(rows)
    return codes


@np.errstate(all="ignore")
def _numbers(codes: Array, scales: Array) -> Array:
    numbers, first = codes.astype(np.float32), 0
    for rows in _blocks(numbers):
        rows *= scales[first : first + len(rows), None]
        first += len(rows)
    return numbers
