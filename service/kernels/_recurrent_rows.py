"""The rows of a batch, one for each step of each sequence: where recurrent operators keep them in memory.

The caller's arrays are [S, N, I] (`X`), [D, N, H] (the states) or [S, D, N, K] (a history: one vector for each step,
direction and sequence). The passes through time work on arrays by rows, whose first dimensions are `EvenRows.shape`.

`EvenRows` serves sequences of one length, and its arrays by rows are views. `RaggedRows` serves sequences of several
lengths. It sorts the sequences and packs their rows, so that no product contains a step beyond a sequence's end.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from service.dtypes import Array
from service.kernels._blocks import spare_memory


class EvenRows:
    """The order of a batch's rows, for sequences of one length: arrays by rows are [steps, N, ...].

    Its methods return views of the caller's arrays, so that nothing is left to write back. `d` numbers a direction;
    `steps`, `chunk` and `block` are slices of S, S and N.
    """

    def __init__(self, N: int, steps: int) -> None:
        self.shape: tuple[int, ...] = (steps, N)
        """The first dimensions of an array by rows."""
        self._steps = steps

    def running_steps(self, steps: slice, block: slice) -> slice:
        """The part of `steps` that some sequence of the block runs. It stops before it starts if no sequence runs."""
        return steps

    def chunk_rows(self, chunk: slice) -> slice:
        """The place of a chunk of steps in an array by rows."""
        return chunk

    def view_rows(self, array: Array, steps: slice, block: slice) -> Array:
        """View the rows of `array` that belong to a block in `steps`, which lie in one chunk and which it runs."""
        return array[steps, block]

    def split_by_step(self, rows: Array, steps: slice, block: slice, *, back: bool) -> Iterable[Array]:
        """View what `view_rows` returned step by step, in the order of time or backwards.

        All views are made at once: to make each when its step comes would take as long as a small step.
        """
        return rows[:: -1 if back else 1]

    def running_states(self, states: Array, steps: slice, block: slice, *, back: bool) -> Iterable[Array]:
        """View, for each step, the part of `states` that belongs to sequences that run the step.

        `states` has a vector for each sequence of the block, sorted.
        """
        return itertools.repeat(states)

    def sort_states(self, states: Array) -> Array:
        """Return [D, N, H] in the order of the blocks: `states` itself, or a copy."""
        return states

    def unsort_states(self, states: Array, ordered: Array) -> None:
        """Write what `sort_states` returned back into `states`."""

    def gather_rows(self, X: Array) -> Array:
        """Return [S, N, I] by rows: a view, or a copy."""
        return X

    def empty_rows(self, X: Array) -> Array:
        """Return memory for the rows that `scatter_rows` will write into `X`: `X` itself, or uninitialised memory."""
        return X

    def scatter_rows(self, X: Array, chunk: slice, rows: Array) -> None:
        """Write a chunk's rows into `X` [S, N, I], and zeros beyond the sequences' ends."""

    def empty_history_rows(self, history: Array) -> Array:
        """Return [D, *shape, K] for the rows that `scatter_history` will write: a view, or uninitialised memory."""
        return history.swapaxes(0, 1)

    def clear_padding(self, history: Array, d: int, chunk: slice) -> None:
        """Write zeros into [S, D, N, K] beyond the sequences' ends."""

    def gather_history(self, history: Array, d: int, steps: slice, block: slice) -> Array:
        """Return a block's rows of [S, D, N, K]: a view, or a copy."""
        return history[steps, d, block]

    def scatter_history(self, history: Array, d: int, steps: slice, block: slice, rows: Array) -> None:
        """Write a block's rows into [S, D, N, K]."""

    def gather_previous(
        self, history: Array, initial: Array | None, d: int, steps: slice, block: slice, out: Array, *, back: bool
    ) -> None:
        """Write into `out` a block's rows of [S, D, N, H] one step earlier, or, if `back`, one step later.

        Where a sequence has no such step, `out` gets its vector in `initial` [D, N, H], or zeros if that is None.
        """
        vectors, beyond = history[:, d, block], 0 if initial is None else initial[d, block]
        start, stop = steps.start, steps.stop
        if back:
            out[:-1] = vectors[start + 1 : stop]
            out[-1] = vectors[stop] if stop < self._steps else beyond
        else:
            out[1:] = vectors[start : stop - 1]
            out[0] = vectors[start - 1] if start else beyond


class RaggedRows(EvenRows):
    """Sequences of several lengths: arrays by rows are [rows, ...], ordered by chunk, block, step and sequence.

    The longest sequence comes first, so the sequences of a block that run a step are the first ones of the block.
    """

    def __init__(self, lengths: Array, steps: int, D: int, blocks: Sequence[slice], chunks: Sequence[slice]) -> None:
        """`lengths` is [N], `steps` is the greatest of them, and `chunks` are in the order of time."""
        N = lengths.size
        self._lengths, self._N, self._D = lengths, N, D
        self._order = np.argsort(-lengths, kind="stable")
        running = N - np.searchsorted(lengths[self._order[::-1]], np.arange(steps), side="right")
        self._counts = {block.start: np.clip(running - block.start, 0, block.stop - block.start) for block in blocks}
        """For each block and step, how many sequences run."""
        self._starts = {block.start: np.empty(steps, np.int64) for block in blocks}
        """For each block and step, the number of its first row."""
        self._chunks: dict[int, slice] = {}
        sources, end = [], 0
        for chunk in chunks:
            start = end
            for block in blocks:
                counts = self._counts[block.start][chunk]
                ends = end + np.cumsum(counts)
                self._starts[block.start][chunk] = ends - counts
                step, place = np.nonzero(np.arange(block.stop - block.start) < counts[:, None])
                sources.append((chunk.start + step) * N + self._order[block.start + place])
                end = int(ends[-1])
            self._chunks[chunk.start] = slice(start, end)
        self._sources = np.concatenate(sources)
        """For each row: its step * N + its sequence."""
        self.shape: tuple[int, ...] = self._sources.shape

    def running_steps(self, steps: slice, block: slice) -> slice:
        longest = int(np.count_nonzero(self._counts[block.start]))
        return slice(steps.start, min(steps.stop, longest))

    def chunk_rows(self, chunk: slice) -> slice:
        return self._chunks[chunk.start]

    def view_rows(self, array: Array, steps: slice, block: slice) -> Array:
        return array[self._block_rows(steps, block)]

    def split_by_step(self, rows: Array, steps: slice, block: slice, *, back: bool) -> Iterable[Array]:
        order = slice(None, None, -1 if back else 1)
        first = self._starts[block.start][steps.start]
        starts = (self._starts[block.start][steps][order] - first).tolist()
        counts = self._counts[block.start][steps][order].tolist()
        return [rows[start : start + count] for start, count in zip(starts, counts, strict=True)]

    def running_states(self, states: Array, steps: slice, block: slice, *, back: bool) -> Iterable[Array]:
        return [states[:count] for count in self._counts[block.start][steps][:: -1 if back else 1].tolist()]

    def sort_states(self, states: Array) -> Array:
        return states[:, self._order]

    def unsort_states(self, states: Array, ordered: Array) -> None:
        states[:, self._order] = ordered

    def gather_rows(self, X: Array) -> Array:
        # The default mode, "raise", would buffer the whole output.
        return _flatten(X, 2).take(self._sources, axis=0, out=self.empty_rows(X), mode="clip")

    def empty_rows(self, X: Array) -> Array:
        return spare_memory((*self.shape, X.shape[2]), X.dtype)

    def scatter_rows(self, X: Array, chunk: slice, rows: Array) -> None:
        X[chunk] = 0
        _flatten(X, 2)[self._sources[self.chunk_rows(chunk)]] = rows

    def empty_history_rows(self, history: Array) -> Array:
        return spare_memory((self._D, *self.shape, history.shape[3]), history.dtype)

    def clear_padding(self, history: Array, d: int, chunk: slice) -> None:
        history[chunk, d][np.arange(chunk.start, chunk.stop)[:, None] >= self._lengths] = 0

    def gather_history(self, history: Array, d: int, steps: slice, block: slice) -> Array:
        return _flatten(history, 3).take(self._places(d, steps, block), axis=0)

    def scatter_history(self, history: Array, d: int, steps: slice, block: slice, rows: Array) -> None:
        _flatten(history, 3)[self._places(d, steps, block)] = rows

    def gather_previous(
        self, history: Array, initial: Array | None, d: int, steps: slice, block: slice, out: Array, *, back: bool
    ) -> None:
        step, sequence = np.divmod(self._sources[self._block_rows(steps, block)], self._N)
        outermost = step == (self._lengths[sequence] - 1 if back else 0)
        places = self._places(d, steps, block) + (1 if back else -1) * self._D * self._N
        _flatten(history, 3).take(places, axis=0, out=out, mode="clip")
        out[outermost] = 0 if initial is None else initial[d, sequence[outermost]]

    def _block_rows(self, steps: slice, block: slice) -> slice:
        """The place of a block's rows in an array by rows."""
        starts, counts, last = self._starts[block.start], self._counts[block.start], steps.stop - 1
        return slice(int(starts[steps.start]), int(starts[last] + counts[last]))

    def _places(self, d: int, steps: slice, block: slice) -> Array:
        """The places of a block's rows in [S, D, N, ...] with its first three dimensions made one."""
        sources = self._sources[self._block_rows(steps, block)]
        places: Array = sources + (sources // self._N * (self._D - 1) + d) * self._N
        return places


def _flatten(array: Array, dimensions: int) -> Array:
    """Make one dimension of the first `dimensions` of `array`."""
    return array.reshape(math.prod(array.shape[:dimensions]), *array.shape[dimensions:])
