"""The clock of a store on the disk: all processes of one run of the machine share it."""

from __future__ import annotations

import struct
from contextlib import suppress

import lmdb

from service.buffers import clock
from service.buffers.clock import Clock
from service.buffers.lmdb.environment import Environment
from service.buffers.lmdb.format import CLOCK, keep
from service.buffers.lmdb.reader import Reader, reading

_OFFSET = struct.Struct("<d")


def clock_of(env: Environment, *, readonly: bool = False) -> Clock:
    """Return the clock of the store. Raises `StoreFailed`.

    While the machine runs, the clock only runs on, whatever its processes do. When the machine has started again, the
    clock starts at the machine's time, but not before the newest idempotency key.
    """
    with reading(env) as reader:
        shared = _shared(reader)
        started = Clock.starting(reader.keys.newest())
    if shared is not None:
        return shared
    if not readonly:
        with suppress(lmdb.Error):  # on a full disk each process has a clock of its own
            return _share(env, started)
    return started


def _share(env: Environment, started: Clock) -> Clock:
    """Store the clock. If another process was faster, return the other clock."""
    with env.writing() as txn:
        shared = _shared(Reader(env, txn))
        if shared is None:
            keep(txn, env.meta, CLOCK, _OFFSET.pack(started.offset) + clock.boot())
    return shared or started


def _shared(reader: Reader) -> Clock | None:
    """Return the stored clock; None if there is none, or if it belongs to an earlier run of the machine."""
    stored, boot = reader.stored_clock(), clock.boot()
    if not boot or stored[_OFFSET.size :] != boot:
        return None
    shared = Clock(_OFFSET.unpack_from(stored)[0])
    return shared if shared() >= reader.keys.newest() else None  # else it is damaged, or of another machine
