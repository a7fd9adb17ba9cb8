"""The arithmetic of GRUTraining."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial

import numpy as np

from service.dtypes import Array
from service.kernels._blocks import check_wanted
from service.kernels._gru_plan import Plan
from service.kernels._tasks import Tasks


class Forward:
    """The pass through time, one chunk of steps after the other.

    `gates` holds X W' and the biases once a chunk is projected, and the gates after their activations once all blocks
    of sequences have walked through the chunk.
    """

    def __init__(self, plan: Plan, x: Array, inputs: Mapping[str, Array | None], outputs: Mapping[str, Array]) -> None:
        """`x` is GRUTraining's X, `inputs` has its other inputs except SL, and `outputs` has the arrays to fill."""
        self.plan, self.rows, self.inputs, self.outputs = plan, plan.rows, inputs, outputs
        HAll, HFinal, ZRH = (outputs[name] for name in ("HAll", "HFinal", "ZRH"))
        HFinal[...] = 0 if inputs["H0"] is None else inputs["H0"]
        HAll[plan.steps :], ZRH[plan.steps :] = 0, 0
        self.x, self.states = self.rows.gather_rows(x), self.rows.sort_states(HFinal)
        self.history, self.gates = self.rows.empty_history_rows(HAll), self.rows.empty_history_rows(ZRH)
        D, H = plan.D, plan.H
        bias = np.zeros((D, 6 * H), x.dtype) if inputs["B"] is None else inputs["B"]
        self.candidate_bias = bias[:, 5 * H :]
        self.input_bias = bias[:, : 3 * H].copy()
        """The biases to add to X W', the same at all steps."""
        with np.errstate(all="ignore"):
            self.input_bias[:, : 2 * H] += bias[:, 3 * H : 5 * H]
            if not plan.linear_before_reset:
                self.input_bias[:, 2 * H :] += self.candidate_bias

    def run(self) -> None:
        """Fill `outputs`."""
        plan, tasks = self.plan, Tasks()
        chunks, blocks = [plan.chunks(d) for d in range(plan.D)], plan.blocks()
        last_walks: dict[tuple[int, int], list[int]] = {}  # direction and block -> the task of the previous chunk
        for number, d in itertools.product(range(len(chunks[0])), range(plan.D)):
            steps = chunks[d][number]
            project = partial(self._project, d, steps)
            walks = [partial(self._walk, d, steps, block) for block in blocks]
            if plan.single_threaded:
                check_wanted()
                with np.errstate(all="ignore"):
                    for task in (project, *walks):
                        task()
                continue
            projected = tasks.add(project, rank=number)
            for k, walk in enumerate(walks):
                last_walks[d, k] = [tasks.add(walk, [projected, *last_walks.get((d, k), ())], rank=number)]
        tasks.run()
        self.rows.unsort_states(self.outputs["HFinal"], self.states)

    def _input(self, name: str) -> Array:
        array = self.inputs[name]
        assert array is not None
        return array

    def _project(self, d: int, steps: slice) -> None:
        """Multiply X by W', for all sequences and all steps of a chunk at once."""
        rows, W = self.rows.chunk_rows(steps), self._input("W")[d]
        x, gates = self.x[rows], self.gates[d][rows]
        product = np.matmul(x.reshape(-1, x.shape[-1]) if x.size else x, W.T).reshape(gates.shape)
        np.add(product, self.input_bias[d], out=gates)
        for name in ("HAll", "ZRH"):
            self.rows.clear_padding(self.outputs[name], d, steps)

    def _walk(self, d: int, chunk: slice, block: slice) -> None:
        """Take a block of sequences through a chunk of steps."""
        rows, H, R, back = self.rows, self.plan.H, self._input("R")[d], self.plan.reverse[d]
        steps = rows.running_steps(chunk, block)
        if steps.stop <= steps.start:
            return
        to_gates, to_candidate, candidate_bias = R[: 2 * H].T, R[2 * H :].T, self.candidate_bias[d]
        gates, history = (rows.view_rows(array[d], steps, block) for array in (self.gates, self.history))
        for pre, state, h in zip(
            rows.split_by_step(gates, steps, block, back=back),
            rows.split_by_step(history, steps, block, back=back),
            rows.running_states(self.states[d, block], steps, block, back=back),
            strict=False,
        ):
            zr = np.matmul(h, to_gates)
            zr += pre[:, : 2 * H]
            np.negative(zr, out=zr)
            np.exp(zr, out=zr)
            zr += 1
            np.divide(1, zr, out=zr)
            z, reset = zr[:, :H], zr[:, H:]
            if self.plan.linear_before_reset:
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
        rows.scatter_history(self.outputs["HAll"], d, steps, block, history)
        rows.scatter_history(self.outputs["ZRH"], d, steps, block, gates)
