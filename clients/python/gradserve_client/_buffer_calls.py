"""The calls of a buffer: what to send, and how to read the answer. Both clients share them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, Unpack

import numpy.typing as npt

from gradserve_client import _answers
from gradserve_client._answers import JSON
from gradserve_client._arguments import (
    as_contributor,
    as_contributors,
    as_dtype,
    as_finite,
    as_float,
    as_key,
    as_name,
    as_query,
    as_whole,
    mistaken,
)
from gradserve_client._policy import Call
from gradserve_client._rows import Rows, tensors_of
from gradserve_client._tensors import MEDIA_TYPE, Array, TensorLike, encode
from gradserve_client.models import BufferInfo, BufferRules, Receipt, Statistics, Taken

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
        **rules_json(rules),
    }


def rules_json(rules: Mapping[str, Any]) -> dict[str, Any]:
    """Return rules as the server reads them. Raises `TypeError` for one that does not exist."""
    for name in rules:
        if name not in _RULES:
            raise TypeError(f"got an unexpected keyword argument {name!r}")
    return {name: None if rule is None else _RULES[name](name, rule) for name, rule in rules.items()}


def create(name: str, spec: Mapping[str, Any], *, exist_ok: bool, idempotency_key: str | None) -> Call[BufferInfo]:
    """Create the buffer."""
    return Call(
        "PUT",
        _path(name),
        _answers.info,
        buffers=[name],
        headers={"Content-Type": JSON, "Accept": JSON, **({} if exist_ok else {"If-None-Match": "*"})},
        body=[json.dumps(spec).encode()],
        key=as_key(idempotency_key),
    )


def info(name: str) -> Call[BufferInfo]:
    """Read the buffer's metadata."""
    return Call("GET", _path(name), _answers.info, headers={"Accept": JSON}, buffers=[name])


def closed(name: str, *, epoch: int, timeout: float) -> Call[Receipt]:
    """Read the receipt of a closed epoch."""
    query = as_query({"epoch": epoch})
    return Call(
        "GET", _path(name), _answers.receipt, query=query, headers={"Accept": JSON}, buffers=[name], wait=timeout
    )


def set_rules(name: str, rules: BufferRules, *, if_match: str | None, idempotency_key: str | None) -> Call[BufferInfo]:
    """Change some rules of the buffer."""
    return Call(
        "PATCH",
        _path(name),
        _answers.info,
        buffers=[name],
        headers={"Content-Type": JSON, "Accept": JSON, **_if_match(if_match)},
        body=[json.dumps(rules_json(rules)).encode()],
        key=as_key(idempotency_key),
    )


def accumulate(
    name: str,
    gradient: TensorLike | Rows,
    *,
    weight: float,
    epoch: int | None,
    overwrite: bool,
    do_update: bool,
    contributor: str | None,
    return_value: bool,
    if_match: str | None,
    idempotency_key: str | None,
) -> Call[Receipt]:
    """Add a gradient."""
    query = add_query(weight, epoch, overwrite, do_update, contributor)
    accept = MEDIA_TYPE if return_value else JSON
    return Call(
        "POST",
        _path(name, "/accumulate"),
        _answers.receipt_with_value if return_value else _answers.receipt,
        buffers=[name],
        query={**query, "return": "value"} if return_value else query,
        headers={"Content-Type": MEDIA_TYPE, "Accept": accept, **_if_match(if_match)},
        body=encode(tensors_of(gradient, "gradient")),
        key=as_key(idempotency_key),
    )


def value(name: str, *, epoch: int | None, reduce: Reduce, dtype: npt.DTypeLike | None, timeout: float) -> Call[Array]:
    """Read the buffer's value."""
    return Call(
        "GET",
        _path(name, "/value"),
        _answers.value,
        buffers=[name],
        query=as_query({"epoch": epoch, "reduce": reduce, "dtype": as_dtype(dtype)}),
        headers={"Accept": MEDIA_TYPE},
        wait=timeout,
    )


def statistics(name: str, *, epoch: int | None, heat_map: int | None) -> Call[Statistics]:
    """Read the statistics of the buffer."""
    query = as_query({"epoch": epoch, "heat_map": heat_map})
    accept = {"Accept": JSON}
    return Call("GET", _path(name, "/statistics"), _answers.statistics, buffers=[name], query=query, headers=accept)


def take(
    name: str,
    *,
    min_count: int,
    epoch: int | None,
    timeout: float,
    reduce: Reduce,
    dtype: npt.DTypeLike | None,
    if_match: str | None,
    idempotency_key: str | None,
) -> Call[Taken]:
    """Close the epoch, and return its value."""
    return Call(
        "POST",
        _path(name, "/take"),
        _answers.taken,
        buffers=[name],
        query=as_query({"min_count": min_count, "epoch": epoch, "reduce": reduce, "dtype": as_dtype(dtype)}),
        headers={"Accept": MEDIA_TYPE, **_if_match(if_match)},
        key=as_key(idempotency_key),
        wait=timeout,
    )


def zero(name: str, *, if_match: str | None, idempotency_key: str | None) -> Call[Receipt]:
    """Discard the sum, and begin the next epoch."""
    return Call(
        "POST",
        _path(name, "/zero"),
        _answers.receipt,
        buffers=[name],
        headers={"Accept": JSON, **_if_match(if_match)},
        key=as_key(idempotency_key),
    )


def delete(name: str, *, if_match: str | None, idempotency_key: str | None) -> Call[None]:
    """Delete the buffer."""
    return Call(
        "DELETE",
        _path(name),
        _answers.deleted,
        buffers=[name],
        headers={"Accept": JSON, **_if_match(if_match)},
        key=as_key(idempotency_key),
    )


def add_query(
    weight: float, epoch: int | None, overwrite: bool, do_update: bool, contributor: str | None
) -> dict[str, Any]:
    """Return the parameters of an add that differ from the server's defaults."""
    return as_query(
        {
            "weight": None if (number := as_float("weight", weight)) == 1 else number,
            "epoch": epoch,
            "overwrite": overwrite or None,
            "do_update": None if do_update else False,
            "contributor": None if contributor is None else as_contributor(contributor),
        }
    )


def _path(name: str, action: str = "") -> str:
    return f"/v1/buffers/{as_name(name)}{action}"


def _dims(shape: Sequence[int] | int) -> list[int]:
    try:
        dims: list[Any] = [*shape]  # type: ignore[misc]
    except TypeError:  # a number
        dims = [shape]
    return [as_whole("shape", dim) for dim in dims]


def _if_match(etag: str | None) -> dict[str, str]:
    if not isinstance(etag, str | None):
        raise mistaken("if_match", f"is {etag!r}, but must be an etag, a string")
    return {} if etag is None else {"If-Match": etag}
