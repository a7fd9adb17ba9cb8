"""The headers of conditional and of repeated requests: Idempotency-Key, If-Match and If-None-Match."""

from __future__ import annotations

import re
from collections.abc import Sequence

import xxhash

from service.api.http.answer import JSON, coded_tag
from service.api.http.call import Call
from service.buffers.perform import check_same
from service.buffers.record import Key, Known
from service.buffers.store import Store
from service.codecs import safetensors
from service.errors import InvalidParameter, shown

MAX_KEY_CHARACTERS = 255
"""Characters of an Idempotency-Key."""

_READ_BY = {"If-Match": "change", "If-None-Match": "read or create"}

_LOWER = {name: name.lower().encode() for name in _READ_BY}

_TAG = re.compile(r'\*|(?:W/)?"[^"]*"')

_FORMS = {JSON: "", safetensors.MEDIA_TYPE: "-safetensors"}
"""What the tags of an answer with this media type end with."""

_FORM = re.compile(r'(-safetensors)?(-int8)?(-(x-)?gzip|-deflate)?"$')
"""What the tags of one state differ in: the form of the answer."""


def key_of(call: Call, *bodies: memoryview | bytes) -> Key | None:
    """Return the Idempotency-Key, with the fingerprint of the request and its bytes. Raises `InvalidParameter`."""
    if b"idempotency-key" not in call.headers:
        return None
    lines = call.head.values(b"idempotency-key")
    text = lines[0].decode("latin-1").strip()
    if len(lines) > 1:
        raise InvalidParameter(f"Idempotency-Key is given {len(lines)} times, not once", parameter="Idempotency-Key")
    if not 0 < len(text) <= MAX_KEY_CHARACTERS or not text.isascii() or not text.isprintable():
        problem = f"Idempotency-Key is {shown(text)}, but must be 1 to {MAX_KEY_CHARACTERS} printable ASCII characters"
        raise InvalidParameter(problem, parameter="Idempotency-Key")
    return Key(call.caller.namespace, text, fingerprint_of(call, *bodies))


def fingerprint_of(call: Call, *bodies: memoryview | bytes) -> bytes:
    """Return 16 bytes that differ for requests of another path, query, Content-Type or body."""
    content_type = b",".join(call.head.values(b"content-type"))
    head = [call.method.encode(), call.path.encode(), call.query_string, content_type, b""]
    fingerprint = xxhash.xxh3_128(b"\0".join(head))
    for body in bodies:
        fingerprint.update(body)
    return fingerprint.digest()


def match_of(call: Call) -> frozenset[str] | None:
    """Return the states whose tags are in If-Match, or None; `*` is a state, too. Raises `InvalidParameter`."""
    tags = _tags(call, "If-Match")
    return None if tags is None else frozenset(_FORM.sub('"', tag) for tag in tags)


def states_not_wanted(call: Call) -> frozenset[str]:
    """Return the states whose tags are in If-None-Match. Raises `InvalidParameter`."""
    return frozenset(_FORM.sub('"', tag.removeprefix("W/")) for tag in _tags(call, "If-None-Match") or ())


def formed(tag: str, media_type: str, encoding: str | None = None) -> str:
    """Return the tag of an answer of this media type and encoding about the state with this tag."""
    return f'{tag[:-1]}{_FORMS[media_type]}{"-int8" * (encoding == "int8")}"'


def known_tag(call: Call, tag: str, coding: str | None = None) -> str | None:
    """Return the tag that the client has of this answer: as If-None-Match says, with the coding or without it.

    Return None if the client has neither. Raises `InvalidParameter`.
    """
    known = frozenset(each.removeprefix("W/") for each in _tags(call, "If-None-Match") or ())
    tags = [tag] if coding is None else [coded_tag(tag, coding), tag]
    return next((each for each in tags if known & {"*", each}), None)


def _tags(call: Call, name: str) -> frozenset[str] | None:
    """Return the tags in a header: `"step-version"`, in quotation marks, or `*`. Raises `InvalidParameter`."""
    if _LOWER[name] not in call.headers:
        return None
    header = b",".join(call.head.values(_LOWER[name])).decode("latin-1")
    tags = frozenset(tag.strip() for tag in header.split(",")) - {""}
    if not tags or not all(map(_TAG.fullmatch, tags)):
        problem = f'{name} is {shown(header)}, but must be tags in quotation marks like "3-17", or *'
        raise InvalidParameter(problem, parameter=name)
    return tags


def refuse_headers(call: Call, *names: str) -> None:
    """Raise `InvalidParameter` if the request has one of these headers, which it would ignore."""
    for name in names:
        if _LOWER[name] in call.headers:
            raise InvalidParameter(f"{name} is for requests that {_READ_BY[name]} one buffer", parameter=name)


def recalled(store: Store, key: Key | None, names: Sequence[str] = ()) -> Known | None:
    """Return the data of this key in the store, if the request, for these buffers, came before. Raises `KeyReused`."""
    known = None if key is None else store.recall(key, names)
    if key is not None and known is not None:
        check_same(key, known)
    return known
