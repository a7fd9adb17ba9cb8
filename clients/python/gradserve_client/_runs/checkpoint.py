"""The tensors of a checkpoint: parameters by their names, and all else by names that begin with `::`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gradserve_client._runs.training import STATE, Run, Values, state
from gradserve_client._wire.tensors import Array, TensorLike, as_array
from gradserve_client.errors import mistaken
from gradserve_client.graph_models import GraphInfo
from gradserve_client.models import BufferInfo

LOOKS = 50
"""How often a worker that saves looks whether a step that is under way has ended."""

PAUSE = 0.1
"""Seconds between two of these looks."""


def in_buffers(prefix: str, info: GraphInfo, tensors: Mapping[str, TensorLike]) -> dict[str, Array]:
    """Return weights, or the tensors of a checkpoint, by the names of their buffers. Raises `InvalidInput`."""
    given = {name if name.startswith("::") else f"::parameters.{name}": value for name, value in tensors.items()}
    arrays = {}
    for name, value in given.items():
        group, _, member = name.removeprefix("::").partition(".")
        if group not in (*STATE, "step"):
            raise mistaken("weights", f"has {name!r}, but a checkpoint has only ::step and ::{'.*, ::'.join(STATE)}.*")
        if group == "step":
            arrays[f"{prefix}::first"] = as_array(value, name).astype(np.float64)
        else:
            arrays[f"{prefix}{STATE[group]}.{member}"] = as_array(value, name)
    for group in ("parameters", "statistics"):
        known = {name for name, _ in state(prefix, group, getattr(info, group))}
        there = {name for name in arrays if name.startswith(f"{prefix}{STATE[group]}.")}
        if group == "parameters" or there:
            _check_names(group, prefix, known, there)
    return arrays


def _check_names(group: str, prefix: str, known: set[str], given: set[str]) -> None:
    for names, fault in ((known - given, "lacks"), (given - known, "has")):
        if names:
            one = min(names).removeprefix(f"{prefix}{STATE[group]}.")
            raise mistaken("weights", f"{fault} {one!r}, but must have the {group} of the graph, all of them")


def kept(prefix: str, found: Sequence[BufferInfo]) -> list[str]:
    """Return the names, without the prefix, of the buffers that a run keeps from step to step."""
    starts = tuple(f"{letter}." for letter in STATE.values())
    names = [one.name.removeprefix(prefix) for one in found]
    return [name for name in names if name.startswith(starts)]


def of_values(run: Run, values: Values) -> tuple[int, dict[str, Array]]:
    """Return the number of steps, and the tensors of a checkpoint."""
    letters = {letter: group for group, letter in STATE.items()}
    tensors, step = {}, run.first
    for buffer, (value, receipt) in values.items():
        letter, _, name = buffer.removeprefix(run.prefix).partition(".")
        tensors[name if letter == "p" else f"::{letters[letter]}.{name}"] = value
        step = run.first + receipt["version"] - 1 if letter == "p" else step
    return step, {**tensors, "::step": np.array(step, np.int64)}


def is_between(prefix: str, values: Values) -> bool:
    """Whether statistics are a step ahead of the parameters: a step writes them first."""
    versions = {name.removeprefix(prefix)[:2]: receipt["version"] for name, (_, receipt) in values.items()}
    return bool(versions.get("s.", 0) > versions["p."])
