"""A step: a job with inputs from buffers, or with outputs that go to buffers. A repeated step is made once."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from service.api.buffers.preconditions import key_of, recalled, refuse_headers
from service.api.buffers.receipts import replayed
from service.api.http.call import Call
from service.api.http.offload import INLINE_BYTES
from service.api.operators.job import Job, Use
from service.api.operators.run import Result, compute, computes_at_once, reserve_answer
from service.api.operators.shared_memory import write_outputs
from service.api.operators.sources import read, until_closed
from service.api.operators.targets import changes_of, kept_of
from service.buffers import failpoints
from service.buffers.changes import Change
from service.buffers.names import BufferName
from service.buffers.perform import Outcome, check_same_buffer, counted_once
from service.buffers.record import Key, Known, Receipt
from service.codecs import safetensors
from service.dtypes import Array
from service.errors import Busy, GradserveError, SourceChanged, StepGone

MAX_ATTEMPTS = 5
"""Times that a step is computed whose sources change meanwhile: steps of others that share them go first."""


class _Computed(NamedTuple):
    """The result of a job before buffers change: the outputs to answer, and the changes, computed from the sources."""

    answered: Mapping[str, Array]
    changes: Sequence[Change]
    sources: Mapping[Use, str]
    """The state of the buffer of each source."""
    key: Key | None
    outcome: Outcome | None = None
    """The outcome of a repeated request whose answer is known; it needs no other step."""


async def step(call: Call, job: Job) -> Result:
    """Run the job, and bring the outputs that it names to their buffers. A repeated job does so once.

    If it writes over buffers and a source changes meanwhile, it runs again, `MAX_ATTEMPTS` times at most: then it
    raises `SourceChanged`. Memory for the answer is reserved before buffers change.
    """
    _check(call, job)
    call.spent.setdefault("queue", 0)
    key = None
    if any(one.step is not None for one in job.buffers.sources):
        key = await call.offload(job.size <= INLINE_BYTES, _key, call, job)
        await until_closed(call, job, key)
        call.start_clock()
    for _ in range(MAX_ATTEMPTS - 1):
        held = call.reservation.bytes
        try:
            return await _attempt(call, job, key)
        except SourceChanged:
            call.give_back(call.reservation.bytes - held)
    return await _attempt(call, job, key)


async def _attempt(call: Call, job: Job, key: Key | None) -> Result:
    use = job.buffers
    inline = not use.sources and computes_at_once(call, job) and not (use.targets and call.store.blocks)
    computed = await call.offload(inline, _compute, call, job, inline, key)
    answered, outcome = computed.answered, computed.outcome
    coding = job.encoding and reserve_answer(call, job, answered)
    if not use.targets:
        return Result(answered, coding=coding)
    if outcome is None:
        kept = b"" if computed.key is None else kept_of(answered)
        failpoints.hit("computed")
        states = [] if kept else [*computed.sources.values()]
        outcome = await call.submit(computed.changes, computed.key, states, answer=kept, by_prefix=use.by_prefix)
        if outcome.answer:
            answered = _restored(call, job, outcome.answer)
        elif answered:
            _check_unchanged(computed.sources, outcome.sources, outcome.receipts)
    receipts = {use.output_of(buffer): receipt for buffer, receipt in outcome.receipts.items()}
    return Result(answered, receipts, replayed(outcome), coding)


def _check(call: Call, job: Job) -> None:
    """Raise `Forbidden`, and `InvalidParameter` for headers that this job would ignore."""
    if job.buffers.sources:
        call.caller.require("buffers:read")
    if job.buffers.targets:
        call.caller.require("buffers:write")
    if b"if-match" in call.headers or b"if-none-match" in call.headers:
        is_one = len(job.buffers.targets) == 1 and not job.buffers.by_prefix
        refuse_headers(call, "If-None-Match", *([] if is_one else ["If-Match"]))


def _answered(job: Job) -> Sequence[str]:
    """Return the outputs that the answer has, rather than a buffer; of a group in part, the group."""
    names: Sequence[str] = job.operator.output_names if job.wanted is None else job.wanted
    return [name for name in names if job.buffers.target_of(name) is None]


def _is_answered(job: Job, name: str, output: Any) -> bool:
    """Whether the answer has the output. It goes to no buffer, or it is one number that the request names: a loss."""
    is_number = isinstance(output, np.ndarray) and output.size == 1
    return job.buffers.target_of(name) is None or (is_number and name in (job.wanted or ()))


def _key(call: Call, job: Job) -> Key | None:
    """Return the idempotency key of a job that changes buffers."""
    return key_of(call, job.body, job.shared) if job.buffers.targets else None


def _compute(call: Call, job: Job, inline: bool, key: Key | None) -> _Computed:
    began = time.perf_counter_ns()
    computed = _computed(call, job, inline, key or _key(call, job))
    call.spent["kernel"] = time.perf_counter_ns() - began
    return computed


def _computed(call: Call, job: Job, inline: bool, key: Key | None) -> _Computed:
    """Compute the outputs, with inputs from buffers, unless the request only repeats a change."""
    use = job.buffers
    # A request that names no buffer by a prefix may be known without the names of its buffers.
    names = [] if use.by_prefix else [one.buffer for one in use.targets]
    known = recalled(call.store, key, names)
    if (repeated := _repeated(call, job, key, known)) is not None:
        return repeated
    try:
        held, sources = read(call, job) if use.sources else ({}, {})
        tensors = {**job.tensors, **held} if held else job.tensors
        if known is not None:
            _check_unchanged(sources, known.sources, known.receipts)
        if not use.targets:
            return _Computed(compute(call, job, tensors, job.wanted, inline), (), sources, key)
        targets = [one.tensor for one in use.targets]
        wanted = [*_answered(job), *targets]
        outputs = compute(call, job, tensors, wanted, inline, pieces=wanted == targets)
        answered = {name: output for name, output in outputs.items() if _is_answered(job, name, output)}
        return _Computed(answered, changes_of(call, use, outputs, sources), sources, key)
    except GradserveError as error:
        if known is None:  # another may have made the same request meanwhile
            repeated = _repeated(call, job, key, recalled(call.store, key, names))
            if repeated is not None:
                return repeated
            raise
        if isinstance(error, (StepGone, Busy)):
            raise
        raise counted_once(str(error), known.receipts) from None


def _repeated(call: Call, job: Job, key: Key | None, known: Known | None) -> _Computed | None:
    """Return the result of a request that is known with all that it answered; else None.

    Raises `StepGone` if a buffer that it has changed was deleted and created again.
    """
    if known is None or not (known.answer or not _answered(job)):
        return None
    for record in call.store.look({BufferName(call.store.namespace, name) for name in known.receipts}).values():
        check_same_buffer(record, known)
    answered = _restored(call, job, known.answer) if known.answer else {}
    return _Computed(answered, (), {}, key, Outcome(known.receipts, replayed=True))


def _restored(call: Call, job: Job, kept: bytes) -> Mapping[str, Array]:
    """Return the outputs that were answered to the original request."""
    outputs = safetensors.decode(memoryview(kept), call.engine.limits)
    if job.parts:
        write_outputs(call, job.parts, outputs)
    return outputs


def _check_unchanged(now: Mapping[Use, str], before: Sequence[str], receipts: Mapping[str, Receipt]) -> None:
    """Raise `StepGone` if a source has changed since the original request, which read the states `before`."""
    for (use, state), old in zip(now.items(), before, strict=False):  # a first request has no `before`
        if old != state:
            raise counted_once(f"its input, the buffer {use.buffer!r}, has changed since", receipts)
