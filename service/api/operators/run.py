"""A request's way through the engine, and from buffers or into them: in the pool, or, if it is small, at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from starlette.types import Receive, Scope

from service.api.buffers.preconditions import change, key_of, match_of, recalled, refuse, store_of
from service.api.buffers.receipts import replayed
from service.api.http.admission import hold
from service.api.http.body import Answer, coding_of, inflate, read_body, wanted_coding
from service.api.http.context import caller_of, context_of, engine_of, settings_of
from service.api.http.offload import in_pool, in_pool_after_change
from service.api.operators.statistics import Statistics
from service.buffers.changes import Add
from service.buffers.perform import Outcome, check_same_buffer, counted_once
from service.buffers.record import Key, Receipt, Snapshot
from service.dtypes import Array
from service.engine import Engine
from service.errors import Busy, EpochGone, GradserveError, InvalidParameter, UnknownBuffer
from service.kernels import Operator

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


class _NotSmallError(Exception):
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

        def work(inline: bool) -> Answer | Adding:
            return _Run(scope, operator, body, codings, decode, asked, inline).perform()

        try:
            done = work(True) if small else await in_pool(scope, receive, engine, partial(work, False))
        except _NotSmallError:
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


class _Run:
    """One run of an operator: what a request asks for, decoded, and when each of its phases began, in nanoseconds.

    `inline` in the event loop, where `_NotSmallError` is raised for what takes long after all.
    """

    def __init__(
        self,
        scope: Scope,
        operator: Operator,
        body: memoryview,
        codings: tuple[str | None, str | None],
        decode: Callable[[Engine, memoryview], Job],
        asked: int,
        inline: bool,
    ) -> None:
        self._scope, self._operator, self._engine = scope, operator, engine_of(scope)
        self._asked, self._started = asked, time.perf_counter_ns()
        came_in, self._goes_out_in = codings
        self._body = body
        if came_in is not None:
            self._body = inflate(body, came_in, settings_of(scope).max_inflated_bytes)
            hold(scope, len(self._body))
        self._job = job = decode(self._engine, self._body)
        if inline and (len(body) > INLINE_TEXT or job.buffers is not NO_BUFFERS) and _takes_long(job, len(body)):
            raise _NotSmallError
        self._alone = inline and len(body) <= INLINE_BYTES
        self._decoded = time.perf_counter_ns()

    def perform(self) -> Answer | Adding:
        """Run the operator, and answer, or tell what to add into buffers before."""
        job = self._job
        if job.buffers is not NO_BUFFERS:
            return self._perform_on_buffers(job.buffers)
        refuse(self._scope, "If-Match", "If-None-Match")
        return self._answer(self._outputs(job.tensors, job.wanted), {}, {})

    def _outputs(self, tensors: Mapping[str, Array], wanted: Sequence[str] | None) -> dict[str, Array]:
        outputs = self._engine.run(self._operator, tensors, self._job.attributes, wanted, alone=self._alone)
        # Here, not when they are answered: what is added into buffers would have been added then.
        hold(self._scope, sum([one.nbytes for one in outputs.values()]) - len(self._body))
        return outputs

    def _answer(
        self, outputs: Mapping[str, Array], receipts: Mapping[str, Receipt], headers: Mapping[str, str]
    ) -> Answer:
        computed = time.perf_counter_ns()
        answer = self._job.encode(outputs, receipts).coded(self._goes_out_in)
        if headers:
            answer = answer._replace(headers={**answer.headers, **headers})
        encoded = time.perf_counter_ns()
        asked, started, decoded = self._asked, self._started, self._decoded
        statistics_of(self._scope).succeeded(self._operator.name, asked, started, decoded, computed, encoded)
        spent = context_of(self._scope).spent
        spent["queue"], spent["decode"] = started - asked, decoded - started
        spent["kernel"], spent["encode"] = computed - decoded, encoded - computed
        return answer

    def _perform_on_buffers(self, buffers: Buffers) -> Answer | Adding:
        scope, store, targets = self._scope, store_of(self._scope), buffers.targets
        if buffers.sources:
            caller_of(scope).require("buffers:read")
        if targets:
            caller_of(scope).require("buffers:write")
        key, match = key_of(scope, self._body) if targets else None, match_of(scope)
        refuse(scope, "If-None-Match")
        if len(targets) != 1:
            refuse(scope, "If-Match")
        names = [*(self._operator.output_names if self._job.wanted is None else self._job.wanted)]
        answered = [name for name in names if name not in targets]
        names += [name for name in targets if name not in names]

        known = recalled(store, key)
        if known is not None and not answered:
            for buffer in targets.values():
                with suppress(UnknownBuffer):
                    check_same_buffer(store.record(buffer), known)
            return self._answer_adds({}, [], Outcome(known.receipts, replayed=True))
        try:
            hold(scope, sum(store.record(buffer).spec.nbytes for buffer in buffers.sources.values()))
            snapshots = store.read([*buffers.sources.values()])
            states = [snapshot.state for snapshot in snapshots]
            if known is not None:
                self._check_unchanged(known.sources, states, known.receipts)
            tensors = {**self._job.tensors, **self._taken(snapshots)}
            if self._operator.sparse is not None and not answered:
                outputs = {names[0]: self._engine.in_pieces(self._operator, tensors, self._job.attributes)}
            else:
                outputs = self._outputs(tensors, names)
        except GradserveError as error:
            if known is None or isinstance(error, (EpochGone, Busy)):
                raise
            raise counted_once(str(error), known.receipts) from None
        if not targets:
            return self._answer(outputs, {}, {})
        add = partial(Add, weight=buffers.weight, epoch=buffers.epoch, match=match)
        changes = [add(name=buffer, tensor=name, gradient=outputs[name]) for name, buffer in targets.items()]
        finish = partial(self._answer_adds, {name: outputs[name] for name in answered}, states)
        return Adding(changes, key, states, finish)

    def _taken(self, snapshots: Sequence[Snapshot]) -> dict[str, Array]:
        """The inputs that are taken from buffers, of which these are the states."""
        for name, buffer in self._job.buffers.sources.items():
            if name in self._job.tensors:
                raise InvalidParameter(
                    f"{name} is in the body, but from= takes it from the buffer {buffer!r}, too", parameter="from"
                )
        return {name: one.value for name, one in zip(self._job.buffers.sources, snapshots, strict=True)}

    def _answer_adds(self, outputs: Mapping[str, Array], states: Sequence[str], outcome: Outcome) -> Answer:
        """The outputs that are answered, computed from these states, and the receipts of those that were added."""
        if outputs:
            self._check_unchanged(outcome.sources, states, outcome.receipts)
        receipts = {name: outcome.receipts[buffer] for name, buffer in self._job.buffers.targets.items()}
        return self._answer(outputs, receipts, replayed(outcome))

    def _check_unchanged(self, before: Sequence[str], now: Sequence[str], receipts: Mapping[str, Receipt]) -> None:
        """Raise `EpochGone` if a source had another state when the request was made first."""
        sources = self._job.buffers.sources.values()
        for buffer, then, state in zip(sources, before, now, strict=False):  # earlier versions stored none
            if then != state:
                raise counted_once(f"its input, the buffer {buffer!r}, has changed since", receipts)


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
