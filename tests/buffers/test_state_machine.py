"""Every store answers random requests as a plain model does. `make fuzz` makes more requests."""

from __future__ import annotations

import copy
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from service.buffers.changes import Add, Change, Create, Delete, Take, Zero
from service.buffers.gradients import Coded
from service.buffers.graph_changes import DeleteGraph, PutGraph
from service.buffers.graphs import StoredGraph
from service.buffers.parts import Forget
from service.buffers.perform import Outcome, Request
from service.buffers.pushes import Part
from service.buffers.record import Key, Spec
from service.buffers.rules import CloseIfDue, SetRules
from service.buffers.sets import Set, Unchanged
from service.buffers.store import Store
from service.codecs.codes import decode, encode
from service.dtypes import DTYPES, NAMES, Array
from service.errors import GradserveError, UnknownBuffer
from tests.buffers.calls import key, tensors_of
from tests.buffers.postgres import Schema, shrink
from tests.buffers.stores import KEY_SECONDS, PATIENCE, Clock, open_lmdb, shrink_lmdb, wrong
from tests.kernels.calls import FLOAT_DTYPES
from tests.kernels.equality import assert_same_bits

NAMED = ["a", "b", "c.0", "d"]
MOST_BUFFERS = 3
FUZZ = int(os.environ.get("GRADSERVE_FUZZ", "1"))


@dataclass
class Buffer:
    """A buffer of the model. `steps` holds receipt and value of each closed step."""

    spec: Spec
    birth: int
    created: float
    updated: float
    value: Array
    step: int = 0
    version: int = 0
    count: int = 0
    weight: float = 0.0
    began: float | None = None
    names: dict[str, int] = field(default_factory=dict)
    last_names: dict[str, int] = field(default_factory=dict)
    """Who was in the last closed step."""
    seen: dict[str, float] = field(default_factory=dict)
    """When the last step of each of those, and of those expected then, closed; without one, the creation."""
    closed_at: float | None = None
    steps: dict[int, tuple[dict[str, Any], Array]] = field(default_factory=dict)

    def receipt(self, name: str, *, updated: bool = True, closed: bool = False) -> dict[str, Any]:
        numbers = {"step": self.step, "version": self.version, "count": self.count, "weight": self.weight}
        return {"name": name, "updated": updated, "closed": closed, **numbers}

    @property
    def ends(self) -> float | None:
        """When the deadline of the running step ends."""
        seconds = self.spec.deadline_seconds
        return None if self.began is None or seconds is None else self.began + seconds

    @property
    def due(self) -> float | None:
        return self.ends if self.count >= self.spec.min_count else None

    @property
    def expires(self) -> float | None:
        ttl = self.spec.ttl_seconds
        if ttl is None:
            return None
        closes = self.due is not None and self.due < self.updated + ttl
        return ttl + (max(self.updated, self.due or 0) if closes else self.updated)

    def reason(self, now: float) -> str | None:
        """Return what closes the running step."""
        spec = self.spec
        if spec.quorum is not None and self.count >= spec.quorum:
            return "quorum"
        if spec.quorum_weight is not None and self.weight >= spec.quorum_weight * (1 - 1e-9):
            return "quorum"
        return "deadline" if self.due is not None and self.due <= now else None

    def metadata(self, name: str) -> dict[str, Any]:
        expected, missing = self.spec.contributors, self.missing()
        named = {"name": name, "shape": list(self.spec.shape), "dtype": NAMES[self.spec.dtype]}
        rules = {rule: getattr(self.spec, rule) for rule in ("nonfinite", "keep", *RULES)}
        numbers = {"step": self.step, "version": self.version, "count": self.count, "weight": self.weight}
        times = {"created_at": self.created, "updated_at": self.updated, "expires_at": self.expires}
        return {
            **named,
            **rules,
            "run": None,
            "life": None,
            "contributors": None if expected is None else [*expected],
            **numbers,
            **times,
            "bytes": self.value.nbytes,
            "closed_steps": list(self.steps),
            "closed_at": self.closed_at,
            "deadline_at": self.ends,
            "contributors_in": self.names,
            "missing": missing,
            "missing_since": None if missing is None else {one: self.seen.get(one, self.created) for one in missing},
        }

    def add(self, gradient: Array, weight: float, overwrite: bool, contributor: str | None, now: float) -> bool:
        """Add a gradient; return whether the buffer's rules allow the sum."""
        dtype = self.spec.dtype
        wide = np.dtype(np.float64 if dtype == np.float64 else np.float32)
        with np.errstate(all="ignore"):
            product = gradient if weight == 1 else gradient.astype(wide) * wide.type(weight)
            if not weight:
                total = np.zeros_like(self.value) if overwrite else self.value
            elif not overwrite and gradient.size == 1 and not gradient.any():
                total = self.value  # a -0 in the sum stays
            elif overwrite:
                total = np.broadcast_to(product, self.value.shape).astype(dtype)
            else:
                total = np.asarray(self.value.astype(wide) + product.astype(wide)).astype(dtype)
            if self.spec.nonfinite == "reject" and not np.isfinite(total.astype(np.float64)).all():
                return False
        self.value, self.version = total, self.version + 1
        self.count = 1 if overwrite else self.count + 1
        self.weight = weight if overwrite else self.weight + weight
        if self.began is None and self.spec.deadline_seconds is not None:
            self.began = now
        self.names = {} if overwrite else dict(self.names)
        if contributor is not None:
            self.names[contributor] = self.names.get(contributor, 0) + 1
        return True

    def begin(self) -> None:
        self.step, self.count, self.weight, self.value = self.step + 1, 0, 0.0, np.zeros_like(self.value)
        self.began, self.names = None, {}

    def missing(self) -> list[str] | None:
        """Return who is missing, None if nobody knows."""
        expected = self.spec.contributors
        all_named = sum(self.names.values()) == self.count
        if expected is None and self.last_names and all_named and all(one in self.last_names for one in self.names):
            expected = (*self.last_names,)
        return None if expected is None else [one for one in expected if one not in self.names]

    def close(self, name: str, by: str) -> dict[str, Any]:
        receipt = {**self.receipt(name, closed=True), "closed_by": by, "contributors": self.names}
        self.steps[self.step] = (receipt, self.value)
        left = {one: self.seen.get(one, self.created) for one in self.spec.contributors or ()}
        self.closed_at = self.updated
        self.last_names, self.seen = dict(sorted(self.names.items())), left | dict.fromkeys(self.names, self.updated)
        for old in sorted(self.steps)[: -self.spec.keep]:
            del self.steps[old]
        self.begin()
        return receipt


class RefusedError(Exception):
    """An error whose code the store must raise, too."""


@dataclass
class StagedPart:
    """A part of a push that the model has staged, with the births of its buffers and the norms of its gradients."""

    mark: str
    adds: list[Add]
    births: dict[str, int]
    norms: dict[str, float]


@dataclass
class StagedPush:
    """A push in parts that the model has not completed. `common` is what all its parts say."""

    common: Part
    began: float
    staged: dict[int, StagedPart] = field(default_factory=dict)
    refusal: str | None = None

    @property
    def until(self) -> float:
        return self.began + self.common.seconds

    def check_norm(self, norms: list[float], buffers: list[Buffer]) -> None:
        limits = [one.spec.max_norm for one in buffers if one.spec.max_norm is not None]
        if self.common.weight and not all(math.hypot(*norms) <= most for most in limits):
            raise RefusedError("norm_too_large")


@dataclass
class CompletePush:
    """A push in parts that the model has added."""

    at: float
    marks: list[str]
    receipts: dict[str, Any]
    births: dict[str, int]


class Model:
    def __init__(self, clock: Clock) -> None:
        self.clock, self.buffers, self.births = clock, dict[str, Buffer](), 0
        self.pushes, self.complete = dict[str, StagedPush](), dict[str, CompletePush]()
        self.seen: dict[str, tuple[int, int, int]] = {}
        """The birth, step and version of the states that the store's snapshots have named."""

    def alive(self) -> dict[str, Buffer]:
        """Return the buffers that have not expired, after the closing of steps whose deadlines are over."""
        now = self.clock.now
        alive = {name: one for name, one in sorted(self.buffers.items()) if one.expires is None or now < one.expires}
        for name, one in alive.items():
            if one.due is not None and one.due <= now:
                one.updated, one.version = max(one.updated, one.due), one.version + 1
                one.close(name, "deadline")
        return alive

    def do(self, changes: list[Change]) -> tuple[dict[str, Any], dict[str, Array]] | str:
        """Return receipts and values, or the expected error's code if nothing may change."""
        buffers, receipts, values = copy.deepcopy(self.alive()), {}, {}
        try:
            for change in changes:
                self._check(change, buffers.get(change.name))
            for change in changes:
                if isinstance(change, Unchanged):
                    continue
                receipts[change.name], found = self._make(change, buffers)
                if found is not None:
                    values[change.name] = found
        except RefusedError as refused:
            return str(refused)
        self.buffers = buffers
        return receipts, values

    def part(self, part: Part, adds: list[Add]) -> tuple[dict[str, Any], list[int] | None, bool] | str:
        """Return receipts, numbers of staged parts, and whether the part came before; or the expected error's code."""
        alive, now = self.alive(), self.clock.now
        done = self.complete.get(part.push)
        if done is not None and now < done.at + KEY_SECONDS:
            if part.mark not in done.marks:
                return "idempotency_key_reused"
            replaced = [name for name, birth in done.births.items() if name in alive and alive[name].birth != birth]
            return "step_gone" if replaced else (done.receipts, None, True)
        push = self.pushes.get(part.push)
        if push is None or push.until <= now:
            push = self.pushes[part.push] = StagedPush(part, now)
        if push.refusal is not None:
            return push.refusal
        if part.number in push.staged:
            known = push.staged[part.number].mark == part.mark
            return ({}, sorted(push.staged), True) if known else "idempotency_key_reused"
        try:
            return self._stage(part, push, adds, alive)
        except RefusedError as refused:
            push.staged, push.refusal = {}, str(refused)
            return push.refusal

    def _stage(
        self, part: Part, push: StagedPush, adds: list[Add], alive: dict[str, Buffer]
    ) -> tuple[dict[str, Any], list[int] | None, bool]:
        if part != push.common._replace(number=part.number, fingerprint=part.fingerprint):
            raise RefusedError("invalid_parameter")
        for add in adds:
            self._check(add, alive.get(add.name), with_norm=False)
        buffers = {add.name: alive[add.name] for add in adds}
        for add in adds:
            zeros = replace(buffers[add.name], value=np.zeros_like(buffers[add.name].value))
            if not zeros.add(_array(add), add.weight, False, None, 0.0):
                raise RefusedError("nonfinite_gradient")
        births = {name: one.birth for name, one in buffers.items()}
        norms = {add.name: _norm(add, buffers[add.name].spec) for add in adds if buffers[add.name].spec.max_norm}
        push.staged[part.number] = StagedPart(part.mark, adds, births, norms)
        push.check_norm([norm for each in push.staged.values() for norm in each.norms.values()], [*buffers.values()])
        if len(push.staged) < part.parts:
            return {}, sorted(push.staged), False
        return self._complete(push, alive), None, False

    def _complete(self, push: StagedPush, alive: dict[str, Buffer]) -> dict[str, Any]:
        parts = [push.staged[number] for number in sorted(push.staged)]
        adds = [(add, part) for part in parts for add in part.adds]
        for add, part in adds:
            self._check(add, alive.get(add.name), with_norm=False, with_shape=False)
            if alive[add.name].birth != part.births[add.name]:
                raise RefusedError("unknown_buffer")
        buffers = {add.name: alive[add.name] for add, _ in adds}
        if not buffers:
            raise RefusedError("missing_tensor")
        if len(buffers) < len(adds):
            raise RefusedError("invalid_request")
        limited = [add for add, _ in adds if buffers[add.name].spec.max_norm]
        push.check_norm([_norm(add, buffers[add.name].spec) for add in limited], [*buffers.values()])
        for add, _ in adds:
            if not replace(buffers[add.name]).add(_array(add), add.weight, False, None, 0.0):
                raise RefusedError("nonfinite_gradient")
        self.buffers = copy.deepcopy(alive)
        receipts = {add.name: self._make(add, self.buffers)[0] for add, _ in adds}
        births = {name: one.birth for name, one in buffers.items()}
        self.complete[push.common.push] = CompletePush(self.clock.now, [part.mark for part in parts], receipts, births)
        del self.pushes[push.common.push]
        return receipts

    def _check(self, change: Change, buffer: Buffer | None, *, with_norm: bool = True, with_shape: bool = True) -> None:
        if buffer is None and isinstance(change, Set) and change.spec is not None and change.state is None:
            if np.shape(_array(change)) != change.spec.shape:
                raise RefusedError("shape_mismatch")
            return
        if buffer is None:
            if isinstance(change, Create) and change.match is None:
                if _contradicts(change.spec):
                    raise RefusedError("invalid_parameter")
                return
            raise RefusedError("precondition_failed" if isinstance(change, Create) else "unknown_buffer")
        if change.match is not None and f'"{buffer.step}-{buffer.version}"' not in change.match:
            raise RefusedError("precondition_failed")
        if change.state is not None and self.seen[change.state] != (buffer.birth, buffer.step, buffer.version):
            raise RefusedError("source_changed")
        if isinstance(change, Create) and change.spec != buffer.spec:
            raise RefusedError("buffer_exists")
        if isinstance(change, SetRules) and _contradicts(replace(buffer.spec, **change.rules)):
            raise RefusedError("invalid_parameter")
        if isinstance(change, Take):
            if change.step not in (None, buffer.step):
                raise RefusedError("stale_step")
            if buffer.spec.quorum is not None and change.min_count >= buffer.spec.quorum:
                raise RefusedError("invalid_parameter")
            if buffer.count < change.min_count:
                raise RefusedError("too_few_gradients")
            if change.mean and not buffer.weight:
                raise RefusedError("nothing_to_average")
        if isinstance(change, Add):
            if change.step not in (None, buffer.step):
                raise RefusedError("stale_step")
            adds = buffer.names.get(change.contributor or "", 0)
            if change.do_update and not change.overwrite and adds >= buffer.spec.per_contributor:
                raise RefusedError("duplicate_contributor")
            shape = np.shape(_array(change))
            is_exact = isinstance(change, Set) or isinstance(change.gradient, Coded)
            fits = shape == buffer.spec.shape if is_exact else _fits(shape, buffer.spec.shape)
            if with_shape and change.do_update and not fits:
                raise RefusedError("shape_mismatch")
            if with_norm and change.do_update and change.weight and buffer.spec.max_norm is not None:
                if not _norm(change, buffer.spec) <= buffer.spec.max_norm:
                    raise RefusedError("norm_too_large")

    def _make(self, change: Change, buffers: dict[str, Buffer]) -> tuple[dict[str, Any], Array | None]:
        name, now = change.name, self.clock.now
        new = name not in buffers
        if isinstance(change, Create | Set) and new:
            if len(buffers) >= MOST_BUFFERS:
                raise RefusedError("too_many_buffers")
            self.births += 1
            assert change.spec is not None
            buffers[name] = Buffer(change.spec, self.births, now, now, np.zeros(change.spec.shape, change.spec.dtype))
        if isinstance(change, Create):
            return {**buffers[name].metadata(name), "created": new}, None
        buffer = buffers[name]
        if isinstance(change, Delete):
            del buffers[name]
            return buffer.receipt(name), None
        if isinstance(change, Zero):
            buffer.begin()
            buffer.version, buffer.updated = buffer.version + 1, now
            return buffer.receipt(name), None
        if isinstance(change, Take):
            buffer.version, buffer.updated = buffer.version + 1, now
            taken = buffer.value
            return buffer.close(name, "take"), taken
        if isinstance(change, SetRules):
            spec = replace(buffer.spec, **change.rules)
            if spec != buffer.spec:
                if spec.deadline_seconds is None or not buffer.count:
                    buffer.began = None
                elif buffer.began is None:
                    buffer.began = now
                buffer.spec, buffer.version, buffer.updated = spec, buffer.version + 1, now
                if buffer.count and (reason := buffer.reason(now)) is not None:
                    buffer.close(name, reason)
            return buffer.metadata(name), None
        assert isinstance(change, Add)
        if not change.do_update:
            return buffer.receipt(name, updated=False), buffer.value if change.want_value else None
        if not buffer.add(_array(change), change.weight, change.overwrite, change.contributor, now):
            raise RefusedError("nonfinite_gradient")
        buffer.updated = now
        found = buffer.value if change.want_value else None
        created = {"created": True} if new else {}
        if (reason := buffer.reason(now)) is not None:
            return buffer.close(name, reason) | created, found
        return buffer.receipt(name) | created, found


def _contradicts(spec: Spec) -> bool:
    """Return whether the rules cannot mean what they say."""
    quorum = math.inf if spec.quorum is None else spec.quorum
    counted = math.inf if spec.contributors is None else len(spec.contributors) * spec.per_contributor
    least = 1 if spec.deadline_seconds is not None else spec.min_count
    return least > 1 or spec.min_count > min(quorum, counted) or (spec.quorum is not None and quorum > counted)


def _array(change: Add) -> Array:
    """Return the numbers of a gradient, which may be in 8 bits."""
    if isinstance(change.gradient, Coded):
        return decode(change.gradient.codes.reshape(-1), change.gradient.scales).reshape(change.gradient.shape)
    assert isinstance(change.gradient, np.ndarray)
    return change.gradient


def _norm(add: Add, spec: Spec) -> float:
    """Return the 2-norm of a gradient; nothing of it counts whose weight is 0."""
    whole = np.broadcast_to(_array(add), spec.shape).astype(np.float64)
    return float(np.linalg.norm(whole.reshape(-1))) if add.weight else 0.0


def _fits(shape: tuple[int, ...], onto: tuple[int, ...]) -> bool:
    if len(shape) > len(onto):
        return False
    return all(one in (1, other) for one, other in zip(reversed(shape), reversed(onto), strict=False))


@dataclass(eq=False)  # comparing arrays gives no bool
class Sent:
    """A request sent with a key: the births of buffers that adds changed, and birth, step and value of each take."""

    changes: list[Change]
    text: str
    at: float
    receipts: dict[str, Any]
    added: dict[str, int]
    taken: dict[str, tuple[int, int, Array]]


@dataclass
class Push:
    """A push that takes several requests, each with a key of its own."""

    requests: list[tuple[list[Change], str]]


def mean_of(total: Array, weight: float) -> Array:
    wide = np.dtype(np.float64 if total.dtype == np.float64 else np.float32)
    with np.errstate(all="ignore"):
        return np.asarray(total.astype(wide) / wide.type(weight)).astype(total.dtype)


SHAPES: list[tuple[int, ...]] = [(), (3,), (2, 3), (0, 3), (11,)]
GRADIENT_SHAPES: list[tuple[int, ...]] = [*SHAPES, (1,), (2, 1)]
TAGS = ['"0-0"', '"0-1"', '"1-1"', '"1-2"']
VALUES = [0.0, -0.0, 1.0, -1.0, 0.1, 3.0, 1e-7, 2049.0, 65504.0, 3e38, np.inf, -np.inf, np.nan]

specs = st.builds(
    Spec,
    st.sampled_from(SHAPES),
    st.sampled_from([*DTYPES.values()][:4]),
    st.sampled_from(["allow", "reject"]),
    st.sampled_from([None, None, 1, 2, 3]),
    st.sampled_from([1, 2]),
    st.sampled_from([None, None, 40.0]),
    st.sampled_from([None, None, 7.0, 30.0]),
    st.sampled_from([1, 1, 2]),
    st.sampled_from([None, None, None, 1.5]),
    st.sampled_from([None, None, ("x", "y")]),
    st.sampled_from([1, 2]),
    st.sampled_from([None, None, None, 5.0]),
)
contributors = st.sampled_from([None, "x", "x", "y", "z"])
RULES: dict[str, list[Any]] = {
    "quorum": [None, 1, 2, 3],
    "ttl_seconds": [None, 15.0],
    "deadline_seconds": [None, 1.0, 15.0],
    "min_count": [1, 2],
    "quorum_weight": [None, 0.5, 1.5],
    "contributors": [None, ("z",)],
    "per_contributor": [1, 2],
    "max_norm": [None, 5.0],
}
rules = st.lists(st.sampled_from(sorted(RULES)), min_size=1, max_size=3, unique=True).flatmap(
    lambda drawn: st.fixed_dictionaries({name: st.sampled_from(RULES[name]) for name in drawn})
)
names = st.sampled_from(NAMED)


@st.composite
def gradients(draw: st.DrawFn) -> Array:
    shape, usual = draw(st.sampled_from(GRADIENT_SHAPES)), draw(st.integers(0, 3)) > 0
    numbers = VALUES[:8] if usual else VALUES
    random = np.random.default_rng(draw(st.integers(0, 999)))
    with np.errstate(over="ignore"):
        return np.asarray(random.choice(numbers, shape), draw(st.sampled_from(FLOAT_DTYPES)))


matches = st.one_of(st.none(), st.none(), st.frozensets(st.sampled_from(TAGS), min_size=1))
adds = st.builds(
    Add,
    name=names,
    gradient=gradients(),
    weight=st.sampled_from([1.0, 1.0, 0.5, -0.3, 0.0, 1e-6]),
    do_update=st.sampled_from([True, True, True, False]),
    overwrite=st.sampled_from([False, False, False, True]),
    step=st.sampled_from([None, None, None, 0, 1]),
    want_value=st.booleans(),
    contributor=contributors,
    match=matches,
)
changes: dict[str, st.SearchStrategy[Change]] = {
    "create": st.builds(Create, name=names, spec=specs),
    "add": adds,
    "zero": st.builds(Zero, name=names),
    "take": st.builds(
        Take,
        name=names,
        min_count=st.sampled_from([0, 0, 1, 2]),
        step=st.sampled_from([None, None, 0, 1]),
        mean=st.booleans(),
    ),
    "delete": st.builds(Delete, name=names),
    "set rules": st.builds(SetRules, name=names, rules=rules, match=matches),
}
many = st.lists(
    st.one_of(adds, adds, changes["take"], changes["zero"], changes["create"], changes["set rules"]),
    min_size=2,
    max_size=3,
    unique_by=lambda change: change.name,
)
keyed = st.sampled_from([False, False, True])
aims = st.sampled_from([0, 0, 0, 1, 2, None])
"""Which of the buffers that exist a change is for; None for any name."""


class Machine(RuleBasedStateMachine):
    """The rules of the state machine. A subclass opens its kind of store, which may be a service."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = self.new_clock()
        self.model = Model(self.clock)
        self.store = self.open()
        self.sent: list[Sent] = []
        self.pushes: list[Push] = []
        self.requests = 0

    def new_clock(self) -> Clock:
        return Clock()

    def open(self) -> Store:
        raise NotImplementedError

    def told(self, changes: list[Change], receipts: dict[str, Any]) -> dict[str, Any]:
        """Return the receipts that the answer to these changes has."""
        return receipts

    def shown(self, change: Change, total: Array, weight: float) -> Array:
        """Return what the answer to this change has of a sum."""
        return total

    def teardown(self) -> None:
        self.store.close()

    def ask(self, changes: list[Change], text: str | None) -> Outcome | str:
        """Return the store's outcome, or the code of its error."""
        names = " ".join(change.name for change in changes)
        request = self.request(changes, None if text is None else key(text, request=names))
        try:
            return self.store.submit(request).result(PATIENCE)
        except GradserveError as error:
            return error.code

    def request(self, changes: list[Change], key: Key | None) -> Request:
        return Request(changes, key)

    def make(self, changes: list[Change], with_key: bool) -> None:
        self.requests += 1
        self.expect(changes, f"key {self.requests}" if with_key else None)

    def expect(self, changes: list[Change], text: str | None) -> None:
        """Send a new request to store and model, and compare their answers."""
        got, done = self.ask(changes, text), self.model.do(changes)
        if isinstance(done, str):
            assert got == done
            return
        receipts, values = done
        for change in changes:
            if change.name in values:
                values[change.name] = self.shown(change, values[change.name], receipts[change.name]["weight"])
        assert isinstance(got, Outcome), got
        assert not got.replayed
        assert got.receipts == self.told(changes, receipts)
        assert list(got.values) == list(values)
        for name, array in values.items():
            assert_same_bits(got.values[name], array)
            got.values[name][...] = 77
        if text is not None:
            births = {name: one.birth for name, one in self.model.buffers.items()}
            added = {change.name: births[change.name] for change in changes if isinstance(change, Add)}
            taken = {
                change.name: (births[change.name], receipts[change.name]["step"], values[change.name])
                for change in changes
                if isinstance(change, Take)
            }
            # the contract suite tests repeated adds that want the value
            if not any(isinstance(change, Add) and change.want_value for change in changes):
                self.sent.append(Sent(changes, text, self.clock.now, receipts, added, taken))

    @initialize(several=st.lists(changes["create"], min_size=1, max_size=3, unique_by=lambda change: change.name))
    def create_some(self, several: list[Change]) -> None:
        self.make(several, False)

    def aimed(self, change: Change, at: int | None) -> Change:
        """Return the change for one of the buffers that exist: those with an open step come first."""
        alive = self.model.alive()
        several = sorted(alive, key=lambda name: not alive[name].count)
        return change if at is None or not alive else replace(change, name=several[at % len(several)])

    def fitting(self, data: st.DataObject, name: str) -> Array | Coded:
        """Draw a gradient that fits the buffer, sometimes in 8 bits."""
        own = self.model.buffers[name].spec.shape
        if data.draw(st.integers(0, 4)) == 4:
            random = np.random.default_rng(data.draw(st.integers(0, 999)))
            codes, scales = encode(random.standard_normal(math.prod(own), np.float32))
            return Coded(codes.reshape(own), scales)
        shapes = [shape for shape in GRADIENT_SHAPES if _fits(shape, own)]
        random = np.random.default_rng(data.draw(st.integers(0, 999)))
        gradient = random.normal(scale=data.draw(st.sampled_from([1, 1, 9])), size=data.draw(st.sampled_from(shapes)))
        return np.asarray(gradient, data.draw(st.sampled_from(FLOAT_DTYPES)))

    @rule(change=changes["create"], with_key=keyed)
    def create(self, change: Change, with_key: bool) -> None:
        self.make([change], with_key)

    @rule(change=adds, at=aims, with_key=keyed)
    def add(self, change: Change, at: int | None, with_key: bool) -> None:
        self.make([self.aimed(change, at)], with_key)

    @rule(data=st.data())
    @precondition(lambda self: self.model.alive())
    def add_what_fits(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(self.model.alive())))
        weight, overwrite = data.draw(st.sampled_from([1.0, 1.0, 0.7, 0.0])), data.draw(st.integers(0, 4)) == 4
        who = data.draw(st.one_of(contributors, st.sampled_from([*self.model.buffers[name].names, None])))
        gradient = self.fitting(data, name)
        change = Add(name=name, gradient=gradient, weight=weight, overwrite=overwrite, contributor=who)
        self.make([change], data.draw(keyed))

    @rule(change=changes["set rules"], at=aims, with_key=keyed)
    def set_rules(self, change: Change, at: int | None, with_key: bool) -> None:
        self.make([self.aimed(change, at)], with_key)

    @rule(data=st.data(), with_key=keyed)
    @precondition(lambda self: any(one.count for one in self.model.alive().values()))
    def set_rules_of_an_open_step(self, data: st.DataObject, with_key: bool) -> None:
        """Set rules that the step fulfils already, or another deadline."""
        name = data.draw(st.sampled_from([name for name, one in self.model.alive().items() if one.count]))
        buffer = self.model.buffers[name]
        choices: list[dict[str, Any]] = [{"deadline_seconds": seconds} for seconds in (15.0, 20.0, None)]
        choices += [{"deadline_seconds": 1.0, "min_count": 2}, {"quorum": buffer.count}]
        if buffer.weight > 0:
            choices.append({"quorum_weight": buffer.weight})
        if buffer.began is not None and buffer.began < self.clock.now:
            choices.append({"deadline_seconds": self.clock.now - buffer.began, "min_count": 1})
        self.make([SetRules(name=name, rules=data.draw(st.sampled_from(choices)))], with_key)

    @rule()
    def close_what_is_due(self) -> None:
        for name in self.model.alive():
            self.store.submit(Request([CloseIfDue(name=name)])).result(PATIENCE)
        assert not self.due()

    def due(self) -> set[str]:
        """Return the buffers whose deadlines are over, and which the store has not closed yet."""
        now = self.clock.now
        return {record.name for record in self.store.records() if record.due is not None and record.due <= now}

    @rule(change=changes["zero"], at=aims, with_key=keyed)
    def zero(self, change: Change, at: int | None, with_key: bool) -> None:
        self.make([self.aimed(change, at)], with_key)

    @rule(change=changes["take"], at=aims, with_key=keyed)
    def take(self, change: Change, at: int | None, with_key: bool) -> None:
        self.make([self.aimed(change, at)], with_key)

    @rule(change=changes["delete"], with_key=keyed)
    def delete(self, change: Change, with_key: bool) -> None:
        self.make([change], with_key)

    @rule(several=many, with_key=keyed)
    def change_many(self, several: list[Change], with_key: bool) -> None:
        self.make(several, with_key)

    @rule(seconds=st.sampled_from([1, 2, 7, 8, 15, 15, 39, 40, 41, int(KEY_SECONDS) - 30, int(KEY_SECONDS)]))
    def let_time_pass(self, seconds: int) -> None:
        self.clock.advance(seconds)

    @rule(data=st.data())
    @precondition(lambda self: any(one.ends is not None for one in self.model.alive().values()))
    def let_a_deadline_pass(self, data: st.DataObject) -> None:
        """Go on to the very moment, or to just before."""
        ends = [one.ends for one in self.model.alive().values() if one.ends is not None]
        moment = data.draw(st.sampled_from(ends)) - data.draw(st.sampled_from([0, 0, 0.25]))
        self.clock.advance(max(0.0, moment - self.clock.now))

    @rule(data=st.data(), whole=st.booleans())
    @precondition(lambda self: len(self.model.alive()) > 1)
    def push_in_parts(self, data: st.DataObject, whole: bool) -> None:
        """Send some requests of a push. Its client dies between two of them, unless it sends the whole push."""
        alive = self.model.alive()
        several = data.draw(st.lists(st.sampled_from([*alive]), min_size=2, max_size=3, unique=True), label="names")
        rest: dict[str, Any] = {
            "weight": data.draw(st.sampled_from([1.0, 0.5, 0.0])),
            "contributor": data.draw(contributors),
        }
        push = Push([])
        for part in (several[:1], several[1:]):
            step = data.draw(st.sampled_from([None, alive[part[0]].step]))
            drawn = [Add(name=name, gradient=self.fitting(data, name), step=step, **rest) for name in part]
            # as the server finds them in a body: those in 8 bits come last
            drawn.sort(key=lambda add: 0 if isinstance(add.gradient, Coded) else -tensors_of(add)[""].itemsize)
            self.requests += 1
            push.requests.append(([*drawn], f"key {self.requests}"))
        self.pushes.append(push)
        for changes, text in push.requests[: 2 if whole else 1]:
            self.expect(changes, text)

    @rule(data=st.data())
    @precondition(lambda self: self.pushes)
    def go_on_with_a_push(self, data: st.DataObject) -> None:
        """Send all requests of a push with their keys: those that were made before count no more."""
        for changes, text in data.draw(st.sampled_from(self.pushes), label="push").requests:
            made = [sent for sent in self.sent if sent.text == text]
            if made:
                self.repeat(made[0])
            else:
                self.expect(changes, text)

    @rule(data=st.data())
    @precondition(lambda self: self.sent)
    def send_again(self, data: st.DataObject) -> None:
        self.repeat(data.draw(st.sampled_from(self.sent), label="sent"))

    def repeat(self, sent: Sent) -> None:
        if sent.at + KEY_SECONDS <= self.clock.now:
            self.sent.remove(sent)
            self.expect(sent.changes, sent.text)
            return
        got = self.ask(sent.changes, sent.text)
        alive = self.model.alive()
        replaced = [name for name, birth in sent.added.items() if name in alive and alive[name].birth != birth]
        lost = [
            name
            for name, (birth, step, _) in sent.taken.items()
            if name not in alive or alive[name].birth != birth or step not in alive[name].steps
        ]
        if replaced or lost:
            assert got == "step_gone"
            return
        assert isinstance(got, Outcome), got
        assert got.replayed
        assert got.receipts == self.told(sent.changes, sent.receipts)
        assert list(got.values) == list(sent.taken)
        for name, (_, _, array) in sent.taken.items():
            assert_same_bits(got.values[name], array)

    @rule(data=st.data())
    @precondition(lambda self: self.sent)
    def send_another_request_with_the_key(self, data: st.DataObject) -> None:
        sent = data.draw(st.sampled_from(self.sent), label="sent")
        if self.clock.now < sent.at + KEY_SECONDS:
            assert self.ask([Zero(name="another")], sent.text) == "idempotency_key_reused"

    @rule(name=names, step=st.integers(0, 4))
    def read_step(self, name: str, step: int) -> None:
        buffer = self.model.alive().get(name)
        self.ask([CloseIfDue(name=name)], None)
        if buffer is None or step not in buffer.steps:
            with pytest.raises(GradserveError) as caught:
                self.store.read([name], step)
            early = "unknown_buffer" if buffer is None else "step_open"
            assert caught.value.code == ("step_gone" if buffer and step < buffer.step else early)
            if buffer is not None and step >= buffer.step:
                at = {"buffer": name, "step": buffer.step, "count": buffer.count}
                if buffer.spec.quorum is not None:
                    at["quorum"] = buffer.spec.quorum
                if buffer.missing() is not None:
                    at["missing"] = buffer.missing()
                assert caught.value.context == at
            return
        (snapshot,) = self.store.read([name], step)
        receipt, array = buffer.steps[step]
        assert snapshot.receipt() == {**receipt, "updated": False}
        assert_same_bits(snapshot.value, array)

    @rule(name=names)
    def look_up(self, name: str) -> None:
        buffer = self.model.alive().get(name)
        self.ask([CloseIfDue(name=name)], None)
        if buffer is None:
            with pytest.raises(UnknownBuffer):
                self.store.record(name)
        else:
            assert self.store.record(name).as_json() == buffer.metadata(name)

    @rule(prefix=st.sampled_from(["", "a", "c."]), after=st.sampled_from(["", "a", "b"]), limit=st.integers(0, 3))
    def list_some(self, prefix: str, after: str, limit: int) -> None:
        expected = [name for name in self.model.alive() if name.startswith(prefix) and name > after]
        assert [record.name for record in self.store.records(prefix, after, limit)] == expected[:limit]

    @invariant()
    def everything_is_the_same(self) -> None:
        alive = self.model.alive()
        records, now = self.store.records(), self.clock.now
        assert [record.name for record in records] == [*alive]
        open_yet = self.due()
        for record in records:
            if record.due is None or record.due > now:
                assert record.as_json() == alive[record.name].metadata(record.name)
            else:
                assert record.step == alive[record.name].step - 1
        for snapshot in self.store.read([name for name in alive if name not in open_yet]):
            assert_same_bits(snapshot.value, alive[snapshot.record.name].value)


PUSH_SECONDS = 60.0


class PartsMachine(Machine):
    """The rules of pushes in parts. At most a few pushes are open."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[tuple[Part, list[Add]]] = []

    def send(self, part: Part, adds: list[Add]) -> None:
        """Send a part to store and model, and compare their answers."""
        got: Outcome | str
        try:
            got = self.store.submit(Request(adds, part=part)).result(PATIENCE)
        except GradserveError as error:
            got = error.code
        expected = self.model.part(part, adds)
        if isinstance(expected, str):
            assert got == expected
        else:
            assert isinstance(got, Outcome), got
            assert (got.receipts, got.staged, got.replayed) == expected

    def send_new(self, part: Part, adds: list[Add]) -> None:
        self.requests += 1
        part = part._replace(fingerprint=f"{self.requests}".encode().ljust(16))
        self.parts.append((part, adds))
        self.send(part, adds)

    def open_pushes(self) -> list[StagedPush]:
        return [push for push in self.model.pushes.values() if push.until > self.clock.now]

    def adds_of(self, data: st.DataObject, part: Part, without: Sequence[str]) -> list[Add]:
        """Draw adds to buffers that the push does not change yet, as far as there are any."""
        alive = self.model.alive()
        left = [name for name in alive if name not in without] or [*alive]
        least = data.draw(st.sampled_from([1, 1, 1, 1, 0])) if left else 0
        chosen = st.lists(st.sampled_from(left or [""]), min_size=least, max_size=2 * least, unique=True)
        several = data.draw(chosen, label="names")
        rest: dict[str, Any] = {"weight": part.weight, "step": part.step, "contributor": part.contributor}
        numbers: dict[str, Array | Coded] = {name: self.fitting(data, name) for name in several}
        if several and data.draw(st.integers(0, 5)) == 5:
            numbers[several[0]] = data.draw(gradients())
        return [Add(name=name, tensor=name, gradient=numbers[name], **rest) for name in several]

    @rule(data=st.data())
    @precondition(lambda self: self.model.alive() and len(self.open_pushes()) < 3)
    def begin_a_push(self, data: st.DataObject) -> None:
        steps = [one.step for one in self.model.alive().values()]
        part = Part(
            f"push {self.requests}",
            data.draw(st.integers(0, 2)),
            data.draw(st.sampled_from([1, 2, 2, 2, 3])),
            "",
            b"",
            PUSH_SECONDS,
            data.draw(st.sampled_from([1.0, 1.0, 1.0, 0.5, -0.3, 0.0])),
            data.draw(st.sampled_from([None, None, *steps])),
            data.draw(contributors),
        )
        self.send_new(part, self.adds_of(data, part, ()))

    @rule(data=st.data())
    @precondition(lambda self: self.open_pushes())
    def go_on_with_parts(self, data: st.DataObject) -> None:
        push = data.draw(st.sampled_from(self.open_pushes()), label="push")
        part = push.common._replace(number=data.draw(st.integers(0, 3)))
        if data.draw(st.integers(0, 9)) == 9:
            part = part._replace(weight=2.0)
        names = [add.name for each in push.staged.values() for add in each.adds]
        self.send_new(part, self.adds_of(data, part, names))

    @rule(data=st.data())
    @precondition(lambda self: any(push.staged for push in self.open_pushes()))
    def complete_with_empty_parts(self, data: st.DataObject) -> None:
        push = data.draw(st.sampled_from([push for push in self.open_pushes() if push.staged]), label="push")
        missing = [number for number in range(4) if number not in push.staged]
        for number in missing[: push.common.parts - len(push.staged)]:
            self.send_new(push.common._replace(number=number), [])

    @rule(data=st.data(), other_bytes=st.sampled_from([False, False, False, True]))
    @precondition(lambda self: self.parts)
    def send_a_part_again(self, data: st.DataObject, other_bytes: bool) -> None:
        """Send a part again, perhaps after its push is complete, forgotten or refused."""
        part, adds = data.draw(st.sampled_from(self.parts), label="part")
        self.send(part._replace(fingerprint=bytes(16)) if other_bytes else part, adds)

    @rule(data=st.data())
    @precondition(lambda self: self.model.pushes)
    def forget_a_push(self, data: st.DataObject) -> None:
        push = self.model.pushes.pop(data.draw(st.sampled_from([*self.model.pushes]), label="push"))
        outcome = self.store.submit(Request([Forget()], part=push.common)).result(PATIENCE)
        assert outcome.staged == (sorted(push.staged) if push.until > self.clock.now else [])

    @invariant()
    def pushes_are_the_same(self) -> None:
        expected = [
            (push.common.push, sorted(push.staged), _bytes_of(push), push.refusal)
            for push in sorted(self.open_pushes(), key=lambda push: (push.began, push.common.push))
        ]
        found = [(name, push, push.as_json(name)) for name, push in self.store.pushes()]
        assert [(name, push.numbers, push.nbytes, told["refused"]) for name, push, told in found] == expected


def _bytes_of(push: StagedPush) -> int:
    """Return the bytes of the gradients that change a sum."""
    adds = [add for part in push.staged.values() for add in part.adds if add.weight]
    counted = [add for add in adds if isinstance(add.gradient, Coded) or _array(add).size != 1 or _array(add).any()]
    return sum(one.nbytes for add in counted for one in tensors_of(add).values())


class StoreMachine(PartsMachine):
    """The rules of steps, which HTTP has for operators alone: they are computed from states that may have changed."""

    def ask(self, changes: list[Change], text: str | None) -> Outcome | str:
        got = super().ask(changes, text)
        if isinstance(got, Outcome) and got.replayed:
            assert got.answer == (f"answer of {text}".encode() if any(isinstance(one, Set) for one in changes) else b"")
        return got

    def request(self, changes: list[Change], key: Key | None) -> Request:
        if key is None or not any(isinstance(change, Set) for change in changes):
            return Request(changes, key)
        return Request(changes, key, ["1-0-0"], answer=f"answer of {key.text}".encode())

    @rule()
    def see_states(self) -> None:
        alive = self.model.alive()
        for snapshot in self.store.read([name for name in alive if name not in self.due()]):
            buffer = alive[snapshot.record.name]
            self.model.seen[snapshot.state] = (buffer.birth, buffer.step, buffer.version)

    def change_of_a_step(self, data: st.DataObject, name: str) -> Change | None:
        """Draw a change, with a state that the buffer has or has had; None if none fits the buffer."""
        buffer, who = self.model.alive().get(name), data.draw(contributors)
        own = [text for text, (birth, *_) in self.model.seen.items() if buffer is not None and birth == buffer.birth]
        other = data.draw(st.integers(0, 9)) == 9
        state = data.draw(st.sampled_from([*self.model.seen] if other and own else [None, *own[-1:] * 8, *own[-3:]]))
        kind = data.draw(st.sampled_from(["set", "set", "unchanged", "add"]))
        if buffer is not None and kind == "add":
            return Add(name=name, gradient=self.fitting(data, name), state=state, contributor=who)
        if kind == "unchanged":
            return None if state is None else Unchanged(name=name, state=state)
        spec = data.draw(st.sampled_from([Spec((2, 3), DTYPES["float32"]), Spec((3,), DTYPES["float16"]), None]))
        shape = buffer.spec.shape if buffer is not None else (2, 3) if spec is None or other else spec.shape
        random = np.random.default_rng(data.draw(st.integers(0, 999)))
        gradient = np.asarray(random.normal(size=shape), data.draw(st.sampled_from(FLOAT_DTYPES)))
        return Set(name=name, gradient=gradient, spec=spec, state=state, contributor=who)

    @rule(data=st.data(), with_key=keyed)
    def step(self, data: st.DataObject, with_key: bool) -> None:
        self.see_states()
        some = st.sampled_from([*self.model.alive()] * 3 + NAMED)
        drawn = data.draw(st.lists(some, min_size=1, max_size=3, unique=True), label="names")
        made = [self.change_of_a_step(data, name) for name in drawn]
        self.make([change for change in made if change is not None], with_key)


GRAPHS = ["g", "h", "i"]
options = st.sampled_from([{}, {}, {"loss": "L1Loss"}])
MOST_GRAPHS = 2
MODELS = [b"a model", b"another model", b"a large model" * 20]


class GraphMachine(StoreMachine):
    """The rules of graphs, which come and go together with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs: dict[str, tuple[StoredGraph, bytes]] = {}
        self.sent_graphs: list[tuple[Request, float, Outcome]] = []

    def is_new_graph(self, change: PutGraph | DeleteGraph) -> bool | str:
        """Return whether the change makes a graph, or the code of its error."""
        stored, model = self.graphs.get(change.name, (None, b""))
        if isinstance(change, DeleteGraph):
            return "unknown_graph" if stored is None else False
        if stored is None:
            return "too_many_graphs" if len(self.graphs) == MOST_GRAPHS else True
        return False if (model, stored.options) == (change.content.tobytes(), change.options) else "graph_exists"

    def answer(self, request: Request) -> Outcome | str:
        try:
            return self.store.submit(request).result(PATIENCE)
        except GradserveError as error:
            return error.code

    @rule(data=st.data(), with_key=keyed)
    def change_a_graph(self, data: st.DataObject, with_key: bool) -> None:
        name, model = data.draw(st.sampled_from(GRAPHS)), data.draw(st.sampled_from(MODELS))
        put = PutGraph.of(name, model, data.draw(options))
        kinds: list[PutGraph | DeleteGraph] = [put, put, DeleteGraph(name=name)]
        change = data.draw(st.sampled_from(kinds))
        several = data.draw(st.lists(changes["create"] | changes["delete"], max_size=1))
        self.requests += 1
        request = Request(several, key(f"key {self.requests}") if with_key else None, hidden=change)
        got, is_new = self.answer(request), self.is_new_graph(change)
        done = is_new if isinstance(is_new, str) else self.model.do(several)
        if isinstance(done, str):
            assert got == done
            return
        assert isinstance(got, Outcome), got
        assert (got.receipts, got.is_new, got.replayed) == (self.told(several, done[0]), is_new, False)
        if got.graph is None:
            del self.graphs[name]
        else:
            self.graphs[name] = (got.graph, model)
        if with_key:
            self.sent_graphs.append((request, self.clock.now, got))

    @rule(data=st.data())
    @precondition(lambda self: self.sent_graphs)
    def send_a_graph_again(self, data: st.DataObject) -> None:
        sent = data.draw(st.sampled_from(self.sent_graphs), label="sent")
        request, at, outcome = sent
        if at + KEY_SECONDS <= self.clock.now:
            self.sent_graphs.remove(sent)
            return
        got, now = self.answer(request), self.graphs.get(outcome.graph.name) if outcome.graph else None
        if outcome.graph is not None and (now is None or now[0] != outcome.graph):
            assert got == "step_gone"
        else:
            assert got == replace(outcome, replayed=True)

    @invariant()
    def graphs_are_the_same(self) -> None:
        found = {graph.name: (graph, bytes(self.store.graph_content(graph))) for graph in self.store.graphs()}
        assert found == self.graphs
        assert [*found] == sorted(found)


class LmdbMachine(GraphMachine):
    def __init__(self) -> None:
        self.patch = pytest.MonkeyPatch()
        shrink_lmdb(self.patch)
        self.directory = tempfile.TemporaryDirectory()
        super().__init__()

    def open(self) -> Store:
        return open_lmdb(Path(self.directory.name), self.clock, max_buffers=MOST_BUFFERS, max_graphs=MOST_GRAPHS)

    @rule()
    def open_again(self) -> None:
        self.store.close()
        self.store = self.open()

    def teardown(self) -> None:
        super().teardown()
        said = wrong(Path(self.directory.name))
        self.directory.cleanup()
        self.patch.undo()
        assert said == []


class ByTurns:
    """Several stores of one schema, which take turns: each call goes to the next."""

    def __init__(self, stores: Sequence[Store]) -> None:
        self._stores, self._turns = stores, cycle(stores)

    def __getattr__(self, name: str) -> Any:
        return getattr(next(self._turns), name)

    def close(self) -> None:
        for store in self._stores:
            store.close()


class PostgresMachine(GraphMachine):
    url: str
    stores = 1

    def __init__(self) -> None:
        self.patch = pytest.MonkeyPatch()
        shrink(self.patch)
        self.schema = Schema(self.url)
        super().__init__()

    def open(self) -> Store:
        for _ in range(self.stores):
            limits: dict[str, Any] = {"max_buffers": MOST_BUFFERS, "max_graphs": MOST_GRAPHS}
            self.schema.open(clock=self.clock, key_seconds=KEY_SECONDS, **limits)
        return cast(Store, ByTurns(self.schema.stores))

    @rule()
    def open_again(self) -> None:
        self.schema.close()
        self.store = self.open()

    def teardown(self) -> None:
        super().teardown()
        said = self.schema.faults()
        self.schema.drop()
        self.patch.undo()
        assert said == []


class TwoPostgresMachine(PostgresMachine):
    stores = 2


@pytest.fixture(scope="module", autouse=True)
def database(postgres_url: str) -> None:
    PostgresMachine.url = postgres_url


SOME = settings(
    max_examples=20 * FUZZ,
    stateful_step_count=30,
    phases=[phase for phase in Phase if phase is not Phase.explain],  # explaining takes minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

TestLmdb = LmdbMachine.TestCase
TestLmdb.settings = settings(SOME, max_examples=50 * FUZZ, stateful_step_count=50)
TestPostgres = PostgresMachine.TestCase
TestPostgres.settings = settings(SOME, max_examples=5 * FUZZ)  # each step takes many times as long as with LMDB
TestTwoPostgres = TwoPostgresMachine.TestCase
TestTwoPostgres.settings = settings(SOME, max_examples=5 * FUZZ)
