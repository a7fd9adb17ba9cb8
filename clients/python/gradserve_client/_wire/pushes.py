"""Pushes in parts: what to send of an add that one request cannot carry. Both clients share it."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from gradserve_client._http.outcomes import Answer
from gradserve_client._http.placement import RETRYABLE
from gradserve_client._http.policy import Call
from gradserve_client._wire import answers
from gradserve_client._wire.answers import JSON
from gradserve_client._wire.arguments import check_choice
from gradserve_client._wire.bulk import accumulate
from gradserve_client._wire.codes import FEWEST, Coded, encoded
from gradserve_client._wire.tensors import Array
from gradserve_client.errors import Conflict, KeyReused, StoreFull, TooLarge, mistaken
from gradserve_client.models import Receipt, StagedPush

Receipts: TypeAlias = dict[str, Receipt]

SMALL_BYTES = 1 << 20
"""Bytes of an add that the client sends without a look at the server's limits."""

SMALL_BUFFERS = 1000
"""Buffers of such an add."""

PART_BYTES = 64 << 20
"""Bytes of a part at most, by default: a quarter of what a server takes by default (GRADSERVE_MAX_BODY_BYTES)."""

PART_BUFFERS = 4096
"""Buffers in a part at most: the server allows 16384 tensors, and each costs it 20 us."""

PAUSES = (0.5, 3.0)
"""Seconds to wait for room, at least and at most: a large push takes seconds."""

LISTED = 1000
"""Pushes that one request lists: the most that the server allows."""


@dataclass(frozen=True)
class Push:
    """The parts of an add on one server: those that only stage gradients, and the last, which completes the push."""

    id: str
    staging: Sequence[Call[Receipts | None]]
    last: Call[Receipts | None]

    @property
    def nbytes(self) -> int:
        """The bytes of the parts."""
        return sum(len(piece) for part in (*self.staging, self.last) for piece in part.body)


def is_small(call: Call[Receipts]) -> bool:
    """Whether the add is sent as one request to each server: it is small, or has to be one."""
    assert call.buffers is not None
    size = sum(map(len, call.body))
    return is_whole(call) or (size <= SMALL_BYTES and len(call.buffers) <= SMALL_BUFFERS)


def is_whole(call: Call[Receipts]) -> bool:
    """Whether the add has to be one request: a part cannot do what it does."""
    return not call.query.keys().isdisjoint({"overwrite", "do_update"})


def pushes(adds: Sequence[Call[Receipts]], limits: Sequence[Mapping[str, int]], most: int | None) -> list[Push]:
    """Return the push of each server in place of its add; none if one request each can carry the adds.

    `limits` are those of the servers. With `most`, the bytes of a request, there are always pushes. Raises `TooLarge`.
    """
    sizes = [{name: _size(add, name) for name in add.buffers or ()} for add in adds]
    if most is None and all(map(_is_one_request, sizes, limits)):
        return []
    made = []
    for add, some, known in zip(adds, sizes, limits, strict=True):
        _check_each(some, known["max_body_bytes"])
        parts = [*packed(some, min(most or PART_BYTES, known["max_body_bytes"]), known["max_tensors"] // 2)]
        if len(parts) > 1 or len(adds) > 1:  # all gradients are staged everywhere before any push is complete
            parts.append([])
        if len(parts) > (most_parts := known.get("max_parts", 0)):
            raise TooLarge(f"The push has {len(parts)} parts, but the server takes up to {most_parts} (max_parts)")
        made.append(_push(add, parts))
    return made


def _size(add: Call[Receipts], name: str) -> int:
    assert add.body_for is not None
    return sum(map(len, add.body_for([name])))


def _is_one_request(sizes: Mapping[str, int], limits: Mapping[str, int]) -> bool:
    # A server of an earlier version knows no pushes in parts.
    fits = sum(sizes.values()) <= limits["max_body_bytes"] and 2 * len(sizes) <= limits["max_tensors"]
    return fits or "max_parts" not in limits


def _check_each(sizes: Mapping[str, int], limit: int) -> None:
    for name, size in sizes.items():
        if size > limit:
            raise TooLarge(
                f"The gradient of {name!r} takes {size} bytes of a request, but the server takes up to {limit}"
                " (GRADSERVE_MAX_BODY_BYTES)",
                code="body_too_large",
                context={"buffer": name, "limit": limit},
            )


def packed(sizes: Mapping[str, int], limit: int, count: int = PART_BUFFERS) -> Iterator[list[str]]:
    """Yield the names in parts of at most `limit` bytes and `count` buffers, or of one buffer.

    All workers of a run divide its buffers by this, also those with another version of the client.
    """
    some: list[str] = []
    held = 0
    for name, size in sizes.items():
        if some and (held + size > limit or len(some) >= min(count, PART_BUFFERS)):
            yield some
            some, held = [], 0
        some.append(name)
        held += size
    yield some


def travelling(arrays: Mapping[str, Array], wire_dtype: str | None) -> dict[str, Array | Coded]:
    """Return the arrays as they travel."""
    check_choice("wire_dtype", wire_dtype, (None, "int8"))
    return {
        name: encoded(array) if wire_dtype is not None and array.size >= FEWEST else array
        for name, array in arrays.items()
    }


def overwrites(arrays: Mapping[str, Array | Coded], most: int, key: str) -> Iterator[Call[Receipts]]:
    """Yield the requests that write arrays over buffers, each of up to half of what the server takes in bytes."""
    sizes = {name: array.nbytes for name, array in arrays.items()}
    for number, names in enumerate(packed(sizes, min(PART_BYTES, most // 2))):
        some = {name: arrays[name] for name in names}
        more: Any = {"weight": 1.0, "step": None, "contributor": None}
        yield accumulate(some, overwrite=True, idempotency_key=f"{key}-{number}" if number else key, **more)


def _push(add: Call[Receipts], parts: Sequence[Sequence[str]]) -> Push:
    assert add.key is not None
    assert add.body_for is not None
    # A key may have spaces.
    name = hashlib.sha256(add.key.encode()).hexdigest() if " " in add.key else add.key
    calls = [
        Call(
            add.method,
            add.path,
            _receipts_if_complete,
            query={**add.query, "push": name, "part": number, "parts": len(parts)},
            headers=add.headers,
            body=add.body_for(names),
            buffers=names,
        )
        for number, names in enumerate(parts, 1)
    ]
    return Push(name, calls[:-1], replace(calls[-1], key=add.key))


def _receipts_if_complete(answer: Answer) -> Receipts | None:
    return None if answer.status == 202 else answers.receipts(answer)


def errors_in(outcomes: Sequence[object]) -> list[Exception]:
    """Return the errors among the outcomes of servers."""
    return [one for one in outcomes if isinstance(one, Exception)]


def is_begun(outcome: object) -> bool:
    """Whether a server has staged other gradients under the id of the push, which is not complete there."""
    return isinstance(outcome, KeyReused) and "staged" in outcome.context


def is_spent(outcome: object) -> bool:
    """Whether a server has a complete push of this id with other gradients."""
    return isinstance(outcome, KeyReused) and not is_begun(outcome)


def is_known(outcomes: Sequence[object]) -> bool:
    """Whether each server has the push, or has staged it."""
    return all(isinstance(one, KeyReused) for one in errors_in(outcomes))


def is_refused(errors: Sequence[Exception]) -> bool:
    """Whether a server takes the push neither now nor later, or has no room for it."""
    lasting = [one for one in errors if isinstance(one, StoreFull) or not isinstance(one, (*RETRYABLE, KeyReused))]
    return bool(lasting)


def finds_room_later(error: StoreFull, made: Sequence[Push]) -> bool:
    """Whether only the parts of other pushes leave no room for these pushes."""
    return error.code == "pushes_full" and all(push.nbytes < error.context["limit"] for push in made)


def pause() -> float:
    """Return the seconds to wait for room: others wait for other times, so that not all come again together."""
    return random.uniform(*PAUSES)


def taken_over(push: Push) -> Conflict:
    """Return the error of a push that another client of the same key forgets again and again."""
    return Conflict(
        f"The push {push.id} was forgotten while its parts were sent: another client sends other gradients with the"
        " same key",
        idempotency_key=push.last.key,
    )


def listed(prefix: str) -> Call[list[StagedPush]]:
    """List the pushes that are not complete."""
    if not isinstance(prefix, str):
        raise mistaken("prefix", f"is {prefix!r}, but must be a string")

    def read(answer: Answer) -> list[StagedPush]:
        return [StagedPush.of(fields) for fields in json.loads(answer.body)["pushes"]]

    return Call("GET", "/v1/pushes", read, query={"prefix": prefix, "limit": LISTED}, headers={"Accept": JSON})


def forget(push: str) -> Call[bool]:
    """Forget a push that is not complete. The answer says whether a part of it was staged."""
    if not isinstance(push, str):
        raise mistaken("push", f"is {push!r}, but must be the id of a push, a string")

    def read(answer: Answer) -> bool:
        return bool(json.loads(answer.body)["forgotten"])

    return Call("DELETE", "/v1/pushes", read, query={"push": push}, headers={"Accept": JSON})
