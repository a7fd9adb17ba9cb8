"""What the step of a run asks of an optimizer: its operator, and the numbers of groups of parameters."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np

from gradserve_client._wire.arguments import as_finite
from gradserve_client.errors import mistaken

OPTIMIZERS = {"AdamWOptimizer": ("momentums_1", "momentums_2"), "SGDOptimizerV2": ()}
"""The optimizers, and the groups that each keeps besides the parameters."""

NUMBERS = {"AdamWOptimizer": ("lr", "weight_decay"), "SGDOptimizerV2": ("lr",)}
"""What a group of parameters may have of its own."""

SCALE = 2.0**50
"""An epsilon so large that AdamW divides by it alone. The rate makes up for it, and a power of 2 costs no bits."""


class Optimizer(NamedTuple):
    """An operator that takes a step, with its inputs besides buffers, and its attributes."""

    operator: str
    inputs: Mapping[str, Any]
    attributes: Mapping[str, Any]


def optimizer_of(
    name: str, parameters: Collection[str], lr: float, groups: Any, momentum: float, attributes: Mapping[str, Any]
) -> Optimizer:
    """Return the optimizer of a step. Raises `InvalidInput`.

    SGD with momentum is AdamWOptimizer that divides by a constant. Its first moment is that of SGD, times 1 - momentum.
    """
    if name not in [*OPTIMIZERS]:
        names = " or ".join(map(repr, OPTIMIZERS))
        hint = "Adam is AdamWOptimizer with weight_decay=0, and SGD is SGDOptimizerV2, also with momentum="
        raise mistaken("optimizer", f"is {name!r}, but must be one of {names}: {hint}")
    if attributes.get("nesterov"):
        raise mistaken("nesterov", "is missing: no operator does it. Use SGDOptimizerV2 with momentum= alone")
    rate, own = np.float64(lr), _own_numbers(name, parameters, groups or {})
    if not momentum:
        return Optimizer(name, {"lr": rate, **own}, attributes)
    if name != "SGDOptimizerV2" or not 0 < as_finite("momentum", momentum) < 1:
        raise mistaken("momentum", f"is {momentum!r}, but must be in [0, 1), and only SGDOptimizerV2 takes it")
    if attributes:
        raise mistaken(min(attributes), "is no attribute of SGDOptimizerV2, which has none besides momentum")
    factor = SCALE / (1 - momentum)
    inputs = {"lr": rate * factor, "lrs": {one: number * factor for one, number in own["lrs"].items()}}
    as_adamw = {"alpha": momentum, "beta": 1.0, "epsilon": SCALE, "adam_mode": 1, "correct_bias": 0}
    return Optimizer("AdamWOptimizer", inputs, {**as_adamw, "weight_decay": 0.0})


def _own_numbers(name: str, parameters: Collection[str], groups: Mapping[str, Any]) -> dict[str, dict[str, np.float64]]:
    """Return the inputs with numbers of single parameters, in the order of the parameters: later patterns win."""
    own: dict[str, dict[str, np.float64]] = {key: {} for key in NUMBERS[name]}
    for pattern, numbers in groups.items():
        if not isinstance(numbers, Mapping) or not {*numbers} <= {*own}:
            problem = f"has {numbers!r} for {pattern!r}, but {name} takes a dict of {' and '.join(own)} there"
            raise mistaken("groups", problem)
        chosen = [one for one in parameters if one == pattern or fnmatchcase(one, pattern)]
        if not chosen:
            names = textwrap.shorten(", ".join(parameters), 1000, placeholder=" ...")
            raise mistaken("groups", f"has {pattern!r}, which fits no parameter: the parameters are {names}")
        for key, number in numbers.items():
            own[key] |= dict.fromkeys(chosen, np.float64(as_finite(key, number)))
    return {f"{key}s": {one: given[one] for one in parameters if one in given} for key, given in own.items()}
