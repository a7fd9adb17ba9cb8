"""What the pushes and pulls of an accumulator return, as data classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradserve_client.models import Receipt


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """The state of the step after a push of a `GradientAccumulator`."""

    step: int
    count: int
    """The number of pushes in the step, with this push."""
    weight: float
    """The sum of the pushes' weights."""
    closed: bool
    """Whether this push completed the quorum."""
    replayed: bool
    """Whether the server had counted this push before, and did not count it again."""
    counted: bool = True
    """Whether the gradients are in the step. False, with `optimizer=`: the step had closed before this worker came."""

    @classmethod
    def late(cls, step: int) -> Pushed:
        """Return the outcome of a push whose step has closed without it."""
        return cls(step=step, count=0, weight=0.0, closed=True, replayed=False, counted=False)

    @classmethod
    def of(cls, receipts: Sequence[Receipt]) -> Pushed:
        """Return the outcome of a push in several requests: what holds for all of them."""
        least = min(receipts, key=lambda receipt: receipt.count)
        return cls(
            step=least.step,
            count=least.count,
            weight=least.weight,
            closed=all(receipt.closed for receipt in receipts),
            replayed=all(receipt.replayed for receipt in receipts),
        )


@dataclass(frozen=True, kw_only=True)
class Pulled:
    """The step of a pull of a `GradientAccumulator`."""

    step: int
    count: int
    """The number of pushes in the step."""
    weight: float
    """The sum of the pushes' weights. If it is 0, all gradients are None, except with `reduce="sum"`."""
    contributors: Mapping[str, int] | None
    """The number of pushes of each worker, if the server knows it."""
    closed_by: str | None
    """What closed the step: "quorum", "deadline" or "take", if the server says so."""
    loss: float | None = None
    """The mean of the losses of the pushes by their weights. None without `loss=True`, and if all weights are 0."""

    @classmethod
    def of(cls, step: int, receipts: Sequence[Mapping[str, Any]], loss: float | None = None) -> Pulled:
        """Return what was pulled in several requests: the receipt with the fewest pushes."""
        least = min(receipts, key=lambda receipt: receipt["count"])
        return cls(
            step=step,
            count=least["count"],
            weight=least["weight"],
            contributors=least.get("contributors"),
            closed_by=least.get("closed_by"),
            loss=loss,
        )
