"""The calls of operators, built once: what to send, and how to read the answer. The clients differ in sending only."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from gradserve_client._defaults import DEFAULTS
from gradserve_client._policy import Answer, Call
from gradserve_client._tensors import MEDIA_TYPE, Array, TensorLike, as_array, decode, encode
from gradserve_client.errors import InvalidInput, NotFound
from gradserve_client.models import BufferName, OperatorInfo, Receipt, TensorInfo

JSON = "application/json"

Into: TypeAlias = "str | BufferName"
Input: TypeAlias = TensorLike | BufferName

# ----- the server and its operators -----


def ready() -> Call[None]:
    """Whether the server takes requests."""

    def read(answer: Answer) -> None:
        if not json.loads(answer.body)["ready"]:
            raise ValueError("it is not ready")

    return Call("GET", "/v2/health/ready", read)


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
    gives: Sequence[str] = (),
    outputs: Sequence[str] | None = None,
    into: Mapping[str, Into] | None = None,
    weight: float | None = None,
    epoch: int | None = None,
    idempotency_key: str | None = None,
) -> Call[dict[str, Array | Receipt]]:
    """Run the operator. `gives` are its outputs, where known."""
    if not isinstance(op, str) or not re.fullmatch(r"[A-Za-z0-9_]+", op):
        raise NotFound(f"There is no operator {op!r}", code="unknown_operator")
    if wrong := attributes.keys() & {"from", "into", "outputs", "weight", "epoch"}:
        raise InvalidInput(
            f"{min(wrong)} is no attribute of an operator; outputs, into, weight and epoch are arguments of their own,"
            " and an input is taken from a buffer that is given in its place",
            code="invalid_parameter",
        )
    given = {name: value for name, value in tensors.items() if value is not None}
    sources = {name: value.name for name, value in given.items() if isinstance(value, BufferName)}
    defaults = DEFAULTS.get(op, {})
    arrays = {
        name: as_array(value, name, defaults.get(name, "float32"))
        for name, value in given.items()
        if name not in sources
    }
    targets = {name: as_name(buffer) for name, buffer in (into or {}).items()}

    def read(answer: Answer) -> dict[str, Array | Receipt]:
        values, metadata = decode(answer.body)
        receipts = {name: as_receipt(one, answer) for name, one in json.loads(metadata.get("receipts", "{}")).items()}
        results: dict[str, Array | Receipt] = {**values, **receipts}
        if gives and outputs is None and results.keys() != set(gives):
            raise LookupError(f"the outputs are {', '.join(results) or 'none'}, but must be {', '.join(gives)}")
        return results

    return Call(
        "POST",
        f"/v1/ops/{op}",
        read,
        query={
            **as_query(attributes),
            **as_query(
                {
                    "outputs": outputs if outputs is None or isinstance(outputs, str) else ",".join(outputs),
                    "weight": None if weight is None else as_float("weight", weight),
                    "epoch": epoch,
                }
            ),
            "from": [f"{name}:{buffer}" for name, buffer in sources.items()],
            "into": [f"{name}:{buffer}" for name, buffer in targets.items()],
        },
        headers={"Content-Type": MEDIA_TYPE, "Accept": MEDIA_TYPE},
        body=encode(arrays),
        key=as_key(idempotency_key) if targets or idempotency_key is not None else None,
    )


# ----- what the calls share -----


def as_key(given: str | None) -> str:
    """The key of a change: a new one if none was given. Raises `InvalidInput`."""
    if given is None:
        return uuid.uuid4().hex
    if not isinstance(given, str) or not re.fullmatch(r"[!-~]([ -~]{0,253}[!-~])?", given):
        raise InvalidInput(
            f"idempotency_key is {given!r}, but must be 1 to 255 printable ASCII characters, without a space at either"
            " end",
            code="invalid_parameter",
        )
    return given


def as_name(buffer: str | BufferName) -> str:
    """The name of a buffer. Raises `InvalidInput`."""
    name = buffer.name if isinstance(buffer, BufferName) else buffer
    fits = isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9._:-]{1,200}", name)
    if not fits or name in (".", ".."):  # which mean others in a URL
        raise InvalidInput(
            f"{name!r} is no name of a buffer: 1 to 200 of the characters A-Z a-z 0-9 . _ : -, but neither . nor ..",
            code="invalid_parameter",
        )
    return name


def as_query(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that are not left out, as a URL has them."""
    given = {name: one for name, one in parameters.items() if one is not None}
    for name, one in given.items():
        if isinstance(one, list | tuple) and not one:  # of which a URL would have nothing, as if it were left out
            raise InvalidInput(f"{name} is empty: leave it out, or say what it is", code="invalid_parameter")
    return {name: str(one).lower() if isinstance(one, bool | np.bool_) else one for name, one in given.items()}


def as_float(name: str, number: float) -> float:
    """An argument that is a number. Raises `InvalidInput`."""
    try:
        return float(number)
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidInput(f"{name} is no number that a float can be: {error}", code="invalid_parameter") from None


def receipt_fields(receipt: Mapping[str, Any], answer: Answer) -> dict[str, Any]:
    """What a `Receipt` is made of."""
    known = {name: one for name, one in receipt.items() if name in Receipt.__dataclass_fields__}
    return {**known, "replayed": answer.headers.get("idempotency-replayed") == "true"}


def as_receipt(receipt: Mapping[str, Any], answer: Answer) -> Receipt:
    """A receipt in an answer."""
    return Receipt(**receipt_fields(receipt, answer))
