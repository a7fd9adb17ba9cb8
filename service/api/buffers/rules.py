"""The rules of a buffer in a request, and epochs whose deadlines are over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from service.api.http.call import Call
from service.buffers.names import BufferName
from service.buffers.record import Record
from service.buffers.rules import CloseIfDue, check_expected
from service.buffers.specs import RULES


def rules_of(new: BaseModel) -> dict[str, Any]:
    """Return the rules that the request has, as members of `Spec`. Raises `InvalidParameter`."""
    rules = {name: getattr(new, name) for name in new.model_fields_set & RULES.keys()}
    if (contributors := rules.get("contributors")) is not None:
        check_expected(contributors)
        rules["contributors"] = tuple(contributors)
    return rules


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
