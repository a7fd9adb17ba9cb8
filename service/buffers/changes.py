"""The changes that a request makes to buffers, written in terms of a store's `Transaction`."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from service.buffers.closing import check_may_add, close, contributed, fulfilled, next_step
from service.buffers.gradients import Coded, Dense, Gradient, Rows, Sent, adds_nothing, check_norm
from service.buffers.lives import check_life, new_buffer
from service.buffers.names import BufferName
from service.buffers.record import Receipt, Record, Spec, unknown_buffer
from service.buffers.specs import contradiction
from service.buffers.steps import described, no_mean
from service.buffers.transaction import Transaction
from service.dtypes import Array, DType, compute_dtype
from service.errors import (
    BufferExists,
    GradserveError,
    InvalidParameter,
    NonfiniteGradient,
    NothingToAverage,
    PreconditionFailed,
    ShapeMismatch,
    StaleStep,
    StepGone,
    TooFewGradients,
    cut,
    shown,
)


@dataclass(kw_only=True)
class Change:
    """A change of one buffer: only if it has one of the tags in `match`, the `state` and the `life`, if given."""

    name: str
    match: frozenset[str] | None = None
    state: str | None = None
    life: str | None = None

    def admit(self, record: Record | None) -> None:
        """Raise if the change cannot be made. Called for all changes of a request before the first is made."""
        if self.life is not None:
            check_life(record, self.life)
        if record is None:
            raise unknown_buffer(self.name)
        if self.match is not None and not self.match & record.tags:
            problem = f"If-Match is {cut(', '.join(sorted(self.match)))}, but {self.name!r} is at {record.etag}"
            raise PreconditionFailed(problem, buffer=self.name)
        if self.state is not None:
            record.check_state(self.state)

    def apply(self, txn: Transaction, name: BufferName, record: Any, now: float) -> tuple[Receipt, Array | None]:
        """Make the change of the admitted `record`. Return the receipt, and the value if the request wants it."""
        raise NotImplementedError

    def again(self, txn: Transaction, record: Record | None, receipt: Receipt) -> Array | None:
        """Return the value for the receipt of a repeated request. `record` is None if the buffer is gone."""
        return None


@dataclass(kw_only=True)
class Create(Change):
    """Create the buffer, or find one with the same spec. `unless` has tags that an existing buffer must not have."""

    spec: Spec
    unless: frozenset[str] = frozenset()
    refusal: GradserveError | None = None
    """Why no new buffer may be like this, if so."""

    def admit(self, record: Record | None) -> None:
        if record is None:
            if self.match is not None:
                raise PreconditionFailed(f"There is no buffer {self.name!r}, but If-Match needs one", buffer=self.name)
            if (refusal := self.refusal or contradiction(self.spec)) is not None:
                raise refusal
            return
        super().admit(record)
        if self.unless & record.tags:
            raise PreconditionFailed(
                f"If-None-Match is {cut(', '.join(sorted(self.unless)))}, but {self.name!r} exists, at {record.etag}",
                buffer=self.name,
            )
        new, old = self.spec.as_json(), record.spec.as_json()
        if new != old:
            others = [f"{rule} {shown(old[rule])}, not {shown(new[rule])}" for rule in new if new[rule] != old[rule]]
            raise BufferExists(f"There is a buffer {self.name!r} with {', '.join(others)}", buffer=self.name)

    def apply(
        self, txn: Transaction, name: BufferName, record: Record | None, now: float
    ) -> tuple[Receipt, Array | None]:
        created = record is None
        if record is None:
            txn.put(record := new_buffer(txn, name, self.spec, now))
        return {**record.as_json(), "created": created}, None


@dataclass(kw_only=True)
class Addition(Change):
    """InPlaceAccumulator and InPlaceAccumulatorV2: add `weight` times a gradient, or replace the sum by it.

    With `step`, only while the buffer is in this step.
    """

    tensor: str = "gradient"
    """The name of the gradient in the request."""
    weight: float = 1.0
    do_update: bool = True
    overwrite: bool = False
    step: int | None = None
    want_value: bool = False
    contributor: str | None = None

    def admit(self, record: Record | None) -> None:
        super().admit(record)
        assert record is not None
        _check_step(record, self.step)
        dtype = compute_dtype(record.spec.dtype)
        total = self.weight if self.overwrite else record.weight + self.weight
        if not (self.weight in (0, 1) or _is_in_range(abs(self.weight), dtype)) or not math.isfinite(total):
            raise InvalidParameter(
                f"weight is {self.weight}, but must be 0 or in the range of {dtype}, and the sum of the weights finite",
                parameter="weight",
            )
        if self.contributor is not None and self.do_update and not self.overwrite:
            check_may_add(record, self.contributor)

    def apply(self, txn: Transaction, name: BufferName, record: Record, now: float) -> tuple[Receipt, Array | None]:
        if not self.do_update:
            return record.receipt(updated=False), txn.load(record.spec, record.value) if self.want_value else None
        try:
            value = self._sum(txn, record)
        except NonfiniteGradient as error:
            error.context["tensor"] = self.tensor
            raise
        record = record.changed(
            value=value,
            updated=now,
            version=record.version + 1,
            count=1 if self.overwrite else record.count + 1,
            weight=self.weight if self.overwrite else record.weight + self.weight,
            began=now if record.began is None and record.spec.deadline_seconds is not None else record.began,
        )
        if self.contributor is not None or self.overwrite:
            record = contributed(record, self.contributor, alone=self.overwrite)
        loaded = txn.load(record.spec, value) if self.want_value else None
        if (reason := fulfilled(record, now)) is not None:
            record, closed = close(txn, record, reason)
            return record.receipt(updated=True, of=closed), loaded
        txn.put(record)
        return record.receipt(updated=True), loaded

    def _sum(self, txn: Transaction, record: Record) -> int | None:
        """Return the id of the sum with the gradient."""
        raise NotImplementedError

    def again(self, txn: Transaction, record: Record | None, receipt: Receipt) -> Array | None:
        if self.want_value:
            with suppress(StepGone):  # the receipt alone is worth an answer
                return _load(txn, self.name, record, receipt)
        return None


@dataclass(kw_only=True)
class Add(Addition):
    """The addition of a gradient of the request.

    The gradient must broadcast to the buffer's shape. The caller must not change the gradient before the request is
    done. `Rows` and `Coded` must fit the buffer's shape as they are.
    """

    gradient: Gradient | Sent

    def admit(self, record: Record | None) -> None:
        self.admit_part(record)
        assert record is not None
        if record.spec.max_norm is not None and self.do_update and self.weight:
            check_norm(self.onto(record.spec), record.spec.max_norm, self.tensor)

    def admit_part(self, record: Record | None) -> None:
        """Raise what `admit` raises, except for the norm: a push in parts has one norm for all its gradients."""
        super().admit(record)
        assert record is not None
        if self.do_update and self.gradient.shape != record.spec.shape:
            self.onto(record.spec)

    def onto(self, spec: Spec) -> Gradient:
        """Return the gradient, broadcast to the buffer's shape. Raises `ShapeMismatch` and `IndexOutOfRange`."""
        if isinstance(self.gradient, np.ndarray):
            return Dense(self.gradient, spec.shape, self.tensor)
        if isinstance(self.gradient, Rows | Coded):
            return self.gradient.onto(spec.shape, self.tensor)
        if self.gradient.shape == spec.shape:
            return self.gradient
        size = math.prod(self.gradient.shape)
        if size > spec.size:  # before memory is allocated for it
            problem = f"{self.tensor} has shape {list(self.gradient.shape)}, but {self.name!r} has {list(spec.shape)}"
            raise ShapeMismatch(problem, buffer=self.name, tensor=self.tensor)
        whole = self.gradient.piece(0, size) if size else None
        flat = np.zeros(size, self.gradient.dtype) if whole is None else whole
        return Dense(flat.reshape(self.gradient.shape), spec.shape, self.tensor)

    @property
    def counts(self) -> bool:
        """Whether the gradient changes the sum. Nothing of a gradient counts whose weight is 0, not even NaN."""
        return bool(self.weight) and not adds_nothing(self.gradient)

    def _sum(self, txn: Transaction, record: Record) -> int | None:
        if self.counts or (self.weight and self.overwrite):
            return txn.accumulate(record, self.onto(record.spec), self.weight, self.overwrite)
        if not self.overwrite:
            return record.value
        txn.free(record.value)
        return None


@dataclass(kw_only=True)
class Zero(Change):
    """ZeroGradient: discard the sum, and begin the next step."""

    def apply(self, txn: Transaction, name: BufferName, record: Record, now: float) -> tuple[Receipt, Array | None]:
        txn.free(record.value)
        record = next_step(record).changed(updated=now, version=record.version + 1)
        txn.put(record)
        return record.receipt(updated=True), None


@dataclass(kw_only=True)
class Take(Change):
    """Close the step once it has `min_count` gradients; with `step`, only this step. Return its value if wanted."""

    min_count: int = 0
    step: int | None = None
    mean: bool = False
    """Whether the client wants the mean, for which the weights must not sum to zero."""
    want_value: bool = True

    def admit(self, record: Record | None) -> None:
        super().admit(record)
        assert record is not None
        _check_step(record, self.step)
        if record.spec.quorum is not None and self.min_count >= record.spec.quorum:
            raise InvalidParameter(
                f"min_count is {self.min_count}, but {self.name!r} closes a step by itself once it has its quorum of"
                f" {record.spec.quorum}: wait for the value of that step",
                parameter="min_count",
            )
        if record.count < self.min_count:
            raise TooFewGradients(
                f"The count of {self.name!r} is {record.count} in step {record.step}, but min_count is"
                f" {self.min_count}{described(record.awaited)}",
                **record.progress(),
                min_count=self.min_count,
            )
        if self.mean and not record.weight:
            raise NothingToAverage(no_mean(self.name, record.count), buffer=self.name)

    def apply(self, txn: Transaction, name: BufferName, record: Record, now: float) -> tuple[Receipt, Array | None]:
        loaded = txn.load(record.spec, record.value) if self.want_value else None
        record, closed = close(txn, record.changed(updated=now, version=record.version + 1), "take")
        return record.receipt(updated=True, of=closed), loaded

    def again(self, txn: Transaction, record: Record | None, receipt: Receipt) -> Array | None:
        return _load(txn, self.name, record, receipt) if self.want_value else None


@dataclass(kw_only=True)
class Delete(Change):
    """Delete the buffer and its values."""

    def apply(self, txn: Transaction, name: BufferName, record: Record, now: float) -> tuple[Receipt, Array | None]:
        txn.remove(record)
        return record.receipt(updated=True), None


def _check_step(record: Record, step: int | None) -> None:
    if step is not None and step != record.step:
        late = "has passed" if step < record.step else "has not begun"
        problem = f"Step {step} of {record.name!r} {late}: the buffer is in step {record.step}"
        raise StaleStep(problem, buffer=record.name, step=record.step)


def _is_in_range(weight: float, dtype: DType) -> bool:
    return bool(np.finfo(dtype).smallest_subnormal <= weight <= np.finfo(dtype).max)


def _load(txn: Transaction, name: str, record: Record | None, receipt: Receipt) -> Array:
    """Return the value of the step that the receipt closed, or the buffer's value if the receipt closed none."""
    if record is None:
        raise StepGone(f"The buffer {name!r} of this receipt is gone, and its value with it", buffer=name)
    if receipt["closed"]:
        return txn.load(record.spec, record.closed_step(receipt["step"]).value)
    if record.version != receipt["version"]:
        raise StepGone(f"{name!r} has changed since this receipt, and its old value is not kept", buffer=name)
    return txn.load(record.spec, record.value)
