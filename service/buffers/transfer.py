"""Buffers on their way out of a store and back, as safetensors files.

A file holds the running value of each buffer under its name, and under `__metadata__["buffers"]`, as JSON, what is
needed to create the buffers again. Closed epochs and idempotency keys stay behind.
"""

from __future__ import annotations

import math
import mmap
import os
import shutil
import sys
import time
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
from service.buffers.record import LONGEST_TTL, MOST_KEEP, MOST_QUORUM, Record, name_buffer, spec_of
from service.buffers.store import Store
from service.codecs import safetensors
from service.dtypes import FLOATS
from service.errors import BufferCorrupt, BufferExists, MalformedBody, UnknownBuffer, shown
from service.limits import Limits


def export(store: Path, max_bytes: int, path: Path | None, prefix: str = "") -> tuple[int, int]:
    """Write the buffers with this prefix, as they are at one moment, to `path`, or, if it is None, to stdout.

    Returns how many there are, and the bytes of the file.

    The store may be in use. Raises `UnknownBuffer`, `StoreFailed` and `BufferCorrupt`, and OSError for the file, which
    then is as it was.
    """
    with opened_readonly(store, max_bytes) as opened, _replacing(path) as file:
        with opened.reading() as reader, np.errstate(all="ignore"):
            now = time.time()
            found = reader.records(prefix.encode(), prefix.encode() + b"\xff", strict=True)
            records = {one.full_name.joined: one for one in found if one.lives(now)}
            if prefix and not records:  # rather than replace a good file by one of nothing
                raise UnknownBuffer(f"There is no buffer whose name begins with {shown(prefix)}")
            ordered = safetensors.in_order({name: (one.spec.dtype, one.spec.shape) for name, one in records.items()})
            about = {name: _described(one) for name, one in records.items()}
            size: int = file.write(safetensors.head(ordered, {"buffers": orjson.dumps(about).decode()}))
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
    """A file that takes the place of the one at `path`, or of the one that a link there leads to, once it is whole.

    If it does not come to that, all is as before. A device or a pipe is written to as it is, and so is stdout: None.
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
        file = open(unfinished, "xb", opener=partial(os.open, mode=0o600))  # its user's alone, as the store is
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
    """The buffers of a file that `export` wrote, at `path`, or, if it is None, in stdin.

    Raises `MalformedBody`, what else `limits` and names raise, and OSError for the file.
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
    about = safetensors.metadata_of(body, limits).get("buffers")
    if about is None:
        raise MalformedBody(f"{what} was not written by gradserve export: its metadata lacks buffers")
    records = {name: _record(name, one, longest_name) for name, one in _checked(what, about).items()}
    for name, record in records.items():
        tensor = tensors.get(name)
        if tensor is None or (tensor.shape, tensor.dtype) != (record.spec.shape, record.spec.dtype):
            raise MalformedBody(f"{what} has no tensor {name!r} as its metadata describes it")
    return [Restore(name=record.name, record=record, value=tensors[name]) for name, record in records.items()]


@contextmanager
def _on_disk(path: Path | None) -> Iterator[BinaryIO]:
    """What is at `path`, or, if it is None, in stdin, as a file that can be mapped: a copy of a pipe, say."""
    if path is not None and path.is_file():
        with path.open("rb") as file:
            yield file
        return
    if path is None and sys.stdin is None:
        raise OSError("stdin is closed")
    with TemporaryFile() as copy, nullcontext(sys.stdin.buffer) if path is None else path.open("rb") as given:
        shutil.copyfileobj(given, copy)
        copy.flush()
        yield copy


def restore(store: Store, buffers: Collection[Restore]) -> None:
    """Create the buffers: all of them, or, on an error, none.

    Raises `BufferExists`, `StoreFull` and `TooManyBuffers`.
    """
    names = {one.record.full_name for one in buffers}
    spaces = {namespace: store.within(namespace) for namespace, _ in names}
    there = [one.full_name.joined for space in spaces.values() for one in space.records() if one.full_name in names]
    if there:
        raise BufferExists(f"Buffers of these names already exist: {', '.join(sorted(there)[:5])}")
    asked = {one.record.full_name: spaces[one.record.full_name.namespace].submit(Request([one])) for one in buffers}
    try:
        for one in asked.values():
            one.result()
    except BaseException:
        made = [name for name, one in asked.items() if one.exception() is None]
        for removed in [spaces[namespace].submit(Request([Delete(name=name)])) for namespace, name in made]:
            removed.result()
        raise


def _is_whole(value: Any, least: int = 0, most: int = (1 << 63) - 1) -> bool:
    return type(value) is int and least <= value <= most


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


_Members: TypeAlias = dict[str, tuple[str, Callable[[Any], bool]]]
"""What each member must be, in words and as a check."""

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
        f"null or an integer from 1 to {MOST_QUORUM}",
        lambda value: value is None or _is_whole(value, 1, MOST_QUORUM),
    ),
    "keep": (f"an integer from 1 to {MOST_KEEP}", lambda value: _is_whole(value, 1, MOST_KEEP)),
    "ttl_seconds": (
        f"null or a number above 0, up to {LONGEST_TTL}",
        lambda value: value is None or (_is_number(value) and 0 < value <= LONGEST_TTL),
    ),
}


def _checked(what: str, about: str) -> dict[str, dict[str, Any]]:
    """What the file says of each buffer. Raises `MalformedBody` if `export` would not say it."""
    try:
        found = orjson.loads(about)
    except orjson.JSONDecodeError as error:
        raise MalformedBody(f"The metadata of the buffers in {what} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise MalformedBody(f"The metadata of the buffers in {what} is {shown(found)}, but must be an object")
    for name, one in found.items():
        whose = f"The metadata of the buffer {shown(name)} in {what}"
        _check(whose, "", one, _STATE, _STATE.keys())
        _check(whose, "spec.", one["spec"], _RULES, {"shape", "dtype"})
    return found


def _check(whose: str, where: str, given: Any, members: _Members, needed: Set[str]) -> None:
    """Raise `MalformedBody` if a member is missing, unknown or wrong."""
    if not isinstance(given, dict):
        raise MalformedBody(f"{whose} is {shown(given)}, but must be an object")
    for missing in sorted(needed - given.keys()):
        raise MalformedBody(f"{whose} lacks {where}{missing}")
    for member, value in given.items():
        if member not in members:
            raise MalformedBody(f"{whose} has {shown(where + member)}, which is unknown")
        wanted, is_good = members[member]
        if not is_good(value):
            raise MalformedBody(f"{whose} has {where}{member} {shown(value)}, but it must be {wanted}")


def _record(name: str, about: dict[str, Any], longest_name: int) -> Record:
    full_name = BufferName.split(name)
    check_length(check_name(full_name.name), longest_name)
    spec, created = spec_of(about["spec"]), about["created"]
    state = about["epoch"], about["version"], about["count"], about["weight"]
    return Record(full_name, spec, 0, created, created, *state)
