"""`watch`: the buffers with a prefix, again and again: the rate of their adds, their norms, and what is wrong."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import typer
from rich.live import Live

from gradserve_client._cli.output import LATE_COLUMNS, console, count, late, print_json, shape, table
from gradserve_client._http.words import WAITING_SECONDS, waiting
from gradserve_client.errors import NotFound
from gradserve_client.models import BufferInfo, Statistics

if TYPE_CHECKING:
    from gradserve_client._cli.server import Server
    from gradserve_client.buffers import Buffers

_NUMBERS = ["step", "count", "weight", "norm", "adds/s"]
_OPTIONAL = [*LATE_COLUMNS, "state"]
COLUMNS = ["name", "shape", "dtype", *_NUMBERS, *_OPTIONAL]

_LATE_SHARE = 0.25
"""The share of a deadline that is left when a step is late, as on the page."""

_CLOCK_SECONDS = 2.0
"""Seconds that the clocks may seem to differ by: a server writes its time once a second, without fractions."""


class Row(NamedTuple):
    """A buffer, the norm of its sum, and adds per second since the last update; None for what is not known yet."""

    info: BufferInfo
    norm: float | None
    rate: float | None
    state: str
    """What is wrong, if anything is."""


def show_updates(server: Server, prefix: str, interval: float, times: int | None, *, as_json: bool) -> None:
    """Show the buffers in a table that changes in place, or in lines if the output is not a terminal."""
    live = Live(console=console(), auto_refresh=False) if console().is_terminal and not as_json else None
    if live is None and not as_json:
        typer.echo("\t".join(["time", *COLUMNS]))
    with live or nullcontext():
        for rows in _updates(server, prefix, interval, times):
            now = datetime.now().astimezone()
            if as_json:
                print_json({"time": now.timestamp(), "buffers": [_json(row) for row in rows]})
            elif live is None:
                for row in rows:
                    typer.echo("\t".join([now.isoformat(timespec="seconds"), *_cells(row)]))
            else:
                cells = map(_cells, rows)
                live.update(table(COLUMNS, cells, wraps="name", numbers=_NUMBERS, optional=_OPTIONAL), refresh=True)


def _updates(server: Server, prefix: str, interval: float, times: int | None) -> Iterator[list[Row]]:
    ahead = _ahead(server)
    before: dict[str, tuple[float, BufferInfo]] = {}
    for number in itertools.count(1):
        now, infos = time.monotonic(), server.buffers.list(prefix)
        sums = _statistics(server.buffers, prefix) if infos else {}
        at = time.time() + ahead
        yield [_row(info, sums.get(info.name), _rate(info, before.get(info.name), now), at) for info in infos]
        before = {info.name: (now, info) for info in infos}
        if number == times:
            return
        time.sleep(interval)


def _row(info: BufferInfo, sums: Statistics | None, rate: float | None, now: float) -> Row:
    return Row(info, None if sums is None else sums.norm, rate, _state(info, sums, now))


def _ahead(server: Server) -> float:
    """Return the seconds that the server's clock is ahead of this machine's."""
    from gradserve_client._wire import calls

    its = server.run(calls.clock())
    ahead = 0.0 if its is None else its - time.time()
    return ahead if abs(ahead) > _CLOCK_SECONDS else 0.0


def _statistics(buffers: Buffers, prefix: str) -> Mapping[str, Statistics | None]:
    """Return the statistics that the server has computed. It may come to other sums by the next update."""
    try:
        return buffers.statistics(prefix=prefix)
    except NotFound:  # the buffers were deleted after they were listed
        return {}


def _state(info: BufferInfo, sums: Statistics | None, now: float) -> str:
    """Return what is wrong with a buffer at the server's time `now`, with the rules and the words of the page."""
    if sums is not None and sums.nan + sums.infinite:
        return "non-finite"
    still, missing = now - info.updated_at, info.missing or ()
    if still >= WAITING_SECONDS and info.count and (missing or _lacks(info)):
        return waiting(missing, info.count, info.quorum, still, otherwise="more weight")
    is_late = info.deadline_at is not None and info.deadline_at - now < _LATE_SHARE * (info.deadline_seconds or 0)
    return "late" if is_late else ""


def _lacks(info: BufferInfo) -> bool:
    """Whether the step has a quorum, and has not got that much."""
    shares = [(info.count, info.quorum), (info.weight, info.quorum_weight)]
    wanted = [(part, whole) for part, whole in shares if whole is not None]
    return bool(wanted) and all(part < whole for part, whole in wanted)


def _rate(info: BufferInfo, before: tuple[float, BufferInfo] | None, now: float) -> float | None:
    if before is None or before[1].created_at != info.created_at:
        return None
    then, last = before
    closings = info.step - last.step if info.quorum is None else 0  # a take or a zero is no add
    return max(info.version - last.version - closings, 0) / (now - then)


def _json(row: Row) -> dict[str, Any]:
    return {**asdict(row.info), "norm": row.norm, "adds_per_second": row.rate, "state": row.state}


def _cells(row: Row) -> list[str]:
    info, norm, rate, state = row
    return [
        *(info.name, shape(info.shape), info.dtype, str(info.step), count(info), f"{info.weight:g}"),
        *("" if norm is None else f"{norm:.4g}", "" if rate is None else f"{rate:.3g}"),
        *late(info),
        state,
    ]
