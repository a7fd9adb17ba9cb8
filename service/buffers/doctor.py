"""`gradserve doctor`: a look at a store that finds whatever is wrong with it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from service.buffers.lmdb.opening import open_environment
from service.buffers.lmdb.reader import Reader
from service.buffers.lmdb.slots import CHUNK
from service.buffers.lmdb.values import Parts
from service.buffers.record import Record
from service.errors import BufferCorrupt

WRONG = "WRONG: "
"""What a line of `examine` begins with that tells of damage."""


def examine(store: Path, max_bytes: int) -> Iterator[str]:
    """Lines about the store, which is only read and may be in use; those that tell of damage begin with `WRONG`.

    Raises `StoreFailed` if it cannot be opened at all.
    """
    env = open_environment(store, max_bytes=max_bytes, readonly=True)
    try:
        sizes = env.sizes()
        yield f"store {store}, format {env.format}"
        yield f"data.mdb {sizes['data.mdb']} bytes, values {sizes['values']}; limit {sizes['limit']}"
        with env.reading() as txn, np.errstate(all="ignore"):
            lines = [*_examined(Reader(env, txn))]  # at once: who reads them slowly must not hold the transaction
        yield from lines
    finally:
        env.close()


def _examined(reader: Reader) -> Iterator[str]:
    """Lines about what a transaction sees."""
    records, parts = 0, dict[int, Parts]()
    for name, record in reader.sound_records():
        records += 1
        if record is None:
            yield f"{WRONG}the buffer {name!r} is damaged"
            continue
        for what, value in _values(record):
            if value is None:
                continue
            parts.setdefault(value, Parts([], None))
            try:
                parts |= reader.values.parts_of(value)
                for _ in reader.values.streamed(record.spec, value):
                    pass  # to read it is to check it
            except BufferCorrupt:
                yield f"{WRONG}{what} of the buffer {name!r} is damaged"
    orphans = sorted(set(reader.value_ids()) - parts.keys())
    slots = _Slots.of(reader, parts, orphans)
    yield f"{records} buffers, {len(parts)} values, {len(slots.used)} slots in use, {len(slots.free)} free"
    if lost := slots.lost():
        yield f"{lost} slots of {CHUNK} bytes are lost to damage; to regain them, export to a new store"
    yield f"{reader.entries()['keys']} idempotency keys"
    if damaged := reader.damaged_keys():
        yield f"{WRONG}{damaged} idempotency keys are damaged: a retry with one of them fails"
    yield from _miscounted(reader)
    for value in orphans:
        yield f"{WRONG}value {value} belongs to no buffer that can be read"
    yield from slots.misused()


def _values(record: Record) -> list[tuple[str, int | None]]:
    return [("the running value", record.value), *((f"epoch {one.epoch}", one.value) for one in record.closed)]


def _miscounted(reader: Reader) -> Iterator[str]:
    """A line for each namespace that has more or fewer buffers than are counted."""
    if not reader.is_counted():  # an older version wrote last; the next to write counts anew
        return
    counts, counted = reader.counts(), reader.counted_anew()
    for one in sorted(counts | counted):
        said, found = counts.get(one, 0), counted.get(one, 0)
        if said != found:
            yield (
                f"{WRONG}the namespace {one!r} has {found} buffers, not {said}, as counted for GRADSERVE_MAX_BUFFERS;"
                " start the server again, which then counts anew"
            )


class _Slots(NamedTuple):
    """The slots of a store, `total` of them.

    `own` has for each how many values have it for themselves, `shared` which values share it, and `lists` which do
    according to its list.
    """

    total: int
    free: list[int]
    own: Counter[int]
    shared: dict[int, set[int]]
    lists: dict[int, dict[int, int] | None]

    @classmethod
    def of(cls, reader: Reader, parts: dict[int, Parts], orphans: list[int]) -> _Slots:
        """The slots of these values, and of those that belong to no buffer."""
        own = Counter(slot for each in parts.values() for slot in each.own)
        found, shared = dict(parts), defaultdict[int, set[int]](set)
        for value in orphans:
            with suppress(BufferCorrupt):
                found |= reader.values.parts_of(value)
        for value, each in found.items():
            if each.shared is not None:
                shared[each.shared.slot].add(value)
        return cls(reader.slot_count(), reader.free_slots(), own, dict(shared), reader.packs())

    @property
    def used(self) -> set[int]:
        """Those with values in them."""
        return self.own.keys() | self.shared.keys()

    def lost(self) -> int:
        """How many there are of which nothing tells."""
        return len(set(range(self.total)) - self.used - self.lists.keys() - set(self.free))

    def misused(self) -> Iterator[str]:
        """A line for each that is not used as it should be."""
        free, used = set(self.free), self.used
        twice = {slot for slot, count in self.own.items() if count > 1} | self.own.keys() & self.shared.keys()
        for slot in sorted(twice | used & free):
            yield f"{WRONG}slot {slot} has more than one use"
        for slot in sorted(self.lists.keys() | self.shared.keys()):
            found, listed = self.shared.get(slot, set()), self.lists.get(slot)
            if listed is None:
                yield f"{WRONG}the list of slot {slot}, which {len(found)} values share, is damaged"
            elif found != listed.keys():
                yield f"{WRONG}slot {slot} is shared by {len(found)} values, and not by the {len(listed)} of its list"
        for slot in sorted(slot for slot in free if not 0 <= slot < self.total):
            yield f"{WRONG}slot {slot} is said to be free, but there are {self.total}"
