"""`gradserve doctor`: a look at a store that finds whatever is wrong with it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from service.buffers.lmdb.format import FORMAT
from service.buffers.lmdb.opening import open_environment
from service.buffers.lmdb.reader import Reader
from service.buffers.lmdb.slots import CHUNK
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
        yield f"store {store}, format {FORMAT}"
        yield f"data.mdb {sizes['data.mdb']} bytes, values {sizes['values']}; limit {sizes['limit']}"
        with env.reading() as txn, np.errstate(all="ignore"):
            lines = [*_examined(Reader(env, txn))]  # at once: who reads them slowly must not hold the transaction
        yield from lines
    finally:
        env.close()


def _examined(reader: Reader) -> Iterator[str]:
    """Lines about what a transaction sees."""
    records, slots = 0, dict[int, list[int]]()
    for name, record in reader.sound_records():
        records += 1
        if record is None:
            yield f"{WRONG}the buffer {name!r} is damaged"
            continue
        for what, value in _values(record):
            if value is None:
                continue
            slots.setdefault(value, [])
            try:
                slots |= reader.values.slots_of(value)
                for _ in reader.values.streamed(record.spec, value):
                    pass  # to read it is to check it
            except BufferCorrupt:
                yield f"{WRONG}{what} of the buffer {name!r} is damaged"
    used, free, total = Counter(itertools.chain(*slots.values())), reader.free_slots(), reader.slot_count()
    yield f"{records} buffers, {len(slots)} values, {len(used)} slots in use, {len(free)} free"
    if lost := set(range(total)) - used.keys() - set(free):
        yield f"{len(lost)} slots of {CHUNK} bytes are lost to damage, until all is exported into a new store"
    yield f"{reader.entries()['keys']} idempotency keys"
    if damaged := reader.damaged_keys():
        yield f"{WRONG}{damaged} idempotency keys are damaged: who repeats such a request is not answered"
    yield from _miscounted(reader)
    for value in sorted(set(reader.value_ids()) - slots.keys()):
        yield f"{WRONG}value {value} belongs to no buffer that can be read"
    for slot in sorted({slot for slot, count in used.items() if count > 1} | used.keys() & set(free)):
        yield f"{WRONG}slot {slot} has more than one use"
    for slot in sorted(slot for slot in free if not 0 <= slot < total):
        yield f"{WRONG}slot {slot} is said to be free, but there are {total}"


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
