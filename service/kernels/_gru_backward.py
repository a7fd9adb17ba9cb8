"""The arithmetic of GRUGrad."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from service.dtypes import Array
from service.kernels._blocks import check_wanted, scratch, spare_memory
from service.kernels._gru_plan import Plan
from service.kernels._tasks import Tasks

PIECE_ELEMENTS = 1 << 16
"""Elements of a block's states to prepare at once: enough to outweigh the cost of NumPy's calls."""
MAX_PRODUCT_ELEMENTS = 1 << 19
"""The most elements of a product to hold in scratch, which each thread keeps, before they are added."""
WIDE_HIDDEN_UNITS = 128
"""Hidden units from which on the products of each gate are a task of their own."""


class Backward:
    """The gradient, one chunk of steps after the other, against the direction of the forward pass.

    A block of sequences walks through one chunk after the other. It leaves the gradients of the pre-activations in
    `gates`. When all blocks have walked through a chunk, products over all its steps add to dX, dW, dR and dB, while
    the blocks walk on.

    `gates` holds z, r and h, as W sees them. With linear_before_reset, R sees another h: r times the h of W. It stands
    before z, so that the gates of R (h, z, r) are contiguous, and so are those of W (z, r, h).
    """

    def __init__(self, plan: Plan, x: Array, inputs: Mapping[str, Array | None], outputs: Mapping[str, Array]) -> None:
        """`x` is GRUGrad's X, `inputs` has its other inputs except SL, and `outputs` has the arrays to fill."""
        self.plan, self.rows, self.inputs, self.outputs = plan, plan.rows, inputs, outputs
        self.x = self.rows.gather_rows(x)
        H, D, dtype = plan.H, plan.D, x.dtype
        self.z_place = 1 if plan.linear_before_reset else 0
        self.gates: Array = spare_memory((D, *self.rows.shape, 3 + self.z_place, H), dtype)
        self.previous: Array = spare_memory((D, *self.rows.shape, H), dtype)
        """The state before each step."""
        self.reset_previous: Array | None = None
        """r * previous, if R sees that product instead of `previous`."""
        self.recurrent_weights = self._input("R")
        if plan.linear_before_reset:
            R = self.recurrent_weights
            self.recurrent_weights = np.concatenate([R[:, 2 * H :], R[:, : 2 * H]], axis=1)
        else:
            self.reset_previous = spare_memory((D, *self.rows.shape, H), dtype)
        grad_Ht = inputs["grad_Ht"]
        outputs["dH0"][...] = 0 if grad_Ht is None else grad_Ht
        self.state_gradient = self.rows.sort_states(outputs["dH0"])
        if "dX" in outputs:
            outputs["dX"][plan.steps :] = 0
            self.dX = self.rows.empty_rows(outputs["dX"])

    def run(self) -> None:
        """Fill `outputs`."""
        plan = self.plan
        chunks, blocks = [plan.chunks(d)[::-1] for d in range(plan.D)], plan.blocks()
        stages = list(itertools.product(range(len(chunks[0])), range(plan.D)))  # a chunk's number, a direction
        if not stages:
            for name in {"dX", "dW", "dR", "dB"} & self.outputs.keys():
                self.outputs[name][...] = 0
        if plan.single_threaded:
            self._run_here([(d, chunks[d][number]) for number, d in stages], blocks)
        else:
            self._run_in_threads(chunks, blocks, stages)
        self.rows.unsort_states(self.outputs["dH0"], self.state_gradient)

    def _run_in_threads(
        self, chunks: Sequence[Sequence[slice]], blocks: Sequence[slice], stages: Sequence[tuple[int, int]]
    ) -> None:
        tasks = Tasks()
        walks: dict[tuple[int, int], list[int]] = {}  # direction and chunk -> a task for each block
        for number, d in stages:
            earlier = walks.get((d, number - 1), [])
            walks[d, number] = [
                tasks.add(partial(self._walk, d, chunks[d][number], block), earlier[k : k + 1], rank=number)
                for k, block in enumerate(blocks)
            ]
        last: dict[object, int] = {}  # a target of products -> the task that adds to it last
        for number, d in stages:
            for target, product in self._products(d, chunks[d][number]):
                earlier = [last[target]] if target in last else []
                after = [*walks[d, number], *earlier]
                last[target] = tasks.add(partial(product, not earlier), after, rank=number + 1)
        tasks.run()

    def _run_here(self, stages: Iterable[tuple[int, slice]], blocks: Iterable[slice]) -> None:
        begun: set[object] = set()
        with np.errstate(all="ignore"):
            for d, steps in stages:
                check_wanted()
                for block in blocks:
                    self._walk(d, steps, block)
                for target, product in self._products(d, steps):
                    product(target not in begun)
                    begun.add(target)

    def _input(self, name: str) -> Array:
        array = self.inputs[name]
        assert array is not None
        return array

    def _walk(self, d: int, chunk: slice, block: slice) -> None:
        """Take a block of sequences back through a chunk of steps, in pieces small enough for scratch."""
        running = self.rows.running_steps(chunk, block)
        height = max(1, PIECE_ELEMENTS // ((block.stop - block.start) * self.plan.H))
        pieces = [slice(t, min(t + height, running.stop)) for t in range(running.start, running.stop, height)]
        for steps in pieces if self.plan.reverse[d] else reversed(pieces):
            self._through_time(d, steps, block)

    def _factors(self, d: int, steps: slice, block: slice) -> tuple[Array, Array]:
        """Fill `gates` with the factors of the state's gradient; return copies of z and r in scratch."""
        H = self.plan.H
        zrh = self.rows.gather_history(self._input("ZRH"), d, steps, block)
        z, r, h = (zrh[..., k * H : (k + 1) * H] for k in range(3))
        update, reset, candidate, rest, part = scratch(0, 5 * z.size, z.dtype).reshape(5, *z.shape)
        gates, previous = (self.rows.view_rows(array[d], steps, block) for array in (self.gates, self.previous))
        to_z, to_r, to_h = (gates[..., self.z_place + k, :] for k in range(3))
        HAll, H0 = self._input("HAll"), self.inputs["H0"]
        self.rows.gather_previous(HAll, H0, d, steps, block, previous, back=self.plan.reverse[d])
        update[...], reset[...], candidate[...] = z, r, h
        np.subtract(1, update, out=rest)
        np.subtract(previous, candidate, out=part)
        part *= update
        np.multiply(part, rest, out=to_z)
        candidate *= candidate
        np.subtract(1, candidate, out=part)
        part *= rest
        to_h[...] = part
        if self.reset_previous is None:
            part *= reset
            gates[..., 0, :] = part
            np.matmul(previous.reshape(-1, H), self._input("R")[d, 2 * H :].T, out=rest.reshape(-1, H))
            if self.inputs["B"] is not None:
                rest += self._input("B")[d, 5 * H :]
            part *= rest
        else:
            np.multiply(reset, previous, out=part)
            self.rows.view_rows(self.reset_previous[d], steps, block)[...] = part
        np.subtract(1, reset, out=rest)
        np.multiply(part, rest, out=to_r)
        return update, reset

    def _through_time(self, d: int, steps: slice, block: slice) -> None:
        """Take the gradient of a block's state back through steps of a chunk, and leave the gradients of its gates."""
        rows, H, R, grad_HAll = self.rows, self.plan.H, self.recurrent_weights[d], self.inputs["grad_HAll"]
        update, reset = self._factors(d, steps, block)
        gates, states = rows.view_rows(self.gates[d], steps, block), self.state_gradient[d, block]
        flat_gates = gates.reshape(*gates.shape[:-2], -1)
        split_by_step, running_states = (
            partial(method, steps=steps, block=block, back=not self.plan.reverse[d])
            for method in (rows.split_by_step, rows.running_states)
        )
        absent = itertools.repeat(None)
        for gradient, z, r, gate, row, state, state_of_gates, product in zip(
            absent if grad_HAll is None else split_by_step(rows.gather_history(grad_HAll, d, steps, block)),
            split_by_step(update),
            absent if self.reset_previous is None else split_by_step(reset),
            split_by_step(gates),
            split_by_step(flat_gates[..., : 3 * H if self.reset_previous is None else 2 * H]),
            running_states(states),
            running_states(states[:, None]),
            running_states(np.empty_like(states)),
            strict=False,
        ):
            if gradient is not None:
                state += gradient
            if self.reset_previous is None:
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
        """Yield the products over a chunk's gradients: the target that each adds to, and a function that computes it.

        The function's argument is True for the first product of a target, which overwrites the target.
        """
        outputs = self.outputs
        if "dX" in outputs:
            yield steps.start, partial(self._to_x, d, steps)
        for name, together in (("dW", (0, 3)), ("dR", (0, 2, 3))):
            if name in outputs:
                for gates in [(0, 1), (1, 2), (2, 3)] if self.plan.H >= WIDE_HIDDEN_UNITS else [together]:
                    yield (name, d, gates), partial(self._to_weights, name, d, steps, gates)
        if "dB" in outputs:
            yield ("dB", d), partial(self._to_bias, d, steps)

    def _to_weights(self, name: str, d: int, steps: slice, bounds: Sequence[int], fresh: bool) -> None:
        """Add to dW or dR, in the rows of the gates between each two of `bounds`."""
        H, total, rows = self.plan.H, self.outputs[name][d], self.rows.chunk_rows(steps)
        for start, stop in itertools.pairwise(bounds):
            place = self.z_place + start
            if name == "dW":
                factor = self.x[rows]
            elif start < 2:
                factor = self.previous[d, rows]
            elif self.reset_previous is None:  # the h that R sees
                factor, place = self.previous[d, rows], 0
            else:
                factor, place = self.reset_previous[d, rows], 2
            gates = self.gates[d, rows]
            gradient = gates[..., place : place + stop - start, :].reshape(math.prod(gates.shape[:-2]), -1)
            factor = factor.reshape(len(gradient), factor.shape[-1])
            _add_product(total[start * H : stop * H], gradient.T, factor, fresh)

    def _to_bias(self, d: int, steps: slice, fresh: bool) -> None:
        gates = self.gates[d, self.rows.chunk_rows(steps)]
        kinds, H = gates.shape[-2:]
        rows = gates.reshape(-1, kinds * H)
        sums = np.matmul(np.ones((1, len(rows)), rows.dtype), rows).reshape(kinds, H)
        total = self.outputs["dB"][d].reshape(6, H)
        if fresh:
            total[...] = 0
        total[:3] += sums[self.z_place :]
        total[3:5] += sums[self.z_place : self.z_place + 2]
        total[5] += sums[0 if self.z_place else 2]

    def _to_x(self, d: int, steps: slice, fresh: bool) -> None:
        W, rows = self._input("W")[d], self.rows.chunk_rows(steps)
        gates, dX = self.gates[d, rows][..., self.z_place :, :].reshape(-1, len(W)), self.dX[rows]
        _add_product(dX.reshape(len(gates), W.shape[1]), gates, W, fresh)
        if self.plan.D == 1 or not fresh:  # all directions have added to it
            self.rows.scatter_rows(self.outputs["dX"], steps, dX)


def _add_product(total: Array, left: Array, right: Array, fresh: bool) -> None:
    """total = left @ right if `fresh`, else total += left @ right."""
    if fresh:
        np.matmul(left, right, out=total)
        return
    height = max(1, MAX_PRODUCT_ELEMENTS // max(1, total.shape[1]))
    for start in range(0, len(total), height):
        part = total[start : start + height]
        product = scratch(0, part.size, part.dtype).reshape(part.shape)
        part += np.matmul(left[start : start + height], right, out=product)
