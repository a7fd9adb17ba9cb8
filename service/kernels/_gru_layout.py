"""What GRUTraining and GRUGrad share: their sizes and attributes, checked, and how their work is cut into blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from service.dtypes import Array, DType, compute_dtype
from service.errors import InvalidParameter, InvalidTensor, ShapeMismatch, shown
from service.kernels._blocks import new_output, spare_memory
from service.kernels._gru_rows import Even, Ragged

SEQUENCES = 32
"""Sequences in a block, as a rule: enough rows for a product with R to be worth it."""
BLOCKS = 8
"""Blocks of sequences, at most: enough to share out."""
ROWS = 512
"""Rows, of step times sequence, in a chunk of steps: enough for a product of its own, few enough to stay in a cache."""
STEPS = 16
"""Steps in a chunk, at least."""
LEAST_SHARED = 40_000_000
"""Multiplications and additions that are worth a second thread: below, threads wait for each other, and for memory that
another core has written, longer than they work."""
MOST_EMPTY = 1 << 16
"""Steps times sequences, at most, where X has no bytes: a request of a few bytes must not work for minutes."""

Direction = Literal["forward", "reverse", "bidirectional"]


@dataclass(frozen=True)
class Layout:
    """The sizes, checked, and how a batch is cut, for the passes through time."""

    S: int
    N: int
    I: int  # noqa: E741 - ONNX's name
    H: int
    D: int
    reverse: tuple[bool, ...]
    lengths: Array | None
    """None if all sequences are as long as the longest."""
    steps: int
    """Of the longest sequence: what is beyond is not computed."""
    linear_before_reset: bool

    @cached_property
    def rows(self) -> Even:
        """What is computed."""
        if self.lengths is None:
            return Even(self.N, self.steps)
        return Ragged(self.lengths, self.steps, self.D, self.blocks(), self._chunks())

    @property
    def alone(self) -> bool:
        """Whether the work is too little for more than one thread."""
        rows = self.N * self.steps if self.lengths is None else int(self.lengths.sum())
        return self.D * rows * 3 * self.H * (2 * self.I + self.H) < LEAST_SHARED

    def blocks(self) -> list[slice]:
        """The sequences in blocks, by length, which go through time each by itself, as each direction does."""
        in_halves = self.D == 1 and self.N > SEQUENCES // 2
        most = 1 if self.alone and self.N <= ROWS else BLOCKS
        count = min(max(self.N // SEQUENCES, 1 + in_halves), most) if self.N else 0
        return [slice(self.N * k // count, self.N * (k + 1) // count) for k in range(count)]

    def chunks(self, direction: int) -> list[slice]:
        """The steps that any sequence runs, in chunks, in the order of the forward pass."""
        return self._chunks()[:: -1 if self.reverse[direction] else 1]

    def _chunks(self) -> list[slice]:
        if not self.N:  # however many steps it is of
            return []
        height = max(STEPS, ROWS // self.N)
        return [slice(t, min(t + height, self.steps)) for t in range(0, self.steps, height)]


_REVERSE: dict[str, tuple[bool, ...]] = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


def layout_of(
    X: Array,
    R: Array,
    SL: Array | None,
    *,
    hidden_size: int | None,
    direction: str,
    linear_before_reset: int,
    activations: Sequence[str] | None,
    clip: float | None,
) -> Layout:
    """The sizes, which X and R tell, and the attributes, checked.

    Raises `ShapeMismatch`, `InvalidTensor` for lengths out of range, and `InvalidParameter`.
    """
    if direction not in _REVERSE:
        raise _refused("direction", direction, f"one of {', '.join(_REVERSE)}")
    if linear_before_reset not in (0, 1):
        raise _refused("linear_before_reset", linear_before_reset, "0 or 1")
    reverse = _REVERSE[direction]
    pairs = ["sigmoid", "tanh"] * len(reverse)
    if activations is not None and [name.lower() for name in activations] != pairs:
        raise _refused("activations", list(activations), f"{pairs}, the only ones that there are, in any letter case")
    if clip is not None:
        raise _refused("clip", clip, "left out: the gradient of clipped gates is not defined by ONNX Runtime either")
    for name, tensor in (("X", X), ("R", R)):
        if tensor.ndim != 3:
            raise ShapeMismatch(f"{name} has shape {list(tensor.shape)}, but must have 3 dimensions", tensor=name)
    S, N, I = X.shape  # noqa: E741
    H = R.shape[2]
    if H == 0:
        raise ShapeMismatch(f"R has shape {list(R.shape)}, but there must be a hidden unit", tensor="R")
    if R.shape != (len(reverse), 3 * H, H):
        units = H if hidden_size is None or hidden_size < 1 else hidden_size
        check_shape("R", R, len(reverse), 3 * units, units)
    if hidden_size is not None and hidden_size != H:
        raise _refused("hidden_size", hidden_size, f"{H}, the last dimension of R, or left out")
    if not X.size and max(S, 1) * N > MOST_EMPTY:
        raise ShapeMismatch(
            f"X has shape {[S, N, I]}, but as it has no elements, its steps and sequences may be {MOST_EMPTY} at most,"
            " multiplied",
            tensor="X",
        )
    steps, lengths = S, None
    if SL is not None:
        check_shape("SL", SL, N)
        wrong = np.flatnonzero((SL < 0) | (SL > S))
        if wrong.size:
            raise InvalidTensor(
                f"SL[{wrong[0]}] is {SL[wrong[0]]}, but must be in [0, {S}], the steps of X", tensor="SL"
            )
        steps = int(SL.max(initial=0))
        lengths = None if (SL == steps).all() else SL
    return Layout(S, N, I, H, len(reverse), reverse, lengths, steps, linear_before_reset == 1)


def _refused(name: str, value: object, wanted: str) -> InvalidParameter:
    return InvalidParameter(f"{name} is {shown(value)}, but must be {wanted}", parameter=name)


def check_shape(name: str, tensor: Array | None, *shape: int) -> None:
    """Raise `ShapeMismatch` unless the tensor, if there is one, has this shape."""
    if tensor is not None and tensor.shape != shape:
        raise ShapeMismatch(f"{name} has shape {list(tensor.shape)}, but must have {list(shape)}", tensor=name)


def results(dtype: DType, *shapes: tuple[int, ...]) -> list[tuple[Array, Array]]:
    """For each shape an output of `dtype`, and where it is computed: itself, or wider memory beside it."""
    outputs: list[Array] = [new_output(None, shape, dtype) for shape in shapes]
    wide = compute_dtype(dtype)
    return [(output, output if wide == dtype else spare_memory(output.shape, wide)) for output in outputs]


def narrowed(output: Array, made: Array) -> Array:
    """The output, with what was computed, rounded to its dtype."""
    if made is not output:
        with np.errstate(all="ignore"):
            output[...] = made
    return output


def widened(tensor: Array | None, dtype: DType) -> Array | None:
    """The tensor, if there is one, row-major and as `dtype`."""
    return None if tensor is None else np.ascontiguousarray(tensor, dtype)
