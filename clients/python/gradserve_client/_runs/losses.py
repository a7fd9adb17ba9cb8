"""The losses of a run: a buffer beside the gradients, to which each push adds its own."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import Any, SupportsFloat, TypeAlias

import numpy as np

from gradserve_client._wire.arguments import as_float
from gradserve_client._wire.tensors import Array
from gradserve_client.errors import InvalidInput, mistaken

Loss: TypeAlias = SupportsFloat | None
"""A loss as a program has it: a number, or a tensor of one."""

KEPT_LOSSES = 2000
"""Closed steps of the loss that are kept: the page draws them. It is the most that a server keeps."""


def loss_name(prefix: str, others: Collection[str], loss: bool) -> str | None:
    """Return the name of the buffer of a run's losses, None without. Raises `InvalidInput` if it is a parameter's."""
    if not isinstance(loss, bool):
        raise mistaken("loss", f"is of type {type(loss).__name__}, but must be True or False: push takes each loss")
    if loss and (name := f"{prefix}loss") in others:
        raise InvalidInput(f"{name!r} is the buffer of a parameter: rename the parameter, or leave out loss=True")
    return name if loss else None


def loss_of(loss: Loss, weight: float, *, is_wanted: bool) -> Array:
    """Return what a push adds to the losses: nothing with weight 0. Raises `InvalidInput` for a wrong loss."""
    if loss is None:
        if is_wanted and weight:
            raise mistaken("loss", "is missing, but the accumulator has loss=True: give push the loss of its samples")
        return np.zeros(())
    if not is_wanted:
        raise mistaken("loss", "is given, but the accumulator has no loss=True: give it that, in all workers")
    number = _as_number(loss)
    return np.array(number if weight else 0.0)


def _as_number(loss: Any) -> float:
    """Return a number, or that of a tensor, without what the tensor was computed from."""
    found = loss
    with suppress(RuntimeError, TypeError, ValueError):  # an array of several numbers
        found = loss.item() if hasattr(loss, "item") else loss
    if isinstance(found, bool) or not isinstance(found, int | float):
        what = f"of the shape {tuple(loss.shape)}" if hasattr(loss, "shape") else f"of type {type(loss).__name__}"
        raise mistaken("loss", f"is {what}, but must be a number, or an array of one number")
    return as_float("loss", found)
