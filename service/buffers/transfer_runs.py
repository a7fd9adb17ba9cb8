"""Runs in the file of an export: `__metadata__["runs"]` holds them, as JSON, by their names."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import orjson

from service.buffers.graphs import digest_of
from service.buffers.names import LIFE, BufferName
from service.buffers.readonly import Moment
from service.buffers.record import Record
from service.buffers.runs import RestoreRun, StoredRun, as_form, is_kept
from service.buffers.transfer_graphs import MAX_SECONDS, checked
from service.host.documents import Members, is_number

SavedRun: TypeAlias = tuple[BufferName, RestoreRun]
"""A run of a file, and the change that makes it again."""


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_kept(value: Any) -> bool:
    return isinstance(value, dict) and is_kept(value)


_RUN: Members = {
    "life": ("a life of the run, or empty", lambda value: _is_text(value) and bool(not value or LIFE.fullmatch(value))),
    "created": ("seconds since 1970, from 0 to 10^11", lambda value: is_number(value, 0, MAX_SECONDS)),
    "prefix": ("a text", _is_text),
    "buffer": ("a text", _is_text),
    "begun": ("a boolean", lambda value: isinstance(value, bool)),
    "workers": ("an object of texts", lambda value: isinstance(value, dict) and all(map(_is_text, value.values()))),
    "ended": (
        "null or an object with outcome, at, worker and error",
        lambda value: value is None or (isinstance(value, dict) and {*value} == {"outcome", "at", "worker", "error"}),
    ),
    "form": ("an object of finite numbers and integers of 64 bits", _is_kept),
    "start": ("an object of finite numbers and integers of 64 bits", _is_kept),
}


def described(moment: Moment, record: Record) -> dict[str, Any]:
    """Return a run as the file has it. Raises `BufferCorrupt`."""
    pieces = [piece.reshape(-1).view(np.uint8).tobytes() for piece in moment.streamed(record.spec, record.value)]
    run = StoredRun.of(record)
    form: dict[str, Any] = orjson.loads(b"".join(pieces))
    return {name: getattr(run, name) for name in _RUN if name not in form} | form


def read(what: str, metadata: str | None) -> list[SavedRun]:
    """Return the runs of a file. Raises `MalformedBody`."""
    runs = checked(what, ("runs", "run"), metadata, _RUN, _RUN.keys())
    return [_saved(BufferName.split(name), {**members}) for name, members in runs.items()]


def _saved(name: BufferName, members: dict[str, Any]) -> SavedRun:
    form, start, created = members.pop("form"), members.pop("start"), float(members.pop("created"))
    about = members | {"digest": digest_of(orjson.dumps(form, option=orjson.OPT_SORT_KEYS))}
    return name, RestoreRun(name=name.name, form=as_form(form, start), created=created, about=about)
