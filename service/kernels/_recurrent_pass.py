"""The passes of recurrent operators through time. A subclass has the arithmetic of its operator's gates.

How they are fast:
- Everything that does not depend on the previous step is one product over all steps: X with W in the forward pass, and
  dX, dW, dR and the bias gradients in the backward pass. The loop over time has one product with R per step.
- Sequences do not depend on each other, so each block of sequences runs through time on its own, in any idle thread.
- A single block runs through time in one thread, and other threads join in for the products. Many short NumPy calls in
  two threads would spend more time on waiting for the interpreter's lock than on work. One thread does all small work.
- Sequences of different lengths are sorted. No product has rows for the steps beyond a sequence's end.
- Inside the engine BLAS runs with one thread, so its threads never compete with the pool's.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from service.dtypes import Array
from service.kernels._blocks import scratch, spare_memory
from service.kernels._checks import check_shape
from service.kernels._narrow import compute_wide, widen_tensor
from service.kernels._recurrent_plan import Plan
from service.kernels._tasks import Tasks

PIECE_ELEMENTS = 1 << 16
"""Elements of a block's states to prepare at once: enough to outweigh the cost of NumPy's calls."""
MAX_PRODUCT_ELEMENTS = 1 << 19
"""The most elements of a product to hold in scratch, which each thread keeps, before they are added."""
WIDE_HIDDEN_UNITS = 128
"""Hidden units from which on the products of each gate are a task of their own."""

Run = tuple[int, int, int, Sequence[Array] | Array]
"""A run of gates: the first one, the one after the last one, the place of the first one in `Backward.gates`, and what
their weights multiply, by direction and row."""


def run_pass(
    kind: type[Pass], plan: Plan, inputs: Mapping[str, Any], outputs: str, wanted: Collection[str], **options: Any
) -> tuple[Any, ...]:
    """Check the shapes of `inputs`, run the pass, and return its `outputs`, None for those that are not `wanted`.

    `options` are what the kind of pass takes besides. What goes from step to step is always computed. Raises
    `ShapeMismatch` and `TensorTooLarge`.
    """
    for name, tensor in inputs.items():
        check_shape(name, tensor, *plan.shapes[name])
    given = inputs["X"].dtype
    widened = {name: tensor if tensor is None else widen_tensor(tensor) for name, tensor in inputs.items()}
    shapes = {name: plan.shapes[name] for name in outputs.split() if name in wanted or name in kind.starts}
    made = compute_wide(shapes, given, lambda memory: kind(plan, widened, memory, **options).run())
    return tuple(made[name] if name in wanted else None for name in outputs.split())


class Pass(ABC):
    """A pass through time."""

    starts: ClassVar[Mapping[str, str]]
    """What goes from step to step: the output where it ends -> the input that it starts from, zeros if left out."""

    def __init__(self, plan: Plan, inputs: Mapping[str, Any], outputs: Mapping[str, Array]) -> None:
        """`inputs` has an array or None for each input except SL, and `outputs` has the arrays to fill."""
        self.plan, self.rows, self.inputs, self.outputs = plan, plan.rows, inputs, outputs
        for name, start in self.starts.items():
            outputs[name][...] = 0 if inputs[start] is None else inputs[start]
        self.x = self.rows.gather_rows(inputs["X"])
        self.states = {name: self.rows.sort_states(outputs[name]) for name in self.starts}
        self.tasks = Tasks(here=plan.single_threaded)

    def run(self) -> None:
        """Fill `outputs`."""
        self._add_tasks([self.plan.chunks(d) for d in range(self.plan.D)], self.plan.blocks())
        self.tasks.run()
        for name, state in self.states.items():
            self.rows.unsort_states(self.outputs[name], state)

    @abstractmethod
    def _add_tasks(self, chunks: Sequence[Sequence[slice]], blocks: Sequence[slice]) -> None:
        """Add the tasks that fill `outputs`. `chunks` has those of each direction."""


class Forward(Pass):
    """The pass through time, one chunk of steps after the other.

    `gates` holds X W' and the biases once a chunk is projected, and the gates after their activations once all blocks
    of sequences have walked through the chunk.
    """

    histories: ClassVar[tuple[str, ...]]
    """The outputs with a vector for each step. The last one has the gates."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        for name in self.histories:
            self.outputs[name][self.plan.steps :] = 0
        self.by_rows = {name: self.rows.empty_history_rows(self.outputs[name]) for name in self.histories}
        self.gates = self.by_rows[self.histories[-1]]
        bias = self.inputs["B"]
        bias = np.zeros(self.plan.shapes["B"], self.x.dtype) if bias is None else bias.copy()
        self.input_bias, self.recurrent_bias = np.split(bias, 2, axis=1)
        """The biases to add to X W', the same at all steps, and those of R."""

    @abstractmethod
    def _through_time(self, d: int, steps: Iterable[tuple[Any, ...]]) -> None:
        """Take a block of sequences through time, and fill its histories.

        `steps` yields views of each history and each state, in the order of `histories` and `starts`.
        """

    def _add_tasks(self, chunks: Sequence[Sequence[slice]], blocks: Sequence[slice]) -> None:
        last_walks: dict[tuple[int, int], list[int]] = {}  # direction and block -> the task of the previous chunk
        for number, d in itertools.product(range(len(chunks[0])), range(self.plan.D)):
            steps = chunks[d][number]
            projected = self.tasks.add(partial(self._project, d, steps), rank=number)
            for k, block in enumerate(blocks):
                after = [projected, *last_walks.get((d, k), ())]
                last_walks[d, k] = [self.tasks.add(partial(self._walk, d, steps, block), after, rank=number)]

    def _project(self, d: int, steps: slice) -> None:
        """Multiply X by W', for all sequences and all steps of a chunk at once."""
        rows, W = self.rows.chunk_rows(steps), self.inputs["W"][d]
        x, gates = self.x[rows], self.gates[d][rows]
        product = np.matmul(x.reshape(-1, x.shape[-1]) if x.size else x, W.T).reshape(gates.shape)
        np.add(product, self.input_bias[d], out=gates)
        for name in self.histories:
            self.rows.clear_padding(self.outputs[name], d, steps)

    def _walk(self, d: int, chunk: slice, block: slice) -> None:
        """Take a block of sequences through a chunk of steps."""
        rows, steps = self.rows, self.rows.running_steps(chunk, block)
        if steps.stop <= steps.start:
            return
        cut: dict[str, Any] = {"steps": steps, "block": block, "back": self.plan.reverse[d]}
        histories = [rows.view_rows(self.by_rows[name][d], steps, block) for name in self.histories]
        views = [rows.split_by_step(history, **cut) for history in histories]
        views += [rows.running_states(state[d, block], **cut) for state in self.states.values()]
        self._through_time(d, zip(*views, strict=False))
        for name, history in zip(self.histories, histories, strict=True):
            rows.scatter_history(self.outputs[name], d, steps, block, history)


class Backward(Pass):
    """The gradient, one chunk of steps after the other, against the direction of the forward pass.

    A block of sequences walks through one chunk after the other. It leaves the gradients of the pre-activations in
    `gates`. When all blocks have walked through a chunk, products over all its steps add to dX, dW, dR and dB, while
    the blocks walk on.
    """

    gradient: ClassVar[str]
    """The input with the gradient of HAll."""
    of_r: Sequence[Run]
    """The gates of R."""

    def __init__(self, *given: Any, kinds: int) -> None:
        """`kinds` is how many gradients `gates` holds of each unit. The last ones are those of the gates of W."""
        super().__init__(*given)
        self.of_w = kinds - self.plan.gates
        self.gates: Array = spare_memory((self.plan.D, *self.rows.shape, kinds, self.plan.H), self.x.dtype)
        self.previous = self._empty_rows()
        """The state before each step."""
        if "dX" in self.outputs:
            self.outputs["dX"][self.plan.steps :] = 0
            self.dX = self.rows.empty_rows(self.outputs["dX"])

    @abstractmethod
    def _factors(self, d: int, steps: slice, block: slice) -> Sequence[Array | None]:
        """Fill `gates` with factors of the states' gradients, and return by rows what `_through_time` takes."""

    @abstractmethod
    def _through_time(self, d: int, steps: Iterable[tuple[Any, ...]]) -> None:
        """Take the gradients of a block's states back through steps, and leave those of its gates.

        `steps` yields views of the gradient of HAll or None, of what `_factors` returned, of each state in the order
        of `starts`, of the last state as [n, 1, H], and a state to write to.
        """

    def _empty_rows(self) -> Array:
        """Return memory for a vector of the hidden units by direction and row."""
        return spare_memory((self.plan.D, *self.rows.shape, self.plan.H), self.x.dtype)

    def _add_tasks(self, chunks: Sequence[Sequence[slice]], blocks: Sequence[slice]) -> None:
        if not chunks[0]:
            for name in self.outputs.keys() - self.states.keys():
                self.outputs[name][...] = 0
        walks: dict[tuple[int, int], list[int]] = {}  # direction and block -> the task of the previous chunk
        last: dict[object, list[int]] = {}  # a target of products -> the task that adds to it last
        for number, d in itertools.product(range(len(chunks[0])), range(self.plan.D)):
            steps = chunks[d][-1 - number]
            for k, block in enumerate(blocks):
                walk = partial(self._walk, d, steps, block)
                walks[d, k] = [self.tasks.add(walk, walks.get((d, k), ()), rank=2 * number)]
            walked = [walks[d, k][0] for k in range(len(blocks))]
            for target, product in self._products(d, steps):  # once the blocks' next walks have begun
                earlier = last.get(target, [])
                task = partial(product, not earlier)
                last[target] = [self.tasks.add(task, walked + earlier, rank=2 * number + 3)]

    def _walk(self, d: int, chunk: slice, block: slice) -> None:
        """Take a block of sequences back through a chunk of steps, in pieces small enough for scratch."""
        running = self.rows.running_steps(chunk, block)
        height = max(1, PIECE_ELEMENTS // ((block.stop - block.start) * self.plan.H))
        pieces = [slice(t, min(t + height, running.stop)) for t in range(running.start, running.stop, height)]
        for steps in pieces if self.plan.reverse[d] else reversed(pieces):
            self._walk_piece(d, steps, block)

    def _walk_piece(self, d: int, steps: slice, block: slice) -> None:
        rows = self.rows
        cut: dict[str, Any] = {"steps": steps, "block": block, "back": not self.plan.reverse[d]}
        gradient = self.inputs[self.gradient]
        history = None if gradient is None else rows.gather_history(gradient, d, steps, block)
        by_rows, states = self._factors(d, steps, block), [state[d, block] for state in self.states.values()]
        views = [
            itertools.repeat(None) if one is None else rows.split_by_step(one, **cut) for one in (history, *by_rows)
        ]
        for state in (*states, states[-1][:, None], np.empty_like(states[0])):
            views.append(rows.running_states(state, **cut))
        self._through_time(d, zip(*views, strict=False))

    def _products(self, d: int, steps: slice) -> Iterator[tuple[object, Callable[[bool], None]]]:
        """Yield the products over a chunk's gradients: the target that each adds to, and a function that computes it.

        The function's argument is True for the first product of a target, which overwrites the target.
        """
        if "dX" in self.outputs:
            yield steps.start, partial(self._to_x, d, steps)
        for name, runs in self._weights():
            yield (name, d, runs[0][0]), partial(self._to_weights, name, d, steps, runs)
        if "dB" in self.outputs:
            yield ("dB", d), partial(self._to_bias, d, steps)

    def _weights(self) -> list[tuple[str, Sequence[Run]]]:
        """Return the parts of dW and dR that a task computes: the output's name, and runs of gates."""
        everything = {"dW": [(0, self.plan.gates, self.of_w, (self.x,) * self.plan.D)], "dR": self.of_r}
        parts = [(name, runs) for name, runs in everything.items() if name in self.outputs]
        if self.plan.H < WIDE_HIDDEN_UNITS:
            return parts
        gates = [(name, place - start, range(start, stop), x) for name, runs in parts for start, stop, place, x in runs]
        return [(name, [(gate, gate + 1, gate + ahead, x)]) for name, ahead, run, x in gates for gate in run]

    def _to_weights(self, name: str, d: int, steps: slice, runs: Sequence[Run], fresh: bool) -> None:
        """Add to dW or dR, in the rows of the gates of `runs`."""
        H, rows = self.plan.H, self.rows.chunk_rows(steps)
        for start, stop, place, x in runs:
            gates, factor = self.gates[d, rows][..., place : place + stop - start, :], x[d][rows]
            gradient = gates.reshape(math.prod(gates.shape[:-2]), -1)
            factor = factor.reshape(len(gradient), factor.shape[-1])
            _add_product(self.outputs[name][d, start * H : stop * H], gradient.T, factor, fresh)

    def _to_bias(self, d: int, steps: slice, fresh: bool) -> None:
        gates = self.gates[d, self.rows.chunk_rows(steps)]
        kinds, H = gates.shape[-2:]
        rows = gates.reshape(-1, kinds * H)
        sums = np.matmul(np.ones((1, len(rows)), rows.dtype), rows).reshape(kinds, H)
        total = self.outputs["dB"][d].reshape(2, -1, H)
        if fresh:
            total[...] = 0
        total[0] += sums[self.of_w :]
        for start, stop, place, _ in self.of_r:
            total[1, start:stop] += sums[place : place + stop - start]

    def _to_x(self, d: int, steps: slice, fresh: bool) -> None:
        W, rows = self.inputs["W"][d], self.rows.chunk_rows(steps)
        gates, dX = self.gates[d, rows][..., self.of_w :, :].reshape(-1, len(W)), self.dX[rows]
        _add_product(dX.reshape(len(gates), W.shape[1]), gates, W, fresh)
        if self.plan.D == 1 or not fresh:  # all directions have added to it
            self.rows.scatter_rows(self.outputs["dX"], steps, dX)


def sigmoid(x: Array) -> None:
    """Replace x by 1 / (1 + exp(-x))."""
    np.negative(x, out=x)
    np.exp(x, out=x)
    x += 1
    np.divide(1, x, out=x)


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
