"""`watch`: the buffers with a prefix, again and again, with the rate of their adds and the norms of their sums."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from datetime import datetime

import typer
from rich.live import Live

from gradserve_client._cli.output import LATE_COLUMNS, console, count, late, print_json, shape, table
from gradserve_client.buffers import Buffers
from gradserve_client.errors import NotFound
from gradserve_client.models import BufferInfo

_NUMBERS = ["epoch", "count", "weight", "norm", "adds/s"]
COLUMNS = ["name", "shape", "dtype", *_NUMBERS, *LATE_COLUMNS]

Row = tuple[BufferInfo, float | None, float | None]
"""A buffer, the norm of its sum, and adds per second since the last update; None for what is not known yet."""


def show_updates(buffers: Buffers, prefix: str, interval: float, times: int | None, *, as_json: bool) -> None:
    """Show the buffers in a table that changes in place, or in lines if the output is not a terminal."""
    live = Live(console=console(), auto_refresh=False) if console().is_terminal and not as_json else None
    if live is None and not as_json:
        typer.echo("\t".join(["time", *COLUMNS]))
    with live or nullcontext():
        for rows in _updates(buffers, prefix, interval, times):
            now = datetime.now().astimezone()
            if as_json:
                found = [{**asdict(info), "norm": norm, "adds_per_second": rate} for info, norm, rate in rows]
                print_json({"time": now.timestamp(), "buffers": found})
            elif live is None:
                for row in rows:
                    typer.echo("\t".join([now.isoformat(timespec="seconds"), *_cells(row)]))
            else:
                cells = map(_cells, rows)
                live.update(table(COLUMNS, cells, wraps="name", numbers=_NUMBERS, optional=LATE_COLUMNS), refresh=True)


def _updates(buffers: Buffers, prefix: str, interval: float, times: int | None) -> Iterator[list[Row]]:
    before: dict[str, tuple[float, BufferInfo]] = {}
    for number in itertools.count(1):
        now, infos = time.monotonic(), buffers.list(prefix)
        norms = _norms(buffers, prefix) if infos else {}
        yield [(info, norms.get(info.name), _rate(info, before.get(info.name), now)) for info in infos]
        before = {info.name: (now, info) for info in infos}
        if number == times:
            return
        time.sleep(interval)


def _norms(buffers: Buffers, prefix: str) -> dict[str, float | None]:
    """Return the norms that the server has computed. It may come to other sums by the next update."""
    try:
        found = buffers.statistics(prefix=prefix)
    except NotFound:  # the buffers were deleted after they were listed
        return {}
    return {name: one.norm for name, one in found.items() if one is not None}


def _rate(info: BufferInfo, before: tuple[float, BufferInfo] | None, now: float) -> float | None:
    if before is None or before[1].created_at != info.created_at:
        return None
    then, last = before
    closings = info.epoch - last.epoch if info.quorum is None else 0  # a take or a zero is no add
    return max(info.version - last.version - closings, 0) / (now - then)


def _cells(row: Row) -> list[str]:
    info, norm, rate = row
    return [
        *(info.name, shape(info.shape), info.dtype, str(info.epoch), count(info), f"{info.weight:g}"),
        *("" if norm is None else f"{norm:.4g}", "" if rate is None else f"{rate:.3g}"),
        *late(info),
    ]
