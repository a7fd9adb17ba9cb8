"""Snapshots of buffers: the rate of their adds, and the norms of their sums."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime

import numpy as np
import typer
from rich.live import Live
from rich.table import Table

from gradserve_client._output import LATE_COLUMNS, console, count, late, print_json, shape, table
from gradserve_client.buffers import Buffers
from gradserve_client.errors import NotFound
from gradserve_client.models import BufferInfo

_NUMBERS = ["epoch", "count", "weight", "norm", "adds/s"]
_COLUMNS = ["name", "shape", "dtype", *_NUMBERS, *LATE_COLUMNS]


@dataclass(frozen=True)
class Row:
    """A buffer in a snapshot."""

    info: BufferInfo
    norm: float | None
    """The Euclidean norm of the sum, if it is wanted."""
    rate: float | None
    """Adds per second since the last snapshot, if it has the buffer."""

    def cells(self) -> list[str]:
        """Return the cells of a table's row."""
        norm = "" if self.norm is None else f"{self.norm:.4g}"
        rate = "" if self.rate is None else f"{self.rate:.3g}"
        info = self.info
        return [
            *(info.name, shape(info.shape), info.dtype, str(info.epoch), count(info), f"{info.weight:g}"),
            *(norm, rate, *late(info)),
        ]


@dataclass(frozen=True)
class Snapshot:
    """The buffers at a time."""

    at: datetime
    rows: list[Row]


def snapshots(buffers: Buffers, prefix: str, *, interval: float, count: int | None, norms: bool) -> Iterator[Snapshot]:
    """Yield a snapshot every `interval` seconds, `count` times or without end."""
    before: dict[str, tuple[float, Row]] = {}
    number = 0
    while True:
        now, infos = time.monotonic(), buffers.list(prefix)
        rows = [_row(buffers, info, before.get(info.name), now, norms) for info in infos]
        before = {row.info.name: (now, row) for row in rows}
        yield Snapshot(datetime.now().astimezone(), rows)
        number += 1
        if number == count:
            return
        time.sleep(interval)


def _row(buffers: Buffers, info: BufferInfo, before: tuple[float, Row] | None, now: float, norms: bool) -> Row:
    if before is None or before[1].info.created_at != info.created_at:
        return Row(info, _norm(buffers, info.name) if norms else None, None)
    then, row = before
    adds = info.version - row.info.version
    if info.quorum is None:  # without a quorum, an epoch begins by a take or a zero, which are no adds
        adds -= info.epoch - row.info.epoch
    norm = row.norm if info.etag == row.info.etag or not norms else _norm(buffers, info.name)
    return Row(info, norm, max(adds, 0) / (now - then))


def _norm(buffers: Buffers, name: str) -> float | None:
    try:
        value = buffers[name].value()
    except NotFound:  # deleted since it was listed
        return None
    return float(np.linalg.norm(value.astype(np.float64)))


def show_live(snapshots: Iterator[Snapshot]) -> None:
    """Show a table that changes in place."""
    with Live(console=console(), auto_refresh=False) as live:
        for snapshot in snapshots:
            live.update(_table(snapshot), refresh=True)


def print_lines(snapshots: Iterator[Snapshot]) -> None:
    """Print a line for each buffer of each snapshot."""
    typer.echo("\t".join(["time", *_COLUMNS]))
    for snapshot in snapshots:
        for row in snapshot.rows:
            typer.echo("\t".join([snapshot.at.isoformat(timespec="seconds"), *row.cells()]))


def print_documents(snapshots: Iterator[Snapshot]) -> None:
    """Print a line of JSON for each snapshot."""
    for snapshot in snapshots:
        buffers = [{**asdict(row.info), "norm": row.norm, "adds_per_second": row.rate} for row in snapshot.rows]
        print_json({"time": snapshot.at.timestamp(), "buffers": buffers})


def _table(snapshot: Snapshot) -> Table:
    rows = (row.cells() for row in snapshot.rows)
    return table(_COLUMNS, rows, wraps="name", numbers=_NUMBERS, optional=LATE_COLUMNS)
