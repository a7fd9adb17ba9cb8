"""The inputs of a job that come from buffers: as the buffers run, or as a step closed with."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from service.api.buffers.preconditions import recalled
from service.api.buffers.request import RECEIPT_BYTES, RECORD_FACTOR, closed_due
from service.api.http.body import INLINE_MEMBERS
from service.api.http.call import Call
from service.api.http.offload import INLINE_LOOKUPS
from service.api.operators.job import Job, Use
from service.api.operators.values import read_cached
from service.buffers.names import BufferName, check_name
from service.buffers.record import Key, Snapshot, unknown_prefix
from service.dtypes import Array
from service.errors import InvalidParameter, NothingToAverage, StepOpen
from service.kernels.accumulate import converted


def expanded(call: Call, job: Job, uses: Sequence[Use]) -> list[Use]:
    """Return the uses, a prefix as one use for each tensor of the group.

    If the group's names are not fixed, these are the buffers of the prefix. Raises `UnknownBuffer` if there are none,
    and `TooManyTensors`.
    """
    limits, found = call.engine.limits, list[Use]()
    for use in uses:
        if not use.is_prefix:
            found.append(use)
            continue
        members: Collection[str] | None = job.operator.inputs_by_name[use.tensor].members
        if members is None:
            most = limits.max_tensors - len(found) + 2  # one may have the prefix alone as its name
            names = call.store.names(use.buffer, most)
            members = [name.removeprefix(use.buffer) for name in names if name != use.buffer]
            if not members:
                raise unknown_prefix(use.buffer)
        limits.check_count(len(found) + len(members))
        found += [use._replace(tensor=f"{use.tensor}.{one}", buffer=check_name(use.buffer + one)) for one in members]
    return found


def read(call: Call, job: Job) -> tuple[dict[str, Array], dict[Use, str]]:
    """Read the buffers, in memory that is reserved first: those that run at one moment.

    Return the inputs that they hold, and the state of the buffer of each. Raises what `Store.read` raises,
    `InvalidParameter` for an input that the body has, too, and `NothingToAverage`.
    """
    uses = expanded(call, job, job.buffers.sources)
    for use in uses:
        if use.tensor in job.tensors:
            problem = f"{use.tensor} is in the body, but from= takes it from the buffer {use.buffer!r}, too"
            raise InvalidParameter(problem, parameter="from")
    snapshots = dict[Use, Snapshot]()
    for step in {use.step: None for use in uses}:
        chosen = [use for use in uses if use.step == step]
        found = snapshots_of(call, [use.buffer for use in chosen], step, 2 if job.buffers.mean else 1)
        snapshots.update(zip(chosen, found, strict=True))
    states = {use: snapshots[use].state for use in uses}
    return {use.tensor: _value(snapshots.pop(use), job.buffers.mean) for use in uses}, states


def snapshots_of(call: Call, names: Sequence[str], step: int | None, copies: int) -> list[Snapshot]:
    """Read the buffers, in memory that is reserved for `copies` of them. The records of many take some, too."""
    if len(names) > INLINE_MEMBERS:
        call.reserve(RECEIPT_BYTES * len(names) + RECORD_FACTOR * call.store.record_bytes(names))
    if step is None and call.graph is not None:
        return read_cached(call, names)
    full = [BufferName(call.store.namespace, name) for name in names]
    found = call.store.look({*full})
    call.reserve(copies * sum([found[name].spec.nbytes for name in full if name in found]))
    return call.store.read(names, step)


def _value(snapshot: Snapshot, mean: bool) -> Array:
    """Return the value; of a closed step the mean, if that is wanted."""
    if snapshot.of is None or not mean:
        return snapshot.value
    if not snapshot.of.weight:
        name = snapshot.record.name
        problem = f"The weights in {name!r} sum to zero in step {snapshot.of.step}: there is no mean"
        raise NothingToAverage(problem, buffer=name, receipt=snapshot.receipt())
    return converted(snapshot.value, snapshot.value.dtype, snapshot.of.weight)


async def until_closed(call: Call, job: Job, key: Key | None) -> None:
    """Wait until all steps that the job reads have closed, or until another request has done the same job.

    Raises `StepOpen` once the timeout is over. What else keeps the job from its inputs, `read` raises.
    """
    left: deque[Use] | None = None
    many = INLINE_LOOKUPS + 1  # as many as a prefix may fit

    def look() -> None:
        nonlocal left
        if recalled(call.store, key) is not None:
            left = deque()
        elif left is None:
            left = deque(expanded(call, job, [use for use in job.buffers.sources if use.step is not None]))
        found = call.store.look({BufferName(call.store.namespace, use.buffer) for use in left})
        while left:
            record = found.get(BufferName(call.store.namespace, left[0].buffer))
            if record is not None and record.step <= (left[0].step or 0):
                record.closed_step(left[0].step or 0)
            left.popleft()

    async def attempt() -> None:
        count = len(left) if left is not None else sum(many if use.is_prefix else 1 for use in job.buffers.sources)
        try:
            await call.look_up(count, look)
        except StepOpen:
            if not (left and await closed_due(call, [use.buffer for use in left])):
                raise
            await call.look_up(len(left), look)

    await call.wait_for(job.buffers.timeout, attempt)
