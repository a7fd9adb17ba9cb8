"""The contributors to an epoch: how often each may add, and how many there may be."""

from __future__ import annotations

from service.buffers.epochs import MAX_CONTRIBUTORS, MAX_KEPT_CONTRIBUTORS
from service.buffers.record import Record
from service.errors import DuplicateContributor, InvalidParameter, shown


def most_contributors(keep: int) -> int:
    """Return how many contributors an epoch may have, if the buffer keeps this many closed epochs."""
    return min(MAX_CONTRIBUTORS, MAX_KEPT_CONTRIBUTORS // keep)


def check_may_add(record: Record, name: str) -> None:
    """Raise `DuplicateContributor`, or `InvalidParameter` if the epoch has as many contributors as it may."""
    adds, others = record.contributors_in.get(name, 0), len(record.contributors_in)
    limit, most = record.spec.per_contributor, most_contributors(record.spec.keep)
    if adds >= limit:
        raise DuplicateContributor(
            f"{shown(name)} has added {adds} gradient{'s' * (adds > 1)} to epoch {record.epoch} of {record.name!r},"
            f" which takes {limit} of each contributor (see per_contributor)",
            buffer=record.name,
            epoch=record.epoch,
            count=record.count,
        )
    if not adds and others >= most:
        raise InvalidParameter(
            f"contributor is {shown(name)}, but epoch {record.epoch} of {record.name!r} has {others} contributors,"
            " the limit",
            parameter="contributor",
            buffer=record.name,
            epoch=record.epoch,
            limit=most,
        )


def contributed(record: Record, name: str | None, *, alone: bool) -> Record:
    """Return the record after an add of this contributor; with `alone`, after its overwrite."""
    before = {} if alone else record.contributors_in
    own = {} if name is None else {name: before.get(name, 0) + 1}
    return record.changed(contributors_in={**before, **own})
