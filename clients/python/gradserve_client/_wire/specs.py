"""What the calls of a buffer and of several have alike: specifications, rules and the parameters of an add."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar, Unpack

import numpy.typing as npt

from gradserve_client._http.outcomes import Answer
from gradserve_client._http.policy import Call
from gradserve_client._wire.answers import JSON
from gradserve_client._wire.arguments import (
    as_contributor,
    as_contributors,
    as_dtype,
    as_finite,
    as_float,
    as_name,
    as_query,
    as_whole,
)
from gradserve_client.errors import mistaken
from gradserve_client.models import BufferRules

T = TypeVar("T")

Reduce: TypeAlias = Literal["sum", "mean"]

_RULES: dict[str, Callable[[str, Any], Any]] = {
    "quorum": as_whole,
    "ttl_seconds": as_finite,
    "deadline_seconds": as_finite,
    "min_count": as_whole,
    "quorum_weight": as_finite,
    "contributors": as_contributors,
    "per_contributor": as_whole,
    "max_norm": as_finite,
}
"""The checks of the rules, by their names."""


def spec_json(
    shape: Sequence[int] | int,
    *,
    dtype: npt.DTypeLike = "float32",
    keep: int = 1,
    nonfinite: str = "allow",
    life: str | None = None,
    **rules: Unpack[BufferRules],
) -> dict[str, Any]:
    """Return the specification of a buffer as the server reads it."""
    if not isinstance(nonfinite, str):
        raise mistaken("nonfinite", f"is {nonfinite!r}, but must be a string")
    return {
        "shape": _dims(shape),
        "dtype": as_dtype(dtype),
        "keep": as_whole("keep", keep),
        "nonfinite": nonfinite,
        **({} if life is None else {"life": life}),
        **rules_json(rules),
    }


def rules_json(rules: Mapping[str, Any]) -> dict[str, Any]:
    """Return rules as the server reads them. Raises `TypeError` for one that does not exist."""
    for name in rules:
        if name not in _RULES:
            raise TypeError(f"got an unexpected keyword argument {name!r}")
    return {name: None if rule is None else _RULES[name](name, rule) for name, rule in rules.items()}


def on(
    name: str,
    method: str,
    action: str,
    read: Callable[[Answer], T],
    *,
    headers: Mapping[str, str] | None = None,
    **more: Any,
) -> Call[T]:
    """Return a call of a buffer: `action` is the end of its path. Without other `headers`, the answer is JSON."""
    path = f"/v1/buffers/{as_name(name)}{action}"
    return Call(method, path, read, buffers=[name], headers={"Accept": JSON, **(headers or {})}, **more)


def add_query(
    weight: float, step: int | None, overwrite: bool, do_update: bool, contributor: str | None, life: str | None = None
) -> dict[str, Any]:
    """Return the parameters of an add that differ from the server's defaults."""
    return as_query(
        {
            "weight": None if (number := as_float("weight", weight)) == 1 else number,
            "step": step,
            "overwrite": overwrite or None,
            "do_update": None if do_update else False,
            "contributor": None if contributor is None else as_contributor(contributor),
            "life": life,
        }
    )


def matching(etag: str | None) -> dict[str, str]:
    """Return the header for the `etag` that a buffer must have."""
    if not isinstance(etag, str | None):
        raise mistaken("if_match", f"is {etag!r}, but must be an etag, a string")
    return {} if etag is None else {"If-Match": etag}


def _dims(shape: Sequence[int] | int) -> list[int]:
    try:
        dims: list[Any] = [*shape]  # type: ignore[misc]
    except TypeError:  # a number
        dims = [shape]
    return [as_whole("shape", dim) for dim in dims]
