"""The headers of a request that changes buffers: its Idempotency-Key, If-Match and If-None-Match."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

import xxhash
from starlette.datastructures import Headers
from starlette.types import Scope

from service.api.http.context import caller_of, context_of
from service.api.http.openapi import LONGEST_KEY
from service.buffers.changes import Change
from service.buffers.namespaced import Namespaced
from service.buffers.perform import Outcome, check_same
from service.buffers.perform import Request as Asked
from service.buffers.record import Key, Known
from service.buffers.store import Store
from service.errors import InvalidParameter, NotReady, shown

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
        raise InvalidParameter(f"Idempotency-Key is given {len(given)} times, not once", parameter="Idempotency-Key")
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
