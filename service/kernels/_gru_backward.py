"""The arithmetic of GRUGrad."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from service.dtypes import Array
from service.kernels._blocks import scratch, spare_memory
from service.kernels._gru_layout import Layout
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
        self.layout, self.rows, self.given, self.made = layout, layout.rows, given, made
        self.x = self.rows.by_rows(x)
        H, D, dtype = layout.H, layout.D, x.dtype
        self.first = 1 if layout.linear_before_reset else 0  # where z stands
        self.gates: Array = spare_memory((D, *self.rows.shape, 3 + self.first, H), dtype)
        self.previous: Array = spare_memory((D, *self.rows.shape, H), dtype)  # the state before each step
        self.reset: Array | None = None  # r * previous, where R sees that instead
        self.recurrent = self._array("R")
        if layout.linear_before_reset:
            self.recurrent = np.concatenate([self.recurrent[:, 2 * H :], self.recurrent[:, : 2 * H]], axis=1)
        else:
            self.reset = spare_memory((D, *self.rows.shape, H), dtype)
        grad_Ht = given["grad_Ht"]
        made["dH0"][...] = 0 if grad_Ht is None else grad_Ht
        self.state = self.rows.by_length(made["dH0"])  # its gradient
        if "dX" in made:
            made["dX"][layout.steps :] = 0
            self.dX = self.rows.like(made["dX"])

    def run(self) -> None:
        """Fill `made`."""
        layout = self.layout
        chunks, blocks = [layout.chunks(d)[::-1] for d in range(layout.D)], layout.blocks()
        places = list(itertools.product(range(len(chunks[0])), range(layout.D)))
        if not places:
            for name in {"dX", "dW", "dR", "dB"} & self.made.keys():
                self.made[name][...] = 0
        if layout.alone:
            self._run_alone([(d, chunks[d][number]) for number, d in places], blocks)
        else:
            self._run_shared(chunks, blocks, places)
        self.rows.return_states(self.made["dH0"], self.state)

    def _run_shared(
        self, chunks: Sequence[Sequence[slice]], blocks: Sequence[slice], places: Sequence[tuple[int, int]]
    ) -> None:
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
        running = self.rows.running(chunk, block)
        height = max(1, PIECE // ((block.stop - block.start) * self.layout.H))
        pieces = [slice(t, min(t + height, running.stop)) for t in range(running.start, running.stop, height)]
        for steps in pieces if self.layout.reverse[d] else reversed(pieces):
            self._through_time(d, steps, block)

    def _factors(self, d: int, steps: slice, block: slice) -> tuple[Array, Array]:
        """Fill `gates` with what to multiply the state's gradient by; return z, and r, in memory of their own."""
        H = self.layout.H
        zrh = self.rows.taken(self._array("ZRH"), d, steps, block)
        z, r, h = (zrh[..., k * H : (k + 1) * H] for k in range(3))
        passing, reset, candidate, rest, part = scratch(0, 5 * z.size, z.dtype).reshape(5, *z.shape)
        gates, previous = (self.rows.part(one[d], steps, block) for one in (self.gates, self.previous))
        to_z, to_r, to_h = (gates[..., self.first + k, :] for k in range(3))
        HAll, H0 = self._array("HAll"), self.given["H0"]
        self.rows.previous(HAll, H0, d, steps, block, previous, back=self.layout.reverse[d])
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
            gates[..., 0, :] = part
            np.matmul(previous.reshape(-1, H), self._array("R")[d, 2 * H :].T, out=rest.reshape(-1, H))
            if self.given["B"] is not None:
                rest += self._array("B")[d, 5 * H :]
            part *= rest
        else:
            np.multiply(reset, previous, out=part)
            self.rows.part(self.reset[d], steps, block)[...] = part
        np.subtract(1, reset, out=rest)
        np.multiply(part, rest, out=to_r)
        return passing, reset

    def _through_time(self, d: int, steps: slice, block: slice) -> None:
        """Take the gradient of a block's state back through steps of a chunk, and leave those of its gates."""
        rows, H, R, grad_HAll = self.rows, self.layout.H, self.recurrent[d], self.given["grad_HAll"]
        passing, reset = self._factors(d, steps, block)
        gates, G = rows.part(self.gates[d], steps, block), self.state[d, block]
        by_row = gates.reshape(*gates.shape[:-2], -1)
        step_by_step, who_runs = (
            partial(each, steps=steps, block=block, back=not self.layout.reverse[d])
            for each in (rows.step_by_step, rows.who_runs)
        )
        nothing = itertools.repeat(None)
        for gradient, z, r, gate, row, state, state_of_gates, product in zip(
            nothing if grad_HAll is None else step_by_step(rows.taken(grad_HAll, d, steps, block)),
            step_by_step(passing),
            nothing if self.reset is None else step_by_step(reset),
            step_by_step(gates),
            step_by_step(by_row[..., : 3 * H if self.reset is None else 2 * H]),
            who_runs(G),
            who_runs(G[:, None]),
            who_runs(np.empty_like(G)),
            strict=False,
        ):
            if gradient is not None:
                state += gradient
            if self.reset is None:
                gate *= state_of_gates
                np.matmul(row, R, out=product)
            else:
                gate[:, ::2] *= state_of_gates
                to_reset = np.matmul(gate[:, 2], R[2 * H :])
                gate[:, 1] *= to_reset
                np.matmul(row, R[: 2 * H], out=product)
                to_reset *= r
                product += to_reset
            state *= z
            state += product

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
        H, total, rows = self.layout.H, self.made[name][d], self.rows.chunk(steps)
        for start, stop in itertools.pairwise(bounds):
            place = self.first + start
            if name == "dW":
                factor = self.x[rows]
            elif start < 2:
                factor = self.previous[d, rows]
            else:  # h, as R sees it
                factor, place = (self.previous[d, rows], 0) if self.reset is None else (self.reset[d, rows], 2)
            gates = self.gates[d, rows]
            gradient = gates[..., place : place + stop - start, :].reshape(math.prod(gates.shape[:-2]), -1)
            factor = factor.reshape(len(gradient), factor.shape[-1])
            _add_product(total[start * H : stop * H], gradient.T, factor, fresh)

    def _to_bias(self, d: int, steps: slice, fresh: bool) -> None:
        gates = self.gates[d, self.rows.chunk(steps)]
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
        W, rows = self._array("W")[d], self.rows.chunk(steps)
        gates, dX = self.gates[d, rows][..., self.first :, :].reshape(-1, len(W)), self.dX[rows]
        _add_product(dX.reshape(len(gates), W.shape[1]), gates, W, fresh)
        if self.layout.D == 1 or not fresh:  # no other direction adds to it
            self.rows.return_rows(self.made["dX"], steps, dX)


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
