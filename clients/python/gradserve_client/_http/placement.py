"""Where each buffer is, if a client has several servers, and how a call is split among them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from gradserve_client._http.policy import Call
from gradserve_client.errors import (
    Busy,
    ConnectionFailed,
    GradserveError,
    InvalidInput,
    ServerFailed,
    TimedOut,
    Unavailable,
)

T = TypeVar("T")

RETRYABLE = (Busy, ConnectionFailed, ServerFailed, TimedOut, Unavailable)
"""Errors after which the same call may succeed. Of several errors they come first, so that the caller repeats it."""


class Placement:
    """The servers of a client by their URLs, and the server of each buffer."""

    def __init__(self, urls: Sequence[str]) -> None:
        """Raises `InvalidInput` without a URL, and for a URL that comes twice."""
        if not urls:
            raise InvalidInput("The list of URLs is empty, but must name at least one server")
        if twice := [url for number, url in enumerate(urls) if url in urls[:number]]:
            raise InvalidInput(f"The list of URLs has {twice[0]} twice, but each server has a store of its own")
        self.urls = tuple(urls)
        self._placed: dict[str, int] = {}
        self._turn = 0

    def place(self, places: Mapping[str, str]) -> None:
        """Put buffers on the servers of these URLs. Raises `InvalidInput` for a URL that is not in the list."""
        for name, url in places.items():
            if url not in self.urls:
                raise InvalidInput(f"{name!r} is on {url}, but the client's servers are {', '.join(self.urls)}")
        self._placed |= {name: self.urls.index(url) for name, url in places.items()}

    def server_of(self, name: str) -> int:
        """Return the number of the server where a buffer is, by rendezvous hashing unless it was placed."""
        placed = self._placed.get(name)
        return self.urls.index(max(self.urls, key=lambda url: _weight(url, name))) if placed is None else placed

    def routes(self, call: Call[T]) -> list[tuple[int, Call[T]]]:
        """Return the numbers of the servers that a call is for, each with its part of the call.

        Raises `InvalidInput` for a call that cannot be split and names buffers of several servers.
        """
        if call.buffers is None:
            return [(number, self._part(call, number)) for number in range(len(self.urls))]
        if not call.buffers:
            number, self._turn = self._turn, (self._turn + 1) % len(self.urls)
            return [(number, call)]
        names: dict[int, list[str]] = {}
        for name in call.buffers:
            if name.endswith("*") and len(self.urls) > 1:
                raise InvalidInput(f"The buffers {name} may be on several servers: use the client of one of them")
            names.setdefault(self.server_of(name), []).append(name)
        if call.body_for is not None:
            return [
                (number, self._part(call, number, body=call.body_for(some), buffers=some))
                for number, some in sorted(names.items())
            ]
        if len(names) > 1:
            places = ", ".join(f"{some[0]!r} on {self.urls[number]}" for number, some in names.items())
            raise InvalidInput(
                f"The buffers are on several servers: {places}; one request reads and changes those of one server",
                code="invalid_parameter",
            )
        return [(next(iter(names)), call)]

    def _part(self, call: Call[T], number: int, **changes: Any) -> Call[T]:
        """Return a server's part of a call, with a key that depends on the server."""
        key = call.key and hashlib.sha256(f"{self.urls[number]}\n{call.key}".encode()).hexdigest()
        return replace(call, key=key, **changes)


def _weight(url: str, name: str) -> bytes:
    return hashlib.sha256(f"{url}\n{name}".encode(errors="replace")).digest()


def balanced(sizes: Mapping[str, int], urls: Sequence[str]) -> dict[str, str]:
    """Return the URL for each name, so that servers hold about equal bytes: the largest first, to the emptiest server.

    The order of names and URLs makes no difference, so all workers of a model agree.
    """
    held, places = dict.fromkeys(sorted(urls), 0), {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        places[name] = min(held, key=lambda url: held[url])
        held[places[name]] += sizes[name]
    return places


def merged(call: Call[T], outcomes: Sequence[T | Exception]) -> T:
    """Return the result of a call from the outcomes of its parts. Raises their errors as one."""
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    results = [outcome for outcome in outcomes if not isinstance(outcome, Exception)]
    if call.buffers is None and results:  # a prefix that fits buffers of some servers
        errors = [error for error in errors if getattr(error, "code", None) != "unknown_buffer"]
    try:
        if errors:
            raise _joined(call, errors, some_done=bool(results))
    finally:  # the error's traceback holds this frame: a cycle that would keep the call's arrays in memory
        del errors, outcomes
    return results[0] if len(results) == 1 else _in_order(call, results)


def _in_order(call: Call[T], results: Sequence[Any]) -> Any:
    """Return the results by name, in the order of the call's names, or for a prefix sorted."""
    found = {name: result for some in results for name, result in some.items()}
    return {name: found[name] for name in call.buffers or sorted(found)}


def _joined(call: Call[Any], errors: Sequence[Exception], *, some_done: bool) -> Exception:
    """Return one of the errors, with the details of all, and with what they mean for the whole call."""
    ours = [error for error in errors if isinstance(error, GradserveError)]
    if len(ours) < len(errors):
        return next(error for error in errors if error not in ours)
    error = next((error for error in ours if isinstance(error, RETRYABLE)), ours[0])
    error.detail = "; ".join(dict.fromkeys(one.detail for one in ours))
    error.args = (error.detail,)
    if missing := [name for one in ours for name in one.context.get("missing") or ()]:
        error.context["missing"] = [*dict.fromkeys(missing)]
    if call.key is not None:
        error.idempotency_key = call.key
        error.maybe_done = some_done or any(one.maybe_done for one in ours)
    return error
