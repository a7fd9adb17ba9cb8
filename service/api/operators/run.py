"""The steps of a request that runs an operator: read the body, decode the job, run it, encode the outputs.

Each step decides once, from its data, whether it runs in the event loop or in the thread pool.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any, NamedTuple

from service.api.buffers.preconditions import refuse_headers
from service.api.http.answer import Answer
from service.api.http.call import Call
from service.api.http.costs import Form
from service.api.http.negotiation import wanted_coding
from service.api.http.offload import INLINE_TEXT_BYTES
from service.api.operators import buffer_use
from service.api.operators.compute import compute, is_small, reserve_answer
from service.api.operators.job import NO_BUFFERS, Job
from service.buffers.record import Receipt
from service.codecs import json as json_codec
from service.dtypes import Array
from service.kernels import Operator


class Result(NamedTuple):
    """The result of a job: the outputs to answer, and the receipts of the outputs that went to buffers."""

    outputs: Mapping[str, Array]
    receipts: Mapping[str, Receipt]
    fields: Mapping[str, str]
    """Headers of the answer."""

    @property
    def nbytes(self) -> int:
        return sum([array.nbytes for array in self.outputs.values()])


def read(call: Call, operator: Operator, head: int = 0) -> Coroutine[Any, Any, memoryview]:
    """Read the body of a request that runs the operator; its tensors begin after `head` bytes."""
    call.operator = operator.name
    call.spent["queue"] = 0
    return call.body(head)


async def run(call: Call, job: Job, encoding: json_codec.Encoding | None, binary: Collection[str] = ()) -> Result:
    """Run the job, and add the outputs that it names to their buffers.

    Memory for the answer is reserved before buffers change: its outputs are JSON, except those in `binary`, or, without
    an `encoding`, bytes.
    """
    form = Form(encoding, wanted_coding(call) is not None)
    if job.buffers is not NO_BUFFERS:
        return Result(*await buffer_use.run(call, job, form, binary))
    refuse_headers(call, "If-Match", "If-None-Match")
    inline = is_small(call, job)
    outputs = await call.offload(inline, compute, call, job, job.tensors, job.wanted, inline, phase="kernel")
    reserve_answer(call, outputs, form, binary)
    return Result(outputs, {}, {})


def encode(
    call: Call, result: Result, is_text: bool, encoder: Callable[..., Answer], *arguments: Any
) -> Coroutine[Any, Any, Answer]:
    """Encode the result in the coding that the client wants. Only text and compression take long."""
    coding = wanted_coding(call)
    inline = result.nbytes <= INLINE_TEXT_BYTES or not (is_text or coding)
    changed = bool(result.receipts)
    return call.offload(inline, _encode, result, coding, encoder, arguments, phase="encode", changed=changed)


def _encode(result: Result, coding: str | None, encoder: Callable[..., Answer], arguments: tuple[Any, ...]) -> Answer:
    answer = encoder(result, *arguments).coded(coding)
    if result.fields:
        answer.fields = {**answer.fields, **result.fields}
    return answer
