"""The rules of a buffer in a request, and epochs whose deadlines are over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from service.api.buffers.specs import NewBuffer, NewRules
from service.api.http.call import Call
from service.buffers.epochs import check_contributor
from service.buffers.names import BufferName
from service.buffers.record import Record, Spec
from service.buffers.rules import CloseIfDue, check_rules
from service.dtypes import DTYPES
from service.errors import InvalidParameter, shown


def spec_of(new: NewBuffer) -> Spec:
    """Return the specification of a new buffer. Raises `InvalidParameter`."""
    members: dict[str, Any] = {name: getattr(new, name) for name in NewBuffer.model_fields}
    spec = Spec(**{**members, "shape": tuple(new.shape), "dtype": DTYPES[new.dtype], **_expected(new)})
    check_rules(spec)
    return spec


def rules_of(new: NewRules) -> dict[str, Any]:
    """Return the rules that the request has, as members of `Spec`. Raises `InvalidParameter`."""
    given = new.model_fields_set & NewRules.model_fields.keys()
    return {**{name: getattr(new, name) for name in given}, **_expected(new)}


def _expected(new: NewBuffer | NewRules) -> dict[str, tuple[str, ...]]:
    if new.contributors is None:
        return {}
    for name, count in Counter(new.contributors).items():
        check_contributor(name, "contributors")
        if count > 1:
            raise InvalidParameter(f"contributors has {shown(name)} {count} times, not once", parameter="contributors")
    return {"contributors": tuple(new.contributors)}


async def current(call: Call, name: str) -> Record:
    """Return the buffer. An epoch whose deadline is over is closed before."""
    record = await call.look_up(1, call.store.record, name)
    if record.due is not None and await closed_due(call, [name]):
        record = await call.look_up(1, call.store.record, name)
    return record


async def closed_due(call: Call, names: Sequence[str]) -> bool:
    """Close the epochs whose deadlines are over. Return whether there were any."""

    def due() -> list[str]:
        found = call.store.look([BufferName(call.store.namespace, name) for name in names]).values()
        dues = {record.name: record.due for record in found if record.due is not None}
        now = call.store.now() if dues else 0.0
        return [name for name, due in dues.items() if due <= now]

    over = await call.look_up(len(names), due)
    if over:
        await call.submit([CloseIfDue(name=name) for name in over], None)
    return bool(over)
