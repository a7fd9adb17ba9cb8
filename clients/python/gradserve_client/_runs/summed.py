"""What a closed step has: the sums or means of all buffers, and who had a gradient."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from gradserve_client._runs.parts import Round
from gradserve_client._wire.specs import Reduce
from gradserve_client._wire.tensors import Array

Read: TypeAlias = tuple[Array | None, Mapping[str, Any]]
"""A value of a closed step with its receipt. A mean of weights that sum to 0 is None."""

_ROUNDING = 1e-9
"""The relative difference up to which numbers are the same: float64 rounds to 1e-15, and scales differ by factors."""


@dataclass
class Summed:
    """The sums or means of a closed step."""

    values: dict[str, Array] = field(default_factory=dict)
    """By the names of the buffers. A mean of weights that sum to 0 is missing."""
    used: set[str] = field(default_factory=set)
    """The buffers that got a gradient from any push."""
    receipts: list[Mapping[str, Any]] = field(default_factory=list)
    """A receipt of each group."""
    loss: float | None = None
    """The mean of the losses, if the run has losses, and weights that do not sum to 0."""
    has_one_scale: bool = True
    """Whether all pushes had gradients of the same scale."""
    weights_cancel: bool = False
    """Whether there is no mean, because the weights of gradients sum to 0, up to rounding."""

    def has(self, names: Set[str], *, zeros: bool) -> bool:
        """Return whether these buffers have values, and got a gradient unless `zeros` will do."""
        return self.values.keys() >= names and (zeros or not self.used.isdisjoint(names))

    def enter(self, one: Round, found: Mapping[str, Read], reduce: Reduce) -> None:
        """Add what was read of a round: sums or means. A tally of weights that sum to 0 is a sum."""
        tallies = {group.tally for group in one.groups}
        self.values |= {name: value for name, (value, _) in found.items() if value is not None and name not in tallies}
        for group in one.groups:
            tally, receipt = found[group.tally]
            assert tally is not None
            self.receipts.append(receipt)
            *used, total, scale, square = tally.tolist()
            if not total:
                continue
            self.used |= {name for name, part in zip(group.names, used, strict=True) if part}
            scale, square = scale / total, square / total
            self.has_one_scale &= abs(square - scale * scale) <= _ROUNDING * square
            self.weights_cancel |= reduce == "mean" and (not receipt["weight"] or _ROUNDING * abs(total) >= 1)
