"""`gradserve doctor`: read a whole store and report its damage."""

from __future__ import annotations

import itertools
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from service.buffers.lmdb import opened_readonly
from service.buffers.lmdb.format import FORMAT
from service.buffers.lmdb.reader import Reader
from service.buffers.lmdb.slots import CHUNK_BYTES
from service.buffers.names import BufferName
from service.buffers.record import Record
from service.errors import BufferCorrupt, GradserveError, StoreFailed

WRONG = "WRONG: "
"""The prefix of a line that reports damage."""


def examine_apart(store: Path, max_bytes: int) -> Iterator[str]:
    """Yield the lines of `examine`, which runs in a process of its own: damaged pages may kill LMDB's process.

    Raises `StoreFailed` if the store cannot be opened.
    """
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_lines, args=(sender, store, max_bytes), daemon=True)
    process.start()
    sender.close()
    with suppress(EOFError):
        while True:
            line = receiver.recv()
            if isinstance(line, GradserveError):
                raise line
            yield line
    process.join()
    if process.exitcode:
        killed = f"signal {-process.exitcode}" if process.exitcode < 0 else f"status {process.exitcode}"
        yield f"{WRONG}reading data.mdb ended the process ({killed}): restore the buffers from an export"


def _send_lines(sender: Connection, store: Path, max_bytes: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command, which ends this process
    try:
        for line in examine(store, max_bytes):
            sender.send(line)
    except GradserveError as error:
        sender.send(error)


def examine(store: Path, max_bytes: int) -> Iterator[str]:
    """Yield lines about the store. Lines about damage begin with `WRONG`. A server may use the store meanwhile.

    Raises `StoreFailed` if the store cannot be opened.
    """
    with opened_readonly(store, max_bytes) as opened:
        sizes = opened.sizes()
        yield f"store {store}, format {FORMAT}"
        yield f"data.mdb {sizes['data.mdb']} bytes, values {sizes['values']}; limit {sizes['limit']}"
        lines: list[str] = []
        try:
            with opened.reading() as reader, np.errstate(all="ignore"):
                lines.extend(_examined(reader))  # all at once: a slow terminal must not hold the reader
        except StoreFailed as error:
            lines.append(f"{WRONG}{error}")
        yield from lines


def _examined(reader: Reader) -> Iterator[str]:
    if faults := reader.damaged_pages():
        yield from (f"{WRONG}{fault}" for fault in faults)
        return  # LMDB might end the process
    records, slots = 0, dict[int, list[int]]()
    for name, record in reader.sound_records():
        records += 1
        if record is None:
            yield f"{WRONG}{_shown(name)} is damaged"
            continue
        for place, value in _values(record):
            if value is None:
                continue
            slots.setdefault(value, [])
            try:
                slots |= reader.values.slots_of(value)
                for _ in reader.values.streamed(record.spec, value):
                    pass  # reading checks the checksums
            except BufferCorrupt:
                yield f"{WRONG}{place} of {_shown(name)} is damaged"
    used, free, total = Counter(itertools.chain(*slots.values())), reader.free_slots(), reader.slot_count()
    yield f"{records} buffers, {len(slots)} values, {len(used)} slots in use, {len(free)} free"
    if lost := set(range(total)) - used.keys() - set(free):
        yield f"{len(lost)} slots of {CHUNK_BYTES} bytes are lost to damage; to regain them, export to a new store"
    entries = reader.entries()
    yield f"{entries['keys']} idempotency keys, {entries['lists']} lists of their buffers' names"
    if damaged := reader.keys.damaged():
        yield f"{WRONG}{damaged} idempotency keys are damaged: a retry with one of them fails"
    yield from _miscounted(reader)
    for value in sorted(set(reader.value_ids()) - slots.keys()):
        yield f"{WRONG}value {value} belongs to no buffer that can be read"
    for slot in sorted({slot for slot, count in used.items() if count > 1} | used.keys() & set(free)):
        yield f"{WRONG}slot {slot} has more than one use"
    for slot in sorted(slot for slot in free if not 0 <= slot < total):
        yield f"{WRONG}slot {slot} is said to be free, but there are {total}"


def _shown(name: BufferName) -> str:
    return f"the buffer {name.name!r}" + (f" of the namespace {name.namespace!r}" if name.namespace else "")


def _values(record: Record) -> list[tuple[str, int | None]]:
    return [("the running value", record.value), *((f"epoch {closed.epoch}", closed.value) for closed in record.closed)]


def _miscounted(reader: Reader) -> Iterator[str]:
    """Yield a line for each namespace whose count is wrong."""
    if not reader.is_counted():  # the next transaction counts all buffers
        return
    counts, counted = reader.counts(), reader.count_all()
    for namespace in sorted(counts | counted):
        stored, actual = counts.get(namespace, 0), counted.get(namespace, 0)
        if stored != actual:
            yield (
                f"{WRONG}the namespace {namespace!r} has {actual} buffers, not {stored}, as counted for"
                " GRADSERVE_MAX_BUFFERS; restart the server, which then counts again"
            )
    uses, used = reader.keys.uses(), reader.keys.count_all()
    for namespace in sorted(uses | used):
        if uses.get(namespace) != used.get(namespace):
            yield (
                f"{WRONG}the idempotency keys of the namespace {namespace!r} are counted wrong: its share of"
                " GRADSERVE_STORE_BYTES is wrong until they expire"
            )
