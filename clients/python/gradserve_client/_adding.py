"""Adds to several buffers: in one request for each server, or in a push of several parts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from gradserve_client._http.parallel import together
from gradserve_client._http.placement import merged
from gradserve_client._http.policy import Call
from gradserve_client._http.runner import Runner
from gradserve_client._wire.calls import limits
from gradserve_client._wire.pushes import (
    Push,
    Receipts,
    errors_in,
    finds_room_later,
    forget,
    is_begun,
    is_known,
    is_refused,
    is_small,
    is_spent,
    is_whole,
    pause,
    pushes,
    taken_over,
)
from gradserve_client.errors import GradserveError, KeyReused, StoreFull, TooLarge

ATTEMPTS = 3
"""How often a push begins at most, if another client sends other gradients with its key."""


def added(runner: Runner, call: Call[Receipts], most: int | None = None) -> Receipts:
    """Return the receipts of an add to several buffers. An add that one request cannot carry is a push in parts.

    With `most`, the bytes of a request, every add is a push. All gradients are staged on all servers before any server
    adds them. Raises `GradserveError`.
    """
    if most is None and is_small(call):
        try:
            return runner.run(call)
        except TooLarge as error:  # this server takes less than others
            if is_whole(call) or error.maybe_done:
                raise
    routes = runner.routes(call)
    for shard, _ in routes:
        learn_limits(shard)
    made = pushes([add for _, add in routes], [shard.limits for shard, _ in routes], most)
    if not made:
        return runner.run(call)
    sent = [(shard, push) for (shard, _), push in zip(routes, made, strict=True)]
    rest = max(shard.patience for shard, _ in sent)
    while True:
        try:
            return pushed(call, sent)
        except StoreFull as error:
            if rest <= 0 or not finds_room_later(error, made):
                raise
        seconds = min(pause(), rest)
        rest -= seconds
        time.sleep(seconds)


def pushed(call: Call[Receipts], sent: Sequence[tuple[Runner, Push]]) -> Receipts:
    """Send a push to each of these servers, and return the receipts. Raises `GradserveError`."""
    begun = together([partial(staged, *each) for each in sent])
    if is_known(begun) and not any(one is True or is_spent(one) for one in begun):  # so no server has the push
        begun = together([partial(staged_again, *each, before) for each, before in zip(sent, begun, strict=True)])
    unspent = [each for each, before in zip(sent, begun, strict=True) if is_known(begun) and not is_spent(before)]
    outcomes = [*errors_in(begun), *together([partial(completed, *each) for each in unspent])]
    try:
        if is_refused(errors_in(outcomes)):
            together([partial(forgotten, *each) for each in sent])
        return merged(call, outcomes)
    finally:  # an error's traceback holds this frame: a cycle that would keep the call's arrays in memory
        del begun, outcomes


def learn_limits(shard: Runner) -> None:
    """Ask a server for its limits, once."""
    shard.limits = shard.limits or shard.run(limits())


def staged(shard: Runner, push: Push) -> bool:
    """Stage the gradients of a push, and return whether it was complete before. Raises `KeyReused`."""
    for part in push.staging:
        if shard.run(part) is not None:
            return True
    return False


def staged_again(shard: Runner, push: Push, before: bool | Exception) -> bool:
    """Stage the gradients of a push in place of others under its id, if that was the outcome `before`."""
    if not isinstance(before, Exception):
        return before
    for _ in range(ATTEMPTS):
        try:
            shard.run(forget(push.id))
            return staged(shard, push)
        except KeyReused as error:
            if not is_begun(error):
                raise
    raise taken_over(push)


def completed(shard: Runner, push: Push) -> Receipts:
    """Add what a push has staged, and return the receipts.

    If another server has added the push before it broke off, this server adds what it had staged by that time: all
    gradients are of one push.
    """
    for _ in range(ATTEMPTS):
        try:
            if (receipts := shard.run(push.last)) is not None:
                return receipts
        except KeyReused as error:
            if not is_begun(error):
                raise
            shard.run(forget(push.id))
        staged(shard, push)
    raise taken_over(push)


def forgotten(shard: Runner, push: Push) -> None:
    """Forget a push that was refused, so that it takes no room, and another attempt may have its id."""
    with suppress(GradserveError):
        shard.run(forget(push.id))
