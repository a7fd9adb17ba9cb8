"""The calls of operators: what to send, and how to read the answer. Both clients share them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any, TypeAlias, TypedDict, TypeVar

from gradserve_client._http.outcomes import Answer
from gradserve_client._http.policy import Call
from gradserve_client._wire.answers import JSON, as_receipt
from gradserve_client._wire.arguments import as_contributor, as_float, as_key, as_query, as_target
from gradserve_client._wire.defaults import DEFAULTS, GROUPS
from gradserve_client._wire.tensors import MEDIA_TYPE, Array, TensorLike, as_array, decode, encode
from gradserve_client.errors import InvalidInput, NotFound
from gradserve_client.models import BufferName, OperatorInfo, Receipt, TensorInfo

T = TypeVar("T")

Into: TypeAlias = "str | BufferName"
Input: TypeAlias = TensorLike | BufferName
Inputs: TypeAlias = Mapping[str, Input] | Sequence[Input]
"""A group of tensors, by name or in order."""


RESERVED = ("from", "outputs", "into", "set", "reduce", "timeout", "weight", "step", "contributor")
"""Parameters of a request that no operator has as an attribute."""


class Adding(TypedDict, total=False):
    """How an operator adds to the buffers of `into`."""

    weight: float | None
    step: int | None
    contributor: str | None
    idempotency_key: str | None


def ready() -> Call[None]:
    """Ask once whether the server takes requests."""

    def read(answer: Answer) -> None:
        if not json.loads(answer.body)["ready"]:
            raise ValueError("it is not ready")

    return Call("GET", "/v2/health/ready", read, is_retried=False)


def limits() -> Call[dict[str, Any]]:
    """Read the limits of the server."""

    def read(answer: Answer) -> dict[str, Any]:
        return {**json.loads(answer.body)}

    return Call("GET", "/v1/limits", read, headers={"Accept": JSON})


def version() -> Call[str]:
    """Read the name and the version of the server."""

    def read(answer: Answer) -> str:
        about = json.loads(answer.body)
        return f"{about['name']} {about.get('version') or ''}".strip()

    return Call("GET", "/v2", read, headers={"Accept": JSON})


def clock() -> Call[float | None]:
    """Read the server's time in seconds since 1970, if it says so, without fractions."""

    def read(answer: Answer) -> float | None:
        with suppress(KeyError, ValueError):
            return parsedate_to_datetime(answer.headers["date"]).timestamp()
        return None

    return Call("GET", "/v2", read, headers={"Accept": JSON})


def caller() -> Call[dict[str, Any]]:
    """Read whom the server takes the client for: `name`, `namespace`, `scopes`, and whether it has `keys`."""

    def read(answer: Answer) -> dict[str, Any]:
        return {**json.loads(answer.body)}

    return Call("GET", "/v1/caller", read, headers={"Accept": JSON})


def operators() -> Call[list[OperatorInfo]]:
    """List the operators."""

    def read(answer: Answer) -> list[OperatorInfo]:
        return [_operator(fields) for fields in json.loads(answer.body)["operators"]]

    return Call("GET", "/v1/ops", read, headers={"Accept": JSON})


def _operator(fields: Mapping[str, Any]) -> OperatorInfo:
    inputs, outputs = (tuple(map(TensorInfo.of, fields[side])) for side in ("inputs", "outputs"))
    attributes = {one["name"]: one["default"] for one in fields["attributes"]}
    required = tuple(one["name"] for one in fields["attributes"] if one.get("required"))
    return OperatorInfo.of(fields, inputs=inputs, outputs=outputs, attributes=attributes, required=required)


def run(
    op: str, tensors: Mapping[str, Input | Inputs | None], attributes: Mapping[str, Any], **more: Any
) -> Call[dict[str, Array | Receipt]]:
    """Run the operator. `more` are the arguments of `running`.

    The tensor `b` of the group `weights` has the name `weights.b` in the results, and may have it in the arguments.
    """
    _check(op, attributes)
    inputs = flat(tensors, GROUPS.get(op, ()))
    return running(f"/v1/ops/{op}", inputs, DEFAULTS.get(op, {}), outputs_in, attributes, **more)


def running(
    path: str,
    inputs: Mapping[str, Any],
    dtypes: Mapping[str, str],
    read: Callable[[Answer], T],
    attributes: Mapping[str, Any] | None = None,
    *,
    outputs: Sequence[str] | None = None,
    into: Mapping[str, Into | Mapping[str, Into]] | None = None,
    set: Mapping[str, Into | Mapping[str, Into]] | None = None,
    reduce: str | None = None,
    timeout: float = 0.0,
    weight: float | None = None,
    step: int | None = None,
    contributor: str | None = None,
    life: str | None = None,
    idempotency_key: str | None = None,
) -> Call[T]:
    """Run what is at this path. `dtypes` are those of lists, by the names of inputs and groups."""
    sources = {name: value.name for name, value in inputs.items() if isinstance(value, BufferName)}
    added, written = _targets(into), _targets(set)
    tensors = {name: value for name, value in inputs.items() if name not in sources}
    return Call(
        "POST",
        path,
        read,
        query={
            **as_query(attributes or {}),
            **as_query(
                {
                    "outputs": outputs if outputs is None or isinstance(outputs, str) else ",".join(outputs),
                    "weight": None if weight is None else as_float("weight", weight),
                    "step": step,
                    "contributor": None if contributor is None else as_contributor(contributor),
                    "life": life,
                    "reduce": reduce,
                }
            ),
            "from": [f"{name}:{buffer}" for name, buffer in sources.items()],
            "into": [f"{name}:{buffer}" for name, buffer in added.items()],
            "set": [f"{name}:{buffer}" for name, buffer in written.items()],
        },
        headers={"Content-Type": MEDIA_TYPE, "Accept": MEDIA_TYPE},
        body=encode(_arrays(tensors, dtypes)),
        key=as_key(idempotency_key) if added or written or idempotency_key is not None else None,
        buffers=[*(name.partition("@")[0] for name in sources.values()), *added.values(), *written.values()],
        wait=timeout,
    )


def _targets(given: Mapping[str, Into | Mapping[str, Into]] | None) -> dict[str, str]:
    """Return the buffers of outputs. The prefix of a group's buffers ends with `*`."""
    return {name: as_target(buffer) for name, buffer in flat(given or {}, {*(given or {})}).items()}


def _check(op: str, attributes: Mapping[str, Any]) -> None:
    if not isinstance(op, str) or not re.fullmatch(r"[A-Za-z0-9_]+", op):
        raise NotFound(f"There is no operator {op!r}", code="unknown_operator")
    if reserved := attributes.keys() & RESERVED:
        raise InvalidInput(
            f"{min(reserved)} is not an attribute of an operator: {', '.join(RESERVED[1:-1])} and {RESERVED[-1]} are"
            " arguments, and a buffer takes the place of an input",
            code="invalid_parameter",
        )


def flat(values: Mapping[str, Any], groups: Collection[str]) -> dict[str, Any]:
    """Return the values that are not None, and those in the groups, by names like `weights.b`."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if value is None:
            continue
        if name in groups and isinstance(value, Mapping):
            flat.update({f"{name}.{member}": one for member, one in value.items()})
        elif name in groups and isinstance(value, list | tuple):
            flat.update({f"{name}.{number}": one for number, one in enumerate(value)})
        else:
            flat[name] = value
    return flat


def _arrays(tensors: Mapping[str, Any], dtypes: Mapping[str, str]) -> dict[str, Array]:
    return {
        name: as_array(value, name, dtypes.get(name.partition(".")[0], "float32")) for name, value in tensors.items()
    }


def outputs_in(answer: Answer) -> dict[str, Array | Receipt]:
    """Read the outputs and the receipts of an operator."""
    values, metadata = decode(answer.body)
    receipts = json.loads(metadata.get("receipts", "{}"))
    return {**values, **{name: as_receipt(receipt, answer) for name, receipt in receipts.items()}}
