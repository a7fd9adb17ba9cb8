"""Buffers on their way out of a store and back, as safetensors files, and a look at the store itself.

A file holds the running value of each buffer under its name, and under `__metadata__["buffers"]`, as JSON, what is
needed to create the buffers again. Closed epochs and idempotency keys stay behind.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from service.buffers.lmdb import Environment, Reader, pieces_of
from service.buffers.store import Delete, Record, Request, Restore, Spec, Store, check_name, spec_of
from service.codecs import safetensors
from service.errors import BufferCorrupt, BufferExists, MalformedBody
from service.limits import Limits

WRONG = "WRONG: "
"""What a line of `examine` begins with that tells of damage."""


def export(store: Path, max_bytes: int, path: Path, prefix: str = "") -> tuple[int, int]:
    """Write the buffers with this prefix, as they are at one moment, to `path`: how many, and the bytes of the file.

    The store may be in use. Raises `StoreFailed` and `BufferCorrupt`, and OSError for the file: then there is none.
    """
    env = Environment(store, max_bytes=max_bytes, readonly=True)
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        with env.reading() as txn, unfinished.open("wb") as file:
            reader = Reader(env, txn)
            now = time.time()
            records = {one.name: one for one in reader.records(prefix) if one.lives(now)}
            ordered = safetensors.in_order({name: (one.spec.dtype, one.spec.shape) for name, one in records.items()})
            about = {name: _described(one) for name, one in records.items()}
            file.write(safetensors.head(ordered, {"buffers": orjson.dumps(about).decode()}))
            for name in ordered:
                _write(reader, records[name], file)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        unfinished.replace(path)
        return len(records), size
    finally:
        unfinished.unlink(missing_ok=True)
        env.close()


def _write(reader: Reader, record: Record, file: Any) -> None:
    spec = record.spec
    for number, start, stop in pieces_of(spec):
        if record.value is None:
            file.write(bytes((stop - start) * spec.dtype.itemsize))
        else:
            file.write(reader.chunk(record.value, number, stop - start, spec.dtype).tobytes())


def _described(record: Record) -> dict[str, Any]:
    return {
        "spec": record.spec.as_json(),
        "epoch": record.epoch,
        "version": record.version,
        "count": record.count,
        "weight": record.weight,
        "created": record.created,
    }


def restore(store: Store, path: Path, limits: Limits) -> list[str]:
    """Create the buffers of a file that `export` wrote: their names. All of them, or, on an error, none.

    Raises `MalformedBody`, `BufferExists`, `StoreFull`, and OSError for the file.
    """
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            raise MalformedBody(f"{path} is empty")
        body = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    tensors = safetensors.decode(body, limits)
    about = safetensors.metadata_of(body).get("buffers")
    if about is None:
        raise MalformedBody(f"{path} was not written by gradserve export: its metadata lacks buffers")
    records = {name: _record(name, one) for name, one in orjson.loads(about).items()}
    for name, record in records.items():
        tensor = tensors.get(name)
        if tensor is None or (tensor.shape, tensor.dtype) != (record.spec.shape, record.spec.dtype):
            raise MalformedBody(f"{path} has no tensor {name!r} like its metadata says")
    there = {one.name for one in store.records()} & records.keys()
    if there:
        raise BufferExists(f"There are buffers of the same names already: {', '.join(sorted(there)[:5])}")
    made: list[str] = []
    try:
        for name, record in records.items():
            store.submit(Request([Restore(name=name, record=record, value=tensors[name])])).result()
            made.append(name)
    except BaseException:
        for name in made:
            store.submit(Request([Delete(name=name)])).result()
        raise
    return made


def _record(name: str, about: dict[str, Any]) -> Record:
    spec = spec_of(about["spec"])
    created = about["created"]
    return Record(
        check_name(name), spec, created, created, about["epoch"], about["version"], about["count"], about["weight"]
    )


def examine(store: Path, max_bytes: int) -> Iterator[str]:
    """Lines about the store, which is only read and may be in use; those that tell of damage begin with `WRONG`.

    Raises `StoreFailed` if it cannot be opened at all.
    """
    env = Environment(store, max_bytes=max_bytes, readonly=True)
    try:
        sizes = env.sizes()
        yield f"store {store}, format {env.format}"
        yield f"file {sizes['file']} bytes, of which pages {sizes['used']}; limit {sizes['limit']}"
        with env.reading() as txn:
            reader = Reader(env, txn)
            records, referenced = 0, {}
            for name, record in reader.sound_records():
                records += 1
                if record is None:
                    yield f"{WRONG}the buffer {name!r} is damaged"
                    continue
                for what, value in _values(record):
                    if value is not None:
                        referenced[value] = record.spec
                        yield from _damage(reader, name, what, record.spec, value)
            found = reader.chunk_counts()
            entries = reader.entries()
        yield f"{records} buffers, {len(referenced)} values, {entries['values']} chunks"
        yield f"{entries['keys']} idempotency keys"
        for value in sorted(found.keys() - referenced.keys()):
            yield f"{WRONG}value {value}, {found[value]} chunks, belongs to no buffer"
    finally:
        env.close()


def _values(record: Record) -> list[tuple[str, int | None]]:
    return [("the running value", record.value), *((f"epoch {one.epoch}", one.value) for one in record.closed)]


def _damage(reader: Reader, name: str, what: str, spec: Spec, value: int) -> Iterator[str]:
    for number, start, stop in pieces_of(spec):
        try:
            reader.chunk(value, number, stop - start, spec.dtype)
        except BufferCorrupt:
            yield f"{WRONG}{what} of the buffer {name!r}, elements {start} to {stop}"
