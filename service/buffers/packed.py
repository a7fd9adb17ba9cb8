"""A record as stores keep it: a list that JSON can hold.

A buffer without the rules of a later version is stored as the version before stored it, in no more bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from service.buffers.epochs import Closed, ClosedBy
from service.buffers.names import BufferName
from service.buffers.record import Record, Spec
from service.dtypes import DTYPES


def spec_of(members: Mapping[str, Any]) -> Spec:
    """Return the specification whose `as_json` has these members. Absent rules have their defaults."""
    if members.get("contributors") is not None:
        members = {**members, "contributors": tuple(members["contributors"])}
    return Spec(**{**members, "shape": tuple(members["shape"]), "dtype": DTYPES[members["dtype"]]})


def pack_record(record: Record) -> bytes:
    """Return a record without its name, as JSON."""
    spec = record.spec
    fields = [
        orjson.Fragment(spec.text),
        record.id,
        record.created,
        record.updated,
        record.epoch,
        record.version,
        record.count,
        record.weight,
        record.value,
        [_pack_closed(spec, closed) for closed in record.closed],
    ]
    if record.began is not None or record.contributors_in:
        fields += [record.began, record.contributors_in]
    return orjson.dumps(fields)


def unpack_record(name: BufferName, packed: bytes | memoryview) -> Record:
    """Return the record of this name. Raises LookupError, TypeError and ValueError for what no version has packed."""
    spec_members, *state = orjson.loads(packed)
    spec = spec_of(spec_members)
    closed = tuple(_unpack_closed(spec, *each) for each in state[8])
    return Record(name, spec, *[*state[:8], closed, *state[9:]])


def _pack_closed(spec: Spec, closed: Closed) -> Sequence[Any]:
    short = (closed.epoch, closed.version, closed.count, closed.weight, closed.value)
    if not closed.contributors and closed.closed_by == _usual(spec, closed.count):
        return short
    return (*short, closed.closed_by, closed.contributors)


def _unpack_closed(
    spec: Spec,
    epoch: int,
    version: int,
    count: int,
    weight: float,
    value: int | None,
    closed_by: ClosedBy | None = None,
    contributors: Mapping[str, int] | None = None,
) -> Closed:
    closed_by = closed_by or _usual(spec, count)
    return Closed(epoch, version, count, weight, value, closed_by, {} if contributors is None else contributors)


def _usual(spec: Spec, count: int) -> ClosedBy:
    """Return what has closed an epoch that is stored without a reason."""
    return "quorum" if spec.quorum is not None and count >= spec.quorum else "take"
