"""The format of an LMDB store, and the life of a value from `put` to the reuse of its slots.

A value of up to 64 KB is in LMDB itself. A larger value is cut into chunks of 256 KB, each in a slot of the file
`values`:

              transaction N                                  transaction M              transaction M + 2
    +---------------+------------+----------------+   +-------------------------+   +--------------------------+
    | put           | fdatasync  | commit         |   | freed                   |   | reusable                 |
    | a chunk goes  | `values`   | LMDB names the |-->| the chunk changes or is |-->| a new chunk may take the |
    | into a free   | is on the  | slot: it is in |   | deleted: `free` lists   |   | slot, once no reader     |
    | slot          | disk       | use            |   | its slot under M        |   | sees a state before M    |
    +---------------+------------+----------------+   +-------------------------+   +--------------------------+

A crash before a commit leaves all slots as the commit before it had them; after the commit the value outlives a crash.
A chunk never changes where it is: the changed chunk goes into another slot. LMDB reuses its own pages by the same rule
of two transactions. A slot that one transaction takes and frees again is reusable at once. A sparse gradient, and a
gradient that a part of a push has staged, is stored as a value of its own. It may wait to be added (`values.py`).

The databases of the LMDB environment hold:

    meta       b"format" -> the number of the format (`packed.FORMAT`), as text
               b"last_id" -> the last id that a buffer or a value was given, 8 bytes, sealed
               b"slots" -> the number of slots, free ones included, 8 bytes, sealed
               b"clock" -> the clock of this run of the machine: its distance from the monotonic clock in seconds, as
                           float64; the name of the run (`clock.py`); sealed
               b"count:" and a namespace -> the number of its buffers, 8 bytes, sealed
               b"keys:" and a namespace -> the number of its entries in `outcomes`, and the bytes that they take of
                           the store, 8 bytes each, sealed
    buffers    `BufferName.joined` -> a `Record` as JSON, sealed
    values     id of a value, 8 bytes -> a small value: its elements and b"i", sealed
                                      -> a large value: slot and checksum of each chunk, 8 bytes each; what waits to be
                                         added, as JSON; the length of this JSON, 4 bytes; and b"c"; sealed
    free       number of the freeing transaction, 8 bytes, and a running number, 4 bytes -> slots, 8 bytes each; sealed
    keys       digest of caller and key, 16 bytes -> the time of the request, 8 bytes, sealed: an index of `outcomes`
    outcomes   time of the request, 8 bytes, and digest of caller and key -> length of the namespace, 1 byte; the
               namespace; fingerprint, and what a replay answers (`packed.pack_known`); sealed
    deadlines  time, 8 bytes, and `BufferName.joined` -> nothing: when to check whether the buffer has expired
               b"\xff", time, 8 bytes, and `BufferName.joined` -> nothing: when the running step is due

Keys are big-endian, times are microseconds since 1970; numbers in chunks and lists of slots are little-endian. Sealed
data ends with its XXH3 checksum, seeded by the place where it belongs (`service/buffers/packed.py`). The file `format`
says that a store was complete once.

Why `keys` and `outcomes` are apart: the store adds and deletes outcomes in the order of time, so that their pages are
full or free. It adds and deletes digests in any order, which leaves pages half empty, but `keys` is small.

Why large values are outside LMDB: LMDB searches its list of free pages for a run that is long enough, and writes that
list again with every commit. If large values change, the search can take far longer than the write: 10,873 turns of its
loop in one allocation, seven minutes (https://github.com/erigontech/erigon/pull/1213). Our own measurement, a value
replaced durably, by turns, ext4, in ms:

                                       4 MB   32 MB   a small commit afterwards
    chunks in slots                    13.1    46.9      8.5
    chunks of 256 KB in LMDB           10.2    63.4     12.0
    a file for each version            20.5   196       12.2

Slots win from about 8 MB on.
"""

from __future__ import annotations

import itertools
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from service.buffers import graphs, pushes
from service.buffers.names import BufferName, graphs_of, pushes_of
from service.buffers.packed import pack_record, seal, seed_of, unseal
from service.buffers.record import Record
from service.errors import BufferCorrupt

DATABASES = ("buffers", "values", "free", "keys", "outcomes", "deadlines")
"""All databases but `meta`."""

OLDER = (b"graphs", b"pushes")
"""What formats before 9 have in databases of their own."""

DUE = b"\xff"
"""The first byte of an entry of `deadlines` for a step. No time begins with it, so these entries come last."""

FORGET = b"\xfe"
"""The first byte of an entry of `deadlines` for a push, before format 9."""

COUNT = b"count:"
"""The prefix of the counts of buffers in `meta`."""

KEYS = b"keys:"
"""The prefix in `meta` of what the keys of namespaces use."""

USE = struct.Struct(">QQ")
"""Entries and bytes that the keys of a namespace use."""

CLOCK = b"clock"
"""Where `meta` has the clock."""

NUMBER = struct.Struct(">Q")
"""An id, a slot or a count."""

TIME = struct.Struct(">Q")
"""A time in microseconds, or the number of a transaction."""

LATEST_MICROSECONDS = 2.0**63
"""Every later time is stored as this, which fits into 8 bytes."""


def microseconds(seconds: float) -> int:
    """Return a time as it is stored."""
    return int(min(max(0.0, seconds * 1e6), LATEST_MICROSECONDS))


def due_entry(record: Record) -> bytes | None:
    """Return the entry of `deadlines` for the running step, if it closes by itself at some time."""
    due = record.due
    return None if due is None else DUE + TIME.pack(microseconds(due)) + record.full_name.joined.encode()


def name_of(key: bytes | memoryview) -> BufferName:
    """Return the buffer under this key in `buffers`. What is not UTF-8 is damaged, and no buffer is found by it."""
    return BufferName.split(bytes(key).decode(errors="replace"))


def key_range(namespace: str, prefix: str, after: str) -> tuple[bytes, bytes]:
    """Return the first key in `buffers` of the names with this prefix behind `after`, and the key where they end."""
    own = BufferName(namespace, prefix).joined.encode()
    behind = BufferName(namespace, after).joined.encode() + b"\0"
    stop = own + b"\xff"  # which is in no UTF-8
    return max(own, behind), stop if namespace else min(stop, b"~")


def keep(txn: Any, database: Any, key: bytes, data: bytes) -> None:
    """Store data under a key, with its checksum."""
    txn.put(key, seal(data, seed_of(key)), db=database)


def index(txn: Any, keys: Any, outcomes: Any) -> None:
    """Make the database `keys` again."""
    txn.drop(keys, delete=False)
    with txn.cursor(db=outcomes) as cursor:
        for place in map(bytes, cursor.iternext(values=False)):  # a key that was used again has two: the newer is last
            keep(txn, keys, place[TIME.size :], place[: TIME.size])


def older_records(txn: Any, older: Sequence[Any]) -> Iterator[tuple[BufferName, bytes | memoryview]]:
    """Yield the buffers that the graphs and the pushes of an older store are: their names, and their sealed records.

    What is damaged stays damaged, under its new name.
    """
    for database, brought_over in zip(older, (_older_graph, _older_push), strict=False):
        for key, sealed in txn.cursor(db=database):
            yield brought_over(bytes(key), sealed)


def _older_graph(key: bytes, sealed: bytes | memoryview) -> tuple[BufferName, bytes | memoryview]:
    own = name_of(key)
    with suppress(BufferCorrupt):
        sealed = pack_record(graphs.unpack_older(own, sealed))
    return BufferName(graphs_of(own.namespace), own.name), sealed


def _older_push(key: bytes, sealed: bytes | memoryview) -> tuple[BufferName, bytes | memoryview]:
    namespace, _, push = key.decode(errors="replace").partition("\0")
    name = BufferName(pushes_of(namespace), push)
    with suppress(BufferCorrupt):
        sealed = pack_record(pushes.unpack_older(name, (unseal(sealed, seed_of(key)) or b"")[2 * NUMBER.size :]))
    return name, sealed


def bring_over(txn: Any, older: Sequence[Any], buffers: Any, meta: Any, deadlines: Any) -> None:
    """Make buffers of the graphs and the pushes of an older store, and count and schedule them."""
    counts = Counter[str]()
    for name, sealed in older_records(txn, older):
        txn.put(name.joined.encode(), sealed, db=buffers)
        counts[name.namespace] += 1
    for namespace, count in counts.items():
        keep(txn, meta, COUNT + namespace.encode(), NUMBER.pack(count))
    for entry, _ in [*with_prefix(txn, deadlines, FORGET)]:
        time, key = entry[len(FORGET) :][: TIME.size], entry[len(FORGET) + TIME.size :]
        name, _ = _older_push(key, b"")
        txn.delete(entry, db=deadlines)
        txn.put(time + name.joined.encode(), b"", db=deadlines)
    for database in older:
        txn.drop(database)


def with_prefix(txn: Any, database: Any, prefix: bytes) -> Iterator[tuple[bytes, memoryview]]:
    """Yield the entries of the database whose keys begin with the prefix, in the order of the keys."""
    with txn.cursor(db=database) as cursor:
        if cursor.set_range(prefix):
            entries = ((bytes(key), content) for key, content in cursor)
            yield from itertools.takewhile(lambda entry: entry[0].startswith(prefix), entries)
