"""`/v1/buffers/statistics` and `/v1/buffers/{name}/statistics`: counts, extremes, norms and steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated

from fastapi import APIRouter, Query

from service.api.buffers.chosen import check_not_empty, names_of
from service.api.buffers.models import Names
from service.api.buffers.preconditions import refuse_headers
from service.api.buffers.request import RECEIPT_BYTES, RECORD_FACTOR, read_after_closing_due, receive
from service.api.buffers.routes import READ
from service.api.dashboard.buffer_models import (
    FullStatistics,
    HeatMap,
    ManyStatistics,
    ManyStatisticsQuery,
    StatisticsQuery,
    StepStatistics,
)
from service.api.dashboard.statistics import (
    MAX_STEPS,
    STEPS_ELEMENTS,
    BufferStatistics,
    Computed,
    described,
    last_state,
)
from service.api.dashboard.summary import heat_map
from service.api.http.answer import JsonAnswer
from service.api.http.call import Call, CurrentCall
from service.api.http.routing import access, body
from service.buffers.names import check_name
from service.buffers.record import Record, Snapshot
from service.buffers.steps import Closed
from service.errors import BufferCorrupt, Busy, InvalidParameter, StepGone, TensorTooLarge, UnknownBuffer

MAX_READINGS = 10
"""Readings of the last closed step before a request fails because newer steps have closed meanwhile."""

AT_ONCE_ELEMENTS = 1 << 16
"""Elements of closed steps that are read at once."""


def routes(known: BufferStatistics) -> APIRouter:
    """Return the endpoints, which compute what is not `known`."""
    router = APIRouter(prefix="/v1/buffers", tags=["buffers"])

    @router.post("/statistics", summary="Statistics of many buffers", dependencies=[body(Names, required=False)])
    @access(READ, label="buffers")
    async def statistics_many(
        call: CurrentCall, query: Annotated[ManyStatisticsQuery, Query()]
    ) -> JsonAnswer[ManyStatistics]:
        """A request computes for a bounded number of bytes, first for the buffers that have waited longest. With
        `closed`, of each buffer its last closed step, or its running sum if it keeps none."""
        refuse_headers(call, "If-Match")
        received = await receive(call, changes=False)
        names = await names_of(call, received, query.prefix)
        async with known.flight(call.caller.namespace):
            return await call.offload(False, _answer_many, call, known, names, query)

    @router.get("/{name}/statistics", summary="Statistics of a buffer, with histogram and steps")
    @access(READ, label="buffers")
    async def statistics(
        call: CurrentCall, name: str, query: Annotated[StatisticsQuery, Query()]
    ) -> JsonAnswer[FullStatistics]:
        """Counts, extremes and norms of the running sum or, with `step`, of a closed step. Raises `unknown_buffer`,
        `step_open` and `step_gone`.
        """
        refuse_headers(call, "If-Match", "If-None-Match")
        if query.closed and query.step is not None:
            raise InvalidParameter("closed names the last closed step, so it excludes step", parameter="closed")
        await read_after_closing_due(call, check_name(name))
        async with known.flight((call.caller.namespace, name)):
            return await call.offload(False, _answer_last if query.closed else _answer_one, call, known, name, query)

    return router


# ----- many buffers -----


def _answer_many(
    call: Call, known: BufferStatistics, names: Sequence[str], query: ManyStatisticsQuery
) -> JsonAnswer[ManyStatistics]:
    prefix = query.prefix
    names = names if prefix is None else call.store.names(prefix)
    call.reserve(RECEIPT_BYTES * len(names) + RECORD_FACTOR * call.store.record_bytes(names))
    records = call.store.durable(names) if prefix is None else call.store.records(prefix)
    check_not_empty(records, prefix)
    states = {record.id: last_state(record, closed=query.closed) for record in records}
    found = {record.id: known.last(record, states[record.id]) for record in records}
    for record in _oldest_first(records, states, found):
        if not known.budget.allows():
            break
        known.budget.spend(record.spec.size)
        try:
            state = states[record.id]
            with _read(call, record, None if state is record else state.step) as snapshot:
                found[record.id] = known.computed(snapshot)
        except (UnknownBuffer, StepGone, BufferCorrupt, Busy, TensorTooLarge):
            continue  # the endpoint of this buffer alone answers the error
    shown = {record.name: found[record.id] for record in records}
    return JsonAnswer({"statistics": {name: None if one is None else one.text for name, one in shown.items()}})


def _oldest_first(
    records: Sequence[Record], states: Mapping[int, Record | Closed], found: Mapping[int, Computed | None]
) -> list[Record]:
    """Return the buffers whose statistics are missing or of an earlier state; first those that have waited longest."""
    waited = []
    for record in records:
        computed = found[record.id]
        if computed is None or not computed.is_of(states[record.id]):
            waited.append((0.0 if computed is None else computed.at, record))
    return [record for _, record in sorted(waited, key=lambda pair: pair[0])]


@contextmanager
def _reserved(call: Call, size: int) -> Iterator[None]:
    """Reserve memory meanwhile. Raises what `Call.reserve` raises."""
    call.reserve(size)
    try:
        yield
    finally:
        call.give_back(size)


@contextmanager
def _read(call: Call, record: Record, step: int | None) -> Iterator[Snapshot]:
    """Read the buffer, and reserve its memory meanwhile. Raises what `Call.reserve` and `Store.read` raise."""
    with _reserved(call, record.spec.nbytes):
        yield call.store.read([record.name], step)[0]


# ----- one buffer -----


def _answer_last(call: Call, known: BufferStatistics, name: str, query: StatisticsQuery) -> JsonAnswer[FullStatistics]:
    """Answer for the last closed step, or for the running sum if the buffer keeps none. Raises `StepGone`."""
    tries = 0
    while True:
        closed = call.store.record(name).closed
        chosen = query.model_copy(update={"step": closed[-1].step if closed else None})
        try:
            return _answer_one(call, known, name, chosen)
        except StepGone:
            tries += 1
            if tries == MAX_READINGS:
                raise


def _answer_one(call: Call, known: BufferStatistics, name: str, query: StatisticsQuery) -> JsonAnswer[FullStatistics]:
    (record,) = call.store.durable([name], query.step)
    state = record if query.step is None else record.closed_step(query.step)
    computed, picture = known.of(record, state), None
    if computed is None or query.heat_map is not None:
        with _read(call, record, query.step) as snapshot:
            record, computed = snapshot.record, known.computed(snapshot)
            if query.heat_map is not None:
                picture = _picture(snapshot, query.heat_map)
    summary = computed.summary
    answer: FullStatistics = {
        **computed.as_json(),  # type: ignore[typeddict-item]  # it has no heat map, though it might
        "histogram": {"bounds": [*summary.bounds], "counts": [*summary.counts]},
        "steps": _steps(call, known, record, query.since),
    }
    if picture is not None:
        answer["heat_map"] = picture
    return JsonAnswer(answer)


def _picture(snapshot: Snapshot, cells: int) -> HeatMap:
    """Return the heat map. JSON writes its NaN as null."""
    means = heat_map(snapshot.value, cells)
    rows, columns = means.shape
    return {"rows": rows, "columns": columns, "values": means.tolist()}


def _read_together(call: Call, known: BufferStatistics, record: Record, steps: Sequence[Closed]) -> int:
    """Compute the statistics of the first of these steps: to read the record for each would take seconds.

    Return the number of their elements.
    """
    few = steps[: min(AT_ONCE_ELEMENTS, STEPS_ELEMENTS) // max(record.spec.size, 1)]
    with suppress(UnknownBuffer, StepGone, BufferCorrupt), _reserved(call, len(few) * record.spec.nbytes):
        for snapshot in call.store.read([record.name] * len(few), [closed.step for closed in few]):
            known.computed(snapshot)
        return len(few) * record.spec.size
    return 0  # each is read alone


def _steps(call: Call, known: BufferStatistics, record: Record, since: int) -> list[StepStatistics]:
    """Return the closed steps that the buffer keeps, oldest first. Those not known are computed, newest first."""
    wanted = [closed for closed in record.closed[: -MAX_STEPS - 1 : -1] if closed.step >= since]
    spent = _read_together(call, known, record, [closed for closed in wanted if known.of(record, closed) is None])
    steps = []
    for closed in wanted:
        computed = known.of(record, closed)
        if computed is None:
            if spent and spent + record.spec.size > STEPS_ELEMENTS:
                break
            spent += record.spec.size
            try:
                with _read(call, record, closed.step) as snapshot:
                    computed = known.computed(snapshot)
            except (UnknownBuffer, StepGone, BufferCorrupt):
                continue  # it is no longer kept, or cannot be read
        steps.append(described(closed, computed.summary))
    return steps[::-1]
