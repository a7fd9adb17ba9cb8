"""Answers to changes of buffers: receipts, values, and the headers that go with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from service.api.http.body import Answer
from service.api.http.negotiation import JSON
from service.buffers.perform import Outcome
from service.buffers.record import Receipt
from service.codecs import json as json_codec
from service.codecs import safetensors
from service.dtypes import Array


def etag_after(receipt: Mapping[str, Any]) -> str:
    """The tag of the buffer after the change that left this receipt."""
    return f'"{receipt["epoch"] + receipt["closed"]}-{receipt["version"]}"'


def answer(
    receipts: Mapping[str, Receipt],
    values: Mapping[str, Array],
    media_type: str,
    form: json_codec.Form,
    headers: Mapping[str, str],
    *,
    one: bool,
) -> Answer:
    """The receipts, each with its value if it has one, of one buffer or of many."""
    if media_type != JSON:
        tensors = dict(zip(["value"], values.values(), strict=False)) if one else values
        return Answer(safetensors.encode(tensors, receipts_text(receipts)), media_type, headers)
    if not values:
        (whole,) = receipts.values() if one else [{"buffers": receipts}]
        return Answer([orjson.dumps(whole)], media_type, headers)
    pieces: list[bytes] = [] if one else [b'{"buffers":{']
    for number, (name, receipt) in enumerate(receipts.items()):
        if not one:
            pieces.append((b"," if number else b"") + orjson.dumps(name) + b":")
        text = orjson.dumps(receipt)
        if name in values:
            pieces += [text[:-1] + b',"value":', *json_codec.encode_tensor(values[name], form), b"}"]
        else:
            pieces.append(text)
    if not one:
        pieces.append(b"}}")
    return Answer(pieces, media_type, headers)


def receipts_text(receipts: Mapping[str, Receipt]) -> dict[str, str]:
    """Receipts as they travel with a safetensors file: JSON in its metadata."""
    return {"receipts": orjson.dumps(receipts).decode()}


def replayed(outcome: Outcome) -> dict[str, str]:
    """The header that tells a repeated request from the first."""
    return {"Idempotency-Replayed": "true"} if outcome.replayed else {}
