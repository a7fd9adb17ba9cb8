"""Changes of buffers on behalf of a request: its headers, and its receipts."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
import xxhash
from starlette.datastructures import Headers
from starlette.types import Scope

from service.api.body import Answer
from service.api.context import caller_of, context_of
from service.api.negotiation import JSON
from service.buffers.changes import Change
from service.buffers.namespaced import Namespaced
from service.buffers.requests import Outcome, check_same
from service.buffers.requests import Request as Asked
from service.buffers.store import Array, Key, Known, Receipt, Store
from service.codecs import json as json_codec
from service.codecs import safetensors
from service.errors import InvalidParameter, NotReady, shown

LONGEST_KEY = 255

_HEEDED_BY = {"If-Match": "change", "If-None-Match": "read or create"}

_TAG = re.compile(r'\*|(?:W/)?"[^"]*"')


def store_of(scope: Scope) -> Store:
    """The store as the caller sees it. Raises `NotReady` before the start has finished and after the stop has begun."""
    store: Store | None = scope["app"].store
    if store is None:
        raise NotReady("The server is starting or stopping; try again soon")
    return Namespaced(store, caller_of(scope).namespace)


def key_of(scope: Scope, body: memoryview | bytes = b"") -> Key | None:
    """The request's Idempotency-Key with the fingerprint of the request. Raises `InvalidParameter`."""
    given = [value for name, value in scope["headers"] if name == b"idempotency-key"]
    if not given:
        return None
    text = given[0].decode("latin-1").strip()
    if len(given) > 1:
        raise InvalidParameter(f"Idempotency-Key is given {len(given)} times", parameter="Idempotency-Key")
    if not 0 < len(text) <= LONGEST_KEY or not text.isascii() or not text.isprintable():
        raise InvalidParameter(
            f"Idempotency-Key is {shown(text)}, but must be 1 to {LONGEST_KEY} printable ASCII characters",
            parameter="Idempotency-Key",
        )
    content_type = b",".join(value for name, value in scope["headers"] if name == b"content-type")
    head = [scope["method"].encode(), scope["path"].encode(), scope["query_string"], content_type, b""]
    fingerprint = xxhash.xxh3_128(b"\0".join(head))
    fingerprint.update(body)
    return Key("", text, fingerprint.digest())


def match_of(scope: Scope) -> frozenset[str] | None:
    """The tags in If-Match, `*` among them. Raises `InvalidParameter`."""
    return tags_of(scope, "If-Match")


def tags_of(scope: Scope, name: str) -> frozenset[str] | None:
    """The tags in a header: `"epoch-version"`, in quotation marks, or `*`. Raises `InvalidParameter`."""
    lines = Headers(scope=scope).getlist(name)
    if not lines:
        return None
    header = ",".join(lines)
    tags = frozenset(one.strip() for one in header.split(",")) - {""}
    if not tags or not all(map(_TAG.fullmatch, tags)):
        raise InvalidParameter(
            f'{name} is {shown(header)}, but must be tags in quotation marks like "3-17", or *', parameter=name
        )
    return tags


def refuse(scope: Scope, *preconditions: str) -> None:
    """Raise `InvalidParameter` for one of these headers, as it would not be heeded."""
    for name in preconditions:
        if name.lower().encode() in context_of(scope).headers:
            raise InvalidParameter(f"{name} is for requests that {_HEEDED_BY[name]} one buffer", parameter=name)


async def change(store: Store, changes: Sequence[Change], key: Key | None, sources: Sequence[str] = ()) -> Outcome:
    """Make the changes, which were computed from `sources`. Raises what `Store.submit` does."""
    return await asyncio.wrap_future(store.submit(Asked(changes, key, sources)))


def recalled(store: Store, key: Key | None) -> Known | None:
    """What was stored with this key, if the request came before. Raises `KeyReused`."""
    known = None if key is None else store.recall(key)
    if key is not None and known is not None:
        check_same(key, known)
    return known


def etag_after(receipt: Mapping[str, Any]) -> str:
    """The tag of the buffer after the change that left this receipt."""
    return f'"{receipt["epoch"] + receipt["closed"]}-{receipt["version"]}"'


def answer(
    receipts: Mapping[str, Receipt],
    values: Mapping[str, Array],
    media_type: str,
    form: json_codec.Encoding,
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
