"""A transaction of the writer: what the database says of the requests' buffers, and what the requests change.

The changes stay in memory until all requests are made, so that a request that fails leaves nothing to undo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import numpy as np

from service.buffers.gradients import Dense, Gradient, add_whole
from service.buffers.names import BufferName, pushes_of
from service.buffers.packed import digest_of, unpack_known
from service.buffers.postgres.blobs import Blobs
from service.buffers.postgres.changes import Changes, Found
from service.buffers.postgres.compactor import Fold, is_worth_a_fold
from service.buffers.postgres.deltas import Delta, complete, delta_of, gradient_of, nbytes_of, source_of, stream, total
from service.buffers.postgres.exchange import Connection
from service.buffers.postgres.janitor import Janitor
from service.buffers.postgres.pushes import Stored
from service.buffers.postgres.schema import ROW_BYTES
from service.buffers.pushes import Place
from service.buffers.record import Key, Known, Record, Spec
from service.buffers.room import Most
from service.buffers.store import Allocate
from service.dtypes import Array
from service.errors import BufferCorrupt

MAX_SEQ = 1 << 62
"""A larger `seq` is damaged: no value has as many gradients."""


class PostgresTransaction:
    """The changes of a request, which `perform` makes. `earlier` has those of the requests before it in the batch.

    `staged` has the blobs of the request's gradients, by the identity of their arrays.
    """

    def __init__(
        self,
        connection: Connection,
        found: Found,
        earlier: Changes,
        staged: Mapping[int, int],
        next_id: Callable[[], int],
        blobs: Blobs,
        allocate: Allocate,
        most: Most,
        now: float,
        janitor: Janitor,
    ) -> None:
        self._connection, self._found, self._earlier, self._staged = connection, found, earlier, staged
        self.new_id, self._blobs, self._allocate, self._most = next_id, blobs, allocate, most
        self.changes, self._now, self._janitor = Changes(), now, janitor

    def _stored(self, name: BufferName) -> Stored | None:
        for state in (self.changes.records, self._earlier.records, self._found.records):
            if name in state:
                found = state[name]
                if isinstance(found, BufferCorrupt):
                    raise found
                return found
        return None

    def get(self, name: BufferName) -> Record | None:
        stored = self._stored(name)
        return None if stored is None else stored.record

    def names(self, namespace: str, prefix: str) -> list[str]:
        known = {name: stored for name, stored in self._found.records.items() if name.namespace == namespace}
        known |= {name: stored for name, stored in self._earlier.records.items() if name.namespace == namespace}
        return sorted(name.name for name, stored in known.items() if stored and name.name.startswith(prefix))

    def count_new(self, name: BufferName, now: float) -> None:
        own = name.namespace
        count = self._found.counts[own] + self._earlier.counts[own] + self.changes.counts[own]
        if (refusal := self._most.refusal(name, count)) is not None:
            raise refusal
        self.changes.counts[own] += 1

    def put(self, record: Record) -> None:
        name, old = record.full_name, self._stored(record.full_name)
        before = 0 if old is None else old.seq
        if name.is_push:
            self._count_staged(name, record.spec.nbytes)
            self.changes.records[name] = Stored(record, record.spec.nbytes)
            return
        self.changes.records[name] = Stored(record, self._seq(record.value, before))
        values = [(record.value, False)]
        if old is not None and record.step > old.record.step and record.closed:
            values.append((record.closed[-1].value, True))
        for value, has_ended in values:
            if value is not None and is_worth_a_fold(record.spec, self._seq(value, before), has_ended):
                self.changes.folds.append(Fold(name, record.spec, value))

    def _seq(self, value: int | None, before: int) -> int:
        """Return the `seq` of the last delta of a value, which was `before` if the request has added none."""
        if value is None:
            return 0
        deltas = self.changes.deltas.get(value)
        return deltas[-1].seq if deltas else before

    def remove(self, record: Record) -> None:
        if record.lives(self._now):  # else it is not in the counts
            self.changes.counts[record.full_name.namespace] -= 1
        self.forget(record.full_name)
        for value in record.values:
            self.free(value)

    def forget(self, name: BufferName) -> None:
        if name.is_push:
            self._count_staged(name, 0)
        self.changes.records[name] = None

    def accumulate(self, record: Record, gradient: Gradient, weight: float, overwrite: bool) -> int | None:
        spec = record.spec
        if spec.nonfinite == "reject":
            before = np.empty(spec.size, spec.dtype) if overwrite else self.load(spec, record.value).reshape(-1)
            add_whole(spec, before, before, gradient, weight, overwrite)  # raises the error of a sum that is not finite
        if not overwrite and not spec.size:
            return record.value
        if overwrite:
            self.free(record.value)
        value, seq = self._following(record, None if overwrite else record.value)
        self._append(value, seq, gradient, weight, overwrite)
        return value

    def _following(self, record: Record, value: int | None) -> tuple[int, int]:
        """Return the value, or a new one for None, and the `seq` of its next delta."""
        if value is None:
            return self.new_id(), 1
        stored = self._stored(record.full_name)
        if stored is not None and not 1 <= stored.seq < MAX_SEQ:
            raise BufferCorrupt(f"The database has {stored.seq} as the place of the last gradient of {record.name!r}")
        return value, 1 if stored is None else stored.seq + 1

    def _append(self, value: int, seq: int, gradient: Gradient, weight: float, overwrite: bool) -> None:
        source = source_of(gradient)
        blob = self._staged.get(id(gradient.array if isinstance(gradient, Dense) else gradient))
        if blob is None and nbytes_of(source) > ROW_BYTES:
            blob = self._blobs.new(nbytes_of(source))
            self.changes.blobs[blob] = source
        self.changes.deltas.setdefault(value, []).append(delta_of(value, seq, source, weight, overwrite, blob))

    def free(self, value: int | None) -> None:
        if value is not None:
            self.changes.freed.append(value)

    def load(self, spec: Spec, value: int | None) -> Array:
        deltas: Iterable[Delta] = ()
        if value is not None:
            new = self._new(value)
            deltas = complete(value, self._read(value), new[-1].seq if new else self._found.seqs.get(value))
        return total(self._connection, spec, deltas, self._allocate, self._unwritten)

    def _new(self, value: int) -> list[Delta]:
        """Return the deltas of a value that are not in the database yet."""
        return [*self._earlier.deltas.get(value, ()), *self.changes.deltas.get(value, ())]

    def _read(self, value: int) -> Iterator[Delta]:
        """Yield all deltas of a value."""
        yield from stream(self._connection, [value])
        for delta in self._new(value):
            if delta.staged is None:
                yield delta
            else:
                yield from (_moved(found, *delta[:3]) for found in stream(self._connection, [delta.staged]))

    @property
    def _unwritten(self) -> Mapping[int, Gradient]:
        return {**self._earlier.blobs, **self.changes.blobs}

    def recall(self, key: Key, names: Sequence[str]) -> Known | None:
        digest = digest_of(key)
        if digest in self._earlier.keys:
            return self._earlier.keys[digest][1]
        packed = self._found.keys.get(digest)
        return None if packed is None else unpack_known(packed, names)

    def admit_key(self, key: Key) -> None:
        self._janitor.check_keys(key.caller)

    def remember(self, key: Key, known: Known, now: float) -> None:
        self.changes.keys[digest_of(key)] = (key, known)

    def _count_staged(self, name: BufferName, nbytes: int) -> None:
        """Count that the push has staged this many bytes from now on."""
        with suppress(BufferCorrupt):
            old = self.get(name)
            nbytes -= old.spec.nbytes if old is not None and old.lives(self._now) else 0  # else it is not in the sum
        self.changes.staged_bytes[name.namespace] += nbytes

    def admit_part(self, namespace: str, nbytes: int) -> None:
        counts = (self._found.staged_bytes, self._earlier.staged_bytes, self.changes.staged_bytes)
        self._janitor.check_staged(sum(count[pushes_of(namespace)] for count in counts) + nbytes)

    def stage(self, record: Record, gradient: Gradient) -> Place:
        value = self.new_id()
        self._append(value, 1, gradient, 1.0, overwrite=True)
        return [[value]]

    def staged(self, spec: Spec, place: Place) -> Gradient:
        ((value,),) = place
        *_, delta = complete(value, self._read(value), 1)
        return gradient_of(self._connection, spec, delta, self._unwritten)

    def add_staged(self, record: Record, place: Place, weight: float) -> int | None:
        ((staged,),) = place
        value, seq = self._following(record, record.value)
        if new := self._new(staged):
            delta = _moved(new[0], value, seq, weight)
            self.changes.added.append(staged)
        elif staged in self._found.staged_values:
            delta = Delta(value, seq, weight, False, "", "", 0, None, None, staged)
        else:
            raise BufferCorrupt(f"The database lacks the gradient of {record.name!r} that this push has staged")
        self.changes.deltas.setdefault(value, []).append(delta)
        return value

    def store_bytes(self, content: Array) -> int:
        value = self.new_id()
        self._append(value, 1, Dense(content, content.shape), 1.0, overwrite=True)
        return value


class WritesError(Exception):
    """A request comes so far as to write a gradient, or a model."""


class Trial(PostgresTransaction):
    """A transaction that tells whether a request would write. It has no connection any more."""

    def _append(self, *_: Any, **__: Any) -> NoReturn:
        raise WritesError

    accumulate = _append

    def load(self, spec: Spec, value: int | None) -> Array:
        return np.empty(0, spec.dtype)


def _moved(delta: Delta, value: int, seq: int, weight: float) -> Delta:
    """Return a staged delta as a part of a sum."""
    return delta._replace(value=value, seq=seq, weight=weight, overwrite=False)
