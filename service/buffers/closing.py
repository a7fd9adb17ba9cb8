"""The contributors to a step, and its end, in terms of a store's `Transaction`."""

from __future__ import annotations

import math

from service.buffers.record import Record
from service.buffers.steps import (
    MAX_CONTRIBUTORS,
    MAX_CONTRIBUTORS_BYTES,
    MAX_KEPT_CONTRIBUTORS,
    MAX_KEPT_CONTRIBUTORS_BYTES,
    Closed,
    ClosedBy,
    names_bytes,
)
from service.buffers.transaction import Transaction
from service.errors import DuplicateContributor, InvalidParameter, shown

WEIGHT_ROUNDING = 1e-9
"""The relative part of `quorum_weight` that may be missing: ten shares of 0.1 sum to a little less than 1."""


def check_may_add(record: Record, name: str) -> None:
    """Raise `DuplicateContributor`, or `InvalidParameter` if the step has as many contributors as it may."""
    adds, others = record.contributors_in.get(name, 0), len(record.contributors_in)
    limit, most = record.spec.per_contributor, MAX_CONTRIBUTORS
    if adds >= limit:
        problem = (
            f"{shown(name)} has added {adds} gradient{'s' * (adds > 1)} to step {record.step} of {record.name!r},"
            f" which takes {limit} of each contributor (see per_contributor)"
        )
        raise DuplicateContributor(problem, buffer=record.name, step=record.step, count=record.count)
    if not adds and others >= most:
        problem = (
            f"contributor is {shown(name)}, but step {record.step} of {record.name!r} has {others} contributors,"
            " the limit"
        )
        raise InvalidParameter(problem, parameter="contributor", buffer=record.name, step=record.step, limit=most)
    size, most = names_bytes([*record.contributors_in, name]), MAX_CONTRIBUTORS_BYTES
    if not adds and size > most:
        problem = (
            f"contributor is {shown(name)}, but with it the names of the {others + 1} contributors to step"
            f" {record.step} of {record.name!r} have {size} bytes; the limit is {most}"
        )
        raise InvalidParameter(problem, parameter="contributor", buffer=record.name, step=record.step, limit=most)


def contributed(record: Record, name: str | None, *, alone: bool) -> Record:
    """Return the record after an add of this contributor; with `alone`, after its overwrite.

    A run awaits a contributor again that was left out.
    """
    before, absent = {} if alone else record.contributors_in, record.absent
    own = {} if name is None else {name: before.get(name, 0) + 1}
    if name in absent and record.spec.life is not None:
        absent = {one: at for one, at in absent.items() if one != name}
    return record.changed(contributors_in={**before, **own}, absent=absent)


def fulfilled(record: Record, now: float) -> ClosedBy | None:
    """Return what closes the running step now, if anything does.

    The first step of a run waits for all expected contributors, or for as many as its quorum if they are more. Its
    later steps do not wait for those that are left out: a step closes once each of the others has its share.
    """
    spec = record.spec
    if spec.life is not None and not record.step and _lacks_contributors(record):
        return None
    if spec.quorum is not None and record.count >= spec.quorum:
        return "quorum"
    if spec.quorum_weight is not None and record.weight >= spec.quorum_weight * (1 - WEIGHT_ROUNDING):
        return "quorum"
    if spec.life is not None and record.left_out and _has_all_members(record):
        return "members"
    return "deadline" if record.began is not None and (record.due or math.inf) <= now else None


def _lacks_contributors(record: Record) -> bool:
    """Whether fewer contributors are in than the first step waits for."""
    missing, expected = record.awaited or (), record.spec.contributors or ()
    inside = sum(name in record.contributors_in for name in expected)
    return bool(missing) and inside < min(inside + len(missing), record.spec.quorum or len(expected))


def _has_all_members(record: Record) -> bool:
    """Whether each contributor that is not left out has its share of the quorum, and the sum has `min_count`."""
    spec, left_out, expected = record.spec, record.left_out, record.spec.contributors or ()
    members = [name for name in expected if name not in left_out]
    if not members or spec.quorum is None or record.count < spec.min_count:
        return False
    share = -(-spec.quorum // len(expected))
    return all(record.contributors_in.get(name, 0) >= share for name in members)


def close(txn: Transaction, record: Record, by: ClosedBy) -> tuple[Record, Closed]:
    """Close the step: keep its value as a closed step, and begin the next step."""
    who = dict(sorted(record.contributors_in.items()))
    closed = Closed(record.step, record.version, record.count, record.weight, record.value, by, who)
    steps = (*record.closed, closed)
    for old in steps[: -record.spec.keep]:
        txn.free(old.value)
    expected, inside = record.spec.contributors or (), record.contributors_in.keys() - record.left_out
    absent = {name: record.last_in(name) for name in expected if name not in inside}
    steps = _named(steps[-record.spec.keep :])
    record = next_step(record).changed(closed=steps, closed_at=record.updated, absent=absent)
    txn.put(record)
    return record, closed


def _named(steps: tuple[Closed, ...]) -> tuple[Closed, ...]:
    """Return these steps. The oldest lose their contributors if all have too many together."""
    names = size = 0
    for place in reversed(range(len(steps))):
        contributors = steps[place].contributors
        names, size = names + len(contributors), size + names_bytes(contributors)
        if names > MAX_KEPT_CONTRIBUTORS or size > MAX_KEPT_CONTRIBUTORS_BYTES:
            return (*(each._replace(contributors={}) for each in steps[: place + 1]), *steps[place + 1 :])
    return steps


def next_step(record: Record) -> Record:
    """Return the record at the begin of its next step."""
    return record.changed(step=record.step + 1, count=0, weight=0.0, value=None, began=None, contributors_in={})


def close_if_due(txn: Transaction, record: Record, now: float) -> Record:
    """Close the step if its deadline is over. Return the record after that.

    The result depends on the record alone, not on the moment: the deadline counts as a change when it ends.
    """
    if record.began is None or (due := record.due) is None or due > now:
        return record
    return close(txn, record.changed(updated=max(record.updated, due), version=record.version + 1), "deadline")[0]
