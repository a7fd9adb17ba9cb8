"""A live table that is as high as the terminal, and that keys scroll."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gradserve_client._output import console, table

_FRAME_LINES = 3
"""Lines of the screen beside the rows: the hint, the names of the columns, and the cursor's."""

_ENDLESS = 1 << 30
"""More rows than any table has."""

_KEYS = {
    **dict.fromkeys((b"\x1b[A", b"\x1bOA", b"k"), (-1, 0)),
    **dict.fromkeys((b"\x1b[B", b"\x1bOB", b"j"), (1, 0)),
    **dict.fromkeys((b"\x1b[5~", b"b"), (0, -1)),
    **dict.fromkeys((b"\x1b[6~", b" "), (0, 1)),
    **dict.fromkeys((b"\x1b[H", b"\x1b[1~", b"\x1bOH", b"g"), (-_ENDLESS, 0)),
    **dict.fromkeys((b"\x1b[F", b"\x1b[4~", b"\x1bOF", b"G"), (_ENDLESS, 0)),
}
"""What keys move: rows and pages. Terminals send arrows in two ways; the letters are those of pagers."""


class Scrolling:
    """A table on the terminal, whose rows `show` replaces. `pause` scrolls while it waits."""

    def __init__(self, columns: Sequence[str], **options: Any) -> None:
        self._columns, self._options = columns, options
        self._rows: list[list[str]] = []
        self._top = 0
        self._live = Live(console=console(), auto_refresh=False)
        self._keys = _keys()

    def __enter__(self) -> Self:
        self._input = self._keys.__enter__()
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        self._keys.__exit__(kind, error, trace)

    def show(self, rows: list[list[str]]) -> None:
        """Show these rows, from the same place on."""
        self._rows = rows
        self._move(0, 0)

    def pause(self, seconds: float) -> None:
        """Wait, and move as keys say."""
        end = time.monotonic() + seconds
        while (rest := end - time.monotonic()) > 0:
            if self._input is None or self._height >= len(self._rows):
                time.sleep(rest)
            elif select.select([self._input], [], [], rest)[0]:
                self._press(os.read(self._input, 1 << 10))

    def _press(self, keys: bytes) -> None:
        while keys:
            key = next((one for one in _KEYS if keys.startswith(one)), keys[:1])
            keys = keys[len(key) :]
            self._move(*_KEYS.get(key, (0, 0)))

    @property
    def _height(self) -> int:
        """The rows that the terminal has room for."""
        return max(self._live.console.height - _FRAME_LINES, 1)

    def _move(self, rows: int, pages: int) -> None:
        most = max(len(self._rows) - self._height, 0)
        self._top = max(0, min(self._top + rows + pages * self._height, most))
        self._live.update(self._view(), refresh=True)

    def _view(self) -> Group | Table:
        bottom = min(self._top + self._height, len(self._rows))
        shown = table(self._columns, self._rows[self._top : bottom], **self._options)
        if bottom - self._top == len(self._rows):
            return shown
        keys = "" if self._input is None else "; arrows, Page Up, Page Down, Home and End scroll"
        return Group(Text(f"rows {self._top + 1} to {bottom} of {len(self._rows)}{keys}", style="dim"), shown)


@contextmanager
def _keys() -> Iterator[int | None]:
    """Let the terminal pass on each key at once. Yield its descriptor; None where no terminal can."""
    terminal = _terminal()
    if terminal is None:
        yield None
        return
    import termios  # which Windows lacks
    import tty

    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal, termios.TCSANOW)
    try:
        yield terminal
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)


def _terminal() -> int | None:
    """Return the descriptor of the terminal whose keys are for this program, None without one."""
    if os.name != "posix" or sys.stdin is None or not sys.stdin.isatty():
        return None
    terminal = sys.stdin.fileno()
    try:
        in_front = os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:  # the terminal of no shell: nothing stops this program
        in_front = True
    return terminal if in_front else None  # the shell would stop a program in the background
