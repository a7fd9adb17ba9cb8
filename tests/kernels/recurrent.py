"""What the tests of all recurrent operators share: options, a few of them together, and how the work is cut."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from service.kernels import _recurrent_pass, _recurrent_plan

DIRECTIONS = ("forward", "reverse", "bidirectional")
LENGTHS = (None, [3, 1, 0], [2, 3, 3], [1, 2, 0], [2, 2, 2], [0, 0, 0])
"""Lengths of three sequences of 3 steps."""


def pairwise(options: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return a few of the options; every pair of values occurs in at least one."""
    missing, chosen = set[Any]().union(*map(_pairs, options)), list[tuple[Any, ...]]()
    while missing:
        chosen.append(max(options, key=lambda option: len(_pairs(option) & missing)))
        missing -= _pairs(chosen[-1])
    return chosen


def _pairs(option: tuple[Any, ...]) -> set[Any]:
    return set(itertools.combinations([(place, str(value)) for place, value in enumerate(option)], 2))


def cut(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the work as if it were too little for several threads ("alone"), or not ("shared"), or much ("cut")."""
    if how != "alone":
        monkeypatch.setattr(_recurrent_plan, "MIN_SHARED_MULTIPLY_ADDS", 0)
    if how == "cut":  # a sequence in each block, 2 steps in a chunk, 1 in a piece, and a task for each gate
        for name, value in (("CHUNK_ROWS", 1), ("MIN_CHUNK_STEPS", 2), ("BLOCK_SEQUENCES", 1)):
            monkeypatch.setattr(_recurrent_plan, name, value)
        for name in ("PIECE_ELEMENTS", "WIDE_HIDDEN_UNITS"):
            monkeypatch.setattr(_recurrent_pass, name, 1)
