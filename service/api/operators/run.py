"""Running a job without buffers: the kernel, and outputs to the answer or to shared memory. `step` runs the others."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import xxhash

from service.api.buffers.preconditions import refuse_headers
from service.api.http.answer import AnswerForm
from service.api.http.body import INLINE_MEMBERS
from service.api.http.call import Call
from service.api.http.negotiation import wanted_coding
from service.api.http.offload import ALONE_BYTES, INLINE_BYTES, INLINE_HALF_BYTES, INLINE_TEXT_BYTES
from service.api.operators.job import Job, chosen
from service.api.operators.shared_memory import write_outputs
from service.buffers.record import Receipt
from service.dtypes import Array
from service.engine.engine import Reserve

_warm: set[str] = set()
"""The operators that have computed in this process. The first time a kernel may import what most servers never need."""


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
        if len(self.outputs) + len(self.receipts) > INLINE_MEMBERS:
            return True
        return as_text and sum([output.nbytes for output in self.outputs.values()]) > INLINE_TEXT_BYTES


async def run(call: Call, job: Job) -> Result:
    """Run a job that names no buffer."""
    refuse_headers(call, "If-None-Match", "If-Match")
    call.spent.setdefault("queue", 0)
    inline = computes_at_once(call, job)
    work = call, job, job.tensors, job.wanted, inline
    outputs = compute(*work) if inline else await call.offload(False, compute, *work)
    return Result(outputs, coding=job.encoding and reserve_answer(call, job, outputs))


def reserve_answer(call: Call, job: Job, outputs: Mapping[str, Array]) -> str | None:
    """Reserve memory for the outputs that leave as JSON. Return how the answer is compressed."""
    form = AnswerForm(job.encoding, wanted_coding(call, job.encoding))
    as_bytes = {*chosen(outputs, job.binary)} if job.binary else ()
    texts = [output for name, output in outputs.items() if name not in as_bytes]
    call.reserve(sum([form.extra_bytes(output.shape, output.dtype) for output in texts]))
    return form.coding


def is_small(call: Call, size: int) -> bool:
    """Return whether the event loop may work on `size` bytes of tensors."""
    return size <= INLINE_BYTES or (size <= ALONE_BYTES and call.is_alone)


def computes_at_once(call: Call, job: Job) -> bool:
    """Return whether the event loop may compute the job: the way to the pool would take as long."""
    if job.operator.multiply_adds is not None or len(job.tensors) > INLINE_MEMBERS or not is_small(call, job.size):
        return False
    if job.size > INLINE_HALF_BYTES and any(tensor.dtype.itemsize == 2 for tensor in job.tensors.values()):
        return False
    return job.operator.name in _warm


def compute(
    call: Call, job: Job, tensors: Mapping[str, Array], wanted: Sequence[str] | None, inline: bool, pieces: bool = False
) -> Mapping[str, Any]:
    """Run the kernel, and write the outputs that go to shared memory. `pieces`: a sparse output need not be whole.

    Memory beyond the size of the inputs is reserved before it is allocated. In the event loop the kernel uses one
    thread, unless the tensors are large. Raises `Busy` and the errors of `Engine.run` and `write`.
    """
    began = time.perf_counter_ns()
    attributes = _seeded(call, job) if job.operator.draws_a_seed else job.attributes
    outputs: Mapping[str, Any]
    if pieces and job.operator.sparse is not None:
        (name,) = job.operator.output_names
        outputs = {name: call.engine.in_pieces(job.operator, tensors, attributes, _beyond_body(call, job))}
    elif inline and job.size <= INLINE_BYTES:
        outputs = call.engine.run(job.operator, tensors, attributes, wanted, alone=True)
    else:
        outputs = call.engine.run(job.operator, tensors, attributes, wanted, reserve=_beyond_body(call, job))
    if not inline:
        _warm.add(job.operator.name)
    if job.parts:
        write_outputs(call, job.parts, outputs)
    call.spent["kernel"] = time.perf_counter_ns() - began
    return outputs


def _seeded(call: Call, job: Job) -> Mapping[str, Any]:
    """Return the attributes. A seed that the request leaves out follows from its key: a retry has the same bits."""
    if job.attributes.get("seed") is not None:
        return job.attributes
    key = call.headers.get(b"idempotency-key")
    return {**job.attributes, "seed": secrets.randbits(31) if key is None else xxhash.xxh32_intdigest(key) >> 1}


def _beyond_body(call: Call, job: Job) -> Reserve:
    """Return a function that reserves memory for the request beyond the size of its inputs. It raises `Busy`.

    It raises `GraphTooSlow` once a graph has run for as long as its client waits.
    """
    left, take = job.size, call.reserve if call.graph is None else call.reserve_in_time

    def reserve(size: int) -> None:
        nonlocal left
        take(size - left)
        left = max(0, left - size)

    return reserve
