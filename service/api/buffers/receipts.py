"""Answers of `/v1/buffers`: receipts, values and their headers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import orjson

from service.api.buffers.models import ValueQuery
from service.api.buffers.preconditions import formed
from service.api.http.answer import JSON, Answer
from service.api.http.call import Call
from service.api.http.negotiation import wanted_coding
from service.api.http.offload import INLINE_LOOKUPS, INLINE_TEXT_BYTES
from service.buffers.lives import check_life, of_this_life
from service.buffers.perform import Outcome
from service.buffers.record import Receipt
from service.buffers.steps import no_mean
from service.buffers.store import Store
from service.codecs import json as json_codec
from service.codecs import safetensors
from service.codecs.codes import encode
from service.dtypes import DTYPES, Array
from service.errors import NothingToAverage
from service.kernels.accumulate import converted

Form: TypeAlias = json_codec.Encoding | Literal["int8"]
"""How an answer has values: codes and scales in 8 bits, or, in JSON, numbers in lists or in base64."""

VARY = "Accept, Accept-Encoding"
"""The headers of a request that an answer with values depends on."""


def etag_after(receipt: Mapping[str, Any], media_type: str, form: Form) -> str:
    """Return the tag of the buffer after the change with this receipt, in an answer of this form."""
    return formed(f'"{receipt["step"] + receipt["closed"]}-{receipt["version"]}"', media_type, form)


def replayed(outcome: Outcome) -> dict[str, str]:
    """Return the header that marks the answer to a repeated request."""
    return {"Idempotency-Replayed": "true"} if outcome.replayed else {}


def receipts_text(receipts: Mapping[str, Receipt]) -> dict[str, str]:
    return {"receipts": orjson.dumps(receipts).decode()}


async def answer_outcome(
    call: Call,
    media_type: str,
    outcome: Outcome,
    form: Form,
    *,
    single: bool,
    reduce: str = "sum",
    dtype: str | None = None,
) -> Answer:
    """Answer with the receipts, and the values that the request wants, of a `single` buffer or of many."""
    fields = replayed(outcome)
    if single:
        (receipt,) = outcome.receipts.values()
        fields["ETag"] = etag_after(receipt, media_type, form)
    size = sum(value.nbytes for value in outcome.values.values())
    inline = size <= INLINE_TEXT_BYTES and len(outcome.receipts) <= INLINE_LOOKUPS
    coding = wanted_coding(call, "list" if media_type == JSON and form == "list" else None)

    def write() -> Answer:
        values = _reduced(outcome.values, outcome.receipts, reduce, dtype, form)
        return _written(outcome.receipts, values, media_type, form, fields, single).coded(coding)

    return await call.offload(inline, write, changed=True)


def read_values(
    store: Store, names: Sequence[str], query: ValueQuery, media_type: str, coding: str | None, single: bool
) -> Answer:
    """Answer with the values of buffers at one moment, and their receipts; of a `single` buffer also its tag."""
    with of_this_life(query.life):
        snapshots = store.read(names, query.step)
    if query.life is not None:
        for snapshot in snapshots:
            check_life(snapshot.record, query.life)
    receipts: dict[str, Receipt] = {snapshot.record.name: snapshot.receipt() for snapshot in snapshots}
    values = {snapshot.record.name: snapshot.value for snapshot in snapshots}
    fields = {"ETag": formed(snapshots[0].etag, media_type, query.encoding), "Vary": VARY} if single else {}
    form = query.encoding or "list"
    values = _reduced(values, receipts, query.reduce, query.dtype, form)
    return _written(receipts, values, media_type, form, fields, single).coded(coding)


def _reduced(
    values: Mapping[str, Array], receipts: Mapping[str, Receipt], reduce: str, dtype: str | None, form: Form
) -> dict[str, Array]:
    """Return the sums or the means, in the dtype that the request wants. Codes are of float32."""
    if not values:
        return {}
    dtype = "float32" if form == "int8" else dtype
    weights = {name: receipts[name]["weight"] if reduce == "mean" else 1.0 for name in values}
    for name, weight in weights.items():
        if not weight:
            raise NothingToAverage(no_mean(name, receipts[name]["count"]), buffer=name, receipt=receipts[name])
    with np.errstate(all="ignore"):
        return {
            name: converted(value, DTYPES[dtype] if dtype else value.dtype, weights[name])
            for name, value in values.items()
        }


def _written(
    receipts: Mapping[str, Receipt],
    values: Mapping[str, Array],
    media_type: str,
    form: Form,
    fields: Mapping[str, str],
    single: bool,
) -> Answer:
    if media_type != JSON:
        tensors = dict(zip(["value"], values.values(), strict=False)) if single else values
        if form == "int8":
            tensors = {f"{name}/{part}": one for name in tensors for part, one in _coded(tensors[name]).items()}
        return Answer(safetensors.encode(tensors, receipts_text(receipts)), media_type, fields)
    if not values:
        (whole,) = receipts.values() if single else [{"buffers": receipts}]
        return Answer([orjson.dumps(whole)], JSON, fields)
    members = [_member(receipt, values.get(name), form) for name, receipt in receipts.items()]
    if single:
        return Answer(members[0], JSON, fields)
    pieces: list[bytes] = [b'{"buffers":{']
    for number, (name, member) in enumerate(zip(receipts, members, strict=True)):
        pieces += [b"," if number else b"", orjson.dumps(name), b":", *member]
    return Answer([*pieces, b"}}"], JSON, fields)


def _member(receipt: Receipt, value: Array | None, form: Form) -> list[bytes]:
    text = orjson.dumps(receipt)
    if value is None:
        return [text]
    if form == "int8":
        return [text[:-1], b',"coded":', *json_codec.encode(_coded(value), "base64"), b"}"]
    return [text[:-1], b',"value":', *json_codec.encode_tensor(value, form), b"}"]


def _coded(value: Array) -> dict[str, Array]:
    codes, scales = encode(value.reshape(-1))
    return {"codes": codes.reshape(value.shape), "scales": scales}
