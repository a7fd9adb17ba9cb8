"""Named accumulation buffers: what a buffer is, how it changes, and what every store promises.

A buffer is a sum with a memory: an add does `value += weight * gradient`, `weight_total += weight`, `count += 1` and
`version += 1`. Its life is cut into epochs: `zero` discards the sum and begins the next one; `take`, or the add that
completes the quorum, closes the epoch, whose value is then set aside for everyone to read.

A request changes one or many buffers, all or none, and stores its idempotency key in the same transaction. What it does
is written once, here, in terms of a `Transaction`; a store is what gives transactions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np

from service.dtypes import DTYPES, FLOATS, NAMES, DType, compute_dtype
from service.errors import (
    BufferCorrupt,
    BufferExists,
    EpochGone,
    EpochOpen,
    GradserveError,
    Invalid,
    InvalidParameter,
    KeyReused,
    NonfiniteGradient,
    NothingToAverage,
    PreconditionFailed,
    ShapeMismatch,
    StaleEpoch,
    TooFewGradients,
    UnknownBuffer,
    shown,
)
from service.kernels import accumulate

Array = np.ndarray[Any, np.dtype[Any]]
Receipt: TypeAlias = dict[str, Any]
"""What a change did: name, updated, closed, epoch, version, count and weight; of a new buffer, all its metadata."""

Allocate: TypeAlias = Callable[[tuple[int, ...], DType], Array]

NAME = re.compile(r"[A-Za-z0-9._:-]{1,200}")
"""Names of buffers: PyTorch's parameter names are, as they stand."""


_RESERVED = (".", "..", "__metadata__")
"""What a path or a safetensors file means something else by."""


def check_name(name: str) -> str:
    """`name`, which must be one that a buffer can have. Raises `InvalidParameter`."""
    if not NAME.fullmatch(name) or name in _RESERVED:
        raise InvalidParameter(
            f"{shown(name)} is no name of a buffer: 1 to 200 of the characters A-Z a-z 0-9 . _ : -, but not"
            f" {', '.join(_RESERVED)}",
            parameter="name",
        )
    return name


@dataclass(frozen=True)
class Spec:
    """What a buffer is created with: its sum's shape and dtype, and its rules.

    With `nonfinite="reject"` an add that would make the sum infinite or NaN is refused. With a `quorum` the add that
    makes the count reach it closes the epoch. Of the closed epochs the last `keep` can be read. `ttl_seconds` after its
    last change the buffer is gone.
    """

    shape: tuple[int, ...]
    dtype: DType
    nonfinite: Literal["allow", "reject"] = "allow"
    quorum: int | None = None
    keep: int = 1
    ttl_seconds: float | None = None

    @cached_property
    def size(self) -> int:
        """Elements of the sum."""
        return math.prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the sum."""
        return self.size * self.dtype.itemsize

    def as_json(self) -> dict[str, Any]:
        """As a client writes it."""
        return {
            "shape": list(self.shape),
            "dtype": NAMES[self.dtype],
            "nonfinite": self.nonfinite,
            "quorum": self.quorum,
            "keep": self.keep,
            "ttl_seconds": self.ttl_seconds,
        }


@dataclass(frozen=True)
class Closed:
    """A closed epoch, its sum under the id `value`, or None if nothing was ever added."""

    epoch: int
    version: int
    count: int
    weight: float
    value: int | None


@dataclass(frozen=True)
class Record:
    """A buffer but for its numbers, which the store keeps under the id `value`; None: zeros that were never written.

    Its own `id` tells it from others that had its name before.
    """

    name: str
    spec: Spec
    id: int
    created: float
    updated: float
    epoch: int = 0
    version: int = 0
    count: int = 0
    weight: float = 0.0
    value: int | None = None
    closed: tuple[Closed, ...] = ()

    def changed(self, **changes: Any) -> Record:
        """A copy with other values in some fields: what `dataclasses.replace` gives, in a fifth of the time."""
        made = object.__new__(Record)
        made.__dict__.update(self.__dict__, **changes)
        return made

    @property
    def etag(self) -> str:
        """The tag of its state, in quotation marks."""
        return f'"{self.epoch}-{self.version}"'

    @property
    def expires(self) -> float | None:
        """When it is gone unless it changes before, in seconds since 1970."""
        return None if self.spec.ttl_seconds is None else self.updated + self.spec.ttl_seconds

    @property
    def values(self) -> list[int]:
        """The ids of its values, those of closed epochs included."""
        return [value for value in (self.value, *(one.value for one in self.closed)) if value is not None]

    def lives(self, now: float) -> bool:
        """Whether it has not expired."""
        return self.expires is None or now < self.expires

    def kept(self, epoch: int) -> Closed:
        """The closed epoch. Raises `EpochOpen` if it is yet to close, and `EpochGone` if it is not kept any more."""
        if epoch >= self.epoch:
            count = self.count if epoch == self.epoch else 0
            raise EpochOpen(
                f"Epoch {epoch} of {self.name!r} has not closed: the buffer is in epoch {self.epoch},"
                f" whose count is {self.count}{'' if self.spec.quorum is None else f' of {self.spec.quorum}'}",
                buffer=self.name,
                epoch=self.epoch,
                count=count,
            )
        for one in self.closed:
            if one.epoch == epoch:
                return one
        raise EpochGone(
            f"Epoch {epoch} of {self.name!r} is not kept: it was zeroed, or is not among the last {self.spec.keep}"
            " that closed (see keep)",
            buffer=self.name,
            epoch=self.epoch,
        )

    def as_json(self) -> dict[str, Any]:
        """Its metadata as a client reads it."""
        return {
            "name": self.name,
            **self.spec.as_json(),
            "epoch": self.epoch,
            "version": self.version,
            "count": self.count,
            "weight": self.weight,
            "bytes": self.spec.nbytes,
            "closed_epochs": [one.epoch for one in self.closed],
            "created_at": self.created,
            "updated_at": self.updated,
            "expires_at": self.expires,
        }

    def receipt(self, *, updated: bool, of: Closed | None = None) -> Receipt:
        """What a change left, or, with `of`, what it closed."""
        state = self if of is None else of
        return {
            "name": self.name,
            "updated": updated,
            "closed": of is not None,
            "epoch": state.epoch,
            "version": state.version,
            "count": state.count,
            "weight": state.weight,
        }


class Gradient(Protocol):
    """A gradient of which any piece can be had by itself."""

    shape: tuple[int, ...]
    dtype: DType

    def piece(self, start: int, stop: int) -> Array | None:
        """The elements from `start` to `stop` of the flat gradient; None where there is nothing to add at all."""


class Dense:
    """An array, broadcast into `shape`, as a gradient. Raises `ShapeMismatch`."""

    def __init__(self, array: Array, shape: tuple[int, ...]) -> None:
        if array.shape != shape:
            try:
                array = np.broadcast_to(array, shape)
            except ValueError:
                raise ShapeMismatch(
                    f"gradient has shape {list(array.shape)}, which does not broadcast into the buffer's,"
                    f" {list(shape)}",
                    tensor="gradient",
                ) from None
        self.shape, self.dtype = shape, array.dtype
        self._flat = array.reshape(-1) if array.flags.c_contiguous else array.flat

    def piece(self, start: int, stop: int) -> Array:
        """The elements from `start` to `stop`, of the flat array."""
        return self._flat[start:stop]


class Key(NamedTuple):
    """An idempotency key: the caller that it belongs to, its text, and the fingerprint of the request it came with."""

    caller: str
    text: str
    fingerprint: bytes


class Known(NamedTuple):
    """What is stored with a key: the fingerprint of its request, the receipts, and the ids of the buffers."""

    fingerprint: bytes
    receipts: dict[str, Receipt]
    ids: dict[str, int]


class Transaction(Protocol):
    """Changes that take effect together when the store commits them, or never."""

    def get(self, name: str) -> Record | None:
        """The buffer, expired or not."""

    def put(self, record: Record) -> None:
        """Store the buffer in place of what was there."""

    def remove(self, record: Record) -> None:
        """Forget the buffer and all its values."""

    def remove_damaged(self, name: str) -> None:
        """Forget the buffer, of which nothing can be read."""

    def new_id(self) -> int:
        """A number that no buffer and no value has or had."""

    def accumulate(self, record: Record, gradient: Gradient, weight: float, overwrite: bool) -> int | None:
        """Add to the buffer's value. Returns the id of the result, under which the old value is no more."""

    def free(self, value: int | None) -> None:
        """Forget a value."""

    def load(self, spec: Spec, value: int | None) -> Array:
        """A value, in memory of its own."""

    def recall(self, key: Key) -> Known | None:
        """What was stored with the key, whatever the fingerprint."""

    def remember(self, key: Key, known: Known, now: float) -> None:
        """Store the key."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """What a request does to one buffer, if its tag is among those that `match` names."""

    name: str
    match: frozenset[str] | None = None

    def admit(self, record: Record | None) -> None:
        """Raise if the change cannot be made, before anything is."""
        if record is None:
            raise unknown(self.name)
        if self.match is not None and not self.match & {"*", record.etag}:
            raise PreconditionFailed(
                f"If-Match is {', '.join(sorted(self.match))}, but {self.name!r} is at {record.etag}", buffer=self.name
            )

    def apply(self, txn: Transaction, record: Any, now: float) -> tuple[Receipt, Array | None]:
        """Make the change, of which `record` was admitted: the receipt, and the value if it was asked for."""
        raise NotImplementedError

    def again(self, txn: Transaction, record: Record | None, receipt: Receipt) -> Array | None:
        """The value that goes with the receipt of a request that is repeated; None for `record`: the buffer is gone."""
        return None


@dataclass(frozen=True, kw_only=True)
class Create(Change):
    """Create the buffer, if there is none like it."""

    spec: Spec

    def admit(self, record: Record | None) -> None:
        if record is None:
            if self.match is not None:
                raise PreconditionFailed(f"There is no buffer {self.name!r}, but If-Match needs one", buffer=self.name)
            return
        super().admit(record)
        asked, there = self.spec.as_json(), record.spec.as_json()
        if asked != there:
            differing = ", ".join(
                f"{what} {shown(there[what])}, not {shown(asked[what])}" for what in asked if asked[what] != there[what]
            )
            raise BufferExists(f"There is a buffer {self.name!r} with {differing}", buffer=self.name)

    def apply(self, txn: Transaction, record: Record | None, now: float) -> tuple[Receipt, Array | None]:
        created = record is None
        if record is None:
            record = Record(self.name, self.spec, txn.new_id(), now, now)
            txn.put(record)
        return {**record.as_json(), "created": created}, None


@dataclass(frozen=True, kw_only=True)
class Add(Change):
    """InPlaceAccumulator and InPlaceAccumulatorV2: add `weight` times the gradient, or replace the sum by it.

    With `epoch`, only while the buffer is in it. The gradient must broadcast into the buffer's shape, and must not
    change before the request is done.
    """

    gradient: Array | Gradient
    weight: float = 1.0
    do_update: bool = True
    overwrite: bool = False
    epoch: int | None = None
    want_value: bool = False

    def admit(self, record: Record | None) -> None:
        super().admit(record)
        assert record is not None
        if self.epoch is not None and self.epoch != record.epoch:
            late = "has passed" if self.epoch < record.epoch else "has not begun"
            raise StaleEpoch(
                f"Epoch {self.epoch} of {self.name!r} {late}: the buffer is in epoch {record.epoch}",
                buffer=self.name,
                epoch=record.epoch,
            )
        dtype = compute_dtype(record.spec.dtype)
        total = self.weight if self.overwrite else record.weight + self.weight
        fits = self.weight == 1 or abs(self.weight) <= float(np.finfo(dtype).max)
        if not (fits and math.isfinite(total)):
            raise InvalidParameter(
                f"weight is {self.weight}, but it, in {dtype}, and the sum of the weights must be finite",
                parameter="weight",
            )
        if self.do_update and self.gradient.shape != record.spec.shape:
            self._onto(record.spec)

    def _onto(self, spec: Spec) -> Gradient:
        if isinstance(self.gradient, np.ndarray):
            return Dense(self.gradient, spec.shape)
        if self.gradient.shape != spec.shape:
            raise ShapeMismatch(
                f"The output has shape {list(self.gradient.shape)}, but the buffer {self.name!r} {list(spec.shape)}",
                buffer=self.name,
            )
        return self.gradient

    def apply(self, txn: Transaction, record: Record, now: float) -> tuple[Receipt, Array | None]:
        if not self.do_update:
            return record.receipt(updated=False), txn.load(record.spec, record.value) if self.want_value else None
        value = txn.accumulate(record, self._onto(record.spec), self.weight, self.overwrite)
        record = record.changed(
            value=value,
            updated=now,
            version=record.version + 1,
            count=1 if self.overwrite else record.count + 1,
            weight=self.weight if self.overwrite else record.weight + self.weight,
        )
        loaded = txn.load(record.spec, value) if self.want_value else None
        if record.spec.quorum is not None and record.count >= record.spec.quorum:
            record, closed = close(txn, record)
            return record.receipt(updated=True, of=closed), loaded
        txn.put(record)
        return record.receipt(updated=True), loaded

    def again(self, txn: Transaction, record: Record | None, receipt: Receipt) -> Array | None:
        if not self.want_value:
            return None
        with suppress(EpochGone):  # the add was made; that its receipt comes again is worth more than the value
            return _load(txn, self.name, record, receipt)
        return None


@dataclass(frozen=True, kw_only=True)
class Zero(Change):
    """ZeroGradient: discard the sum, and begin the next epoch."""

    def apply(self, txn: Transaction, record: Record, now: float) -> tuple[Receipt, Array | None]:
        txn.free(record.value)
        record = _next_epoch(record).changed(updated=now, version=record.version + 1)
        txn.put(record)
        return record.receipt(updated=True), None


@dataclass(frozen=True, kw_only=True)
class Take(Change):
    """Close the epoch and answer its value, once at least `min_count` gradients are in."""

    min_count: int = 0
    mean: bool = False
    """Whether it is of use only if the weights do not sum to zero."""

    def admit(self, record: Record | None) -> None:
        super().admit(record)
        assert record is not None
        if record.count < self.min_count:
            raise TooFewGradients(
                f"The count of {self.name!r} is {record.count} in epoch {record.epoch}, but min_count is"
                f" {self.min_count}",
                buffer=self.name,
                epoch=record.epoch,
                count=record.count,
            )
        if self.mean and not record.weight:
            raise NothingToAverage(f"The weights in {self.name!r} sum to zero: there is no mean", buffer=self.name)

    def apply(self, txn: Transaction, record: Record, now: float) -> tuple[Receipt, Array | None]:
        loaded = txn.load(record.spec, record.value)
        record, closed = close(txn, record.changed(updated=now, version=record.version + 1))
        return record.receipt(updated=True, of=closed), loaded

    def again(self, txn: Transaction, record: Record | None, receipt: Receipt) -> Array | None:
        return _load(txn, self.name, record, receipt)


@dataclass(frozen=True, kw_only=True)
class Delete(Change):
    """Forget the buffer."""

    def apply(self, txn: Transaction, record: Record, now: float) -> tuple[Receipt, Array | None]:
        txn.remove(record)
        return record.receipt(updated=True), None


@dataclass(frozen=True, kw_only=True)
class Restore(Change):
    """Create the buffer in a state that it had elsewhere: as `record`, which knows no closed epochs, with its value."""

    record: Record
    value: Array

    def admit(self, record: Record | None) -> None:
        if record is not None:
            raise BufferExists(f"There is a buffer {self.name!r} already", buffer=self.name)

    def apply(self, txn: Transaction, record: None, now: float) -> tuple[Receipt, Array | None]:
        made = self.record.changed(id=txn.new_id(), value=None, closed=(), updated=now)
        made = made.changed(value=txn.accumulate(made, Dense(self.value, made.spec.shape), 1.0, True))
        txn.put(made)
        return made.receipt(updated=True), None


@dataclass(frozen=True)
class Request:
    """Changes of different buffers, to be made together, under a key if they must not be made twice."""

    changes: Sequence[Change]
    key: Key | None = None


@dataclass(frozen=True)
class Outcome:
    """What a request did, now or, if `replayed`, when its key came first: by buffer the receipts, and the values asked
    for; and the tags of the buffers that it left."""

    receipts: dict[str, Receipt]
    values: dict[str, Array] = field(default_factory=dict)
    replayed: bool = False


def unknown(name: str) -> UnknownBuffer:
    """The error of a buffer that is not there."""
    return UnknownBuffer(f"There is no buffer {shown(name)}; PUT /v1/buffers/{{name}} creates one", buffer=name)


def perform(txn: Transaction, request: Request, now: float) -> Outcome:
    """Make the request's changes, unless its key is known.

    Raises what `Change.admit` raises, `KeyReused`, and, when changes were made that the store must then undo,
    `NonfiniteGradient`, `BufferCorrupt` and `StoreFull`.
    """
    key = request.key
    if key is not None and (known := txn.recall(key)) is not None:
        if known.fingerprint != key.fingerprint:
            raise KeyReused(
                f"The Idempotency-Key {shown(key.text)} was used for another request; a new request needs a new key"
            )
        outcome = Outcome(known.receipts, replayed=True)
        for change in request.changes:
            record = _alive(txn, change.name, now)
            if record is not None and record.id != known.ids[change.name]:
                record = None
            value = change.again(txn, record, known.receipts[change.name])
            if value is not None:
                outcome.values[change.name] = value
        return outcome
    if len({change.name for change in request.changes}) < len(request.changes):
        raise Invalid("A request changes each buffer once at most")
    many = len(request.changes) > 1
    records = []
    for change in request.changes:
        try:
            record = _alive(txn, change.name, now)
            change.admit(record)
        except BufferCorrupt:
            if not isinstance(change, Delete) or many:
                raise
            txn.remove_damaged(change.name)
            return Outcome({change.name: {"name": change.name, "updated": True}})
        except GradserveError as error:
            _name(error, change.name, one_of_many=many)
            raise
        records.append(record)
    outcome, ids = Outcome({}), {}
    for change, record in zip(request.changes, records, strict=True):
        try:
            outcome.receipts[change.name], value = change.apply(txn, record, now)
        except GradserveError as error:
            _name(error, change.name, one_of_many=many)
            raise
        if value is not None:
            outcome.values[change.name] = value
        if key is not None:
            left = record or txn.get(change.name)
            ids[change.name] = 0 if left is None else left.id
    if key is not None:
        txn.remember(key, Known(key.fingerprint, outcome.receipts, ids), now)
    return outcome


def _name(error: GradserveError, name: str, *, one_of_many: bool) -> None:
    """Let the error say which buffer it is about."""
    if "buffer" not in error.context:
        if one_of_many:
            error.detail += f" (the buffer is {name!r})"
        error.context["buffer"] = name


def _alive(txn: Transaction, name: str, now: float) -> Record | None:
    """The buffer; None if there is none, or none any more, and then it is removed."""
    record = txn.get(name)
    if record is not None and not record.lives(now):
        txn.remove(record)
        return None
    return record


def close(txn: Transaction, record: Record) -> tuple[Record, Closed]:
    """Set the value aside and begin the next epoch."""
    closed = Closed(record.epoch, record.version, record.count, record.weight, record.value)
    epochs = (*record.closed, closed)
    for old in epochs[: -record.spec.keep]:
        txn.free(old.value)
    record = _next_epoch(record).changed(closed=epochs[-record.spec.keep :])
    txn.put(record)
    return record, closed


def _next_epoch(record: Record) -> Record:
    return record.changed(epoch=record.epoch + 1, count=0, weight=0.0, value=None)


def _load(txn: Transaction, name: str, record: Record | None, receipt: Receipt) -> Array:
    """The value of the epoch that the receipt closed, or else the buffer's."""
    if record is None:
        raise EpochGone(f"The buffer {name!r} of this receipt is gone, and its value with it", buffer=name)
    if receipt["closed"]:
        return txn.load(record.spec, record.kept(receipt["epoch"]).value)
    if record.version != receipt["version"]:
        raise EpochGone(
            f"{name!r} has changed since this receipt, and its value of then is not kept; the add was counted once",
            buffer=name,
            receipt=dict(receipt),
        )
    return txn.load(record.spec, record.value)


def add_piece(spec: Spec, result: Array, total: Array | int, piece: Array | None, weight: float, anew: bool) -> None:
    """One piece of an add, all arrays flat. Raises `NonfiniteGradient` where the buffer refuses the result.

    NumPy's floating-point warnings are the caller's to silence.
    """
    if anew:
        accumulate.replace(result, total, np.zeros(1, spec.dtype) if piece is None else piece, weight)
    else:
        assert piece is not None
        accumulate.add(result, total, piece, weight)
    if spec.nonfinite == "reject" and not np.isfinite(result).all():
        raise NonfiniteGradient(
            "The gradient would make the buffer infinite or NaN, which nonfinite=reject refuses", tensor="gradient"
        )


@dataclass(frozen=True)
class Snapshot:
    """A buffer as it is, or as it was when its epoch `of` closed, and its value, which is nobody else's."""

    record: Record
    value: Array
    of: Closed | None = None

    @property
    def etag(self) -> str:
        """The tag of this state, in quotation marks."""
        return self.record.etag if self.of is None else f'"{self.of.epoch}-{self.of.version}"'

    @property
    def weight(self) -> float:
        """The sum of the weights in the value."""
        return self.record.weight if self.of is None else self.of.weight

    def receipt(self) -> Receipt:
        """What it is, as a receipt."""
        return self.record.receipt(updated=False, of=self.of)


class Store(Protocol):
    """Keeps buffers. Thread-safe; what it returns is the caller's own, and shared with nobody."""

    def submit(self, request: Request) -> Future[Outcome]:
        """Make the request's changes: all, durably, before the future has its result, or none if it has an error."""

    def record(self, name: str) -> Record:
        """The buffer as it is. Raises `UnknownBuffer`."""

    def records(self, prefix: str = "", after: str = "", limit: int | None = None) -> list[Record]:
        """Buffers in the order of their names, as they are at one moment: those behind `after`."""

    def read(self, names: Sequence[str], epoch: int | None = None) -> list[Snapshot]:
        """Buffers with their values at one moment, or when they closed `epoch`.

        Raises `UnknownBuffer`, `EpochOpen`, `EpochGone` and `BufferCorrupt`.
        """

    def recall(self, key: Key) -> Known | None:
        """What is stored with the key."""

    def generation(self) -> int:
        """A number that is another one after every change, whoever made it."""

    def close(self) -> None:
        """Finish what was submitted, and let go of everything."""


def spec_of(given: Mapping[str, Any]) -> Spec:
    """The way back from `Spec.as_json`."""
    return Spec(**{**given, "shape": tuple(given["shape"]), "dtype": DTYPES[given["dtype"]]})


def float_dtypes() -> Iterator[str]:
    """The names of the dtypes that a buffer can have."""
    return iter(FLOATS.dtypes)
