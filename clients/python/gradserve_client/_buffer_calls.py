"""The calls of a buffer: what to send, and how to read the answer. Both clients share them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy.typing as npt

from gradserve_client import _answers
from gradserve_client._answers import JSON
from gradserve_client._arguments import as_dtype, as_float, as_key, as_name, as_query, as_whole
from gradserve_client._policy import Call
from gradserve_client._tensors import MEDIA_TYPE, Array, TensorLike, as_array, encode
from gradserve_client.errors import InvalidInput
from gradserve_client.models import BufferInfo, Receipt, Taken

Reduce: TypeAlias = Literal["sum", "mean"]


def spec_json(
    shape: Sequence[int] | int,
    *,
    dtype: npt.DTypeLike = "float32",
    quorum: int | None = None,
    keep: int = 1,
    nonfinite: str = "allow",
    ttl_seconds: float | None = None,
    max_norm: float | None = None,
) -> dict[str, Any]:
    """Return the specification of a buffer as the server reads it."""
    if not isinstance(nonfinite, str):
        raise InvalidInput(f"nonfinite is {nonfinite!r}, but must be a string", code="invalid_parameter")
    return {
        "shape": _dims(shape),
        "dtype": as_dtype(dtype),
        "quorum": None if quorum is None else as_whole("quorum", quorum),
        "keep": as_whole("keep", keep),
        "nonfinite": nonfinite,
        "ttl_seconds": None if ttl_seconds is None else as_float("ttl_seconds", ttl_seconds),
        "max_norm": None if max_norm is None else as_float("max_norm", max_norm),
    }


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


def accumulate(
    name: str,
    gradient: TensorLike,
    *,
    weight: float,
    epoch: int | None,
    overwrite: bool,
    do_update: bool,
    return_value: bool,
    if_match: str | None,
    idempotency_key: str | None,
) -> Call[Receipt]:
    """Add a gradient."""
    query = add_query(weight, epoch, overwrite, do_update)
    accept = MEDIA_TYPE if return_value else JSON
    return Call(
        "POST",
        _path(name, "/accumulate"),
        _answers.receipt_with_value if return_value else _answers.receipt,
        buffers=[name],
        query={**query, "return": "value"} if return_value else query,
        headers={"Content-Type": MEDIA_TYPE, "Accept": accept, **_if_match(if_match)},
        body=encode({"gradient": as_array(gradient, "gradient", "float64")}),
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


def add_query(weight: float, epoch: int | None, overwrite: bool, do_update: bool) -> dict[str, Any]:
    """Return the parameters of an add that differ from the server's defaults."""
    return as_query(
        {
            "weight": None if (number := as_float("weight", weight)) == 1 else number,
            "epoch": epoch,
            "overwrite": overwrite or None,
            "do_update": None if do_update else False,
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
        raise InvalidInput(f"if_match is {etag!r}, but must be an etag, a string", code="invalid_parameter")
    return {} if etag is None else {"If-Match": etag}
