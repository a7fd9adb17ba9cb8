"""Export of buffers and graphs to a safetensors file, and import from such a file.

The file holds the current value of each buffer under its name. `__metadata__["buffers"]` holds, as JSON, the data that
creates the buffers again. `transfer_graphs.py` and `transfer_runs.py` have graphs and runs. Closed steps and
idempotency keys are not exported.
"""

from __future__ import annotations

import mmap
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import orjson

from service.buffers import transfer_graphs, transfer_runs
from service.buffers.changes import Delete
from service.buffers.graph_changes import DeleteGraph
from service.buffers.graphs import damaged
from service.buffers.names import BufferName, check_length, check_name, graphs_of, runs_of
from service.buffers.perform import Request
from service.buffers.readonly import Moment
from service.buffers.record import Record, name_buffer
from service.buffers.restore import Restore
from service.buffers.rules import new_spec
from service.buffers.runs import Remove
from service.buffers.specs import RULES, Rule, Spec
from service.buffers.steps import MAX_CONTRIBUTORS, is_contributor
from service.buffers.store import Store
from service.buffers.transfer_graphs import MAX_SECONDS, SavedGraph, checked
from service.buffers.transfer_runs import SavedRun
from service.buffers.url import opened_readonly
from service.codecs import safetensors
from service.dtypes import FLOATS, Array
from service.errors import BufferCorrupt, BufferExists, InvalidParameter, MalformedBody, UnknownBuffer, shown
from service.host.documents import DocumentInvalid, Members, check, is_number
from service.host.files import named, replacing
from service.keys import NAME, NAME_RULE
from service.limits import Limits


def export(
    url: str, max_bytes: int, path: Path | None, prefix: str = "", schema: str = "gradserve"
) -> tuple[int, int, int]:
    """Write the buffers and graphs with this prefix, as of one moment, to `path`; None means stdout.

    Return the counts of buffers and of graphs, and the bytes of the file. Servers may use the store. Raises
    `UnknownBuffer`, `StoreFailed` and `BufferCorrupt`, and OSError for the file; after an error the file is unchanged.
    """
    opening = opened_readonly(url, max_bytes=max_bytes, schema=schema)
    with opening as opened, named(path or "stdout"), replacing(path) as file:
        now = opened.now()
        with opened.reading() as moment, np.errstate(all="ignore"):
            found: dict[str, list[Record]] = {"buffer": [], "graph": [], "run": []}
            for record in filter(lambda one: one.lives(now), _sound(moment, prefix)):
                found[record.full_name.kind[0]].append(record)
            if prefix and not any(found.values()):  # a file without buffers must not replace a good file
                raise UnknownBuffer(f"There is no buffer and no graph whose name begins with {shown(prefix)}")
            records = {record.full_name.joined: record for record in found["buffer"]}
            graphs = {transfer_graphs.tensor_of(each): each for each in found["graph"]}
            runs = {each.full_name.kind[1].joined: transfer_runs.described(moment, each) for each in found["run"]}
            types = {name: (each.spec.dtype, each.spec.shape) for name, each in records.items()}
            ordered = safetensors.in_order(
                types | {name: transfer_graphs.type_of(each) for name, each in graphs.items()}
            )
            size: int = file.write(safetensors.head(ordered, _metadata(records, graphs, runs)))
            for name in ordered:
                if name in graphs:
                    size += sum(map(_writing(file), transfer_graphs.pieces(moment, graphs[name])))
                    continue
                try:
                    size += sum(map(_writing(file), moment.streamed(records[name].spec, records[name].value)))
                except BufferCorrupt as error:
                    name_buffer(error, name, one_of_many=True)
                    raise
        return len(records), len(graphs), size


def _writing(file: Any) -> Callable[[Array], int]:
    """Return a function that writes an array to the file, and returns its bytes."""
    return lambda piece: int(file.write(piece.reshape(-1).view(np.uint8).data))


def _metadata(records: Mapping[str, Record], graphs: Mapping[str, Record], runs: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata of the file. Without graphs and runs a version before reads it, too."""
    metadata: dict[str, Mapping[str, Any]] = {
        "buffers": {name: _described(record) for name, record in records.items()},
        "graphs": {name: transfer_graphs.described(graph) for name, graph in graphs.items()},
        "runs": runs,
    }
    return {name: orjson.dumps(it).decode() for name, it in metadata.items() if it or name == "buffers"}


def _sound(moment: Moment, prefix: str) -> Iterator[Record]:
    """Yield the buffers, graphs and runs whose names have this prefix. Raises `BufferCorrupt` and `GraphCorrupt`."""
    prefixes = [prefix, *(transfer_graphs.prefix_of(prefix, hidden) for hidden in (graphs_of(""), runs_of("")))]
    for name, record in dict(
        chain(*map(moment.sound_records, prefixes))
    ).items():  # the first may have all of the others
        kind, shown = name.kind[0], name.kind[1].joined
        if kind == "push" or not shown.startswith(prefix):
            continue
        if record is None:
            problem = BufferCorrupt(f"The stored record of the {kind} {shown!r} is damaged", buffer=shown)
            raise damaged(shown) if kind == "graph" else problem
        yield record


def _described(record: Record) -> dict[str, Any]:
    """Return the state of a buffer, without what a version before would not know, if it can be absent."""
    state = {
        "spec": record.spec.stored(),
        "step": record.step,
        "version": record.version,
        "count": record.count,
        "weight": record.weight,
        "created": record.created,
    }
    later = {"began": record.began, "contributors": dict(record.contributors_in)}
    return state | {name: value for name, value in later.items() if value}


class Contents(NamedTuple):
    """The buffers, graphs and runs of a file."""

    buffers: list[Restore]
    graphs: list[SavedGraph]
    runs: list[SavedRun]


def read(path: Path | None, limits: Limits, longest_name: int) -> Contents:
    """Return the contents of a file that `export` wrote at `path`; None means stdin.

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
    metadata = safetensors.metadata_of(body, limits)
    if "buffers" not in metadata:
        raise MalformedBody(f"{what} was not written by gradserve export: its metadata lacks buffers")
    states = checked(what, ("buffers", "buffer"), metadata["buffers"], _STATE | _LATER, _STATE.keys())
    graphs = transfer_graphs.read(what, metadata.get("graphs"), tensors)
    if unknown := sorted(tensors.keys() - states.keys() - graphs.keys()):
        raise MalformedBody(f"{what} has the tensor {shown(unknown[0])}, which its metadata does not describe")
    records = {name: _record(what, name, state, longest_name) for name, state in states.items()}
    for name, record in records.items():
        tensor = tensors.get(name)
        if tensor is None or (tensor.shape, tensor.dtype) != (record.spec.shape, record.spec.dtype):
            raise MalformedBody(f"{what} has no tensor {name!r} as its metadata describes it")
    for name, (full_name, _) in graphs.items():
        _check_name(what, name, full_name, longest_name, "graph")
    for run, _ in (runs := transfer_runs.read(what, metadata.get("runs"))):
        _check_name(what, run.joined, run, longest_name, "run")
    restores = [Restore(name=record.name, record=record, value=tensors[name]) for name, record in records.items()]
    return Contents(restores, [*graphs.values()], runs)


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


def restore(store: Store, contents: Contents) -> None:
    """Create all buffers, graphs and runs, or, on an error, none.

    Raises `BufferExists`, `GraphExists`, `RunExists`, `StoreFull`, `TooManyBuffers` and `TooManyGraphs`.
    """
    changes = {change.record.full_name: change for change in contents.buffers}
    stores = {namespace: store.within(namespace) for namespace, _ in changes}
    names = (record.full_name for own in stores.values() for record in own.records())
    if existing := sorted(name.joined for name in names if name in changes):
        raise BufferExists(f"Buffers of these names already exist: {', '.join(existing[:5])}")
    parts = [(name, Request([change]), Request([Delete(name=name.name)])) for name, change in changes.items()]
    hidden: list[Any] = [(name, put, DeleteGraph(name=name.name)) for name, put in contents.graphs]
    hidden += [(name, run, Remove(name=name.name, last=True)) for name, run in contents.runs]
    parts += [(name, Request([], hidden=made), Request([], hidden=undo)) for name, made, undo in hidden]
    futures = [store.within(name.namespace).submit(request) for name, request, _ in parts]
    try:
        for future in futures:
            future.result()
    except BaseException:
        for (name, request, undo), future in zip(parts, futures, strict=True):
            if future.exception() is None and (future.result().is_new or request.hidden is None):
                store.within(name.namespace).submit(undo).result()
        raise


MOST_CHANGES = 1 << 53
"""The largest step, version and count of a file: JSON readers that use doubles round larger integers."""


def _is_whole(value: Any, least: int = 0, most: int = MOST_CHANGES) -> bool:
    return type(value) is int and least <= value <= most


_WHOLE = (f"an integer from 0 to {MOST_CHANGES}", _is_whole)

_STATE: Members = {
    "spec": ("an object", lambda value: isinstance(value, dict)),
    "step": _WHOLE,
    "version": _WHOLE,
    "count": _WHOLE,
    "weight": ("a number", lambda value: is_number(value, -sys.float_info.max, sys.float_info.max)),
    "created": ("seconds since 1970, from 0 to 10^11", lambda value: is_number(value, 0, MAX_SECONDS)),
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


def _spec_of(subject: str, members: dict[str, Any]) -> Spec:
    try:
        check(subject, members, _SPEC, {"shape", "dtype"}, "spec.")
        return new_spec(members)
    except DocumentInvalid as error:
        raise MalformedBody(str(error)) from None
    except InvalidParameter as error:
        parameter = error.context["parameter"]
        raise MalformedBody(f"{subject} has spec.{parameter} that no buffer can have: {error}") from None


def _record(what: str, name: str, state: dict[str, Any], longest_name: int) -> Record:
    full_name = BufferName.split(name)
    _check_name(what, name, full_name, longest_name)
    spec = _spec_of(f"The metadata of the buffer {shown(name)} in {what}", state["spec"])
    created, weight = float(state["created"]), float(state["weight"])
    began, contributors = state.get("began"), state.get("contributors", {})
    record = Record(full_name, spec, 0, created, created, state["step"], state["version"], state["count"], weight)
    return record.changed(began=began, contributors_in=contributors)


def _check_name(what: str, tensor: str, name: BufferName, longest: int, kind: str = "buffer") -> None:
    """Raise `MalformedBody` or `InvalidParameter` unless a client can use this name, which the file has as `tensor`."""
    split = BufferName.split(tensor)
    if split.joined != tensor or not (name.namespace == "" or NAME.fullmatch(name.namespace)):
        raise MalformedBody(f"{what} has the {kind} {shown(tensor)}, but a namespace must be {NAME_RULE}")
    check_length(check_name(name.name, kind), longest, kind)
