"""Questions to BroadcastGradientArgs, which is safe whatever it is asked."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from service.errors import ShapeMismatch
from tests.golden.store import Case
from tests.golden.values import generator

PEER: dict[str, tuple[list[int], list[int]]] = {
    "Basic": ([2, 16, 1024, 1024], [1, 1, 1024, 1024]),
    "Basic_both_valid_op": ([2, 16, 1, 1024], [1, 1, 1024, 1024]),
    "Basic_no_bcast": ([2, 3, 4, 5], [2, 3, 4, 5]),
    "Basic_B_scalar": ([2, 3, 4, 5], []),
    "Basic_B_vector": ([2, 3, 4, 5], [5]),
    "Basic_A_bcast_different_size": ([4, 5], [2, 3, 4, 5]),
    "Basic_both_bcast_different_size": ([1, 4, 5], [2, 3, 1, 1]),
    "Basic_both_bcast_different_size_2": ([3, 4, 5], [2, 1, 1, 1]),
    "Basic_invalid_broadcast": ([3, 4, 5], [2, 1, 6, 1]),
    "Basic_only_A_output": ([3, 4, 5], [2, 1, 1, 1]),
}
EDGES: list[tuple[list[int], list[int]]] = [
    ([], []),
    ([1], []),
    ([], [1]),
    ([1, 1], [1]),
    ([1], [1]),
    ([0], [1]),
    ([1], [0]),
    ([0], [0]),
    ([2], [0]),
    ([-1, 3], [1, 3]),
    ([-1], [-1]),
    ([-1], [2]),
    ([2, 3], [3, 2]),
    ([1, 2, 1, 4], [3, 1, 5, 1]),
    ([1 << 40], [1]),
]

REASONS = {r"Broadcast is not possible": ShapeMismatch}


def ask() -> Iterator[Case]:
    """All questions of this module."""
    for name, (a, b) in PEER.items():
        outputs = ("A_axes",) if name == "Basic_only_A_output" else ("A_axes", "B_axes")
        yield _case(f"peer-{name}", a, b, outputs)
    for a, b in EDGES:
        yield _case(f"{a}-{b}", a, b)
    yield _case("read-flat", [[2, 3], [4, 1]], [[5]])
    yield _case("read-flat-scalar", [2, 3], 3)
    yield from _random()


def _case(name: str, a: object, b: object, outputs: tuple[str, ...] = ("A_axes", "B_axes")) -> Case:
    inputs = {"A_shape": np.array(a, np.int64), "B_shape": np.array(b, np.int64)}
    return Case("BroadcastGradientArgs", name, inputs, outputs)


def _random() -> Iterator[Case]:
    """Shapes of dimensions 0 to 3. In every third pair nothing keeps them from disagreeing."""
    random = generator("BroadcastGradientArgs")
    for number in range(150):
        a, b = (random.integers(0, 4, random.integers(0, 5)).tolist() for _ in "ab")
        shared = min(len(a), len(b))
        for place in range(-shared, 0) if number % 3 else ():
            a[place], b[place] = [(a[place], 1), (1, b[place]), (a[place], a[place])][random.integers(3)]
        yield _case(f"random-{number}-{a}-{b}", a, b)
