"""`gradserve doctor`: read a whole store and report its damage."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection

import numpy as np

from service.buffers.pushes import DRAFT, Push
from service.buffers.readonly import WRONG, Moment
from service.buffers.record import Record
from service.buffers.url import opened_readonly
from service.errors import BufferCorrupt, GradserveError, StoreFailed


def examine_apart(url: str, max_bytes: int, schema: str = "gradserve") -> Iterator[str]:
    """Yield the lines of `examine`, which runs in a process of its own: damaged pages may kill LMDB's process.

    Raises `StoreFailed` if the store cannot be opened.
    """
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_lines, args=(sender, url, max_bytes, schema), daemon=True)
    process.start()
    sender.close()
    with suppress(EOFError):
        while True:
            line = receiver.recv()
            if isinstance(line, GradserveError):
                raise line
            yield line
    process.join()
    if process.exitcode:
        killed = f"signal {-process.exitcode}" if process.exitcode < 0 else f"status {process.exitcode}"
        yield f"{WRONG}reading data.mdb ended the process ({killed}): restore the buffers from an export"


def _send_lines(sender: Connection, url: str, max_bytes: int, schema: str = "gradserve") -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command, which ends this process
    try:
        for line in examine(url, max_bytes, schema):
            sender.send(line)
    except GradserveError as error:
        sender.send(error)


def examine(url: str, max_bytes: int, schema: str = "gradserve") -> Iterator[str]:
    """Yield lines about the store. Lines about damage begin with `WRONG`. A server may use the store meanwhile.

    Raises `StoreFailed` if the store cannot be opened.
    """
    with opened_readonly(url, max_bytes=max_bytes, schema=schema) as opened:
        yield from opened.described()
        lines: list[str] = []
        try:
            with opened.reading() as moment, np.errstate(all="ignore"):
                lines.extend(_examined(moment))  # all at once: a slow terminal must not hold the reader
        except (BufferCorrupt, StoreFailed) as error:
            lines.append(f"{WRONG}{error}")
        yield from lines


def _examined(moment: Moment) -> Iterator[str]:
    if faults := moment.faults():
        yield from (f"{WRONG}{fault}" for fault in faults)
        return
    counts, values = Counter[str](), set[int]()
    for name, record in moment.sound_records():
        counts[name.kind[0]] += 1
        if record is None:
            yield f"{WRONG}{name.shown} is damaged"
            continue
        if name.is_push:
            yield from _staged(moment, record)
            values.update(record.values)
            continue
        for place, value in _values(record):
            if value is None:
                continue
            if value in values:
                yield f"{WRONG}{place} of {name.shown} is a value of another buffer, too"
            values.add(value)
            try:
                for _ in moment.streamed(record.spec, value):
                    pass  # reading checks the value
            except BufferCorrupt:
                yield f"{WRONG}{place} of {name.shown} is damaged"
    yield f"{counts['buffer']} buffers, {len(values)} values"
    yield f"{counts['graph']} graphs"
    yield f"{counts['push']} incomplete pushes"
    yield f"{counts['run']} runs"
    yield from moment.other_findings(values)


def _staged(moment: Moment, push: Record) -> Iterator[str]:
    """Yield a line for each damaged gradient of a push. A draft may have some that are not there yet."""
    for _, buffer, staged in () if push.name.startswith(DRAFT) else Push.of(push).gradients:
        try:
            if staged.place is not None:
                moment.check_staged(staged.place)
        except BufferCorrupt:
            yield f"{WRONG}the gradient of {buffer!r} in {push.full_name.shown} is damaged"


def _values(record: Record) -> list[tuple[str, int | None]]:
    running = {"graph": "the model", "run": "the form"}.get(record.full_name.kind[0], "the running value")
    return [(running, record.value), *((f"step {closed.step}", closed.value) for closed in record.closed)]
