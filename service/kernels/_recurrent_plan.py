"""The sizes and attributes of recurrent operators, checked, and how these cut their work into blocks and chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from service.dtypes import Array
from service.errors import InvalidParameter, InvalidTensor, ShapeMismatch, shown
from service.kernels._checks import check_shape
from service.kernels._recurrent_rows import EvenRows, RaggedRows

BLOCK_SEQUENCES = 32
"""Sequences in a block, as a rule: enough rows for an efficient product with R."""
MAX_BLOCKS = 8
"""The most blocks of sequences: enough to occupy the threads."""
CHUNK_ROWS = 512
"""Rows (steps times sequences) in a chunk: enough for an efficient product, few enough to stay in a cache."""
MIN_CHUNK_STEPS = 16
"""The fewest steps in a chunk."""
MIN_SHARED_MULTIPLY_ADDS = 40_000_000
"""Multiplications and additions from which on a second thread helps.

With fewer, threads spend longer on waiting for each other, and for memory that another core has written, than on work.
"""
MIN_STEP_MULTIPLY_ADDS = 1 << 19
"""Multiplications and additions that take as long as NumPy's calls for a step of a block."""
MIN_STEP_ROWS = 16
"""Rows of a product with R that take as long as to read R."""

Direction = Literal["forward", "reverse", "bidirectional"]


@dataclass(frozen=True)
class Plan:
    """The checked sizes of a batch, and how the passes through time cut it."""

    S: int
    N: int
    I: int  # noqa: E741 - ONNX's name
    H: int
    D: int
    gates: int
    """The gates of a hidden unit and its candidate: the blocks of H rows in W and R."""
    reverse: tuple[bool, ...]
    lengths: Array | None
    """None if all sequences have the same length."""
    steps: int
    """The length of the longest sequence: later steps are not computed."""

    @cached_property
    def rows(self) -> EvenRows:
        """The rows to compute."""
        if self.lengths is None:
            return EvenRows(self.N, self.steps)
        return RaggedRows(self.lengths, self.steps, self.D, self.blocks(), self._chunks())

    @cached_property
    def multiply_adds(self) -> int:
        """The multiplications and additions of the products."""
        rows = self.N * self.steps if self.lengths is None else int(self.lengths.sum())
        return self.D * rows * self.gates * self.H * (2 * self.I + self.H)

    @property
    def single_threaded(self) -> bool:
        """Whether the work is too little for a second thread."""
        return self.multiply_adds < MIN_SHARED_MULTIPLY_ADDS

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each floating tensor, by its name in any of the operators."""
        S, N, I, H, D, G = self.S, self.N, self.I, self.H, self.D, self.gates  # noqa: E741
        X, W, R, B, P = (S, N, I), (D, G * H, I), (D, G * H, H), (D, 2 * G * H), (D, 3 * H)
        shapes = {"X": X, "dX": X, "W": W, "dW": W, "R": R, "dR": R, "B": B, "dB": B, "P": P, "dP": P}
        shapes |= dict.fromkeys(("H0", "HFinal", "grad_Ht", "dH0", "Ht0", "Ct0", "CFinal"), (D, N, H))
        shapes |= dict.fromkeys(("dHFinal", "dCFinal", "dC0"), (D, N, H))
        shapes |= dict.fromkeys(("HAll", "CAll", "grad_HAll", "dHAll"), (S, D, N, H))
        return shapes | dict.fromkeys(("ZRH", "iofc"), (S, D, N, G * H))

    def blocks(self) -> list[slice]:
        """Cut the sequences, in the order of `rows`, into blocks. Each block and direction runs through time alone."""
        in_halves = self.D == 1 and self.N > BLOCK_SEQUENCES // 2
        most = 1 if self.single_threaded and self.N <= CHUNK_ROWS else MAX_BLOCKS
        count = min(max(self.N // BLOCK_SEQUENCES, 1 + in_halves), most) if self.N else 0
        return [slice(self.N * k // count, self.N * (k + 1) // count) for k in range(count)]

    def chunks(self, direction: int) -> list[slice]:
        """Cut the steps into chunks, in the order of the forward pass."""
        return self._chunks()[:: -1 if self.reverse[direction] else 1]

    def _chunks(self) -> list[slice]:
        if not self.N:  # without sequences there may be any number of steps
            return []
        height = max(MIN_CHUNK_STEPS, CHUNK_ROWS // self.N)
        return [slice(t, min(t + height, self.steps)) for t in range(0, self.steps, height)]


def multiply_adds(X: Array, W: Array, R: Array, SL: Array | None) -> int:
    """Return the multiplications and additions of the products, or what takes as long: NumPy's calls for the steps.

    The shapes may be wrong: nobody has checked them.
    """
    steps, sequences = (*X.shape, 0, 0)[:2]
    lengths = None if SL is None else SL.clip(0, steps)
    rows, longest = (steps * sequences, steps) if lengths is None else (int(lengths.sum()), lengths.max(initial=0))
    blocks = min(max(sequences // BLOCK_SEQUENCES, 1), MAX_BLOCKS) if sequences else 0
    step = max(MIN_STEP_ROWS * R.size, MIN_STEP_MULTIPLY_ADDS * sum(R.shape[:1]))
    return max(rows * (2 * W.size + R.size), int(longest) * blocks * step)


_REVERSE: dict[str, tuple[bool, ...]] = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


def make_plan(
    X: Array,
    R: Array,
    SL: Array | None,
    hidden_size: int | None,
    direction: str,
    activations: Sequence[str] | None,
    clip: float | None,
    *,
    gates: int,
    **choices: tuple[int, tuple[int, ...]],
) -> Plan:
    """Check the attributes, and the shapes of X, R and SL, from which the sizes follow.

    `choices` has other attributes, each with its value and the values that it may have.
    Raises `ShapeMismatch`, `InvalidTensor` for lengths out of range, and `InvalidParameter`.
    """
    reverse = _check_attributes(direction, gates, activations, clip)
    for name, (value, allowed) in choices.items():
        if value not in allowed:
            raise _invalid(name, value, " or ".join(map(str, allowed)))
    S, N, I, H = _check_sizes(X, R, len(reverse), gates, hidden_size)  # noqa: E741
    steps, lengths = S, None
    if SL is not None:
        _check_lengths(SL, S, N)
        steps = int(SL.max(initial=0))
        lengths = None if (SL == steps).all() else SL
    return Plan(S, N, I, H, len(reverse), gates, reverse, lengths, steps)


def _check_attributes(
    direction: str, gates: int, activations: Sequence[str] | None, clip: float | None
) -> tuple[bool, ...]:
    """Return for each direction whether it runs in reverse."""
    if direction not in _REVERSE:
        raise _invalid("direction", direction, f"one of {', '.join(_REVERSE)}")
    supported = ["sigmoid", *["tanh"] * (gates - 2)] * len(_REVERSE[direction])
    if activations is not None and [name.lower() for name in activations] != supported:
        raise _invalid("activations", list(activations), f"{supported}, in any letter case; no others are supported")
    if clip is not None:
        raise _invalid("clip", clip, "left out: ONNX Runtime does not define the gradient of clipped gates either")
    return _REVERSE[direction]


def _check_sizes(X: Array, R: Array, D: int, gates: int, hidden_size: int | None) -> tuple[int, int, int, int]:
    """Return S, N, I and H."""
    for name, tensor in (("X", X), ("R", R)):
        if tensor.ndim != 3:
            raise ShapeMismatch(f"{name} has shape {list(tensor.shape)}, but must have 3 dimensions", tensor=name)
    S, N, I = X.shape  # noqa: E741
    H = R.shape[2]
    if H == 0:
        raise ShapeMismatch(f"R has shape {list(R.shape)}, but there must be a hidden unit", tensor="R")
    if R.shape != (D, gates * H, H):
        units = H if hidden_size is None or hidden_size < 1 else hidden_size
        check_shape("R", R, D, gates * units, units)
    if hidden_size is not None and hidden_size != H:
        raise _invalid("hidden_size", hidden_size, f"{H}, the last dimension of R, or left out")
    return S, N, I, H


def _check_lengths(SL: Array, S: int, N: int) -> None:
    check_shape("SL", SL, N)
    outside = np.flatnonzero((SL < 0) | (SL > S))
    if outside.size:
        problem = f"SL[{outside[0]}] is {SL[outside[0]]}, but must be in [0, {S}], where X has {S} steps"
        raise InvalidTensor(problem, tensor="SL")


def _invalid(name: str, value: object, expected: str) -> InvalidParameter:
    return InvalidParameter(f"{name} is {shown(value)}, but must be {expected}", parameter=name)
