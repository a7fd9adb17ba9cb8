"""The data of a buffer: its rules, its state and its closed steps. And the data of an idempotency key."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from service.buffers.names import BufferName
from service.buffers.specs import Spec as Spec
from service.buffers.steps import Closed, described
from service.dtypes import Array
from service.errors import GradserveError, SourceChanged, StepGone, StepOpen, UnknownBuffer, shown

Receipt: TypeAlias = dict[str, Any]
"""The result of a change: name, updated, closed, step, version, count and weight; of a new buffer its metadata.

The receipt of a closed step also has closed_by and contributors."""


@dataclass(frozen=True)
class Record:
    """A buffer without its numbers. The store keeps them under the id `value`; None means zeros, which are not stored.

    `id` tells the buffer from earlier buffers of the same name. `began` is the time of the running step's first add,
    None without a deadline. `contributors_in` counts the gradients of each contributor in it. `closed_at` is when the
    last step closed. `absent` has those of the spec's contributors who were not in that step: when the last step
    that had them closed, or the creation; a run does not wait for them. `about` is kept with what no client names.
    """

    full_name: BufferName
    spec: Spec
    id: int
    created: float
    updated: float
    step: int = 0
    version: int = 0
    count: int = 0
    weight: float = 0.0
    value: int | None = None
    closed: tuple[Closed, ...] = ()
    began: float | None = None
    contributors_in: Mapping[str, int] = field(default_factory=dict)
    closed_at: float | None = None
    absent: Mapping[str, float] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    packed_bytes: int = field(default=0, compare=False)
    """Bytes of the record in the store when it was read last."""

    def changed(self, **changes: Any) -> Record:
        """Return a copy with other values in some fields, in a fifth of the time of `dataclasses.replace`."""
        copy = object.__new__(Record)
        copy.__dict__.update(self.__dict__, **changes)
        return copy

    @property
    def name(self) -> str:
        """The name that clients know."""
        return self.full_name.name

    @property
    def etag(self) -> str:
        """The short tag of the buffer's state, in quotation marks."""
        return f'"{self.step}-{self.version}"'

    def tag_of(self, state: Record | Closed) -> str:
        """Return the tag of the state of this buffer, and of no other buffer of the same name.

        It adds the microsecond of the creation, for caches: a buffer that is created again has the same short tags.
        """
        return f'{state.etag[:-1]}-{round(self.created * 1e6):x}"'

    @property
    def tags(self) -> frozenset[str]:
        """The tags that fit the buffer's state, with `*`, which fits every state."""
        return frozenset({"*", self.etag, self.tag_of(self)})

    @property
    def state(self) -> str:
        """A text that differs for every value of every buffer."""
        return f"{self.id}-{self.step}-{self.version}"

    def check_state(self, state: str) -> None:
        """Raise `SourceChanged` unless this is the buffer's state."""
        if self.state != state:
            problem = f"The buffer {self.name!r} has changed since its value was read: it is at {self.etag} now"
            raise SourceChanged(problem, buffer=self.name)

    @property
    def deadline_at(self) -> float | None:
        """When the deadline of the running step ends, in seconds since 1970."""
        spec, seconds = self.spec, self.spec.deadline_seconds
        if spec.life is not None and not self.step and (spec.contributors or spec.quorum or spec.quorum_weight):
            return None  # a run begins when all are there
        return None if seconds is None or self.began is None else self.began + seconds

    @property
    def due(self) -> float | None:
        """When the running step closes by itself unless it changes."""
        return None if self.began is None or self.count < self.spec.min_count else self.deadline_at

    @property
    def left_out(self) -> Collection[str]:
        """The expected contributors that a run's running step does not wait for: they missed a deadline, or left."""
        return () if self.spec.life is None else self.absent.keys()

    @property
    def missing(self) -> list[str] | None:
        """The contributors that the running step lacks; None if nobody knows them.

        They are the spec's contributors. Without those they are the contributors of the last closed step, as long as
        everybody who is in now was in that step, too.
        """
        inside, last = self.contributors_in, self._last_contributors
        are_known = last and inside.keys() <= last.keys() and sum(inside.values()) == self.count
        expected = self.spec.contributors or (last if are_known else None)
        return None if expected is None else [name for name in expected if name not in inside]

    @property
    def awaited(self) -> list[str] | None:
        """Those who are missing, without those that a run leaves out; None if nobody knows them."""
        missing, out = self.missing, self.left_out
        return missing if missing is None or not out else [name for name in missing if name not in out]

    @property
    def known_contributors(self) -> Collection[str]:
        """Who has added in the running step, or in the last closed one."""
        return {**self._last_contributors, **self.contributors_in}

    @property
    def _last_contributors(self) -> Mapping[str, int]:
        return self.closed[-1].contributors if self.closed else {}

    def last_in(self, name: str) -> float:
        """Return when the last step that had this contributor closed, or since when the running step awaits it."""
        if name in self._last_contributors and self.closed_at is not None:
            return self.closed_at
        return self.absent.get(name, self.created if self.spec.life is None else self.closed_at or self.created)

    def progress(self) -> dict[str, Any]:
        """Return what an error says of a step that is not complete."""
        wanted = {"quorum": self.spec.quorum, "missing": self.awaited}
        known = {name: value for name, value in wanted.items() if value is not None}
        return {"buffer": self.name, "step": self.step, "count": self.count, **known}

    @property
    def expires(self) -> float | None:
        """When the buffer expires unless a client changes it, in seconds since 1970. Its deadline is a change, too."""
        seconds = self.spec.ttl_seconds
        if seconds is None:
            return None
        due = self.due
        return seconds + (self.updated if due is None or due >= self.updated + seconds else max(self.updated, due))

    @property
    def values(self) -> list[int]:
        """The ids of the buffer's values, including those of its closed steps, or of what a push has staged."""
        found = [value for value in (self.value, *(step.value for step in self.closed)) if value is not None]
        for _, _, gradients, _ in self.about.get("staged", ()):
            found += itertools.chain(*[place[0] for _, place, _ in gradients.values() if place is not None])
        return found

    def lives(self, now: float) -> bool:
        return self.spec.ttl_seconds is None or now < (self.expires or math.inf)

    def closed_step(self, step: int) -> Closed:
        """Return the closed step. Raises `StepOpen` if it has not closed, and `StepGone` if it is no longer kept."""
        if step >= self.step:
            spec = self.spec
            raise StepOpen(
                f"Step {step} of {self.name!r} has not closed: the buffer is in step {self.step},"
                f" whose count is {self.count}{'' if spec.quorum is None else f' of {spec.quorum}'}"
                f"{'' if spec.quorum_weight is None else f', and its weight {self.weight} of {spec.quorum_weight}'}"
                f"{described(self.awaited)}",
                **self.progress(),
            )
        for closed in self.closed:
            if closed.step == step:
                return closed
        raise StepGone(
            f"Step {step} of {self.name!r} is no longer kept: it was zeroed, or is older than the last"
            f" {self.spec.keep} closed steps (see keep)",
            buffer=self.name,
            step=self.step,
        )

    def as_json(self) -> dict[str, Any]:
        missing = self.missing
        return {
            "name": self.name,
            **self.spec.as_json(),
            "run": self.spec.run,
            "step": self.step,
            "version": self.version,
            "count": self.count,
            "weight": self.weight,
            "bytes": self.spec.nbytes,
            "closed_steps": [closed.step for closed in self.closed],
            "created_at": self.created,
            "updated_at": self.updated,
            "expires_at": self.expires,
            "closed_at": self.closed_at,
            "deadline_at": self.deadline_at,
            "contributors_in": dict(self.contributors_in),
            "missing": missing,
            "missing_since": None if missing is None else {name: self.last_in(name) for name in missing},
        }

    def receipt(self, *, updated: bool, of: Closed | None = None) -> Receipt:
        """Return the receipt of a change; with `of`, of the step that the change closed."""
        state = self if of is None else of
        receipt = {
            "name": self.name,
            "updated": updated,
            "closed": of is not None,
            "step": state.step,
            "version": state.version,
            "count": state.count,
            "weight": state.weight,
        }
        if of is not None:
            receipt |= {"closed_by": of.closed_by, "contributors": dict(of.contributors)}
        return receipt


MAX_ANSWER_BYTES = 1 << 12
"""Bytes that a key may keep of an answer: losses and norms, but no tensors of a model."""


class Key(NamedTuple):
    """An idempotency key: its caller, its text, and the fingerprint of the request that has it."""

    caller: str
    text: str
    fingerprint: bytes


class Known(NamedTuple):
    """The data that is stored with a key: the fingerprint of its request, the receipts, and the ids of the buffers.

    `sources` are the states of the buffers that the request was computed from, in the request's order. `by_prefix`
    says that the request may have named its buffers by a prefix: then the store keeps their names. `answer` is what a
    repeated request answers besides, in at most `MAX_ANSWER_BYTES`.
    """

    fingerprint: bytes
    receipts: dict[str, Receipt]
    ids: dict[str, int]
    sources: tuple[str, ...] = ()
    by_prefix: bool = False
    answer: bytes = b""

    @property
    def memory_bytes(self) -> int:
        """About what Python takes for it: 700 bytes, 450 for a receipt, and 150 for each of its contributors."""
        contributors = sum(len(receipt.get("contributors") or ()) for receipt in self.receipts.values())
        return 700 + 450 * len(self.receipts) + 150 * contributors + len(self.answer)


def unknown_buffer(name: str) -> UnknownBuffer:
    """Return the error of a buffer that does not exist."""
    return UnknownBuffer(f"There is no buffer {shown(name)}; PUT /v1/buffers/{{name}} creates one", buffer=name)


def unknown_prefix(prefix: str) -> UnknownBuffer:
    """Return the error of a prefix that fits no buffer."""
    return UnknownBuffer(f"There is no buffer whose name begins with {shown(prefix)}")


def name_buffer(error: GradserveError, name: str, *, one_of_many: bool) -> None:
    """Add the buffer to the error's context; if the request has many buffers, add it to the text, too."""
    if "buffer" not in error.context:
        if one_of_many:
            error.detail += f" (the buffer is {name!r})"
        error.context["buffer"] = name


@dataclass(frozen=True)
class Snapshot:
    """A buffer with its value, now or when its step `of` closed. Nothing else refers to the value."""

    record: Record
    value: Array
    of: Closed | None = None

    @property
    def etag(self) -> str:
        """The tag of this state, in quotation marks."""
        return self.record.tag_of(self.of or self.record)

    @property
    def state(self) -> str:
        """The `Record.state` of the value: a closed step keeps its own."""
        at = self.of or self.record
        return f"{self.record.id}-{at.step}-{at.version}"

    def receipt(self) -> Receipt:
        return self.record.receipt(updated=False, of=self.of)
