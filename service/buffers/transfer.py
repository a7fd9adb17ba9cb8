"""Export of buffers to a safetensors file, and import from such a file.

The file holds the current value of each buffer under its name. `__metadata__["buffers"]` holds, as JSON, the data that
creates the buffers again. Closed epochs and idempotency keys are not exported.
"""

from __future__ import annotations

import math
import mmap
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Set
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import orjson

from service.buffers.changes import Delete, Restore
from service.buffers.lmdb import opened_readonly
from service.buffers.names import BufferName, check_length, check_name
from service.buffers.perform import Request
from service.buffers.record import MAX_KEEP, MAX_QUORUM, MAX_TTL_SECONDS, Record, name_buffer, spec_of
from service.buffers.store import Store
from service.codecs import safetensors
from service.dtypes import FLOATS
from service.errors import BufferCorrupt, BufferExists, MalformedBody, UnknownBuffer, shown
from service.limits import Limits


def export(store: Path, max_bytes: int, path: Path | None, prefix: str = "") -> tuple[int, int]:
    """Write the buffers with this prefix, as of one moment, to `path`; None means stdout.

    Return the count of the buffers, and the bytes of the file. The store may be in use. Raises `UnknownBuffer`,
    `StoreFailed` and `BufferCorrupt`, and OSError for the file; after an error the file is unchanged.
    """
    with opened_readonly(store, max_bytes) as opened, _replacing(path) as file:
        now = opened.now()
        with opened.reading() as reader, np.errstate(all="ignore"):
            listing = reader.records(prefix.encode(), prefix.encode() + b"\xff", strict=True)
            records = {record.full_name.joined: record for record in listing if record.lives(now)}
            if prefix and not records:  # a file without buffers must not replace a good file
                raise UnknownBuffer(f"There is no buffer whose name begins with {shown(prefix)}")
            ordered = safetensors.in_order({name: (each.spec.dtype, each.spec.shape) for name, each in records.items()})
            metadata = {name: _described(record) for name, record in records.items()}
            size: int = file.write(safetensors.head(ordered, {"buffers": orjson.dumps(metadata).decode()}))
            for name in ordered:
                try:
                    for piece in reader.values.streamed(records[name].spec, records[name].value):
                        file.write(piece.view(np.uint8).data)
                except BufferCorrupt as error:
                    name_buffer(error, name, one_of_many=True)
                    raise
                size += records[name].spec.nbytes
        return len(records), size


@contextmanager
def _replacing(path: Path | None) -> Iterator[Any]:
    """Yield a file that replaces the file at `path`, through a link too, once it is complete.

    After an error the old file is unchanged. A device, a pipe and stdout (None) are written directly.
    """
    if path is None:
        if sys.stdout is None:
            raise OSError("stdout is closed")
        yield sys.stdout.buffer
        sys.stdout.flush()
        return
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield file
        return
    target = path.resolve()
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.unfinished")
    try:
        file = open(unfinished, "xb", opener=partial(os.open, mode=0o600))  # only its user may read it, like the store
    except OSError as error:
        error.filename = str(path)
        raise
    try:
        with file:
            if target.exists():
                shutil.copymode(target, unfinished)
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def _described(record: Record) -> dict[str, Any]:
    return {
        "spec": record.spec.as_json(),
        "epoch": record.epoch,
        "version": record.version,
        "count": record.count,
        "weight": record.weight,
        "created": record.created,
    }


def read(path: Path | None, limits: Limits, longest_name: int) -> list[Restore]:
    """Return the buffers of a file that `export` wrote at `path`; None means stdin.

    Raises `MalformedBody`, the errors of `limits` and of names, and OSError for the file.
    """
    what = "stdin" if path is None else str(path)
    with _on_disk(path) as file:
        if not os.fstat(file.fileno()).st_size:
            raise MalformedBody(f"{what} is empty")
        body = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    try:
        tensors = safetensors.decode(body, limits)
    except MalformedBody as error:
        raise MalformedBody(f"{what} is not a safetensors file: {error}") from None
    metadata = safetensors.metadata_of(body, limits).get("buffers")
    if metadata is None:
        raise MalformedBody(f"{what} was not written by gradserve export: its metadata lacks buffers")
    states = _checked(what, metadata)
    records = {name: _record(name, state, longest_name) for name, state in states.items()}
    for name, record in records.items():
        tensor = tensors.get(name)
        if tensor is None or (tensor.shape, tensor.dtype) != (record.spec.shape, record.spec.dtype):
            raise MalformedBody(f"{what} has no tensor {name!r} as its metadata describes it")
    return [Restore(name=record.name, record=record, value=tensors[name]) for name, record in records.items()]


@contextmanager
def _on_disk(path: Path | None) -> Iterator[BinaryIO]:
    """Yield the file at `path`, or stdin (None), as a file that can be mapped: a copy, of a pipe for example."""
    if path is not None and path.is_file():
        with path.open("rb") as file:
            yield file
        return
    if path is None and sys.stdin is None:
        raise OSError("stdin is closed")
    with TemporaryFile() as copy, nullcontext(sys.stdin.buffer) if path is None else path.open("rb") as source:
        shutil.copyfileobj(source, copy)
        copy.flush()
        yield copy


def restore(store: Store, buffers: Collection[Restore]) -> None:
    """Create all buffers, or, on an error, none.

    Raises `BufferExists`, `StoreFull` and `TooManyBuffers`.
    """
    changes = {change.record.full_name: change for change in buffers}
    stores = {namespace: store.within(namespace) for namespace, _ in changes}
    names = (record.full_name for own in stores.values() for record in own.records())
    if existing := sorted(name.joined for name in names if name in changes):
        raise BufferExists(f"Buffers of these names already exist: {', '.join(existing[:5])}")
    futures = {name: stores[name.namespace].submit(Request([change])) for name, change in changes.items()}
    try:
        for future in futures.values():
            future.result()
    except BaseException:
        created = [name for name, future in futures.items() if future.exception() is None]
        for deletion in [stores[namespace].submit(Request([Delete(name=name)])) for namespace, name in created]:
            deletion.result()
        raise


def _is_whole(value: Any, least: int = 0, most: int = (1 << 63) - 1) -> bool:
    return type(value) is int and least <= value <= most


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


_Members: TypeAlias = dict[str, tuple[str, Callable[[Any], bool]]]
"""The rule of each member, in words and as a check."""

_WHOLE = ("an integer, 0 or more", _is_whole)
_NUMBER = ("a number", _is_number)

_STATE: _Members = {
    "spec": ("an object", lambda value: isinstance(value, dict)),
    "epoch": _WHOLE,
    "version": _WHOLE,
    "count": _WHOLE,
    "weight": _NUMBER,
    "created": ("seconds since 1970, from 0 to 10^11", lambda value: _is_number(value) and 0 <= value <= 1e11),
}

_RULES: _Members = {
    "shape": ("a list of integers, 0 or more", lambda value: isinstance(value, list) and all(map(_is_whole, value))),
    "dtype": (f"one of {', '.join(FLOATS.dtypes)}", lambda value: value in FLOATS.dtypes),
    "nonfinite": ("allow or reject", lambda value: value in ("allow", "reject")),
    "quorum": (
        f"null or an integer from 1 to {MAX_QUORUM}",
        lambda value: value is None or _is_whole(value, 1, MAX_QUORUM),
    ),
    "keep": (f"an integer from 1 to {MAX_KEEP}", lambda value: _is_whole(value, 1, MAX_KEEP)),
    "ttl_seconds": (
        f"null or a number above 0, up to {MAX_TTL_SECONDS}",
        lambda value: value is None or (_is_number(value) and 0 < value <= MAX_TTL_SECONDS),
    ),
}


def _checked(what: str, metadata: str) -> dict[str, dict[str, Any]]:
    """Return the state of each buffer in the file. Raises `MalformedBody` for a state that `export` cannot write."""
    try:
        states = orjson.loads(metadata)
    except orjson.JSONDecodeError as error:
        raise MalformedBody(f"The metadata of the buffers in {what} is not JSON: {error}") from None
    if not isinstance(states, dict):
        raise MalformedBody(f"The metadata of the buffers in {what} is {shown(states)}, but must be an object")
    for name, state in states.items():
        subject = f"The metadata of the buffer {shown(name)} in {what}"
        _check(subject, "", state, _STATE, _STATE.keys())
        _check(subject, "spec.", state["spec"], _RULES, {"shape", "dtype"})
    return states


def _check(subject: str, prefix: str, value: Any, rules: _Members, required: Set[str]) -> None:
    """Raise `MalformedBody` if a member is missing, unknown or wrong."""
    if not isinstance(value, dict):
        raise MalformedBody(f"{subject} is {shown(value)}, but must be an object")
    for name in sorted(required - value.keys()):
        raise MalformedBody(f"{subject} lacks {prefix}{name}")
    for name, member in value.items():
        if name not in rules:
            raise MalformedBody(f"{subject} has {shown(prefix + name)}, which is unknown")
        rule, is_valid = rules[name]
        if not is_valid(member):
            raise MalformedBody(f"{subject} has {prefix}{name} {shown(member)}, but it must be {rule}")


def _record(name: str, state: dict[str, Any], longest_name: int) -> Record:
    full_name = BufferName.split(name)
    check_length(check_name(full_name.name), longest_name)
    spec, created = spec_of(state["spec"]), state["created"]
    return Record(
        full_name, spec, 0, created, created, state["epoch"], state["version"], state["count"], state["weight"]
    )
