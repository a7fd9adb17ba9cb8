"""Every call of the API, built once: what to send, and how to read the answer. The clients differ in sending only."""

from __future__ import annotations

import json
import operator
import re
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from gradserve_client._policy import Answer, Call
from gradserve_client._tensors import MEDIA_TYPE, Array, TensorLike, as_array, decode, encode
from gradserve_client.errors import InvalidInput, NotFound
from gradserve_client.models import BufferInfo, BufferName, OperatorInfo, Receipt, Taken, TensorInfo

JSON = "application/json"

PAGE = 1000
"""Buffers that one request lists."""

Reduce: TypeAlias = Literal["sum", "mean"]
Into: TypeAlias = "str | BufferName"
Input: TypeAlias = TensorLike | BufferName

# ----- the server and its operators -----


def ready() -> Call[None]:
    """Whether the server takes requests."""
    return Call("GET", "/v2/health/ready", lambda answer: None)


def operators() -> Call[list[OperatorInfo]]:
    """What the server can run."""

    def read(answer: Answer) -> list[OperatorInfo]:
        return [_operator(one) for one in json.loads(answer.body)["operators"]]

    return Call("GET", "/v1/ops", read, headers={"Accept": JSON})


def _operator(one: Mapping[str, Any]) -> OperatorInfo:
    def tensors(side: str) -> tuple[TensorInfo, ...]:
        return tuple(
            TensorInfo(
                name=tensor["name"],
                dtypes=tuple(tensor["dtypes"]),
                default_dtype=tensor["default_dtype"],
                optional=tensor["optional"],
            )
            for tensor in one[side]
        )

    return OperatorInfo(
        name=one["name"],
        formula=one["formula"],
        description=one["description"],
        inputs=tensors("inputs"),
        outputs=tensors("outputs"),
        attributes={attribute["name"]: attribute["default"] for attribute in one["attributes"]},
    )


def run(
    op: str,
    tensors: Mapping[str, Input | None],
    attributes: Mapping[str, Any],
    *,
    defaults: Mapping[str, str] | None = None,
    outputs: Sequence[str] | None = None,
    into: Mapping[str, Into] | None = None,
    weight: float | None = None,
    epoch: int | None = None,
    idempotency_key: str | None = None,
) -> Call[dict[str, Array | Receipt]]:
    """Run the operator. `defaults` are the dtypes of inputs that are lists."""
    if not re.fullmatch(r"[A-Za-z0-9_]+", op):
        raise NotFound(f"There is no operator {op!r}", code="unknown_operator")
    given = {name: value for name, value in tensors.items() if value is not None}
    sources = {name: value.name for name, value in given.items() if isinstance(value, BufferName)}
    arrays = {
        name: as_array(value, name, (defaults or {}).get(name, "float32"))
        for name, value in given.items()
        if name not in sources
    }
    targets = {name: _name(buffer) for name, buffer in (into or {}).items()}

    def read(answer: Answer) -> dict[str, Array | Receipt]:
        values, metadata = decode(answer.body)
        receipts = {name: _receipt(one, answer) for name, one in json.loads(metadata.get("receipts", "{}")).items()}
        return {**values, **receipts}

    return Call(
        "POST",
        f"/v1/ops/{op}",
        read,
        query={
            **_query(attributes),
            **_query(
                {
                    "outputs": outputs if outputs is None or isinstance(outputs, str) else ",".join(outputs),
                    "weight": None if weight is None else _weight(weight),
                    "epoch": epoch,
                }
            ),
            "from": [f"{name}:{buffer}" for name, buffer in sources.items()],
            "into": [f"{name}:{buffer}" for name, buffer in targets.items()],
        },
        headers={"Content-Type": MEDIA_TYPE, "Accept": MEDIA_TYPE},
        body=encode(arrays),
        key=_key(idempotency_key) if targets or idempotency_key is not None else None,
    )


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
    idempotency_key: str | None,
) -> Call[BufferInfo]:
    """Create the buffer."""
    spec = {
        "shape": [operator.index(dim) for dim in (shape if isinstance(shape, Iterable) else [shape])],
        "dtype": _dtype(dtype),
        "quorum": None if quorum is None else operator.index(quorum),
        "keep": operator.index(keep),
        "nonfinite": nonfinite,
        "ttl_seconds": None if ttl_seconds is None else float(ttl_seconds),
    }
    return Call(
        "PUT",
        _path(name),
        _info,
        headers={"Content-Type": JSON, "Accept": JSON},
        body=[json.dumps(spec).encode()],
        key=_key(idempotency_key),
    )


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
            return _receipt(json.loads(answer.body), answer)
        values, metadata = decode(answer.body)
        (receipt,) = json.loads(metadata["receipts"]).values()
        return _receipt({**receipt, "value": values.get("value")}, answer)

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
        key=_key(idempotency_key),
    )


def value(name: str, *, epoch: int | None, reduce: Reduce, dtype: npt.DTypeLike | None, timeout: float) -> Call[Array]:
    """The buffer's value."""
    return Call(
        "GET",
        _path(name, "/value"),
        lambda answer: decode(answer.body)[0]["value"],
        query={**_query({"epoch": epoch, "reduce": reduce, "dtype": _dtype(dtype)})},
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
        return Taken(**_fields({**receipt, "value": values["value"]}, answer))

    return Call(
        "POST",
        _path(name, "/take"),
        read,
        query=_query({"min_count": min_count, "epoch": epoch, "reduce": reduce, "dtype": _dtype(dtype)}),
        headers={"Accept": MEDIA_TYPE, **_if_match(if_match)},
        key=_key(idempotency_key),
        wait=timeout,
    )


def zero(name: str, *, if_match: str | None, idempotency_key: str | None) -> Call[Receipt]:
    """Discard the sum, and begin the next epoch."""
    return Call(
        "POST",
        _path(name, "/zero"),
        lambda answer: _receipt(json.loads(answer.body), answer),
        headers={"Accept": JSON, **_if_match(if_match)},
        key=_key(idempotency_key),
    )


def delete(name: str, *, if_match: str | None, idempotency_key: str | None) -> Call[None]:
    """Forget the buffer."""
    return Call(
        "DELETE",
        _path(name),
        lambda answer: None,
        headers={"Accept": JSON, **_if_match(if_match)},
        key=_key(idempotency_key),
    )


# ----- many buffers -----


def page(prefix: str, cursor: str) -> Call[tuple[list[BufferInfo], str | None]]:
    """Some buffers, and where the next ones begin."""

    def read(answer: Answer) -> tuple[list[BufferInfo], str | None]:
        page = json.loads(answer.body)
        return [BufferInfo.of(one) for one in page["buffers"]], page["next_cursor"]

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
        key=_key(idempotency_key),
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
        query=_query({"prefix": prefix, "epoch": epoch, "reduce": reduce, "dtype": _dtype(dtype)}),
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
        return {name: Taken(**_fields({**one, "value": values[name]}, answer)) for name, one in receipts.items()}

    return Call(
        "POST",
        "/v1/buffers/take",
        read,
        query=_query(
            {"prefix": prefix, "min_count": min_count, "epoch": epoch, "reduce": reduce, "dtype": _dtype(dtype)}
        ),
        key=_key(idempotency_key),
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
        query=_query({"prefix": prefix}),
        key=_key(idempotency_key),
        **_named(names, prefix, answers=JSON),
    )


# ----- what they share -----


def _key(given: str | None) -> str:
    return uuid.uuid4().hex if given is None else given


def _name(buffer: str | BufferName) -> str:
    name = buffer.name if isinstance(buffer, BufferName) else buffer
    if not re.fullmatch(r"[A-Za-z0-9._:-]{1,200}", name) or name in (".", ".."):  # which mean others in a URL
        raise InvalidInput(
            f"{name!r} is no name of a buffer: 1 to 200 of the characters A-Z a-z 0-9 . _ : -, but neither . nor ..",
            code="invalid_parameter",
        )
    return name


def _path(name: str, what: str = "") -> str:
    return f"/v1/buffers/{_name(name)}{what}"


def _query(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that are not left out, as a URL has them."""
    given = {name: one for name, one in parameters.items() if one is not None}
    for name, one in given.items():
        if isinstance(one, list | tuple) and not one:  # of which a URL would have nothing, as if it were left out
            raise InvalidInput(f"{name} is empty: leave it out, or say what it is", code="invalid_parameter")
    return {name: str(one).lower() if isinstance(one, bool | np.bool_) else one for name, one in given.items()}


def _adding(weight: float, epoch: int | None, overwrite: bool, do_update: bool, return_value: bool) -> dict[str, Any]:
    """The parameters of an add that are not as they would be anyway."""
    return _query(
        {
            "weight": None if weight == 1 else _weight(weight),
            "epoch": epoch,
            "overwrite": overwrite or None,
            "do_update": None if do_update else False,
            "return": "value" if return_value else None,
        }
    )


def _weight(weight: float) -> float:
    try:
        return float(weight)
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidInput(f"weight is no number that a float can be: {error}", code="invalid_parameter") from None


def _if_match(tag: str | None) -> dict[str, str]:
    return {} if tag is None else {"If-Match": tag}


def _named(names: Collection[str] | None, prefix: str | None, *, answers: str) -> dict[str, Any]:
    """The headers and the body of a request for buffers by their names, or, without a body, by a prefix."""
    if (names is None) is (prefix is None):
        raise InvalidInput("Say which buffers: either names or prefix", code="invalid_parameter")
    if names is None:
        return {"headers": {"Accept": answers}}
    if isinstance(names, str):
        raise InvalidInput(f"names is {names!r}, but must be a list of names", code="invalid_parameter")
    body = json.dumps({"names": [_name(name) for name in names]}).encode()
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


def _fields(receipt: Mapping[str, Any], answer: Answer) -> dict[str, Any]:
    known = {name: one for name, one in receipt.items() if name in Receipt.__dataclass_fields__}
    return {**known, "replayed": answer.headers.get("idempotency-replayed") == "true"}


def _receipt(receipt: Mapping[str, Any], answer: Answer) -> Receipt:
    return Receipt(**_fields(receipt, answer))


def _receipts(answer: Answer) -> dict[str, Receipt]:
    return {name: _receipt(one, answer) for name, one in json.loads(answer.body)["buffers"].items()}
