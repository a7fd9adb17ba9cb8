"""Buffers over time: how fast they fill, and how large their sums are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime

import numpy as np
import typer
from rich.live import Live
from rich.table import Table

from gradserve_client._session import console, count, document, shape, table
from gradserve_client.client import Client
from gradserve_client.errors import NotFound
from gradserve_client.models import BufferInfo

_COLUMNS = ["name", "shape", "dtype", "epoch", "count", "weight", "norm", "adds/s"]


@dataclass(frozen=True)
class Row:
    """A buffer at a look."""

    info: BufferInfo
    norm: float | None
    """The Euclidean norm of the sum, if it was asked for."""
    rate: float | None
    """Adds per second since the last look, if the buffer was there then."""

    def cells(self) -> list[str]:
        """The row of a table."""
        norm = "" if self.norm is None else f"{self.norm:.4g}"
        rate = "" if self.rate is None else f"{self.rate:.3g}"
        info = self.info
        return [
            *(info.name, shape(info.shape), info.dtype, str(info.epoch), count(info), f"{info.weight:g}"),
            *(norm, rate),
        ]


@dataclass(frozen=True)
class Look:
    """The buffers at a time."""

    at: datetime
    rows: list[Row]


def looks(server: Client, prefix: str, *, interval: float, count: int | None, norms: bool) -> Iterator[Look]:
    """The buffers, every `interval` seconds, `count` times or for ever."""
    before: dict[str, tuple[float, Row]] = {}
    number = 0
    while True:
        now, found = time.monotonic(), server.buffers.list(prefix)
        rows = [_row(server, info, before.get(info.name), now, norms) for info in found]
        before = {row.info.name: (now, row) for row in rows}
        yield Look(datetime.now().astimezone(), rows)
        number += 1
        if number == count:
            return
        time.sleep(interval)


def _row(server: Client, info: BufferInfo, before: tuple[float, Row] | None, now: float, norms: bool) -> Row:
    if before is None or before[1].info.created_at != info.created_at:
        return Row(info, _norm(server, info.name) if norms else None, None)
    then, row = before
    adds = info.version - row.info.version
    if info.quorum is None:  # then what begins an epoch is not an add
        adds -= info.epoch - row.info.epoch
    norm = row.norm if info.etag == row.info.etag or not norms else _norm(server, info.name)
    return Row(info, norm, max(adds, 0) / (now - then))


def _norm(server: Client, name: str) -> float | None:
    try:
        value = server.buffers[name].value()
    except NotFound:  # it was removed a moment ago
        return None
    return float(np.linalg.norm(value.astype(np.float64)))


def show_live(looks: Iterator[Look]) -> None:
    """A table that changes."""
    with Live(console=console(), auto_refresh=False) as live:
        for look in looks:
            live.update(_table(look), refresh=True)


def print_lines(looks: Iterator[Look]) -> None:
    """A line for each buffer at each look."""
    typer.echo("\t".join(["time", *_COLUMNS]))
    for look in looks:
        for row in look.rows:
            typer.echo("\t".join([look.at.isoformat(timespec="seconds"), *row.cells()]))


def print_json(looks: Iterator[Look]) -> None:
    """A line of JSON for each look."""
    for look in looks:
        buffers = [{**asdict(row.info), "norm": row.norm, "adds_per_second": row.rate} for row in look.rows]
        document({"time": look.at.timestamp(), "buffers": buffers})


def _table(look: Look) -> Table:
    return table(_COLUMNS, (row.cells() for row in look.rows), wraps="name", numbers=_COLUMNS[3:])
