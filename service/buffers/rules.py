"""Changes of a buffer's rules, and the closing of steps whose deadlines are over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from service.buffers.changes import Change
from service.buffers.closing import close, fulfilled
from service.buffers.names import BufferName
from service.buffers.packed import MOST_SPECS, spec_of
from service.buffers.record import Receipt, Record, Spec
from service.buffers.specs import contradiction
from service.buffers.steps import MAX_CONTRIBUTORS_BYTES, check_contributor, names_bytes
from service.buffers.transaction import Transaction
from service.dtypes import Array
from service.errors import InvalidParameter, shown


def new_spec(members: Mapping[str, Any]) -> Spec:
    """Return the specification of a new buffer, whose members the table of rules allows. Raises `InvalidParameter`."""
    check_expected(members.get("contributors"))
    return spec_of(members)


def check_expected(contributors: Sequence[str] | None) -> None:
    """Raise `InvalidParameter` if a contributor has no valid name, or is expected twice."""
    if contributors is None:
        return
    for name, count in Counter(contributors).items():
        check_contributor(name, "contributors")
        if count > 1:
            raise InvalidParameter(f"contributors has {shown(name)} {count} times, not once", parameter="contributors")


def check_names(spec: Spec) -> None:
    """Raise `InvalidParameter` if the names of the expected contributors are too long together.

    A buffer of an older version may have such names.
    """
    size, most = names_bytes(spec.contributors or ()), MAX_CONTRIBUTORS_BYTES
    if size > most:
        problem = f"contributors has {size} bytes of names, but a buffer may expect {most}"
        raise InvalidParameter(problem, parameter="contributors", limit=most)


@lru_cache(MOST_SPECS)
def _replaced(spec: Spec, rules: tuple[tuple[str, Any], ...]) -> Spec:
    """Return the specification with these rules: one for all buffers that have had the other."""
    return replace(spec, **dict(rules))


@dataclass(kw_only=True)
class SetRules(Change):
    """Replace some rules of the buffer. A rule that the running step fulfils already closes it.

    A deadline counts from the first add of the running step; if the buffer had none, from this change. Rules that
    contradict each other are refused, unless those of the buffer do already, which an older version has allowed.
    """

    rules: Mapping[str, Any] = field(default_factory=dict)
    """Members of `Spec` that no value depends on."""
    want_metadata: bool = True
    """Whether the client wants the metadata in place of a receipt."""

    def admit(self, record: Record | None) -> None:
        super().admit(record)
        assert record is not None
        spec = _replaced(record.spec, (*self.rules.items(),))
        if "contributors" in self.rules:
            check_names(spec)
        if (refusal := contradiction(spec)) is not None and contradiction(record.spec) is None:
            raise refusal

    def apply(self, txn: Transaction, name: BufferName, record: Record, now: float) -> tuple[Receipt, Array | None]:
        spec, closed = _replaced(record.spec, (*self.rules.items(),)), None
        is_new = spec != record.spec
        if is_new:
            has_deadline = spec.deadline_seconds is not None and record.count > 0
            began = (record.began or now) if has_deadline else None
            record = record.changed(spec=spec, began=began, updated=now, version=record.version + 1)
            reason = fulfilled(record, now) if record.count else None
            if reason is None:
                txn.put(record)
            else:
                record, closed = close(txn, record, reason)
        return record.as_json() if self.want_metadata else record.receipt(updated=is_new, of=closed), None


@dataclass(kw_only=True)
class CloseIfDue(Change):
    """Close the step if its deadline is over, as every change of the buffer does before it is made."""

    def apply(self, txn: Transaction, name: BufferName, record: Record, now: float) -> tuple[Receipt, Array | None]:
        return record.receipt(updated=False), None
