"""A request's way through the engine, and from buffers or into them: in the pool, or, if it is small, at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from starlette.types import Receive, Scope

from service.api.admission import hold
from service.api.body import Answer, coding_of, inflate, read_body, wanted_coding
from service.api.changes import change, key_of, match_of, recalled, refuse_match, replayed, store_of
from service.api.context import caller_of, context_of, engine_of, settings_of
from service.api.statistics import Statistics
from service.api.waiting import in_pool, in_pool_after_change
from service.buffers.changes import Add
from service.buffers.requests import Outcome, counted_once
from service.buffers.store import Key, Receipt, Store
from service.engine import Engine
from service.errors import Busy, EpochGone, GradserveError, InvalidParameter
from service.kernels import Operator
from service.kernels._op import Array

INLINE_TEXT, INLINE_HALVES, INLINE_BYTES = 1 << 18, 1 << 19, 3 << 20
"""Up to this size of a body, be it text or answered as text, of 16-bit floats, or of other bytes, the work is done at
once: to hand it over to the pool and back would take as long. A probe waits for it about a millisecond, no longer than
for a thread that holds the interpreter's lock."""

ALONE_BYTES = 9 << 20
"""In place of INLINE_BYTES while no other large request is in flight. The pool's threads help; to hand all over to them
takes a tenth longer."""

TINY_BYTES = 1 << 12
"""In so few there is no work that could take long."""

BYTES_OF_LIST, BYTES_OF_HEADER = 256, 16
"""A list in a text, and a byte of the header of a safetensors file, take as long as so many bytes of numbers."""


class Buffers(NamedTuple):
    """The buffers of a request: input -> the one that it is taken from, output -> the one that it is added into."""

    sources: Mapping[str, str] = {}
    targets: Mapping[str, str] = {}
    weight: float = 1.0
    epoch: int | None = None


NO_BUFFERS = Buffers()


class Job(NamedTuple):
    """What a body asks for, and how the outputs, and the receipts of those that went into buffers, are answered."""

    tensors: Mapping[str, Array]
    attributes: Mapping[str, Any]
    wanted: Sequence[str] | None
    encode: Callable[[Mapping[str, Array], Mapping[str, Receipt]], Answer]
    text: bool
    """Whether any of them is answered as text."""
    buffers: Buffers = NO_BUFFERS


class Adding(NamedTuple):
    """What is left to do: to add outputs into buffers, and to answer then."""

    changes: list[Add]
    key: Key | None
    sources: Sequence[str]
    finish: Callable[[Outcome], Answer]


class _LargeError(Exception):
    """What looked small is not."""


def statistics_of(scope: Scope) -> Statistics:
    """The statistics of the caller's namespace."""
    kept: dict[str, Statistics] = scope["app"].statistics
    namespace = caller_of(scope).namespace
    found = kept.get(namespace)
    return kept.setdefault(namespace, Statistics()) if found is None else found


async def respond(
    scope: Scope,
    receive: Receive,
    operator: Operator,
    decode: Callable[[Engine, memoryview], Job],
    *,
    text: Callable[[memoryview], int],
    head: int = 0,
) -> Answer:
    """Read the body, in which the tensors begin after `head` bytes, `decode` it, run the operator, and encode.

    All but the reading happens in the pool, or, for a small body, at once; small, too, must be what `text` gives: its
    bytes of text, or what takes as long.
    """
    context, asked = context_of(scope), time.perf_counter_ns()
    try:
        engine = engine_of(scope)
        codings = coding_of(context.headers), wanted_coding(context.headers)
        body = await read_body(scope, receive, engine.buffer, head)
        asked = time.perf_counter_ns()
        size = len(body)
        small = (
            operator.linear
            and codings == (None, None)
            and (size <= INLINE_BYTES or (size <= ALONE_BYTES and scope["app"].admission.bytes == context.held))
            and (size <= TINY_BYTES or text(body) <= INLINE_TEXT)
        )
        work = partial(_perform, scope, operator, body, codings, decode, asked)
        try:
            done = work(small) if small else await in_pool(scope, receive, engine, partial(work, False))
        except _LargeError:
            done = await in_pool(scope, receive, engine, partial(work, False))
        if isinstance(done, Adding):
            began = time.perf_counter_ns()
            outcome = await change(store_of(scope), done.changes, done.key, done.sources)
            context.spent["store"] = time.perf_counter_ns() - began
            finish = partial(done.finish, outcome)
            done = finish() if small else await in_pool_after_change(receive, engine, finish)
        return done
    except GradserveError as error:
        error.context["op"] = operator.name
        statistics_of(scope).failed(operator.name, asked)
        raise


def _perform(
    scope: Scope,
    operator: Operator,
    body: memoryview,
    codings: tuple[str | None, str | None],
    decode: Callable[[Engine, memoryview], Job],
    asked: int,
    inline: bool,
) -> Answer | Adding:
    engine = engine_of(scope)
    started = time.perf_counter_ns()
    came_in, goes_out_in = codings
    plain = body
    if came_in is not None:
        plain = inflate(body, came_in, settings_of(scope).max_inflated_bytes)
        hold(scope, len(plain))
    job = decode(engine, plain)
    if inline and (len(body) > INLINE_TEXT or job.buffers is not NO_BUFFERS) and _takes_long(job, len(body)):
        raise _LargeError
    decoded = time.perf_counter_ns()

    def finish(outputs: Mapping[str, Array], receipts: Mapping[str, Receipt], headers: Mapping[str, str]) -> Answer:
        computed = time.perf_counter_ns()
        answer = job.encode(outputs, receipts).coded(goes_out_in)
        if headers:
            answer = answer._replace(headers={**answer.headers, **headers})
        encoded = time.perf_counter_ns()
        statistics_of(scope).succeeded(operator.name, asked, started, decoded, computed, encoded)
        spent = context_of(scope).spent
        spent["queue"], spent["decode"] = started - asked, decoded - started
        spent["kernel"], spent["encode"] = computed - decoded, encoded - computed
        return answer

    def run(tensors: Mapping[str, Array], wanted: Sequence[str] | None) -> dict[str, Array]:
        alone = inline and len(body) <= INLINE_BYTES
        outputs = engine.run(operator, tensors, job.attributes, wanted, alone=alone)
        # Here, not when they are answered: what is added into buffers would have been added then.
        hold(scope, sum([one.nbytes for one in outputs.values()]) - len(plain))
        return outputs

    if job.buffers is NO_BUFFERS:
        if b"if-match" in context_of(scope).headers:
            refuse_match(scope)
        return finish(run(job.tensors, job.wanted), {}, {})
    return _perform_on_buffers(store_of(scope), engine, scope, operator, plain, job, run, finish)


def text_of(body: memoryview) -> int:
    """The bytes of a JSON body, and what takes as long as more."""
    size = len(body)
    return size if size > INLINE_TEXT else size + BYTES_OF_LIST * bytes(body).count(b"[")


def header_of(body: memoryview) -> int:
    """What the header of a safetensors file takes as long as, in bytes of text."""
    return BYTES_OF_HEADER * int.from_bytes(body[:8], "little")


def _takes_long(job: Job, size: int) -> bool:
    """Whether a body of `size` bytes, which looked small, asks for more than its bytes tell."""
    return bool(
        job.buffers.sources
        or (size > INLINE_TEXT and job.text)
        or (size > INLINE_HALVES and any(tensor.dtype.itemsize == 2 for tensor in job.tensors.values()))
        or (size > INLINE_BYTES and job.buffers.targets)
    )


def _perform_on_buffers(
    store: Store,
    engine: Engine,
    scope: Scope,
    operator: Operator,
    body: memoryview,
    job: Job,
    run: Callable[[Mapping[str, Array], Sequence[str]], dict[str, Array]],
    finish: Callable[[Mapping[str, Array], Mapping[str, Receipt], Mapping[str, str]], Answer],
) -> Answer | Adding:
    sources, targets, weight, epoch = job.buffers
    if sources:
        caller_of(scope).require("buffers:read")
    if targets:
        caller_of(scope).require("buffers:write")
    key, match = key_of(scope, body) if targets else None, match_of(scope)
    if match is not None and len(targets) != 1:
        refuse_match(scope)
    names = [*(operator.output_names if job.wanted is None else job.wanted)]
    names += [name for name in targets if name not in names]

    states: list[str] = []  # of the sources

    def check_unchanged(before: Sequence[str], receipts: Mapping[str, Receipt]) -> None:
        for buffer, then, now in zip(sources.values(), before, states, strict=False):  # earlier versions stored none
            if then != now:
                raise counted_once(f"the buffer {buffer!r}, that it is computed from, has changed since", receipts)

    def answered(outputs: Mapping[str, Any], outcome: Outcome) -> Answer:
        if outputs:
            check_unchanged(outcome.sources, outcome.receipts)
        receipts = {name: outcome.receipts[buffer] for name, buffer in targets.items()}
        return finish({name: outputs[name] for name in names if name not in targets}, receipts, replayed(outcome))

    known = recalled(store, key)
    if known is not None and set(names) == set(targets):
        return answered({}, Outcome(known.receipts, replayed=True))
    try:
        tensors = dict(job.tensors)
        hold(scope, sum(store.record(buffer).spec.nbytes for buffer in sources.values()))
        snapshots = store.read([*sources.values()])
        states += [snapshot.state for snapshot in snapshots]
        if known is not None:
            check_unchanged(known.sources, known.receipts)
        for (name, buffer), snapshot in zip(sources.items(), snapshots, strict=True):
            if name in tensors:
                raise InvalidParameter(
                    f"{name} is in the body, and also to be taken from the buffer {buffer!r}", parameter="from"
                )
            tensors[name] = snapshot.value
        if operator.sparse is not None and set(names) == set(targets):
            outputs = {names[0]: engine.in_pieces(operator, tensors, job.attributes)}
        else:
            outputs = run(tensors, names)
    except GradserveError as error:
        if known is None or isinstance(error, (EpochGone, Busy)):
            raise
        raise counted_once(str(error), known.receipts) from None
    if not targets:
        return finish(outputs, {}, {})
    changes = [
        Add(name=buffer, gradient=outputs[output], tensor=output, weight=weight, epoch=epoch, match=match)
        for output, buffer in targets.items()
    ]
    return Adding(changes, key, states, partial(answered, outputs))
