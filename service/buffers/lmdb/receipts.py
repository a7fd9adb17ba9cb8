"""How the store packs what a replay answers: the receipts of a request, and the ids of its buffers.

Few receipts are JSON, and those of many new buffers are compressed JSON. From `MANY` receipts on, the names and the ids
are a list of their own, because they repeat with every step of a training: all requests for these buffers share the
list for an hour. The key keeps the digest of the list and the numbers of the receipts. Each number has 8 bytes; first
come the lowest bytes of all numbers, then their second bytes, and so on. zlib packs them. For 200 buffers this takes,
in bytes per buffer:

    all buffers have the same numbers                                         0.4
    the versions are random, up to a million                                  3.6
    the counts are random, too, up to 10,000, and the weights with them       8.0
    the epochs are random, too, up to 1,000                                   9.4
    all numbers are random, and as large as a number can be: the worst case    32

A key takes about 200 bytes more in `keys` and `outcomes`. What closed an epoch, and who was in it, follows the numbers
as JSON, for each receipt of a closed epoch: mostly the same for all buffers.

Outcomes and lists name the namespace that owns them, so that its share of the store can be counted; nothing stands for
the default namespace. What a version without shares stored belongs to the default namespace.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson

from service.buffers.lmdb.format import DIGEST_BYTES, FINGERPRINT_BYTES, TIME
from service.buffers.record import Known, Receipt

MANY = 4
"""Receipts that are worth a list: from here on, to pack them takes no longer than to store them as JSON."""

LIST_MICROSECONDS = 3_600_000_000
"""How long requests share a list: the keys of a day need 25 copies, and a copy that no key needs goes after an hour."""

_FIELDS = ("name", "updated", "closed", "epoch", "version", "count", "weight")
"""The members of every receipt. Only the answer to a new buffer, or to new rules, lacks some, and is always JSON."""

_CLOSING = ("closed_by", "contributors")
"""What the receipt of a closed epoch has besides."""

_SHAPES = {_FIELDS, (*_FIELDS, *_CLOSING)}
"""The members of receipts that are stored without their names."""

_OWNER = b"~"
"""The first byte of a namespace: neither receipts nor compressed lists begin with it."""

_CLOSED = _FIELDS.index("closed")

_SPLIT = b"s"
"""The first byte of receipts that are split from their names: JSON begins with another byte."""

_COMPRESSED = b"z"
"""The first byte of compressed JSON: the metadata of 2,000 new buffers takes 600 KB as text."""


class NameList(NamedTuple):
    """The names and ids of a request's buffers as JSON, and the place in `lists` where requests share them."""

    place: bytes
    owner: bytes
    text: bytes

    def compressed(self) -> bytes:
        """Return what `lists` has."""
        return self.owner + zlib.compress(self.text, 1)


def owner_of(data: memoryview) -> str:
    """Return the namespace of an outcome without its fingerprint, or of a list, as they are stored."""
    return bytes(data[2 : _owner_bytes(data)]).decode(errors="replace")


def _owner_bytes(data: memoryview) -> int:
    """Return the number of bytes that the namespace takes."""
    return 2 + data[1] if data[:1] == _OWNER and len(data) > 1 else 0


def _packed_owner(namespace: str) -> bytes:
    name = namespace.encode()[:255]
    return b"".join([_OWNER, bytes([len(name)]), name]) if name else b""


def pack_known(known: Known, time: int, namespace: str) -> tuple[bytes, NameList | None]:
    """Return the outcome of a request that was made at `time`, in microseconds, and the list that it needs."""
    owner = _packed_owner(namespace)
    receipts, ids = [*known.receipts.values()], [*known.ids.values()]
    numbers = _pack_numbers(receipts) if len(receipts) >= MANY else None
    if numbers is None:
        rows = [[*one.values()] if (*one,) in _SHAPES else one for one in receipts]
        text = orjson.dumps([rows, ids, known.sources])
        return known.fingerprint + owner + (_squeezed(text) if len(receipts) >= MANY else text), None
    names = orjson.dumps([[*known.receipts], ids])
    digest = hashlib.blake2b(owner + names, digest_size=DIGEST_BYTES).digest()
    closing = [[one.get(field) for field in _CLOSING] for one in receipts if one["closed"]]
    rest = [known.sources, closing] if closing else known.sources
    packed = zlib.compress(numbers + orjson.dumps(rest), 1)
    return known.fingerprint + owner + _SPLIT + digest + packed, NameList(_place(time, digest), owner, names)


def _squeezed(text: bytes) -> bytes:
    return _COMPRESSED + zlib.compress(text, 1)


def place_of_list(outcome: memoryview, time: int) -> bytes | None:
    """Return where `lists` has the list that an outcome needs; None if it needs none."""
    start = bytes(_body(outcome)[: 1 + DIGEST_BYTES])
    return _place(time, start[1:]) if start[:1] == _SPLIT else None


def unpack_known(outcome: memoryview, shared: memoryview | None) -> Known:
    """Return what `pack_known` took, from an outcome and the list that it needs, as `lists` has it."""
    fingerprint, body = bytes(outcome[:FINGERPRINT_BYTES]), _body(outcome)
    if shared is None:
        is_text = bytes(body[:1]) != _COMPRESSED
        rows, ids, sources = orjson.loads(body if is_text else zlib.decompress(body[1:]))
    else:
        names, ids = orjson.loads(zlib.decompress(shared[_owner_bytes(shared) :]))
        unpacked = zlib.decompress(body[1 + DIGEST_BYTES :])
        columns, rest = _unpack_numbers(unpacked, len(names))
        sources, closing = orjson.loads(rest), []
        if sources and isinstance(sources[0], list):
            sources, closing = sources
        rows = _joined(zip(names, *columns, strict=True), closing)
    receipts = [row if isinstance(row, dict) else _receipt(row) for row in rows]
    by_name = {receipt["name"]: receipt for receipt in receipts}
    return Known(fingerprint, by_name, dict(zip(by_name, ids, strict=True)), tuple(sources))


def _joined(rows: Iterable[tuple[Any, ...]], closing: Iterable[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Return the rows of receipts, those of closed epochs with what closed them, if it is stored."""
    following = iter(closing)
    return [(*row, *next(following, ())) if row[_CLOSED] else row for row in rows]


def _receipt(row: Sequence[Any]) -> Receipt:
    return dict(zip((*_FIELDS, *_CLOSING), row, strict=False))


def _body(outcome: memoryview) -> memoryview:
    """Return an outcome without its fingerprint and its namespace."""
    body = outcome[FINGERPRINT_BYTES:]
    return body[_owner_bytes(body) :]


def _place(time: int, digest: bytes) -> bytes:
    """Return the place of a list, which begins with the time from which on no request shares the list."""
    return TIME.pack((time // LIST_MICROSECONDS + 1) * LIST_MICROSECONDS) + digest


def _numbers(count: int) -> struct.Struct:
    """Return the columns of `count` receipts behind their names: all integers but the weights."""
    return struct.Struct(f"<{(len(_FIELDS) - 2) * count}q{count}d")


def _pack_numbers(receipts: list[Receipt]) -> bytes | None:
    """Return all members of receipts but the names; None if only JSON can hold them exactly."""
    if not {*map(tuple, receipts)} <= _SHAPES:
        return None
    numbers = [one[field] for field in _FIELDS[1:] for one in receipts]
    if {*map(type, numbers[-len(receipts) :])} != {float}:
        return None  # the weight of an imported buffer may be 1, which must not come back as 1.0
    try:
        packed = _numbers(len(receipts)).pack(*numbers)
    except struct.error:
        return None  # the version of an imported buffer may be the largest that fits, and then grow
    return np.frombuffer(packed, np.uint8).reshape(-1, 8).T.tobytes()


def _unpack_numbers(data: bytes, count: int) -> tuple[list[list[object]], bytes]:
    """Return the columns of `count` receipts, and what follows them."""
    form = _numbers(count)
    packed = np.frombuffer(data, np.uint8, form.size).reshape(8, -1).T.tobytes()
    numbers = form.unpack(packed)
    flags = 2 * count
    numbers = (*map(bool, numbers[:flags]), *numbers[flags:])
    return [list(numbers[start : start + count]) for start in range(0, len(numbers), count)], data[form.size :]
