"""Runs: what the workers of a training have in common, and who of them is awaited.

A run is a buffer that no client names: its value is the form, which all workers have alike, and its record the rest.
The buffers of a run have its name and its life in their specifications. Whom a step waits for is in their records,
so an add reads nothing but the buffers that it changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import orjson

from service.buffers.changes import Change
from service.buffers.closing import close, fulfilled
from service.buffers.graph_changes import HiddenChange
from service.buffers.lives import of_life, replaced
from service.buffers.names import BufferName, runs_of
from service.buffers.record import Receipt, Record, Spec
from service.buffers.transaction import Transaction
from service.dtypes import BOOL, Array
from service.errors import RunEnded, RunExists, UnknownRun, WorkerReplaced, shown

Outcome: TypeAlias = Literal["finished", "failed"]
"""How a run has ended."""

MOST_DIFFERENCES = 3
"""Differences of two forms that an error names."""

IDLE_SECONDS = 600.0
"""Seconds without an add, or two deadlines if these are longer, after which nobody seems to work on a run."""


@dataclass(frozen=True)
class StoredRun:
    """A run without its form."""

    name: str
    life: str
    """What tells the run from earlier runs of its name; empty while it is being deleted."""
    created: float
    updated: float
    """When a worker joined or left last."""
    prefix: str
    """What the names of its buffers begin with."""
    buffer: str
    """The buffer whose steps are those of the run."""
    digest: str
    """The digest of the form."""
    begun: bool = False
    """Whether it has had buffers. A run that has none any more is over: the next worker begins another."""
    workers: Mapping[str, str] = field(default_factory=dict)
    """The workers that have joined and not left, each with the token of its process."""
    ended: Mapping[str, Any] | None = None
    """The outcome, the time and the worker, with the first line of its error, once the run has ended."""

    @classmethod
    def of(cls, record: Record) -> StoredRun:
        """Return the run that a buffer is."""
        return cls(record.name, created=record.created, updated=record.updated, **record.about)

    def state(self, steps: Record | None, now: float) -> str:
        """Return in a word how the run is. `steps` is the buffer whose steps it has, None if it does not exist."""
        if self.ended is not None:
            return str(self.ended["outcome"])
        last, deadline = self.updated, 0.0
        if steps is not None:
            last, deadline = max(last, steps.updated), steps.spec.deadline_seconds or 0.0
        if now - last > max(IDLE_SECONDS, 2 * deadline):
            return "idle"
        if steps is None or not steps.step:
            return "joining"
        return "waiting" if steps.count and steps.awaited else "running"


def unknown_run(name: str) -> UnknownRun:
    """Return the error of a run that does not exist."""
    return UnknownRun(f"There is no run {shown(name)}; POST /v1/runs/{{run}}/join begins one", run=name)


@dataclass(frozen=True, kw_only=True)
class RunChange(HiddenChange):
    """A change of a run."""

    def buffer(self, namespace: str) -> BufferName:
        return BufferName(runs_of(namespace), self.name)


def _new(txn: Transaction, name: BufferName, form: Array, created: float, now: float) -> Record:
    """Return the buffer of a new run, which is counted, but not stored. Raises `TooManyBuffers`."""
    txn.count_new(name, now)
    return Record(name, Spec((form.size,), BOOL), txn.new_id(), created, now, value=txn.store_bytes(form))


@dataclass(frozen=True, kw_only=True)
class Join(RunChange):
    """A worker joins the run, or begins it. To join again is no change."""

    worker: str | None
    token: str
    """What only this process of the worker knows: a process that joins later takes the worker's place."""
    prefix: str
    steps: str
    """The name of the buffer whose steps are those of the run."""
    form: Array
    """What `as_form` returns."""
    digest: str
    """The digest of the form alone."""
    life: str
    """The life of a new run, or else that of the run if the worker knows it."""
    again_only: bool = False
    """Whether the worker has joined before: then it begins no run, and takes no worker's place."""

    def make(self, txn: Transaction, namespace: str, now: float) -> tuple[None, bool]:
        """Raises `RunExists` for another form, `RunEnded`, `RunReplaced`, `WorkerReplaced` and `TooManyBuffers`."""
        record = self._found(txn, namespace, now)
        if record is None:
            if self.again_only:
                raise replaced(self.life)
            own = {
                "life": self.life,
                "prefix": self.prefix,
                "buffer": self.steps,
                "digest": self.digest,
                "begun": False,
            }
            about = {**own, "workers": self._among({}), "ended": None}
            txn.put(_new(txn, self.buffer(namespace), self.form, now, now).changed(about=about))
            return None, True
        run = StoredRun.of(record)
        self._check(run)
        if run.digest != self.digest:
            others = _differences(txn.load(record.spec, record.value), self.form)
            raise RunExists(f"There is a run {self.name!r} of another form: {others}", run=self.name)
        workers = self._among(run.workers)
        txn.put(record.changed(updated=now, about={**record.about, "workers": workers}))
        return None, False

    def _found(self, txn: Transaction, namespace: str, now: float) -> Record | None:
        """Return the run, without one whose buffers are gone: deleted, or expired."""
        record = txn.get(self.buffer(namespace))
        if record is not None and record.about["begun"] and record.about["life"]:
            steps = txn.get(BufferName(namespace, record.about["buffer"]))
            if steps is None or not steps.lives(now) or steps.spec.life != record.about["life"]:
                txn.remove(record)
                return None
        return record

    def _among(self, workers: Mapping[str, str]) -> Mapping[str, str]:
        return workers if self.worker is None else {**workers, self.worker: self.token}

    def _check(self, run: StoredRun) -> None:
        if not run.life or (self.again_only and run.life != self.life):
            raise replaced(self.life)
        if self.again_only and self.worker is not None and run.workers.get(self.worker, self.token) != self.token:
            raise WorkerReplaced(
                f"Another process has joined the run {self.name!r} as {shown(self.worker)} since: give each worker a"
                " name of its own, or end this process if the other has taken its place",
                run=self.name,
            )
        if run.prefix != self.prefix:
            problem = f"There is a run {self.name!r} with the prefix {run.prefix!r}, not {shown(self.prefix)}"
            raise RunExists(problem, run=self.name)
        if run.ended is not None:
            raise RunEnded(f"The run {self.name!r} has {run.ended['outcome']}", run=self.name)


@dataclass(frozen=True, kw_only=True)
class RestoreRun(RunChange):
    """The run that an export has: all of it but its buffers."""

    form: Array
    created: float
    about: Mapping[str, Any]

    def make(self, txn: Transaction, namespace: str, now: float) -> tuple[None, bool]:
        """Raises `RunExists` and `TooManyBuffers`."""
        if txn.get(self.buffer(namespace)) is not None:
            raise RunExists(f"There is a run {self.name!r} already", run=self.name)
        txn.put(_new(txn, self.buffer(namespace), self.form, self.created, now).changed(about=self.about))
        return None, True


@dataclass(frozen=True, kw_only=True)
class Leave(RunChange):
    """A worker leaves the run. The last one ends it, if an `outcome` is given."""

    worker: str | None
    life: str
    outcome: Outcome | None = None
    error: str | None = None
    """The first line of the error of a worker that has failed."""

    def make(self, txn: Transaction, namespace: str, now: float) -> tuple[None, bool]:
        """Raises `RunReplaced`."""
        record = of_life(txn, namespace, self.life)
        run = StoredRun.of(record)
        workers = {name: token for name, token in run.workers.items() if name != self.worker}
        ended = run.ended
        if ended is None and self.outcome is not None and not self._others(txn, namespace, run, workers):
            ended = {"outcome": self.outcome, "at": now, "worker": self.worker, "error": self.error}
        txn.put(record.changed(updated=now, about={**record.about, "workers": workers, "ended": ended}))
        return None, False

    def _others(self, txn: Transaction, namespace: str, run: StoredRun, workers: Mapping[str, str]) -> bool:
        """Return whether the run's step waits for others that have joined, as far as they have names."""
        steps = txn.get(BufferName(namespace, run.buffer))
        left_out = () if steps is None else steps.left_out
        return any(name not in left_out for name in workers)


@dataclass(frozen=True, kw_only=True)
class Remove(RunChange):
    """The run is removed; with `last` false only its life ends, and its buffers go before it."""

    last: bool

    def make(self, txn: Transaction, namespace: str, now: float) -> tuple[None, bool]:
        """Raises `UnknownRun`."""
        record = txn.get(self.buffer(namespace))
        if record is None:
            raise unknown_run(self.name)
        if self.last:
            txn.remove(record)
        else:
            txn.put(record.changed(about={**record.about, "life": ""}))
        return None, False


@dataclass(kw_only=True)
class Expect(Change):
    """The running step of a buffer waits for a contributor of its run, or no longer."""

    contributor: str | None
    run: str
    is_expected: bool

    def admit(self, record: Record | None) -> None:
        """Allow it for every buffer: those of others are left alone."""

    def apply(self, txn: Transaction, name: BufferName, record: Record, now: float) -> tuple[Receipt, Array | None]:
        who, expected = self.contributor, record.spec.contributors or ()
        if who not in expected or record.spec.run != self.run or (who in record.absent) != self.is_expected:
            return record.receipt(updated=False), None
        assert who is not None
        absent = {one: at for one, at in record.absent.items() if one != who}
        absent |= {} if self.is_expected else {who: record.last_in(who)}
        record, closed = record.changed(absent=absent, updated=now, version=record.version + 1), None
        if record.count and (reason := fulfilled(record, now)) is not None:
            record, closed = close(txn, record, reason)
        else:
            txn.put(record)
        return record.receipt(updated=True, of=closed), None


@dataclass(kw_only=True)
class RemoveOf(Change):
    """The buffer is removed if it belongs to the run."""

    run: str

    def admit(self, record: Record | None) -> None:
        """Allow it for every buffer, and for none."""

    def apply(
        self, txn: Transaction, name: BufferName, record: Record | None, now: float
    ) -> tuple[Receipt, Array | None]:
        is_ours = record is not None and record.spec.run == self.run
        if record is not None and is_ours:
            txn.remove(record)
        return {"name": self.name, "updated": is_ours}, None


def _differences(there: Array, here: Array) -> str:
    """Return in words what differs first between two forms."""
    old, new = (orjson.loads(form.tobytes())["form"] for form in (there, here))
    names = [name for name in {**new, **old} if old.get(name) != new.get(name)]
    return "; ".join(
        f"{name} is {shown(new.get(name))} here, and {shown(old.get(name))} there" for name in names[:MOST_DIFFERENCES]
    )


def is_kept(members: Mapping[str, Any]) -> bool:
    """Return whether a run gives these members back as they came: integers of 64 bits, and finite numbers."""
    try:
        return bool(orjson.loads(orjson.dumps(members)) == members)
    except orjson.JSONEncodeError:
        return False


def as_form(form: Mapping[str, Any], start: Mapping[str, Any]) -> Array:
    """Return what all workers have alike, and what the first began with, as a run stores them: JSON, flat, as bool."""
    return np.frombuffer(orjson.dumps({"form": form, "start": start}), BOOL)
