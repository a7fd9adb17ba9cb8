"""The kernel's part of a job, and the decision whether the event loop runs it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from service.api.http.call import Call
from service.api.http.costs import Form
from service.api.http.offload import ALONE_BYTES, INLINE_BYTES, INLINE_HALF_BYTES
from service.api.operators.job import Job
from service.api.operators.shared_tensors import write
from service.dtypes import Array
from service.engine.engine import Reserve


def is_quick(call: Call, size: int) -> bool:
    """Return whether the event loop may work on `size` bytes of tensors."""
    return size <= (ALONE_BYTES if call.is_alone else INLINE_BYTES)


def is_small(call: Call, job: Job) -> bool:
    """Return whether the event loop may compute the job: the way to the pool would take as long."""
    if not job.operator.linear or not is_quick(call, job.size):
        return False
    return job.size <= INLINE_HALF_BYTES or all(tensor.dtype.itemsize != 2 for tensor in job.tensors.values())


def compute(
    call: Call, job: Job, tensors: Mapping[str, Array], wanted: Sequence[str] | None, inline: bool
) -> dict[str, Array]:
    """Run the kernel, and write the outputs that go to shared memory.

    Memory beyond the size of the inputs is reserved before it is allocated. In the event loop the kernel uses one
    thread, unless the tensors are large. Raises `Busy` and the errors of `Engine.run` and `write`.
    """
    if inline and job.size <= INLINE_BYTES:
        outputs = call.engine.run(job.operator, tensors, job.attributes, wanted, alone=True)
    else:
        outputs = call.engine.run(job.operator, tensors, job.attributes, wanted, reserve=beyond_body(call, job))
    if job.parts:
        write(call, job.parts, outputs)
    return outputs


def reserve_answer(call: Call, outputs: Mapping[str, Any], form: Form, binary: Collection[str]) -> None:
    """Reserve memory for what the answer takes beside these outputs. Those in `binary` are bytes. Raises `Busy`."""
    if form.encoding is None and not form.is_coded:
        return
    as_bytes = form._replace(encoding=None)
    sizes = [
        (as_bytes if name in binary else form).extra_bytes(output.shape, output.dtype)
        for name, output in outputs.items()
    ]
    call.reserve(sum(sizes))


def beyond_body(call: Call, job: Job) -> Reserve:
    """Return a function that reserves memory for the request beyond the size of its inputs. It raises `Busy`."""
    left = job.size

    def reserve(size: int) -> None:
        nonlocal left
        call.reserve(size - left)
        left = max(0, left - size)

    return reserve
