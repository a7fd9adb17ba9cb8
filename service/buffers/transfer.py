"""Export of buffers to a safetensors file, and import from such a file.

The file holds the current value of each buffer under its name. `__metadata__["buffers"]` holds, as JSON, the data that
creates the buffers again. Closed epochs and idempotency keys are not exported.
"""

from __future__ import annotations

import mmap
import os
import shutil
import stat
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from typing import Any, BinaryIO

import numpy as np
import orjson

from service.buffers.changes import Delete
from service.buffers.epochs import MAX_CONTRIBUTORS, is_contributor
from service.buffers.names import BufferName, check_length, check_name
from service.buffers.perform import Request
from service.buffers.readonly import Moment
from service.buffers.record import Record, name_buffer
from service.buffers.restore import Restore
from service.buffers.rules import new_spec
from service.buffers.specs import RULES, Rule, Spec
from service.buffers.store import Store
from service.buffers.url import opened_readonly
from service.codecs import safetensors
from service.dtypes import FLOATS
from service.errors import BufferCorrupt, BufferExists, InvalidParameter, MalformedBody, UnknownBuffer, shown
from service.host.documents import DocumentInvalid, Members, check, is_number, parse
from service.host.files import named, open_new, put_in_place
from service.host.system import sync
from service.keys import NAME, NAME_RULE
from service.limits import Limits


def export(url: str, max_bytes: int, path: Path | None, prefix: str = "", schema: str = "gradserve") -> tuple[int, int]:
    """Write the buffers with this prefix, as of one moment, to `path`; None means stdout.

    Return the count of the buffers, and the bytes of the file. Servers may use the store. Raises `UnknownBuffer`,
    `StoreFailed` and `BufferCorrupt`, and OSError for the file; after an error the file is unchanged.
    """
    opening = opened_readonly(url, max_bytes=max_bytes, schema=schema)
    with opening as opened, named(path or "stdout"), _replacing(path) as file:
        now = opened.now()
        with opened.reading() as moment, np.errstate(all="ignore"):
            records = {name: record for name, record in _sound(moment, prefix).items() if record.lives(now)}
            if prefix and not records:  # a file without buffers must not replace a good file
                raise UnknownBuffer(f"There is no buffer whose name begins with {shown(prefix)}")
            ordered = safetensors.in_order({name: (each.spec.dtype, each.spec.shape) for name, each in records.items()})
            metadata = {name: _described(record) for name, record in records.items()}
            size: int = file.write(safetensors.head(ordered, {"buffers": orjson.dumps(metadata).decode()}))
            for name in ordered:
                try:
                    for piece in moment.streamed(records[name].spec, records[name].value):
                        file.write(piece.reshape(-1).view(np.uint8).data)
                except BufferCorrupt as error:
                    name_buffer(error, name, one_of_many=True)
                    raise
                size += records[name].spec.nbytes
        return len(records), size


def _sound(moment: Moment, prefix: str) -> dict[str, Record]:
    """Return the buffers with this prefix by their joined names. Raises `BufferCorrupt`."""
    found = {}
    for name, record in moment.sound_records(prefix):
        if record is None:
            raise BufferCorrupt(f"The stored record of the buffer {name.joined!r} is damaged", buffer=name.joined)
        found[name.joined] = record
    return found


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
    target = Path(os.path.realpath(path))
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.unfinished")
    try:
        file = open(open_new(unfinished), "wb")  # only its user may read it, like the store
    except OSError as error:
        error.filename = str(path)
        raise
    try:
        with file:
            with suppress(FileNotFoundError):
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            yield file
            file.flush()
            sync(file.fileno())
        put_in_place(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


def _described(record: Record) -> dict[str, Any]:
    """Return the state of a buffer, without what a version before would not know, if it can be absent."""
    state = {
        "spec": record.spec.stored(),
        "epoch": record.epoch,
        "version": record.version,
        "count": record.count,
        "weight": record.weight,
        "created": record.created,
    }
    later = {"began": record.began, "contributors": dict(record.contributors_in)}
    return state | {name: value for name, value in later.items() if value}


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
    if unknown := sorted(tensors.keys() - states.keys()):
        raise MalformedBody(f"{what} has the tensor {shown(unknown[0])}, which its metadata does not describe")
    records = {name: _record(what, name, state, longest_name) for name, state in states.items()}
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
    opening = nullcontext(sys.stdin.buffer) if path is None else path.open("rb")
    with opening as source, named(gettempdir()), TemporaryFile() as copy:
        shutil.copyfileobj(source, copy)
        copy.flush()
        yield copy


def restore(store: Store, buffers: Collection[Restore]) -> None:
    """Create all buffers, or, on an error, none. Raises `BufferExists`, `StoreFull` and `TooManyBuffers`."""
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


MOST_CHANGES = 1 << 53
"""The largest epoch, version and count of a file: JSON readers that use doubles round larger integers."""

MAX_CREATED_SECONDS = 10**11
"""The latest time of creation, in the year 5138: a time in milliseconds would be later."""


def _is_whole(value: Any, least: int = 0, most: int = MOST_CHANGES) -> bool:
    return type(value) is int and least <= value <= most


_WHOLE = (f"an integer from 0 to {MOST_CHANGES}", _is_whole)

_STATE: Members = {
    "spec": ("an object", lambda value: isinstance(value, dict)),
    "epoch": _WHOLE,
    "version": _WHOLE,
    "count": _WHOLE,
    "weight": ("a number", lambda value: is_number(value, -sys.float_info.max, sys.float_info.max)),
    "created": ("seconds since 1970, from 0 to 10^11", lambda value: is_number(value, 0, MAX_CREATED_SECONDS)),
}

_LATER: Members = {
    "began": _STATE["created"],
    "contributors": (
        f"an object of at most {MAX_CONTRIBUTORS} names with integers, 1 or more",
        lambda value: (
            isinstance(value, dict)
            and len(value) <= MAX_CONTRIBUTORS
            and all(is_contributor(name) and _is_whole(adds, 1) for name, adds in value.items())
        ),
    ),
}
"""Members of a state that a version before did not write."""


def _member(rule: Rule) -> tuple[str, Callable[[Any], bool]]:
    return rule.words if rule.default is not None else f"null or {rule.words}", rule.permits


_SPEC: Members = {
    "shape": ("a list of integers, 0 or more", lambda value: isinstance(value, list) and all(map(_is_whole, value))),
    "dtype": (f"one of {', '.join(FLOATS.dtypes)}", lambda value: value in FLOATS.dtypes),
    **{name: _member(rule) for name, rule in RULES.items()},
}


def _checked(what: str, metadata: str) -> dict[str, dict[str, Any]]:
    """Return the state of each buffer in the file. Raises `MalformedBody` for a state that `export` cannot write."""
    everything = f"The metadata of the buffers in {what}"
    try:
        states: dict[str, dict[str, Any]] = parse(everything, metadata)
        if not isinstance(states, dict):
            raise DocumentInvalid(f"{everything} is {shown(states)}, but must be an object")
        for name, state in states.items():
            subject = f"The metadata of the buffer {shown(name)} in {what}"
            check(subject, state, _STATE | _LATER, _STATE.keys())
            state["spec"] = _spec_of(subject, state["spec"])
    except DocumentInvalid as error:
        raise MalformedBody(str(error)) from None
    return states


def _spec_of(subject: str, members: dict[str, Any]) -> Spec:
    check(subject, members, _SPEC, {"shape", "dtype"}, "spec.")
    try:
        return new_spec(members)
    except InvalidParameter as error:
        parameter = error.context["parameter"]
        raise DocumentInvalid(f"{subject} has spec.{parameter} that no buffer can have: {error}") from None


def _record(what: str, name: str, state: dict[str, Any], longest_name: int) -> Record:
    full_name = BufferName.split(name)
    if full_name.joined != name or not (full_name.namespace == "" or NAME.fullmatch(full_name.namespace)):
        raise MalformedBody(f"{what} has the buffer {shown(name)}, but a namespace must be {NAME_RULE}")
    check_length(check_name(full_name.name), longest_name)
    spec, created, weight = state["spec"], float(state["created"]), float(state["weight"])
    began, contributors = state.get("began"), state.get("contributors", {})
    record = Record(full_name, spec, 0, created, created, state["epoch"], state["version"], state["count"], weight)
    return record.changed(began=began, contributors_in=contributors)
