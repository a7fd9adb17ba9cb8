"""Fair timing, and its tables.

A figure by itself says little of a machine that others share. So contenders run by turns, in one process and in one
run, and what counts is the ratio of their medians.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

R = TypeVar("R")

WARM_UP = 3
_CPU_TIMES = Path("/proc/stat")


def alternate(
    contenders: Mapping[str, Callable[[], R]],
    *,
    seconds: float,
    least: int = 15,
    calls: int = 1,
    check: Callable[[str, R], object] | None = None,
) -> dict[str, float]:
    """The median time of a call of each contender, in seconds.

    They are called by turns, `calls` times in a row, in as many rounds as fit in `seconds`, but at least `least`, after
    a few rounds that do not count. `check`, given the contender's name and what it returned, runs outside the measured
    time.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    collected = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        end, rounds = time.perf_counter() + seconds, 0
        while rounds < WARM_UP + least or time.perf_counter() < end:
            for name, call in [contender for contender in contenders.items() for _ in range(calls)]:
                start = time.perf_counter()
                result = call()
                times[name].append(time.perf_counter() - start)
                if check is not None:
                    check(name, result)
            rounds += 1
    finally:
        if collected:
            gc.enable()
    return {name: statistics.median(taken[WARM_UP * calls :]) for name, taken in times.items()}


@contextmanager
def watched() -> Iterator[None]:
    """Say at the end how busy other processes were: where that is more than a few percent, the figures are worth less.

    Counts this process and its children that have ended by then. Says nothing where the system is not Linux.
    """
    if not _CPU_TIMES.exists():
        yield
        return
    start, others = time.monotonic(), _busy() - sum(os.times()[:4])
    yield
    share = (_busy() - sum(os.times()[:4]) - others) / (time.monotonic() - start) / (os.cpu_count() or 1)
    print(f"\nOther processes took {max(share, 0):.0%} of the processors' time meanwhile.")


def _busy() -> float:
    """The seconds that all processors together have worked."""
    user, nice, system, _idle, _waiting, *rest = map(int, _CPU_TIMES.read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def verdict(met: bool) -> str:
    """What a table says of a target."""
    return "yes" if met else "no"


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """An aligned Markdown table, its first two columns to the left and the others, of numbers, to the right."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rule = ["-" * width if k < 2 else "-" * (width - 1) + ":" for k, width in enumerate(widths)]
    lines = [cells[0], rule, *cells[1:]]
    return "\n".join(
        "| " + " | ".join(f"{cell:{'<' if k < 2 else '>'}{widths[k]}}" for k, cell in enumerate(line)) + " |"
        for line in lines
    )
