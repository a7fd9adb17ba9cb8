"""Both clients with the same interface, so that every test runs with each."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

from anyio.from_thread import BlockingPortal, start_blocking_portal
from gradserve_client import AsyncClient, Client

from tests.serving import wait_until

KINDS = ("sync", "async")


class _Blocking:
    """A part of an `AsyncClient`. Calling a coroutine runs it to its end."""

    def __init__(self, inner: Any, portal: BlockingPortal) -> None:
        self._inner, self._portal = inner, portal

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if inspect.iscoroutinefunction(found):
            return lambda *args, **named: self._portal.call(partial(found, *map(_bare, args), **_bare(named)))
        if inspect.ismethod(found):
            return lambda *args, **named: _Blocking(found(*args, **named), self._portal)
        return _Blocking(found, self._portal) if type(found).__name__.startswith("Async") else found

    def __getitem__(self, name: str) -> Any:
        return _Blocking(self._inner[name], self._portal)


def _bare(value: Any) -> Any:
    if isinstance(value, _Blocking):
        return value._inner
    if type(value) is list and any(isinstance(one, _Blocking) for one in value):
        return [*map(_bare, value)]
    return {name: _bare(one) for name, one in value.items()} if type(value) is dict else value


@contextmanager
def connected(kind: str, url: str | Sequence[str], **settings: Any) -> Iterator[Any]:
    """Yield a `Client`, or an `AsyncClient` that can be used like a `Client`."""
    if kind == "sync":
        with Client(url, **settings) as server:
            yield server
        return
    with start_blocking_portal() as portal:
        inner = portal.call(partial(AsyncClient, url, **settings))
        assert portal.call(inner.__aenter__) is inner
        try:
            yield _Blocking(inner, portal)
        finally:
            portal.call(inner.__aexit__, None, None, None)


@contextmanager
def adding(url: str | Sequence[str], add: Callable[[Any, float], object]) -> Iterator[list[int]]:
    """Let three workers, one of them with `await`, add 1, 2 and 3 again and again. Yield how often each has added."""
    ended, counts = threading.Event(), [0, 0, 0]

    def work(worker: int) -> None:
        with connected("async" if worker == 1 else "sync", url) as mine:
            while not ended.is_set():
                add(mine, worker + 1.0)
                counts[worker] += 1

    with ThreadPoolExecutor(3) as threads:
        workers = [threads.submit(work, worker) for worker in range(3)]
        try:
            yield counts
        finally:
            ended.set()
        for done in workers:
            done.result(60)


def go_on(counts: list[int]) -> None:
    """Wait until each worker of `adding` has added once more."""
    before = [*counts]
    wait_until(lambda: all(now > then for now, then in zip(counts, before, strict=True)))
