"""The format of an LMDB store.

Format 2, in the databases of the LMDB environment:

    meta     b"format" -> the number of the format, as text; b"last_id" -> the last id given, and b"slots" ->
             the number of slots, 8 bytes each; b"writer" -> a mark of the last transaction; b"count:" and a
             namespace -> how many buffers it has, 8 bytes, if the mark has `MARK_SIZE` bytes: versions that do not
             count leave a shorter one; b"pack:" and a slot, 8 bytes -> the ids of the values that share it and
             their bytes, 8 and 4 bytes each, sealed
    buffers  name -> a `Record` as JSON, sealed
    values   id of a value, 8 bytes -> its elements and b"i"; or where it is in a slot that it shares: slot, 8 bytes,
             first byte, 4 bytes, checksum, 8 bytes, and b"p"; or its chunks: slot and checksum, 8 bytes each, what
             waits to be added as JSON, the length of that, 4 bytes, and b"c"; sealed
    free     number of the transaction that freed them, 8 bytes, a number, 4 bytes -> slots, 8 bytes each
    keys     digest of caller and key -> time, fingerprint, receipts, ids of buffers, and, unless an earlier version
             wrote it, states of the buffers that the request was computed from, as JSON, sealed
    times    time, 8 bytes, number of a transaction, 8 bytes -> the digests of the keys that it stored
    deadlines  time, 8 bytes, name -> nothing: when to see whether a buffer has expired

Keys are big-endian, times microseconds since 1970, numbers in chunks, places and lists little-endian. What is sealed
ends with its XXH3 checksum, seeded by where it belongs. The file `values` beside the environment holds the chunks of
large values, and small ones that share slots (`values.py`, `slots.py`, `packs.py`); a file `format` tells that all
was complete once.

Format 1 has no places and no b"pack:". A store of format 1 becomes one of format 2 when the first values share a slot.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import orjson
import xxhash

from service.buffers.lmdb.values import opened, seal
from service.buffers.record import Closed, Key, Record, spec_of
from service.errors import BufferCorrupt

FORMAT = 2

DATABASES = ("buffers", "values", "free", "keys", "times", "deadlines")

WRITER = b"writer"
"""Where in `meta` each transaction leaves a mark: while it is its own, what the writer remembers is true."""

MARK_SIZE = 24
"""Bytes of the mark. A transaction that finds another size counts the buffers anew."""

COUNT = b"count:"
"""What the names of the counts in `meta` begin with; those of namespaces follow."""

DIGEST_SIZE = 16
TIME = struct.Struct(">Q")
LATEST = 2.0**63
"""Microseconds: a time beyond is stored as this."""
KEY_HEAD = struct.Struct(">Q16s")


def microseconds(seconds: float) -> int:
    return int(min(max(0.0, seconds * 1e6), LATEST))


def digest_of(key: Key) -> bytes:
    return hashlib.blake2b(f"{key.caller}\0{key.text}".encode(), digest_size=DIGEST_SIZE).digest()


def seed_of(text: bytes) -> int:
    return xxhash.xxh3_64_intdigest(text)


def packed(record: Record) -> bytes:
    fields = [
        orjson.Fragment(record.spec.text),
        record.id,
        record.created,
        record.updated,
        record.epoch,
        record.version,
        record.count,
        record.weight,
        record.value,
        [(one.epoch, one.version, one.count, one.weight, one.value) for one in record.closed],
    ]
    return seal(orjson.dumps(fields), seed_of(record.name.encode()))


def unpacked(name: str, sealed: memoryview) -> Record:
    data = opened(sealed, seed_of(name.encode()))
    if data is None:
        raise BufferCorrupt(f"The stored record of the buffer {name!r} is damaged on the disk", buffer=name)
    fields: list[Any] = orjson.loads(data)
    spec, *state, closed = fields
    return Record(name, spec_of(spec), *[*state, tuple(Closed(*one) for one in closed)])
