"""Checksums of what a store keeps, seeded by the place where it belongs: in another place, it is damaged, too."""

from __future__ import annotations

import xxhash

from service.buffers import packed
from service.buffers.names import BufferName
from service.buffers.record import Record

SEAL_BYTES = 8
"""Length of a checksum."""


def seed_of(text: bytes | memoryview) -> int:
    """Return the seed of the checksum of what is stored under this name."""
    return xxhash.xxh3_64_intdigest(text)


def seal(data: bytes, seed: int) -> bytes:
    """Return the data and its checksum."""
    return data + xxhash.xxh3_64_digest(data, seed)


def unseal(sealed: bytes | memoryview, seed: int) -> memoryview | None:
    """Return the data without its checksum; None if the two do not match."""
    data = memoryview(sealed)[:-SEAL_BYTES]
    return data if xxhash.xxh3_64_digest(data, seed) == bytes(sealed[-SEAL_BYTES:]) else None


def pack_record(record: Record) -> bytes:
    """Return a record as it is stored under its name, sealed."""
    return seal(packed.pack_record(record), seed_of(record.full_name.joined.encode()))


def unpack_record(name: BufferName, sealed: bytes | memoryview) -> Record:
    """Return the record of this name from what is stored. Raises `BufferCorrupt`."""
    return packed.unpack_record(name, unseal(sealed, seed_of(name.joined.encode())) or b"")
