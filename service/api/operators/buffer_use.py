"""Jobs that take inputs from buffers or add outputs to buffers. A repeated job adds once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from service.api.buffers.preconditions import key_of, match_of, recalled, refuse_headers
from service.api.buffers.receipts import replayed
from service.api.http.call import Call
from service.api.http.costs import Form
from service.api.operators.compute import beyond_body, compute, is_small, reserve_answer
from service.api.operators.job import Job
from service.buffers.changes import Add
from service.buffers.perform import Outcome, check_same_buffer, counted_once
from service.buffers.record import Key, Receipt, Snapshot
from service.buffers.store import Store
from service.dtypes import Array
from service.errors import Busy, EpochGone, GradserveError, InvalidParameter, UnknownBuffer


class Computed(NamedTuple):
    """The result of a job before buffers change: the outputs, and the states of the buffers that were read."""

    outputs: Mapping[str, Any]
    states: Sequence[str]
    key: Key | None
    outcome: Outcome | None = None
    """The outcome of a repeated request whose outputs all went to buffers; it needs no other step."""


async def run(
    call: Call, job: Job, form: Form, binary: Collection[str]
) -> tuple[dict[str, Array], dict[str, Receipt], dict[str, str]]:
    """Run the job and add its outputs to the buffers. Return the outputs to answer, the receipts and headers.

    Memory for the answer is reserved before buffers change; `reserve_answer` has the parameters `form` and `binary`.
    """
    sources, targets = job.buffers.sources, job.buffers.targets
    _check(call, job)
    match = match_of(call)
    inline = not sources and is_small(call, job) and not call.store.blocks
    computed = await call.offload(inline, _compute, call, job, inline, phase="kernel")
    answered = {name: computed.outputs[name] for name in _answered(job) if name in computed.outputs}
    reserve_answer(call, answered, form, binary)
    if not targets:
        return answered, {}, {}
    outcome = computed.outcome
    if outcome is None:
        use = job.buffers
        add = partial(Add, match=match, weight=use.weight, epoch=use.epoch, contributor=use.contributor)
        adds = [add(name=buffer, tensor=name, gradient=computed.outputs[name]) for name, buffer in targets.items()]
        outcome = await call.submit(adds, computed.key, computed.states)
    if answered:
        _check_unchanged(sources, outcome.sources, computed.states, outcome.receipts)
    receipts = {name: outcome.receipts[buffer] for name, buffer in targets.items()}
    return answered, receipts, replayed(outcome)


def _check(call: Call, job: Job) -> None:
    """Raise `Forbidden`, and `InvalidParameter` for headers that this job would ignore."""
    if job.buffers.sources:
        call.caller.require("buffers:read")
    if job.buffers.targets:
        call.caller.require("buffers:write")
    refuse_headers(call, "If-None-Match")
    if len(job.buffers.targets) != 1:
        refuse_headers(call, "If-Match")


def _answered(job: Job) -> list[str]:
    names = job.operator.output_names if job.wanted is None else job.wanted
    return [name for name in names if name not in job.buffers.targets]


def _compute(call: Call, job: Job, inline: bool) -> Computed:
    """Compute the outputs from the buffers, unless the request only repeats an add."""
    store, sources, targets = call.store, job.buffers.sources, job.buffers.targets
    key = key_of(call, job.body, job.shared) if targets else None
    answered = _answered(job)
    known = recalled(store, key)
    if known is not None and not answered:
        for buffer in targets.values():
            with suppress(UnknownBuffer):
                check_same_buffer(store.record(buffer), known)
        return Computed({}, [], key, Outcome(known.receipts, replayed=True))
    try:
        snapshots = _read(call, store, sources)
        states = [snapshot.state for snapshot in snapshots]
        if known is not None:
            _check_unchanged(sources, known.sources, states, known.receipts)
        tensors = {**job.tensors, **_taken(job, snapshots)}
        if job.operator.sparse is not None and targets and not answered:
            (name,) = targets
            output = call.engine.in_pieces(job.operator, tensors, job.attributes, beyond_body(call, job))
            return Computed({name: output}, states, key)
        return Computed(compute(call, job, tensors, [*answered, *targets], inline), states, key)
    except GradserveError as error:
        if known is None or isinstance(error, (EpochGone, Busy)):
            raise
        raise counted_once(str(error), known.receipts) from None


def _read(call: Call, store: Store, sources: Mapping[str, str]) -> list[Snapshot]:
    if not sources:
        return []
    call.reserve(sum(store.record(buffer).spec.nbytes for buffer in sources.values()))
    return store.read([*sources.values()])


def _taken(job: Job, snapshots: Sequence[Snapshot]) -> dict[str, Array]:
    """Return the inputs from buffers: the values of these snapshots."""
    for name, buffer in job.buffers.sources.items():
        if name in job.tensors:
            raise InvalidParameter(
                f"{name} is in the body, but from= takes it from the buffer {buffer!r}, too", parameter="from"
            )
    return {name: snapshot.value for name, snapshot in zip(job.buffers.sources, snapshots, strict=True)}


def _check_unchanged(
    sources: Mapping[str, str], before: Sequence[str], now: Sequence[str], receipts: Mapping[str, Receipt]
) -> None:
    """Raise `EpochGone` if a source has changed since the original request."""
    for buffer, old, new in zip(sources.values(), before, now, strict=False):  # a first request has no `before`
        if old != new:
            raise counted_once(f"its input, the buffer {buffer!r}, has changed since", receipts)
