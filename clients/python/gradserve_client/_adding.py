"""Adds to several buffers: in one request for each server, or in a push of several parts."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from gradserve_client._http.parallel import together
from gradserve_client._http.placement import merged
from gradserve_client._http.policy import Call
from gradserve_client._http.runner import Runner
from gradserve_client._wire.calls import limits
from gradserve_client._wire.pushes import Push, Receipts, errors_in, forget, is_refused, is_small, pushes, taken_over
from gradserve_client.errors import GradserveError, KeyReused

ATTEMPTS = 3
"""How often a push begins at most, if another client sends other gradients with its key."""


def added(runner: Runner, call: Call[Receipts], most: int | None = None) -> Receipts:
    """Return the receipts of an add to several buffers. An add that one request cannot carry is a push in parts.

    With `most`, the bytes of a request, every add is a push. All gradients are staged on all servers before any server
    adds them. Raises `GradserveError`.
    """
    if most is None and is_small(call):
        return runner.run(call)
    routes = runner.routes(call)
    for shard, _ in routes:
        learn_limits(shard)
    made = pushes([add for _, add in routes], [shard.limits for shard, _ in routes], most)
    if not made:
        return runner.run(call)
    sent = [(shard, push) for (shard, _), push in zip(routes, made, strict=True)]
    errors = errors_in(together([partial(staged, *each) for each in sent]))
    receipts = [] if errors else together([partial(completed, *each) for each in sent])
    try:
        if is_refused([*errors, *errors_in(receipts)]):
            together([partial(forgotten, *each) for each in sent])
        return merged(call, receipts or errors)
    finally:  # an error's traceback holds this frame: a cycle that would keep the call's arrays in memory
        del errors, receipts


def learn_limits(shard: Runner) -> None:
    """Ask a server for its limits, once."""
    shard.limits = shard.limits or shard.run(limits())


def staged(shard: Runner, push: Push) -> bool:
    """Stage the gradients of a push, and return whether it was complete before."""
    for attempt in range(ATTEMPTS):
        try:
            for part in push.staging:
                if shard.run(part) is not None:
                    return True
            return False
        except KeyReused:  # of a push that is complete, or that broke off and had other gradients
            if attempt == ATTEMPTS - 1 or not shard.run(forget(push.id)):
                raise
    raise AssertionError


def completed(shard: Runner, push: Push) -> Receipts:
    """Add the gradients that a push has staged, and return the receipts."""
    for _ in range(ATTEMPTS):
        try:
            if (receipts := shard.run(push.last)) is not None:
                return receipts
        except KeyReused:
            if not shard.run(forget(push.id)):
                raise
        staged(shard, push)
    raise taken_over(push)


def forgotten(shard: Runner, push: Push) -> None:
    """Forget a push that was refused, so that it takes no room, and another attempt may have its id."""
    with suppress(GradserveError):
        shard.run(forget(push.id))
