"""A request's way through the engine: in the pool, or, if it is small, at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from service.api.body import Answer, coding_of, deflate, inflate, read_body, wanted_coding
from service.api.statistics import Statistics
from service.engine import Engine
from service.errors import GradserveError, NotReady
from service.kernels import Operator
from service.kernels._op import Array
from service.settings import Settings

R = TypeVar("R")

INLINE_TEXT, INLINE_BYTES = 1 << 18, 3 << 20
"""Up to this size of a body, JSON or bytes, the work is done at once: to hand it over to the pool and back would take
as long. A probe waits for it about a millisecond, no longer than for a thread that holds the interpreter's lock."""


class Job(NamedTuple):
    """What a body asks for, and how the outputs become an answer."""

    tensors: Mapping[str, Array]
    attributes: Mapping[str, Any]
    wanted: Sequence[str] | None
    encode: Callable[[Mapping[str, Array]], Answer]


def engine_of(state: Any) -> Engine:
    """The server's engine. Raises `NotReady` before the start has finished and after the stop has begun."""
    engine: Engine | None = getattr(state, "engine", None)
    if engine is None:
        raise NotReady("The server is starting or stopping; try again soon")
    return engine


async def respond(
    state: Any,
    scope: Scope,
    receive: Receive,
    operator: Operator,
    decode: Callable[[Engine, memoryview], Job],
    *,
    inline: int,
    head: int = 0,
) -> Answer:
    """Read the body, in which the tensors begin after `head` bytes, `decode` it, run the operator, and encode.

    All but the reading happens in the pool, or, for a body of up to `inline` bytes, at once.
    """
    settings: Settings = state.settings
    statistics: Statistics = state.statistics
    asked = time.monotonic_ns()
    try:
        engine, headers = engine_of(state), dict(scope["headers"])
        codings = coding_of(headers), wanted_coding(headers)
        limit, patience = settings.max_body_bytes, settings.request_timeout
        body = await read_body(scope, receive, headers, limit, patience, engine.buffer, head)
        asked = time.monotonic_ns()
        small = len(body) <= inline and operator.linear and codings == (None, None)
        work = partial(_perform, engine, settings, statistics, operator, body, codings, decode, asked, small)
        return work() if small else await _in_pool(receive, engine, work)
    except GradserveError as error:
        error.context["op"] = operator.name
        statistics.failed(operator.name, asked)
        raise


def _perform(
    engine: Engine,
    settings: Settings,
    statistics: Statistics,
    operator: Operator,
    body: memoryview,
    codings: tuple[str | None, str | None],
    decode: Callable[[Engine, memoryview], Job],
    asked: int,
    alone: bool,
) -> Answer:
    started = time.monotonic_ns()
    came_in, goes_out_in = codings
    if came_in is not None:
        body = inflate(body, came_in, settings.max_body_bytes)
    job = decode(engine, body)
    decoded = time.monotonic_ns()
    outputs = engine.run(operator, job.tensors, job.attributes, job.wanted, alone=alone)
    computed = time.monotonic_ns()
    answer = job.encode(outputs)
    if goes_out_in is not None:
        headers = {**answer.headers, "Content-Encoding": goes_out_in}
        answer = Answer(deflate(answer.pieces, goes_out_in), answer.media_type, headers)
    statistics.succeeded(operator.name, asked, started, decoded, computed, time.monotonic_ns())
    return answer


async def _in_pool(receive: Receive, engine: Engine, work: Callable[[], R]) -> R:
    """What `work` returns, called in the engine's pool. The body must have been read.

    If the client goes before the work starts, the work is dropped. Raises `ClientDisconnect` if the client goes.
    """
    working = asyncio.wrap_future(engine.submit(work))
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        either: set[asyncio.Future[Any]] = {working, leaving}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        leaving.cancel()
        working.cancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
