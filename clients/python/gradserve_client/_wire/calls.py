"""The calls of operators: what to send, and how to read the answer. Both clients share them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

from gradserve_client._http.outcomes import Answer
from gradserve_client._http.policy import Call
from gradserve_client._wire.answers import JSON, as_receipt
from gradserve_client._wire.arguments import as_contributor, as_float, as_key, as_name, as_query
from gradserve_client._wire.defaults import DEFAULTS
from gradserve_client._wire.tensors import MEDIA_TYPE, Array, TensorLike, as_array, decode, encode
from gradserve_client.errors import InvalidInput, NotFound
from gradserve_client.models import BufferName, OperatorInfo, Receipt, TensorInfo

Into: TypeAlias = "str | BufferName"
Input: TypeAlias = TensorLike | BufferName


class Adding(TypedDict, total=False):
    """How an operator adds to the buffers of `into`."""

    weight: float | None
    epoch: int | None
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
    def tensors(side: str) -> tuple[TensorInfo, ...]:
        return tuple(
            TensorInfo(
                name=tensor["name"],
                dtypes=tuple(tensor["dtypes"]),
                default_dtype=tensor["default_dtype"],
                optional=tensor["optional"],
            )
            for tensor in fields[side]
        )

    return OperatorInfo(
        name=fields["name"],
        formula=fields["formula"],
        description=fields["description"],
        inputs=tensors("inputs"),
        outputs=tensors("outputs"),
        attributes={attribute["name"]: attribute["default"] for attribute in fields["attributes"]},
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
    contributor: str | None = None,
    idempotency_key: str | None = None,
) -> Call[dict[str, Array | Receipt]]:
    """Run the operator. `gives` names all its outputs, if they are known."""
    _check(op, attributes)
    inputs = {name: value for name, value in tensors.items() if value is not None}
    sources = {name: value.name for name, value in inputs.items() if isinstance(value, BufferName)}
    targets = {name: as_name(buffer) for name, buffer in (into or {}).items()}
    return Call(
        "POST",
        f"/v1/ops/{op}",
        _outputs(gives if outputs is None else ()),
        query={
            **as_query(attributes),
            **as_query(
                {
                    "outputs": outputs if outputs is None or isinstance(outputs, str) else ",".join(outputs),
                    "weight": None if weight is None else as_float("weight", weight),
                    "epoch": epoch,
                    "contributor": None if contributor is None else as_contributor(contributor),
                }
            ),
            "from": [f"{name}:{buffer}" for name, buffer in sources.items()],
            "into": [f"{name}:{buffer}" for name, buffer in targets.items()],
        },
        headers={"Content-Type": MEDIA_TYPE, "Accept": MEDIA_TYPE},
        body=encode(_arrays(op, {name: value for name, value in inputs.items() if name not in sources})),
        key=as_key(idempotency_key) if targets or idempotency_key is not None else None,
        buffers=[*sources.values(), *targets.values()],
    )


def _check(op: str, attributes: Mapping[str, Any]) -> None:
    if not isinstance(op, str) or not re.fullmatch(r"[A-Za-z0-9_]+", op):
        raise NotFound(f"There is no operator {op!r}", code="unknown_operator")
    if reserved := attributes.keys() & {"from", "into", "outputs", "weight", "epoch", "contributor"}:
        raise InvalidInput(
            f"{min(reserved)} is not an attribute of an operator: outputs, into, weight, epoch and contributor are"
            " arguments, and a buffer takes the place of an input",
            code="invalid_parameter",
        )


def _arrays(op: str, tensors: Mapping[str, Any]) -> dict[str, Array]:
    dtypes = DEFAULTS.get(op, {})
    return {name: as_array(value, name, dtypes.get(name, "float32")) for name, value in tensors.items()}


def _outputs(names: Sequence[str]) -> Callable[[Answer], dict[str, Array | Receipt]]:
    """Return a reader of outputs and receipts, which must have these names, or any names if there are none."""

    def read(answer: Answer) -> dict[str, Array | Receipt]:
        values, metadata = decode(answer.body)
        receipts = json.loads(metadata.get("receipts", "{}"))
        results: dict[str, Array | Receipt] = {
            **values,
            **{name: as_receipt(receipt, answer) for name, receipt in receipts.items()},
        }
        if names and results.keys() != set(names):
            raise LookupError(f"the outputs are {', '.join(results) or 'none'}, but must be {', '.join(names)}")
        return results

    return read
