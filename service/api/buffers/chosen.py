"""The buffers of a request for many: those that its body names, or those with a prefix."""

from __future__ import annotations

import difflib
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from service.api.buffers.models import MAX_NAMES_BYTES, Names
from service.api.buffers.preconditions import recalled
from service.api.buffers.request import Received, parse_model, reserved
from service.api.http.answer import AnswerForm
from service.api.http.call import Call
from service.api.http.offload import INLINE_LOOKUPS
from service.buffers.changes import Change
from service.buffers.names import check_name
from service.buffers.perform import Outcome, Wide
from service.buffers.record import unknown_prefix
from service.errors import GradserveError, Invalid, TooManyTensors, UnknownBuffer, shown

R = TypeVar("R")

INLINE_NAMES_BYTES = 1 << 12
"""Bytes of names that the event loop reads itself: at most a thousand names, which take a millisecond."""

MAX_LISTINGS = 10
"""Listings of the buffers of a prefix before a request fails because a listed buffer was deleted meanwhile."""


async def name_like(call: Call, error: GradserveError) -> None:
    """Let `UnknownBuffer` name a buffer that the client may mean, of a few whose names begin as the given one does."""
    name = str(error.context.get("buffer", ""))

    def near() -> list[str]:
        found = call.store.names(name[: name.rfind(".") + 1], 64) or call.store.names(name[:2], 64)
        return difflib.get_close_matches(name, found, 1, 0.8)

    if isinstance(error, UnknownBuffer) and name and "buffers:read" in call.caller.scopes:
        with suppress(GradserveError):  # the first error is the one to answer
            for like in await call.offload(False, near):
                error.detail += f". Did you mean {like!r}?"


def check_not_empty(names: Sequence[object], prefix: str | None) -> None:
    """Raise `UnknownBuffer` if the prefix fits no buffer."""
    if not names:
        raise unknown_prefix(prefix or "")


async def until_ready(
    call: Call,
    received: Received,
    prefix: str | None,
    timeout: float,
    look: Callable[[str], object],
    work: Callable[[list[str]], Awaitable[R]],
) -> R:
    """Return the result of `work` for the buffers in the body, or for the buffers with the prefix; wait if it must.

    `look` raises for one buffer what `work` would raise for it, at less cost.
    """
    names = await names_of(call, received, prefix)
    unready = deque[str]()  # of the last attempt; while the first is not ready, `look` skips the others
    tried = False

    def look_at_unready() -> None:
        while unready:
            try:
                look(unready[0])
            except UnknownBuffer:
                if prefix is None:
                    raise
            unready.popleft()

    async def attempt() -> R:
        nonlocal tried
        if tried and await call.look_up(1, recalled, call.store, received.key) is None:
            await call.look_up(len(unready), look_at_unready)
        tried = True
        attempts = 1 if prefix is None else MAX_LISTINGS
        while True:
            unready.clear()
            unready.extend(names if prefix is None else await names_with_prefix(call, received, prefix))
            try:
                return await work([*unready])
            except UnknownBuffer:  # a buffer of the prefix was deleted after the listing
                attempts -= 1
                if not (attempts and unready):
                    raise

    return await call.wait_for(timeout, attempt)


async def names_of(call: Call, received: Received, prefix: str | None) -> list[str]:
    """Return the names in the body. Raises `Invalid` unless the request has either names or a prefix."""
    if prefix is None and received.is_empty:
        raise Invalid('No buffers are named: send {"names": [...]} in the body, or ?prefix= in the query')
    if prefix is None:
        inline = len(received.body) <= INLINE_NAMES_BYTES
        return await call.offload(inline, lambda: distinct_names(parse_model(received, Names, MAX_NAMES_BYTES).names))
    if not received.is_empty:
        raise Invalid("The request has both names in its body and prefix in its query; send only one")
    return []


def distinct_names(names: list[str]) -> list[str]:
    """Return the names. Raises `InvalidParameter`, and `Invalid` for a repeated name."""
    for name, count in Counter(names).items():
        check_name(name)
        if count > 1:
            raise Invalid(f"{shown(name)} is named {count} times, but a request may name each buffer once")
    return names


async def names_with_prefix(call: Call, received: Received, prefix: str) -> list[str]:
    """Return the buffers with the prefix, or enough of too many for a change; of a repeated request, its own."""
    known = await call.look_up(1, recalled, call.store, received.key)
    if known is not None:
        return [*known.receipts]
    names = await call.look_up(1, call.store.names, prefix, INLINE_LOOKUPS + 1)
    most = call.engine.limits.max_tensors + 1 if received.changes else None
    return names if len(names) <= INLINE_LOOKUPS else await call.offload(False, call.store.names, prefix, most)


async def change_all(
    call: Call,
    received: Received,
    names: Sequence[str],
    change: Callable[[str], Change],
    prefix: str | None,
    form: AnswerForm | None = None,
    *,
    may_fit_none: bool = False,
    growth: int = 0,
) -> Outcome:
    """Make the change of each buffer: of those named, or of those with the prefix at the moment of the change.

    Then `names` are the buffers that had the prefix a moment ago. They say how much memory the request needs. The
    request adds `growth` bytes to each record. Raises `TooManyTensors`.
    """
    most, known = call.engine.limits.max_tensors, None
    if received.key is not None:
        known = await call.look_up(1, recalled, call.store, received.key, names)
    if known is not None:
        call.reserve(2 * known.memory_bytes)  # its receipts, as objects and as text
    elif len(names) > most:
        raise TooManyTensors(
            f"The request would change {len(names)} buffers or more; the limit is {most} (GRADSERVE_MAX_TENSORS): send"
            " it in parts, with longer prefixes, or with names, which GET /v1/buffers lists",
            limit=most,
        )
    changes = await call.offload(len(names) <= INLINE_LOOKUPS, lambda: [*map(change, names)])
    wide = None if prefix is None else Wide(prefix, change, may_fit_none)
    async with reserved(call, names, form, growth if known is None else None):
        return await call.submit(changes, received.key, wide=wide)
