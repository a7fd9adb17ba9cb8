"""Gradients in 8 bits, with error feedback: what rounding cuts off a push is added to the next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gradserve_client._runs.parts import Part
from gradserve_client._wire.codes import FEWEST, encoded_with
from gradserve_client._wire.tensors import Array
from gradserve_client.errors import Conflict
from gradserve_client.rows import Gradient, Sent


class Feedback:
    """What rounding has cut off the pushes of a worker, as far as these have answers.

    It is kept flat, by buffers, times the weight of the push and over the scale of its gradients: as the sum lacks it.
    """

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self._sizes = {name: part.size for name, part in parts.items() if part.size >= FEWEST}
        self._kept: dict[str, Array] = {}

    def encoded(self, numbers: Mapping[str, Gradient], factor: float) -> tuple[dict[str, Sent], dict[str, Array]]:
        """Return the numbers as they travel, and what rounding cuts off. They count `factor` times in the sum.

        Gradients that are small, sparse or not finite travel in full.
        """
        sent: dict[str, Sent] = {**numbers}
        cut: dict[str, Array] = {}
        for name, size in self._sizes.items():
            one = numbers[name]
            if isinstance(one, np.ndarray) and one.size == size:
                coded, rest = encoded_with(self._kept.get(name), one, factor)
                if coded.is_finite:
                    sent[name], cut[name] = coded, rest
        return sent, cut

    def keep(self, cut: Mapping[str, Array]) -> None:
        """Keep what rounding has cut off a push that counts."""
        self._kept.update(cut)

    def state(self) -> dict[str, Array]:
        """Return what is kept."""
        return dict(self._kept)

    def load(self, state: Mapping[str, Any]) -> None:
        """Keep what `state` has returned. Raises `Conflict` if it is of other buffers."""
        kept = {name: np.asarray(one, np.float32) for name, one in state.items()}
        for name, one in kept.items():
            if self._sizes.get(name) != one.size:
                raise Conflict(f"This state has a residual of {one.size} numbers for {name!r}, which is another buffer")
        self._kept = kept
