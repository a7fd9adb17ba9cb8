"""The arithmetic of GRUGrad."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from service.kernels._blocks import scratch, spare_memory
from service.kernels._gru_layout import Layout
from service.kernels._op import Array
from service.kernels._tasks import Tasks

PIECE = 1 << 16
"""Elements of a block's states that are prepared at once: enough for NumPy's calls to be worth it."""
LARGEST_PRODUCT = 1 << 19
"""Elements of a product that wait in scratch, which a thread keeps, to be added."""
WIDE = 128
"""Hidden units from which on each gate's products are a task of their own."""


class Backward:
    """The gradient, chunk of steps after chunk of steps, against the direction of the forward pass.

    Each block of sequences walks through a chunk once it has walked through the one before, and leaves the gradients of
    the pre-activations in `gates`. When all blocks have, the products over all steps of the chunk are due, which add to
    dX, dW, dR and dB, while the blocks walk on.

    `gates` holds z, r and h, as W sees them. With linear_before_reset, R sees another h, r times it, which stands
    before them, so that what belongs to R is contiguous, h, z, r, and what belongs to W is as well.
    """

    def __init__(self, layout: Layout, x: Array, given: Mapping[str, Array | None], made: Mapping[str, Array]) -> None:
        self.layout, self.x, self.given, self.made = layout, x, given, made
        S, N, H, D, dtype = layout.longest(), layout.N, layout.H, layout.D, x.dtype
        self.first = 1 if layout.linear_before_reset else 0  # where z stands
        self.gates: Array = spare_memory((D, S, N, 3 + self.first, H), dtype)
        self.previous: Array = spare_memory((D, S, N, H), dtype)  # the state before each step
        self.reset: Array | None = None  # r * previous, where R sees that instead
        self.recurrent = self._array("R")
        if layout.linear_before_reset:
            self.recurrent = np.concatenate([self.recurrent[:, 2 * H :], self.recurrent[:, : 2 * H]], axis=1)
        else:
            self.reset = spare_memory((D, S, N, H), dtype)

    def run(self) -> None:
        """Fill `made`."""
        layout, grad_Ht = self.layout, self.given["grad_Ht"]
        self.made["dH0"][...] = 0 if grad_Ht is None else grad_Ht
        chunks, blocks = [layout.chunks(d)[::-1] for d in range(layout.D)], layout.blocks()
        places = list(itertools.product(range(len(chunks[0])), range(layout.D)))
        if "dX" in self.made:
            self.made["dX"][layout.longest() :] = 0
        if not places:
            for name in {"dX", "dW", "dR", "dB"} & self.made.keys():
                self.made[name][...] = 0
        if layout.alone:
            self._run_alone([(d, chunks[d][number]) for number, d in places], blocks)
            return
        tasks = Tasks()
        walked: dict[tuple[int, int], list[int]] = {}  # the tasks of a direction's chunk, block by block
        for number, d in places:
            before = walked.get((d, number - 1), [])
            walked[d, number] = [
                tasks.add(partial(self._walk, d, chunks[d][number], block), before[k : k + 1], rank=number)
                for k, block in enumerate(blocks)
            ]
        last: dict[object, int] = {}  # what products add to -> the task that added to it last
        for number, d in places:
            for target, product in self._products(d, chunks[d][number]):
                earlier = [last[target]] if target in last else []
                after = [*walked[d, number], *earlier]
                last[target] = tasks.add(partial(product, not earlier), after, rank=number + 1)
        tasks.run()

    def _run_alone(self, places: Iterable[tuple[int, slice]], blocks: Iterable[slice]) -> None:
        begun: set[object] = set()
        with np.errstate(all="ignore"):
            for d, steps in places:
                for block in blocks:
                    self._walk(d, steps, block)
                for target, product in self._products(d, steps):
                    product(target not in begun)
                    begun.add(target)

    def _array(self, name: str) -> Array:
        array = self.given[name]
        assert array is not None
        return array

    def _walk(self, d: int, chunk: slice, block: slice) -> None:
        """Take a block of sequences back through a chunk of steps, in pieces that are small enough for scratch."""
        if chunk.start >= self.layout.longest(block):
            for array in (self.gates, self.previous, self.reset):
                if array is not None:
                    array[d, chunk, block] = 0
            return
        height = max(1, PIECE // ((block.stop - block.start) * self.layout.H))
        pieces = [slice(t, min(t + height, chunk.stop)) for t in range(chunk.start, chunk.stop, height)]
        for steps in pieces if self.layout.reverse[d] else reversed(pieces):
            self._through_time(d, steps, block)

    def _factors(self, d: int, steps: slice, block: slice) -> tuple[Array, Array]:
        """Fill `gates` with what to multiply the state's gradient by; return z, and r, in memory of their own."""
        layout, H = self.layout, self.layout.H
        z, r, h = (self._array("ZRH")[steps, d, block, k * H : (k + 1) * H] for k in range(3))
        passing, reset, candidate, rest, part = scratch(0, 5 * z.size, z.dtype).reshape(5, *z.shape)
        gates, previous = self.gates[d, steps, block], self.previous[d, steps, block]
        to_z, to_r, to_h = (gates[:, :, self.first + k] for k in range(3))
        self._fill_previous(d, steps, block, previous)
        passing[...], reset[...], candidate[...] = z, r, h
        np.subtract(1, passing, out=rest)
        np.subtract(previous, candidate, out=part)
        part *= passing
        np.multiply(part, rest, out=to_z)
        candidate *= candidate
        np.subtract(1, candidate, out=part)
        part *= rest
        to_h[...] = part
        if self.reset is None:
            part *= reset
            gates[:, :, 0] = part
            np.matmul(previous.reshape(-1, H), self._array("R")[d, 2 * H :].T, out=rest.reshape(-1, H))
            if self.given["B"] is not None:
                rest += self._array("B")[d, 5 * H :]
            part *= rest
        else:
            np.multiply(reset, previous, out=part)
            self.reset[d, steps, block] = part
        np.subtract(1, reset, out=rest)
        np.multiply(part, rest, out=to_r)
        if layout.padded is not None and self.reset is not None:
            self.reset[d, steps, block][layout.padded[steps, block]] = 0
        return passing, reset

    def _fill_previous(self, d: int, steps: slice, block: slice, previous: Array) -> None:
        HAll, H0 = self._array("HAll")[:, d, block], self.given["H0"]
        start: Any = 0 if H0 is None else H0[d, block]
        first, last = steps.start, steps.stop
        if self.layout.reverse[d]:
            previous[:-1] = HAll[first + 1 : last]
            previous[-1] = HAll[last] if last < self.layout.S else start
        else:
            previous[1:] = HAll[first : last - 1]
            previous[0] = HAll[first - 1] if first else start
        if self.layout.lengths is not None:
            lengths = self.layout.lengths[block]
            if self.layout.reverse[d]:
                for n in np.flatnonzero((lengths > first) & (lengths <= last)):
                    previous[lengths[n] - 1 - first, n] = 0 if H0 is None else start[n]
            previous[np.arange(first, last)[:, None] >= lengths] = 0

    def _through_time(self, d: int, steps: slice, block: slice) -> None:
        """Take the gradient of a block's state, in dH0, back through a chunk of steps, and leave those of its gates."""
        layout, H, R, grad_HAll = self.layout, self.layout.H, self.recurrent[d], self.given["grad_HAll"]
        order = slice(None, None, 1 if layout.reverse[d] else -1)
        passing, reset = self._factors(d, steps, block)
        gates = self.gates[d, steps, block][order]
        by_row = gates.reshape(*gates.shape[:2], -1)
        G = self.made["dH0"][d, block]
        G_of_gates, product, waiting = G[:, None], np.empty_like(G), None
        # Slices of all steps at once: slicing step by step would take as long as the arithmetic of a small step.
        for gradient, z, r, gate, row, idle in zip(
            itertools.repeat(None) if grad_HAll is None else grad_HAll[steps, d, block][order],
            passing[order],
            itertools.repeat(None) if self.reset is None else reset[order],
            gates,
            by_row[:, :, : 3 * H if self.reset is None else 2 * H],
            layout.idle(range(steps.start, steps.stop)[order], block),
            strict=False,
        ):
            if idle is not None:
                waiting = G[idle]
            if gradient is not None:
                G += gradient
            if self.reset is None:
                gate *= G_of_gates
                np.matmul(row, R, out=product)
            else:
                gate[:, ::2] *= G_of_gates
                to_reset = np.matmul(gate[:, 2], R[2 * H :])
                gate[:, 1] *= to_reset
                np.matmul(row, R[: 2 * H], out=product)
                to_reset *= r
                product += to_reset
            G *= z
            G += product
            if idle is not None:
                G[idle] = waiting
                gate[idle] = 0

    def _products(self, d: int, steps: slice) -> Iterator[tuple[object, Callable[[bool], None]]]:
        """What is made of a chunk's gradients: what it adds to, and how; True starts from zero."""
        made = self.made
        if "dX" in made:
            yield steps.start, partial(self._to_x, d, steps)
        for name, together in (("dW", (0, 3)), ("dR", (0, 2, 3))):
            if name in made:
                for gates in [(0, 1), (1, 2), (2, 3)] if self.layout.H >= WIDE else [together]:
                    yield (name, d, gates), partial(self._to_weights, name, d, steps, gates)
        if "dB" in made:
            yield ("dB", d), partial(self._to_bias, d, steps)

    def _to_weights(self, name: str, d: int, steps: slice, bounds: Sequence[int], fresh: bool) -> None:
        """Add to the rows of the gates between each two of `bounds` in dW or dR."""
        H, total = self.layout.H, self.made[name][d]
        for start, stop in itertools.pairwise(bounds):
            place = self.first + start
            if name == "dW":
                factor = self._inputs(steps)
            elif start < 2:
                factor = self.previous[d, steps]
            else:  # h, as R sees it
                factor, place = (self.previous[d, steps], 0) if self.reset is None else (self.reset[d, steps], 2)
            factor = factor.reshape(len(factor) * self.layout.N, factor.shape[-1])
            gradient = self.gates[d, steps, :, place : place + stop - start].reshape(len(factor), -1)
            _add_product(total[start * H : stop * H], gradient.T, factor, fresh)

    def _inputs(self, steps: slice) -> Array:
        """X, but zero beyond the sequences' lengths: where it is not finite there, 0 times it is NaN."""
        x, padded = self.x[steps], self.layout.padded
        return x if padded is None else np.where(padded[steps, :, None], x.dtype.type(0), x)

    def _to_bias(self, d: int, steps: slice, fresh: bool) -> None:
        gates = self.gates[d, steps]
        kinds, H = gates.shape[-2:]
        rows = gates.reshape(-1, kinds * H)
        sums = np.matmul(np.ones((1, len(rows)), rows.dtype), rows).reshape(kinds, H)
        total = self.made["dB"][d].reshape(6, H)
        if fresh:
            total[...] = 0
        total[:3] += sums[self.first :]
        total[3:5] += sums[self.first : self.first + 2]
        total[5] += sums[0 if self.first else 2]

    def _to_x(self, d: int, steps: slice, fresh: bool) -> None:
        W, dX = self._array("W")[d], self.made["dX"][steps]
        gates = self.gates[d, steps, :, self.first :].reshape(-1, len(W))
        _add_product(dX.reshape(len(gates), self.layout.I), gates, W, fresh)
        if self.layout.padded is not None:  # where W is not finite, 0 times it is NaN
            dX[self.layout.padded[steps]] = 0


def _add_product(total: Array, left: Array, right: Array, fresh: bool) -> None:
    """total = left @ right, or total += it."""
    if fresh:
        np.matmul(left, right, out=total)
        return
    height = max(1, LARGEST_PRODUCT // max(1, total.shape[1]))
    for start in range(0, len(total), height):
        part = total[start : start + height]
        product = scratch(0, part.size, part.dtype).reshape(part.shape)
        part += np.matmul(left[start : start + height], right, out=product)
