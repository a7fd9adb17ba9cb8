"""The lives of runs: a run that was deleted, and its successor of the same name, are two."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from service.buffers.names import BufferName, runs_of
from service.buffers.record import Record, Spec
from service.buffers.transaction import Transaction
from service.errors import RunReplaced, UnknownBuffer, shown


def run_of(life: str) -> str:
    """Return the run that has this life."""
    return life.partition("@")[0]


def replaced(life: str) -> RunReplaced:
    """Return the error of a request of a run that was deleted."""
    run = run_of(life)
    return RunReplaced(f"The run {shown(run)} of this request was deleted since, or replaced by another", run=run)


def of_life(txn: Transaction, namespace: str, life: str) -> Record:
    """Return the run. Raises `RunReplaced` unless it has this life."""
    record = txn.get(BufferName(runs_of(namespace), run_of(life)))
    if record is None or record.about["life"] != life:
        raise replaced(life)
    return record


def new_buffer(txn: Transaction, name: BufferName, spec: Spec, now: float) -> Record:
    """Return a new buffer, which is counted, but not stored. Raises `RunReplaced` and `TooManyBuffers`."""
    if spec.life is not None:
        run = of_life(txn, name.namespace, spec.life)
        if not run.about["begun"]:
            txn.put(run.changed(about={**run.about, "begun": True}))
    txn.count_new(name, now)
    return Record(name, spec, txn.new_id(), now, now)


def check_life(record: Record | None, life: str) -> None:
    """Raise `RunReplaced` if the buffer is not, or no longer, of this life."""
    if record is not None and record.spec.run not in (None, run_of(life)):
        problem = f"The buffer {record.name!r} belongs to the run {shown(record.spec.run)}, not {shown(run_of(life))}"
        raise RunReplaced(problem, buffer=record.name, run=record.spec.run)
    if record is None or record.spec.life != life:
        raise replaced(life)


@contextmanager
def of_this_life(life: str | None) -> Iterator[None]:
    """Say of a buffer that does not exist that its run was deleted, if a request gives a `life`."""
    try:
        yield
    except UnknownBuffer:
        if life is None:
            raise
        raise replaced(life) from None
