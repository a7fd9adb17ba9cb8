"""Snapshots of buffers: the rate of their adds, and the norms of their sums."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import numpy as np
import typer

from gradserve_client._output import LATE_COLUMNS, count, late, print_json, shape
from gradserve_client._scrolling import Scrolling
from gradserve_client._watch_groups import GROUP_COLUMNS, Group, group_of
from gradserve_client.buffers import Buffers
from gradserve_client.errors import NotFound
from gradserve_client.models import BufferInfo

_NUMBERS = ["epoch", "count", "weight", "norm", "adds/s"]
_ROW_COLUMNS = ["name", "shape", "dtype", *_NUMBERS]


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

    def as_json(self) -> dict[str, Any]:
        """Return the buffer for programs."""
        return {**asdict(self.info), "norm": self.norm, "adds_per_second": self.rate}


@dataclass(frozen=True)
class Snapshot:
    """The buffers at a time."""

    at: datetime
    rows: Sequence[Row | Group]


@dataclass(frozen=True)
class Watch:
    """What to watch: the buffers with a prefix, or groups of them."""

    buffers: Buffers
    prefix: str
    interval: float
    """Seconds between two snapshots."""
    count: int | None
    """The number of snapshots; None: without end."""
    norms: bool
    in_groups: bool

    @property
    def columns(self) -> list[str]:
        """The names of the cells of each row."""
        return [*(GROUP_COLUMNS if self.in_groups else _ROW_COLUMNS), *LATE_COLUMNS]

    def snapshots(self, pause: Callable[[float], None] = time.sleep) -> Iterator[Snapshot]:
        """Yield the snapshots. `pause` waits between them."""
        before: dict[str, tuple[float, Row]] = {}
        for number in itertools.count(1):
            now, infos = time.monotonic(), self.buffers.list(self.prefix)
            rows = [_row(self.buffers, info, before.get(info.name), now, self.norms) for info in infos]
            before = {row.info.name: (now, row) for row in rows}
            yield Snapshot(datetime.now().astimezone(), self._grouped(rows) if self.in_groups else rows)
            if number == self.count:
                return
            pause(self.interval)

    def _grouped(self, rows: Sequence[Row]) -> list[Group]:
        members: dict[str, list[Row]] = {}
        for row in rows:
            members.setdefault(group_of(row.info.name, self.prefix), []).append(row)
        return [Group.of(prefix, some) for prefix, some in members.items()]


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


def show_live(watch: Watch) -> None:
    """Show a table that changes in place."""
    numbers = [*_NUMBERS, "buffers", "size"]
    with Scrolling(watch.columns, wraps=watch.columns[0], numbers=numbers, optional=LATE_COLUMNS) as shown:
        for snapshot in watch.snapshots(shown.pause):
            shown.show([row.cells() for row in snapshot.rows])


def print_lines(watch: Watch) -> None:
    """Print a line for each row of each snapshot."""
    typer.echo("\t".join(["time", *watch.columns]))
    for snapshot in watch.snapshots():
        for row in snapshot.rows:
            typer.echo("\t".join([snapshot.at.isoformat(timespec="seconds"), *row.cells()]))


def print_documents(watch: Watch) -> None:
    """Print a line of JSON for each snapshot."""
    for snapshot in watch.snapshots():
        rows = [row.as_json() for row in snapshot.rows]
        print_json({"time": snapshot.at.timestamp(), "groups" if watch.in_groups else "buffers": rows})
