"""The rows of a batch, one for each step that each sequence runs: what GRUTraining and GRUGrad compute.

Where sequences differ in length, the rows are packed and the sequences sorted, so that what is beyond the end of one is
in no product, and those that run a step stand next to each other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from service.dtypes import Array
from service.kernels._blocks import spare_memory


class Even:
    """Sequences of one length: an array by rows is [steps, N, ...], and one by length is as the caller has it."""

    def __init__(self, N: int, steps: int) -> None:
        self.shape: tuple[int, ...] = (steps, N)
        """The first dimensions of an array by rows."""
        self._steps = steps

    def running(self, steps: slice, block: slice) -> slice:
        """Those of these steps that any sequence of the block runs: none if it stops before it starts."""
        return steps

    def chunk(self, chunk: slice) -> slice:
        """A chunk's place in an array by rows."""
        return chunk

    def part(self, array: Array, steps: slice, block: slice) -> Array:
        """What an array by rows has of steps of a chunk, and of a block that runs all of them."""
        return array[steps, block]

    def step_by_step(self, part: Array, steps: slice, block: slice, *, back: bool) -> Iterable[Array]:
        """Such a part, step by step. Slices of all at once: one by one would take as long as a small step."""
        return part[:: -1 if back else 1]

    def who_runs(self, states: Array, steps: slice, block: slice, *, back: bool) -> Iterable[Array]:
        """The states of a block that change in each step."""
        return itertools.repeat(states)

    def by_length(self, states: Array) -> Array:
        """[D, N, H] by length: itself, or a copy."""
        return states

    def return_states(self, states: Array, by_length: Array) -> None:
        """What became of the copy."""

    def by_rows(self, X: Array) -> Array:
        """[S, N, I] by rows: itself, or a copy."""
        return X

    def like(self, X: Array) -> Array:
        """Memory for what goes to [S, N, I] at last: itself, or other."""
        return X

    def return_rows(self, X: Array, chunk: slice, by_rows: Array) -> None:
        """A chunk from the other memory, and zeros where there are no rows."""

    def likewise(self, states: Array) -> Array:
        """Memory for what goes to [S, D, N, H] at last, each direction by rows: itself, or other."""
        return states.swapaxes(0, 1)

    def clear(self, states: Array, d: int, chunk: slice) -> None:
        """Zeros in [S, D, N, H] where there are no rows."""

    def return_part(self, states: Array, d: int, steps: slice, block: slice, part: Array) -> None:
        """A part from the other memory."""

    def taken(self, states: Array, d: int, steps: slice, block: slice) -> Array:
        """A part by rows of [S, D, N, H]."""
        return states[steps, d, block]

    def previous(
        self, states: Array, first: Array | None, d: int, steps: slice, block: slice, out: Array, *, back: bool
    ) -> None:
        """What [S, D, N, H] has for the steps before, or, if `back`, after: `first`, or zero, where there is none."""
        here, none = states[:, d, block], 0 if first is None else first[d, block]
        start, stop = steps.start, steps.stop
        if back:
            out[:-1] = here[start + 1 : stop]
            out[-1] = here[stop] if stop < self._steps else none
        else:
            out[1:] = here[start : stop - 1]
            out[0] = here[start - 1] if start else none


class Ragged(Even):
    """Sequences of several lengths: an array by rows is [rows, ...], ordered by chunk, block, step and sequence.

    By length, the longest sequence is the first: those of a block that run a step are its first ones.
    """

    def __init__(self, lengths: Array, steps: int, D: int, blocks: Sequence[slice], chunks: Sequence[slice]) -> None:
        """`lengths` [N], of which the most is `steps`; `chunks` in the order of time."""
        N = lengths.size
        self._lengths, self._N, self._D = lengths, N, D
        self._order = np.argsort(-lengths, kind="stable")
        running = N - np.searchsorted(lengths[self._order[::-1]], np.arange(steps), side="right")
        self._counts = {block.start: np.clip(running - block.start, 0, block.stop - block.start) for block in blocks}
        self._starts = {block.start: np.empty(steps, np.int64) for block in blocks}
        self._chunks: dict[int, slice] = {}
        parts, end = [], 0
        for chunk in chunks:
            start = end
            for block in blocks:
                counts = self._counts[block.start][chunk]
                ends = end + np.cumsum(counts)
                self._starts[block.start][chunk] = ends - counts
                step, place = np.nonzero(np.arange(block.stop - block.start) < counts[:, None])
                parts.append((chunk.start + step) * N + self._order[block.start + place])
                end = int(ends[-1])
            self._chunks[chunk.start] = slice(start, end)
        self._source = np.concatenate(parts)
        """For each row: its step * N + its sequence."""
        self.shape = self._source.shape

    def running(self, steps: slice, block: slice) -> slice:
        longest = int(np.count_nonzero(self._counts[block.start]))
        return slice(steps.start, min(steps.stop, longest))

    def chunk(self, chunk: slice) -> slice:
        return self._chunks[chunk.start]

    def part(self, array: Array, steps: slice, block: slice) -> Array:
        return array[self._rows(steps, block)]

    def step_by_step(self, part: Array, steps: slice, block: slice, *, back: bool) -> Iterable[Array]:
        starts, counts = (one[block.start][steps][:: -1 if back else 1] for one in (self._starts, self._counts))
        begin = self._starts[block.start][steps.start]
        return [
            part[start : start + count] for start, count in zip((starts - begin).tolist(), counts.tolist(), strict=True)
        ]

    def who_runs(self, states: Array, steps: slice, block: slice, *, back: bool) -> Iterable[Array]:
        return [states[:count] for count in self._counts[block.start][steps][:: -1 if back else 1].tolist()]

    def by_length(self, states: Array) -> Array:
        return states[:, self._order]

    def return_states(self, states: Array, by_length: Array) -> None:
        states[:, self._order] = by_length

    def by_rows(self, X: Array) -> Array:
        return _flat(X, 2).take(self._source, axis=0, out=self.like(X), mode="clip")  # which needs no other memory

    def like(self, X: Array) -> Array:
        return spare_memory((*self.shape, X.shape[2]), X.dtype)

    def return_rows(self, X: Array, chunk: slice, by_rows: Array) -> None:
        X[chunk] = 0
        _flat(X, 2)[self._source[self.chunk(chunk)]] = by_rows

    def likewise(self, states: Array) -> Array:
        return spare_memory((self._D, *self.shape, states.shape[3]), states.dtype)

    def clear(self, states: Array, d: int, chunk: slice) -> None:
        states[chunk, d][np.arange(chunk.start, chunk.stop)[:, None] >= self._lengths] = 0

    def return_part(self, states: Array, d: int, steps: slice, block: slice, part: Array) -> None:
        _flat(states, 3)[self._places(d, steps, block)] = part

    def taken(self, states: Array, d: int, steps: slice, block: slice) -> Array:
        return _flat(states, 3).take(self._places(d, steps, block), axis=0)

    def previous(
        self, states: Array, first: Array | None, d: int, steps: slice, block: slice, out: Array, *, back: bool
    ) -> None:
        step, sequence = np.divmod(self._source[self._rows(steps, block)], self._N)
        none = step == (self._lengths[sequence] - 1 if back else 0)
        places = self._places(d, steps, block) + (1 if back else -1) * self._D * self._N
        _flat(states, 3).take(places, axis=0, out=out, mode="clip")
        out[none] = 0 if first is None else first[d, sequence[none]]

    def _rows(self, steps: slice, block: slice) -> slice:
        starts, counts, last = self._starts[block.start], self._counts[block.start], steps.stop - 1
        return slice(int(starts[steps.start]), int(starts[last] + counts[last]))

    def _places(self, d: int, steps: slice, block: slice) -> Array:
        """Where these rows stand in [S, D, N, ...], of which the first three dimensions are one."""
        source = self._source[self._rows(steps, block)]
        places: Array = source + (source // self._N * (self._D - 1) + d) * self._N
        return places


def _flat(array: Array, dimensions: int) -> Array:
    """The array with so many of its first dimensions as one."""
    return array.reshape(math.prod(array.shape[:dimensions]), *array.shape[dimensions:])
