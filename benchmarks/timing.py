"""Fair timing, and its tables.

A single figure says little on a shared machine. So contenders run by turns, in one process and in one run, and the
result is the ratio of their medians.
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
    """Return the median time in seconds of a call of each contender.

    Contenders run by turns, `calls` times in a row, in as many rounds as fit in `seconds`, but at least `least`. A few
    rounds before do not count. `check` gets the contender's name and result, outside the measured time.
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
    """Print at the end how busy other processes were: beyond a few percent, the figures are worth less.

    This process and its ended children do not count as other. Print nothing on systems other than Linux.
    """
    if not _CPU_TIMES.exists():
        yield
        return
    start, others = time.monotonic(), _busy() - sum(os.times()[:4])
    yield
    share = (_busy() - sum(os.times()[:4]) - others) / (time.monotonic() - start) / (os.cpu_count() or 1)
    print(f"\nOther processes took {max(share, 0):.0%} of the processors' time meanwhile.")


def _busy() -> float:
    """Return the busy seconds of all processors together."""
    user, nice, system, _idle, _waiting, *rest = map(int, _CPU_TIMES.read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def verdict(met: bool) -> str:
    """Return the word for a target in a table."""
    return "yes" if met else "no"


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return an aligned Markdown table: the first two columns to the left, the others to the right."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rule = ["-" * width if k < 2 else "-" * (width - 1) + ":" for k, width in enumerate(widths)]
    lines = [cells[0], rule, *cells[1:]]
    return "\n".join(
        "| " + " | ".join(f"{cell:{'<' if k < 2 else '>'}{widths[k]}}" for k, cell in enumerate(line)) + " |"
        for line in lines
    )
