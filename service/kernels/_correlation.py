"""Sums of products of a tensor with shifted views of others: what all gradients of convolutions are made of.

Shifted views of a tile are copied one below the other, as rows of a matrix (im2col), and BLAS multiplies this matrix. A
tile has pixels of one or more images and groups. Its size depends on the shapes alone, and so do the parts: tiles that
add to sums of their own. So the bits of a result depend neither on the threads nor on the outputs that are wanted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from service.dtypes import Array
from service.kernels._blocks import check_wanted, cuts, scratch, share_out, spare_memory

MATRIX_BYTES = 1 << 22
"""Bytes of a tile's matrix, at most, unless one pixel needs more. Threads keep scratch memory of this size."""

FEW_COLUMNS = 512
"""Columns from which on more columns make no product faster. Images with fewer share a tile."""

FEW_NUMBERS = 1 << 15
"""Numbers of a tap in a tile from which on NumPy's calls take little time beside the copies. They need images, too."""

MAX_PARTS = 8
"""The most parts: enough to occupy the threads."""

SUMS_BYTES = 1 << 25
"""Bytes of the sums of all parts together. With larger sums there are two parts."""

Slices = tuple[Any, ...]


@dataclass(frozen=True)
class Tap:
    """What every pixel p sees at one place of its window: pixel p + `shift` of a source, or 0 outside the source."""

    source: int
    shift: tuple[int, ...]


@dataclass(frozen=True)
class _Tile:
    """A block of images, of groups and of pixels."""

    images: slice
    groups: slice
    pixels: Slices
    moves: Sequence[tuple[Slices, Slices] | None]
    """For each tap, the pixels of the tile that see a source, and what they see. None: all are outside."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The groups, the images, and the pixels along each axis."""
        return tuple(part.stop - part.start for part in (self.groups, self.images, *self.pixels))

    def of(self, tensor: Array) -> Array:
        """Return the tile of a tensor [N, G, channels, pixels...] as [groups, channels, images, pixels...]."""
        return _channels_first(tensor[(self.images, self.groups, slice(None), *self.pixels)])

    def around(self, source: Array) -> Array:
        """Return all pixels of the tile's images and groups, in the same order of axes."""
        return _channels_first(source[self.images, self.groups])


@dataclass(frozen=True)
class Correlation:
    """The pixels of `partner` [N, G, B, pixels...] see T taps of the `sources` [N, G, A, ...], for each of G groups."""

    sources: Sequence[Array]
    partner: Array
    taps: Sequence[Tap]

    def run(
        self, weight: Array, *, result: Array | None = None, scattered: Sequence[Array] = (), wants_sums: bool
    ) -> Array | None:
        """Compute what is given, and return, if wanted, the sums of products with `partner`, [G, T, A, B].

        `weight` is [G, B, T * A]. `result`, which is like `partner`, becomes the sums over T and A of what each pixel
        sees, times `weight`. The products of `weight` and `partner` are added to `scattered`, which are like `sources`,
        where the pixels see.
        """
        blocks = list(self._blocks(whole_images=bool(scattered)))
        G, B, rows = weight.shape
        bytes_each = self.partner.itemsize * weight.size
        count = min(len(blocks), MAX_PARTS, max(2, SUMS_BYTES // bytes_each))
        sums = spare_memory((count if wants_sums else 0, G, rows, B), self.partner.dtype)

        def run_part(number: int) -> None:
            sums[number : number + 1] = 0
            part = blocks[len(blocks) * number // count : len(blocks) * (number + 1) // count]
            for tile in itertools.chain(*part):
                check_wanted()
                if wants_sums or scattered:
                    partner = _flat(tile.of(self.partner))
                if wants_sums or result is not None:
                    seen = self._seen(tile)
                    if result is not None:
                        _multiply(weight[tile.groups], seen, tile.of(result))
                    if wants_sums:
                        product = self._matrix(1, len(partner), rows, B)
                        sums[number, tile.groups] += np.matmul(seen, partner.swapaxes(1, 2), out=product)
                if scattered:
                    product = self._matrix(0, len(partner), rows, partner.shape[2])
                    np.matmul(weight[tile.groups].swapaxes(1, 2), partner, out=product)
                    self._scatter(product, scattered, tile)

        share_out(run_part, count)
        return sums.sum(axis=0).reshape(G, len(self.taps), -1, B) if wants_sums else None

    def _blocks(self, *, whole_images: bool) -> Iterator[list[_Tile]]:
        """Yield blocks of tiles: single tiles, or all tiles of the same images and groups."""
        N, G, _, *grid = self.partner.shape
        A = self.sources[0].shape[2]
        room = MATRIX_BYTES // self.partner.itemsize // (len(self.taps) * A)
        enough = min(room, max(FEW_COLUMNS, FEW_NUMBERS // A))
        lengths: list[int] = []
        for size, most in (*((size, room) for size in (*grid[::-1], G)), (N, enough)):
            count = -(-size // max(1, most // math.prod(lengths)))
            lengths.insert(0, -(-size // count))
        images, groups, *axes = (cuts(size, length) for size, length in zip((N, G, *grid), lengths, strict=True))
        places = [(pixels, self._moves(pixels)) for pixels in itertools.product(*axes)]
        for block in itertools.product(images, groups):
            tiles = [_Tile(*block, *place) for place in places]
            yield from [tiles] if whole_images else ([tile] for tile in tiles)

    def _moves(self, pixels: Slices) -> list[tuple[Slices, Slices] | None]:
        return [_move(pixels, tap.shift, self.sources[tap.source].shape[3:]) for tap in self.taps]

    def _matrix(self, slot: int, *shape: int) -> Array:
        return scratch(slot, math.prod(shape), self.partner.dtype).reshape(shape)

    def _seen(self, tile: _Tile) -> Array:
        """Return what the pixels of the tile see, as [groups, T * A, pixels]."""
        sources = [tile.around(source) for source in self.sources]
        G, A, *grid = sources[0].shape[:2] + tile.shape[1:]
        if len(self.taps) == 1 and tile.moves[0] and _is_whole(tile.moves[0][0], grid[1:]):
            return _flat(sources[0][(..., *tile.moves[0][1])])
        seen = self._matrix(0, G, len(self.taps), A, *grid)
        for number, (tap, move) in enumerate(zip(self.taps, tile.moves, strict=True)):
            target = seen[:, number]
            if move is None:
                target[...] = 0
            else:
                _clear_around(target, move[0])
                target[(..., *move[0])] = sources[tap.source][(..., *move[1])]
        return seen.reshape(G, len(self.taps) * A, -1)

    def _scatter(self, product: Array, scattered: Sequence[Array], tile: _Tile) -> None:
        targets = [tile.around(source) for source in scattered]
        products = product.reshape(len(product), len(self.taps), -1, *tile.shape[1:])
        for number, (tap, move) in enumerate(zip(self.taps, tile.moves, strict=True)):
            if move is not None:
                targets[tap.source][(..., *move[1])] += products[:, number][(..., *move[0])]


def _channels_first(tensor: Array) -> Array:
    return tensor.transpose(1, 2, 0, *range(3, tensor.ndim))


def _flat(tensor: Array) -> Array:
    """Return a tensor [groups, channels, images, pixels...] with all images and pixels in one axis."""
    return tensor.reshape(*tensor.shape[:2], -1)


def _move(pixels: Slices, shift: Iterable[int], sizes: Iterable[int]) -> tuple[Slices, Slices] | None:
    """Return which of the pixels, counted from their first, see an element of a source, and these elements."""
    inside, place = [], []
    for part, by, size in zip(pixels, shift, sizes, strict=True):
        start, stop = max(part.start, -by), min(part.stop, size - by)
        if start >= stop:
            return None
        inside.append(slice(start - part.start, stop - part.start))
        place.append(slice(start + by, stop + by))
    return tuple(inside), tuple(place)


def _is_whole(inside: Slices, sizes: Sequence[int]) -> bool:
    return all(part.stop - part.start == size for part, size in zip(inside, sizes, strict=True))


def _clear_around(target: Array, inside: Slices) -> None:
    """Make zero what lies outside along the last axes."""
    for axis, part in enumerate(inside, target.ndim - len(inside)):
        before = (slice(None),) * axis
        if part.start:
            target[(*before, slice(part.start))] = 0
        if part.stop < target.shape[axis]:
            target[(*before, slice(part.stop, None))] = 0


def _multiply(weight: Array, seen: Array, target: Array) -> None:
    """target = weight @ seen, in place if the memory of the target allows it."""
    flat = _flat(target)
    np.matmul(weight, seen, out=flat)
    if not np.may_share_memory(flat, target):
        target[...] = flat.reshape(target.shape)
