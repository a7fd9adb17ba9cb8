"""The calls of buffers, built once, as those of operators in `_calls.py`."""

from __future__ import annotations

import json
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from gradserve_client._calls import JSON, as_float, as_key, as_name, as_query, as_receipt, receipt_fields
from gradserve_client._policy import Answer, Call
from gradserve_client._tensors import MEDIA_TYPE, Array, TensorLike, as_array, decode, encode
from gradserve_client.errors import InvalidInput
from gradserve_client.models import BufferInfo, Receipt, Taken

PAGE = 1000
"""Buffers that one request lists."""

Reduce: TypeAlias = Literal["sum", "mean"]

# ----- one buffer -----


def create(
    name: str,
    shape: Sequence[int] | int,
    *,
    dtype: npt.DTypeLike,
    quorum: int | None,
    keep: int,
    nonfinite: str,
    ttl_seconds: float | None,
    exist_ok: bool,
    idempotency_key: str | None,
) -> Call[BufferInfo]:
    """Create the buffer."""
    if not isinstance(nonfinite, str):
        raise InvalidInput(f"nonfinite is {nonfinite!r}, but must be a string", code="invalid_parameter")
    spec = {
        "shape": _dims(shape),
        "dtype": _dtype(dtype),
        "quorum": None if quorum is None else _whole("quorum", quorum),
        "keep": _whole("keep", keep),
        "nonfinite": nonfinite,
        "ttl_seconds": None if ttl_seconds is None else as_float("ttl_seconds", ttl_seconds),
    }
    return Call(
        "PUT",
        _path(name),
        _info,
        headers={"Content-Type": JSON, "Accept": JSON, **({} if exist_ok else {"If-None-Match": "*"})},
        body=[json.dumps(spec).encode()],
        key=as_key(idempotency_key),
    )


def _dims(shape: Sequence[int] | int) -> list[int]:
    try:
        dims: list[Any] = [*shape]  # type: ignore[misc]
    except TypeError:  # a number
        dims = [shape]
    return [_whole("shape", dim) for dim in dims]


def _whole(name: str, number: SupportsIndex) -> int:
    try:
        return operator.index(number)
    except TypeError:
        raise InvalidInput(f"{name} has {number!r}, but must be of integers", code="invalid_parameter") from None


def info(name: str) -> Call[BufferInfo]:
    """The buffer's metadata."""
    return Call("GET", _path(name), _info, headers={"Accept": JSON})


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

    def read(answer: Answer) -> Receipt:
        if not return_value:
            return as_receipt(json.loads(answer.body), answer)
        values, metadata = decode(answer.body)
        (receipt,) = json.loads(metadata["receipts"]).values()
        return as_receipt({**receipt, "value": values.get("value")}, answer)

    return Call(
        "POST",
        _path(name, "/accumulate"),
        read,
        query=_adding(weight, epoch, overwrite, do_update, return_value),
        headers={
            "Content-Type": MEDIA_TYPE,
            "Accept": MEDIA_TYPE if return_value else JSON,
            **_if_match(if_match),
        },
        body=encode({"gradient": as_array(gradient, "gradient", "float64")}),
        key=as_key(idempotency_key),
    )


def value(name: str, *, epoch: int | None, reduce: Reduce, dtype: npt.DTypeLike | None, timeout: float) -> Call[Array]:
    """The buffer's value."""
    return Call(
        "GET",
        _path(name, "/value"),
        lambda answer: decode(answer.body)[0]["value"],
        query=as_query({"epoch": epoch, "reduce": reduce, "dtype": _dtype(dtype)}),
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
    """Close the epoch and answer its value."""

    def read(answer: Answer) -> Taken:
        values, metadata = decode(answer.body)
        (receipt,) = json.loads(metadata["receipts"]).values()
        return Taken(**receipt_fields({**receipt, "value": values["value"]}, answer))

    return Call(
        "POST",
        _path(name, "/take"),
        read,
        query=as_query({"min_count": min_count, "epoch": epoch, "reduce": reduce, "dtype": _dtype(dtype)}),
        headers={"Accept": MEDIA_TYPE, **_if_match(if_match)},
        key=as_key(idempotency_key),
        wait=timeout,
    )


def zero(name: str, *, if_match: str | None, idempotency_key: str | None) -> Call[Receipt]:
    """Discard the sum, and begin the next epoch."""
    return Call(
        "POST",
        _path(name, "/zero"),
        lambda answer: as_receipt(json.loads(answer.body), answer),
        headers={"Accept": JSON, **_if_match(if_match)},
        key=as_key(idempotency_key),
    )


def delete(name: str, *, if_match: str | None, idempotency_key: str | None) -> Call[None]:
    """Forget the buffer."""

    def read(answer: Answer) -> None:
        if answer.status != 204:
            raise ValueError(f"the status is {answer.status}, but must be 204")

    return Call(
        "DELETE",
        _path(name),
        read,
        headers={"Accept": JSON, **_if_match(if_match)},
        key=as_key(idempotency_key),
    )


# ----- many buffers -----


def page(prefix: str, cursor: str) -> Call[tuple[list[BufferInfo], str | None]]:
    """Some buffers, and where the next ones begin."""

    def read(answer: Answer) -> tuple[list[BufferInfo], str | None]:
        page = json.loads(answer.body)
        return [BufferInfo.of(one) for one in page["buffers"]], page["next_cursor"]

    if not isinstance(prefix, str):
        raise InvalidInput(f"prefix is {prefix!r}, but must be a string", code="invalid_parameter")
    query = {"prefix": prefix, "cursor": cursor, "limit": PAGE}
    return Call("GET", "/v1/buffers", read, query=query, headers={"Accept": JSON})


def accumulate_many(
    gradients: Mapping[str, TensorLike],
    *,
    weight: float,
    epoch: int | None,
    overwrite: bool,
    do_update: bool,
    idempotency_key: str | None,
) -> Call[dict[str, Receipt]]:
    """Add gradients to many buffers."""
    return Call(
        "POST",
        "/v1/buffers/accumulate",
        _receipts,
        query=_adding(weight, epoch, overwrite, do_update, return_value=False),
        headers={"Content-Type": MEDIA_TYPE, "Accept": JSON},
        body=encode({name: as_array(one, name, "float64") for name, one in gradients.items()}),
        key=as_key(idempotency_key),
    )


def value_many(
    names: Collection[str] | None,
    prefix: str | None,
    *,
    epoch: int | None,
    reduce: Reduce,
    dtype: npt.DTypeLike | None,
    timeout: float,
) -> Call[dict[str, Array]]:
    """The values of many buffers."""
    return Call(
        "POST",
        "/v1/buffers/value",
        lambda answer: decode(answer.body)[0],
        query=as_query({"prefix": prefix, "epoch": epoch, "reduce": reduce, "dtype": _dtype(dtype)}),
        wait=timeout,
        **_named(names, prefix, answers=MEDIA_TYPE),
    )


def take_many(
    names: Collection[str] | None,
    prefix: str | None,
    *,
    min_count: int,
    epoch: int | None,
    timeout: float,
    reduce: Reduce,
    dtype: npt.DTypeLike | None,
    idempotency_key: str | None,
) -> Call[dict[str, Taken]]:
    """Close the epochs of many buffers and answer their values."""

    def read(answer: Answer) -> dict[str, Taken]:
        values, metadata = decode(answer.body)
        receipts = json.loads(metadata["receipts"])
        return {name: Taken(**receipt_fields({**one, "value": values[name]}, answer)) for name, one in receipts.items()}

    return Call(
        "POST",
        "/v1/buffers/take",
        read,
        query=as_query(
            {"prefix": prefix, "min_count": min_count, "epoch": epoch, "reduce": reduce, "dtype": _dtype(dtype)}
        ),
        key=as_key(idempotency_key),
        wait=timeout,
        **_named(names, prefix, answers=MEDIA_TYPE),
    )


def zero_many(
    names: Collection[str] | None, prefix: str | None, *, idempotency_key: str | None
) -> Call[dict[str, Receipt]]:
    """Discard the sums of many buffers."""
    return Call(
        "POST",
        "/v1/buffers/zero",
        _receipts,
        query=as_query({"prefix": prefix}),
        key=as_key(idempotency_key),
        **_named(names, prefix, answers=JSON),
    )


# ----- what they share -----


def _path(name: str, what: str = "") -> str:
    return f"/v1/buffers/{as_name(name)}{what}"


def _adding(weight: float, epoch: int | None, overwrite: bool, do_update: bool, return_value: bool) -> dict[str, Any]:
    """The parameters of an add that are not as they would be anyway."""
    return as_query(
        {
            "weight": None if (number := as_float("weight", weight)) == 1 else number,
            "epoch": epoch,
            "overwrite": overwrite or None,
            "do_update": None if do_update else False,
            "return": "value" if return_value else None,
        }
    )


def _if_match(tag: str | None) -> dict[str, str]:
    if not isinstance(tag, str | None):
        raise InvalidInput(f"if_match is {tag!r}, but must be an etag, a string", code="invalid_parameter")
    return {} if tag is None else {"If-Match": tag}


def _named(names: Collection[str] | None, prefix: str | None, *, answers: str) -> dict[str, Any]:
    """The headers and the body of a request for buffers by their names, or, without a body, by a prefix."""
    if (names is None) is (prefix is None):
        raise InvalidInput("Say which buffers: either names or prefix", code="invalid_parameter")
    if names is None:
        return {"headers": {"Accept": answers}}
    if isinstance(names, str):
        raise InvalidInput(f"names is {names!r}, but must be a list of names", code="invalid_parameter")
    body = json.dumps({"names": [as_name(name) for name in names]}).encode()
    return {"headers": {"Content-Type": JSON, "Accept": answers}, "body": [body]}


def _dtype(dtype: npt.DTypeLike | None) -> str | None:
    """The name of a dtype."""
    if dtype is None or dtype == "bfloat16":  # which NumPy knows only by ml_dtypes' class
        return None if dtype is None else "bfloat16"
    try:
        return np.dtype(dtype).name
    except TypeError as error:
        raise InvalidInput(f"dtype is {dtype!r}: {error}", code="invalid_parameter") from error


def _info(answer: Answer) -> BufferInfo:
    return BufferInfo.of(json.loads(answer.body))


def _receipts(answer: Answer) -> dict[str, Receipt]:
    return {name: as_receipt(one, answer) for name, one in json.loads(answer.body)["buffers"].items()}
