"""Readers of the answers about buffers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gradserve_client._http.outcomes import Answer
from gradserve_client._wire.codes import whole
from gradserve_client._wire.tensors import Array, decode
from gradserve_client.models import BufferInfo, Receipt, Statistics, Taken

JSON = "application/json"
"""The media type of receipts and metadata."""


def as_receipt(receipt: Mapping[str, Any], answer: Answer) -> Receipt:
    """Return a receipt that the answer contains."""
    return Receipt.of(receipt, replayed=_is_replayed(answer))


def receipt(answer: Answer) -> Receipt:
    """Read the receipt of a buffer."""
    return as_receipt(json.loads(answer.body), answer)


def receipt_with_value(answer: Answer) -> Receipt:
    """Read the receipt of a buffer with its value, if the buffer has one."""
    values, receipts = _tensors_and_receipts(answer)
    (receipt,) = receipts.values()
    return as_receipt({**receipt, "value": values.get("value")}, answer)


def receipts(answer: Answer) -> dict[str, Receipt]:
    """Read the receipts of several buffers."""
    return {name: as_receipt(receipt, answer) for name, receipt in json.loads(answer.body)["buffers"].items()}


def taken(answer: Answer) -> Taken:
    """Read the receipt and the value of a closed step."""
    values, receipts = _tensors_and_receipts(answer)
    (receipt,) = receipts.values()
    return _taken(receipt, values["value"], answer)


def taken_by_name(answer: Answer) -> dict[str, Taken]:
    """Read the receipts and the values of several closed steps."""
    values, receipts = _tensors_and_receipts(answer)
    return {name: _taken(receipt, values[name], answer) for name, receipt in receipts.items()}


def value(answer: Answer) -> Array:
    """Read the value of a buffer."""
    return values(answer)["value"]


def values(answer: Answer) -> dict[str, Array]:
    """Read the values of several buffers."""
    return whole(decode(answer.body)[0])


def values_with_receipts(answer: Answer) -> dict[str, tuple[Array, Mapping[str, Any]]]:
    """Read the values of several buffers, each with its receipt as the server writes it."""
    values, receipts = _tensors_and_receipts(answer)
    return {name: (values[name], receipt) for name, receipt in receipts.items()}


def info(answer: Answer) -> BufferInfo:
    """Read the metadata of a buffer."""
    return BufferInfo.of(json.loads(answer.body))


def infos(answer: Answer) -> dict[str, BufferInfo]:
    """Read the metadata of several buffers, by name."""
    return {name: BufferInfo.of(fields) for name, fields in json.loads(answer.body)["buffers"].items()}


def statistics(answer: Answer) -> Statistics:
    """Read the statistics of a buffer."""
    return Statistics.of(json.loads(answer.body))


def statistics_by_name(answer: Answer) -> dict[str, Statistics | None]:
    """Read the statistics of several buffers."""
    found = json.loads(answer.body)["statistics"]
    return {name: None if fields is None else Statistics.of(fields) for name, fields in found.items()}


def deleted(answer: Answer) -> None:
    """Check that a buffer was deleted."""
    if answer.status != 204:
        raise ValueError(f"the status is {answer.status}, but must be 204")


def _tensors_and_receipts(answer: Answer) -> tuple[dict[str, Array], dict[str, Any]]:
    tensors, metadata = decode(answer.body)
    return whole(tensors), json.loads(metadata["receipts"])


def _taken(receipt: Mapping[str, Any], value: Array, answer: Answer) -> Taken:
    return Taken.of({**receipt, "value": value}, replayed=_is_replayed(answer))


def _is_replayed(answer: Answer) -> bool:
    return bool(answer.headers.get("idempotency-replayed") == "true")
