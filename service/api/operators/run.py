"""Running a job: inputs from buffers, the kernel, and outputs to the answer, to shared memory and to buffers."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from service.api.buffers.preconditions import key_of, match_of, recalled, refuse_headers
from service.api.buffers.receipts import replayed
from service.api.http.answer import AnswerForm
from service.api.http.body import INLINE_MEMBERS
from service.api.http.call import Call
from service.api.http.negotiation import wanted_coding
from service.api.http.offload import ALONE_BYTES, INLINE_BYTES, INLINE_HALF_BYTES, INLINE_TEXT_BYTES
from service.api.operators.job import Job, chosen
from service.api.operators.shared_memory import write_outputs
from service.buffers.changes import Add
from service.buffers.perform import Outcome, check_same_buffer, counted_once
from service.buffers.record import Key, Receipt
from service.codecs import json as json_codec
from service.dtypes import FLOATS, NAMES, Array
from service.engine.engine import Reserve
from service.errors import Busy, DtypeMismatch, EpochGone, GradserveError, InvalidParameter, UnknownBuffer


class Result(NamedTuple):
    """The result of a job: the outputs to answer, and the receipts of the outputs that went to buffers."""

    outputs: Mapping[str, Array]
    receipts: Mapping[str, Receipt] = {}
    fields: Mapping[str, str] = {}
    """Headers of the answer."""
    coding: str | None = None
    """How the answer is compressed."""

    def is_large(self, as_text: bool) -> bool:
        """Whether to write the outputs takes too long for the event loop."""
        if len(self.outputs) > INLINE_MEMBERS:
            return True
        return as_text and sum([output.nbytes for output in self.outputs.values()]) > INLINE_TEXT_BYTES


class _Computed(NamedTuple):
    """The result of a job before buffers change: the outputs, and the states of the buffers that were read."""

    outputs: Mapping[str, Any]
    states: Sequence[str]
    key: Key | None
    outcome: Outcome | None = None
    """The outcome of a repeated request whose outputs all went to buffers; it needs no other step."""


async def run(call: Call, job: Job, encoding: json_codec.Encoding | None, binary: Collection[str] = ()) -> Result:
    """Run the job, and add the outputs that it names to their buffers. A repeated job adds once.

    Memory for the answer is reserved before buffers change: its outputs are JSON, except those in `binary`, or, without
    an `encoding`, bytes.
    """
    sources, targets, use = job.buffers.sources, job.buffers.targets, job.buffers
    _check(call, job)
    call.spent.setdefault("queue", 0)
    inline = not sources and computes_at_once(call, job) and not (targets and call.store.blocks)
    computed = _compute(call, job, True) if inline else await call.offload(False, _compute, call, job, False)
    answered = {name: output for name, output in computed.outputs.items() if name not in targets}
    coding = None
    if encoding is not None:
        coding = wanted_coding(call, encoding)
        form = AnswerForm(encoding, coding)
        as_bytes = {*chosen(answered, binary)} if binary else ()
        texts = [output for name, output in answered.items() if name not in as_bytes]
        call.reserve(sum([form.extra_bytes(output.shape, output.dtype) for output in texts]))
    if not targets:
        return Result(answered, coding=coding)
    outcome = computed.outcome
    if outcome is None:
        _check_floats(computed.outputs, targets)
        add = partial(Add, match=match_of(call), weight=use.weight, epoch=use.epoch, contributor=use.contributor)
        adds = [add(name=buffer, tensor=name, gradient=computed.outputs[name]) for name, buffer in targets.items()]
        outcome = await call.submit(adds, computed.key, computed.states)
    if answered:
        _check_unchanged(sources, outcome.sources, computed.states, outcome.receipts)
    receipts = {name: outcome.receipts[buffer] for name, buffer in targets.items()}
    return Result(answered, receipts, replayed(outcome), coding)


def _check(call: Call, job: Job) -> None:
    """Raise `Forbidden`, and `InvalidParameter` for headers that this job would ignore."""
    if job.buffers.sources:
        call.caller.require("buffers:read")
    if job.buffers.targets:
        call.caller.require("buffers:write")
    if b"if-match" in call.headers or b"if-none-match" in call.headers:
        refuse_headers(call, "If-None-Match", *([] if len(job.buffers.targets) == 1 else ["If-Match"]))


def _check_floats(outputs: Mapping[str, Any], targets: Collection[str]) -> None:
    """Raise `DtypeMismatch` if an output that goes to a buffer is no float here."""
    for name in targets:
        dtype = outputs[name].dtype
        if NAMES[dtype] not in FLOATS.dtypes:
            raise DtypeMismatch(f"{name} is {dtype}, but a buffer holds floats", tensor=name)


def _size(job: Job) -> int:
    """Return the bytes that the request has brought."""
    return len(job.body) + len(job.shared)


def _answered(job: Job) -> Sequence[str]:
    """Return the outputs that the answer has, rather than a buffer."""
    operator = job.operator
    names: Sequence[str] = operator.output_names if job.wanted is None else job.wanted
    if operator.has_groups:
        outputs = operator.outputs_for([*job.tensors, *job.buffers.sources])
        names = [*dict.fromkeys([*chosen(outputs, names), *(name for name in names if "." in name)])]
    return [name for name in names if name not in job.buffers.targets]


def is_small(call: Call, size: int) -> bool:
    """Return whether the event loop may work on `size` bytes of tensors."""
    return size <= INLINE_BYTES or (size <= ALONE_BYTES and call.is_alone)


def computes_at_once(call: Call, job: Job) -> bool:
    """Return whether the event loop may compute the job: the way to the pool would take as long."""
    size = _size(job)
    if job.operator.multiply_adds is not None or len(job.tensors) > INLINE_MEMBERS or not is_small(call, size):
        return False
    return size <= INLINE_HALF_BYTES or all(tensor.dtype.itemsize != 2 for tensor in job.tensors.values())


def _compute(call: Call, job: Job, inline: bool) -> _Computed:
    began = time.perf_counter_ns()
    computed = _computed(call, job, inline)
    call.spent["kernel"] = time.perf_counter_ns() - began
    return computed


def _computed(call: Call, job: Job, inline: bool) -> _Computed:
    """Compute the outputs, with inputs from buffers, unless the request only repeats an add."""
    sources, targets = job.buffers.sources, job.buffers.targets
    key = key_of(call, job.body, job.shared) if targets else None
    known = None if key is None else recalled(call.store, key, [*targets.values()])
    if known is not None and not _answered(job):
        for buffer in targets.values():
            with suppress(UnknownBuffer):
                check_same_buffer(call.store.record(buffer), known)
        return _Computed({}, [], key, Outcome(known.receipts, replayed=True))
    try:
        tensors, states = _inputs(call, job)
        if known is not None:
            _check_unchanged(sources, known.sources, states, known.receipts)
        return _Computed(_outputs(call, job, tensors, inline), states, key)
    except GradserveError as error:
        if known is None or isinstance(error, (EpochGone, Busy)):
            raise
        raise counted_once(str(error), known.receipts) from None


def _inputs(call: Call, job: Job) -> tuple[Mapping[str, Array], Sequence[str]]:
    """Return all inputs, and the states of the buffers that some come from."""
    sources = job.buffers.sources
    if not sources:
        return job.tensors, []
    call.reserve(sum(call.store.record(buffer).spec.nbytes for buffer in sources.values()))
    snapshots = call.store.read([*sources.values()])
    for name, buffer in sources.items():
        if name in job.tensors:
            problem = f"{name} is in the body, but from= takes it from the buffer {buffer!r}, too"
            raise InvalidParameter(problem, parameter="from")
    taken = {name: snapshot.value for name, snapshot in zip(sources, snapshots, strict=True)}
    return {**job.tensors, **taken}, [snapshot.state for snapshot in snapshots]


def _outputs(call: Call, job: Job, tensors: Mapping[str, Array], inline: bool) -> Mapping[str, Any]:
    """Run the kernel, and write the outputs that go to shared memory.

    Memory beyond the size of the inputs is reserved before it is allocated. In the event loop the kernel uses one
    thread, unless the tensors are large. Raises `Busy` and the errors of `Engine.run` and `write`.
    """
    targets = job.buffers.targets
    if job.operator.sparse is not None and targets and not _answered(job):
        (name,) = targets
        return {name: call.engine.in_pieces(job.operator, tensors, job.attributes, _beyond_body(call, job))}
    wanted = [*_answered(job), *targets] if targets else job.wanted
    if inline and _size(job) <= INLINE_BYTES:
        outputs = call.engine.run(job.operator, tensors, job.attributes, wanted, alone=True)
    else:
        outputs = call.engine.run(job.operator, tensors, job.attributes, wanted, reserve=_beyond_body(call, job))
    if job.parts:
        write_outputs(call, job.parts, outputs)
    return outputs


def _beyond_body(call: Call, job: Job) -> Reserve:
    """Return a function that reserves memory for the request beyond the size of its inputs. It raises `Busy`."""
    left = _size(job)

    def reserve(size: int) -> None:
        nonlocal left
        call.reserve(size - left)
        left = max(0, left - size)

    return reserve


def _check_unchanged(
    sources: Mapping[str, str], before: Sequence[str], now: Sequence[str], receipts: Mapping[str, Receipt]
) -> None:
    """Raise `EpochGone` if a source has changed since the original request."""
    for buffer, old, new in zip(sources.values(), before, now, strict=False):  # a first request has no `before`
        if old != new:
            raise counted_once(f"its input, the buffer {buffer!r}, has changed since", receipts)
