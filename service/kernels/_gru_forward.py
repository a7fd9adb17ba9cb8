"""The arithmetic of GRUTraining."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial

import numpy as np

from service.dtypes import Array
from service.kernels._gru_layout import Layout
from service.kernels._tasks import Tasks


class Forward:
    """The pass through time, chunk of steps after chunk of steps.

    `gates` has X W' and the biases, once a chunk is projected, and the gates once all its blocks of sequences have
    walked through it.
    """

    def __init__(self, layout: Layout, x: Array, given: Mapping[str, Array | None], made: Mapping[str, Array]) -> None:
        self.layout, self.rows, self.given, self.made = layout, layout.rows, given, made
        HAll, HFinal, ZRH = (made[name] for name in ("HAll", "HFinal", "ZRH"))
        HFinal[...] = 0 if given["H0"] is None else given["H0"]
        HAll[layout.steps :], ZRH[layout.steps :] = 0, 0
        self.x, self.state = self.rows.by_rows(x), self.rows.by_length(HFinal)
        self.states, self.gates = self.rows.likewise(HAll), self.rows.likewise(ZRH)
        D, H = layout.D, layout.H
        bias = np.zeros((D, 6 * H), x.dtype) if given["B"] is None else given["B"]
        self.candidate_bias = bias[:, 5 * H :]
        self.inputs = bias[:, : 3 * H].copy()
        """What is added to X W', for all steps alike."""
        with np.errstate(all="ignore"):
            self.inputs[:, : 2 * H] += bias[:, 3 * H : 5 * H]
            if not layout.linear_before_reset:
                self.inputs[:, 2 * H :] += self.candidate_bias

    def run(self) -> None:
        """Fill `made`."""
        layout, tasks = self.layout, Tasks()
        chunks, blocks = [layout.chunks(d) for d in range(layout.D)], layout.blocks()
        before: dict[tuple[int, int], list[int]] = {}  # the task of each block's chunk before
        for number, d in itertools.product(range(len(chunks[0])), range(layout.D)):
            steps = chunks[d][number]
            project = partial(self._project, d, steps)
            walks = [partial(self._walk, d, steps, block) for block in blocks]
            if layout.alone:
                with np.errstate(all="ignore"):
                    for work in (project, *walks):
                        work()
                continue
            projected = tasks.add(project, rank=number)
            for k, walk in enumerate(walks):
                before[d, k] = [tasks.add(walk, [projected, *before.get((d, k), ())], rank=number)]
        tasks.run()
        self.rows.return_states(self.made["HFinal"], self.state)

    def _array(self, name: str) -> Array:
        array = self.given[name]
        assert array is not None
        return array

    def _project(self, d: int, steps: slice) -> None:
        """Multiply X by W', for all steps and sequences at once."""
        rows, W = self.rows.chunk(steps), self._array("W")[d]
        x, gates = self.x[rows], self.gates[d][rows]
        product = np.matmul(x.reshape(-1, x.shape[-1]) if x.size else x, W.T).reshape(gates.shape)
        np.add(product, self.inputs[d], out=gates)
        for name in ("HAll", "ZRH"):
            self.rows.clear(self.made[name], d, steps)

    def _walk(self, d: int, chunk: slice, block: slice) -> None:
        """Take a block of sequences through a chunk of steps."""
        rows, H, R, back = self.rows, self.layout.H, self._array("R")[d], self.layout.reverse[d]
        steps = rows.running(chunk, block)
        if steps.stop <= steps.start:
            return
        to_gates, to_candidate, candidate_bias = R[: 2 * H].T, R[2 * H :].T, self.candidate_bias[d]
        gates, states = (rows.part(one[d], steps, block) for one in (self.gates, self.states))
        for pre, state, h in zip(
            rows.step_by_step(gates, steps, block, back=back),
            rows.step_by_step(states, steps, block, back=back),
            rows.who_runs(self.state[d, block], steps, block, back=back),
            strict=False,
        ):
            zr = np.matmul(h, to_gates)
            zr += pre[:, : 2 * H]
            np.negative(zr, out=zr)
            np.exp(zr, out=zr)
            zr += 1
            np.divide(1, zr, out=zr)
            z, reset = zr[:, :H], zr[:, H:]
            if self.layout.linear_before_reset:
                candidate = np.matmul(h, to_candidate)
                candidate += candidate_bias
                candidate *= reset
            else:
                candidate = np.matmul(reset * h, to_candidate)
            candidate += pre[:, 2 * H :]
            np.tanh(candidate, out=candidate)
            pre[:, : 2 * H] = zr
            pre[:, 2 * H :] = candidate
            np.multiply(z, h, out=state)
            state += (1 - z) * candidate
            h[...] = state
        rows.return_part(self.made["HAll"], d, steps, block, states)
        rows.return_part(self.made["ZRH"], d, steps, block, gates)
