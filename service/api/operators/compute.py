"""The kernel's part of a job, and the decision whether the event loop runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from service.api.http.call import Call
from service.api.http.offload import ALONE_BYTES, INLINE_BYTES, INLINE_HALF_BYTES
from service.api.operators.job import Job
from service.dtypes import Array


def is_small(call: Call, job: Job) -> bool:
    """Return whether the event loop may compute the job: the way to the pool would take as long."""
    size = len(job.body)
    if not job.operator.linear or size > (ALONE_BYTES if call.is_alone else INLINE_BYTES):
        return False
    return size <= INLINE_HALF_BYTES or all(tensor.dtype.itemsize != 2 for tensor in job.tensors.values())


def compute(
    call: Call, job: Job, tensors: Mapping[str, Array], wanted: Sequence[str] | None, inline: bool
) -> dict[str, Array]:
    """Run the kernel, and reserve memory for the outputs beyond the size of the body.

    In the event loop the kernel uses one thread, unless the tensors are large. Raises `Busy` and the errors of
    `Engine.run`.
    """
    alone = inline and len(job.body) <= INLINE_BYTES
    outputs = call.engine.run(job.operator, tensors, job.attributes, wanted, alone=alone)
    # Reserve now: when the answer leaves, the outputs may be in buffers already.
    call.reserve(sum([array.nbytes for array in outputs.values()]) - len(job.body))
    return outputs
