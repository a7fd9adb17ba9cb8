"""The command line for tests: its environment, and a terminal for it."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from gradserve_client import Client

COMMAND = str(Path(sys.executable).parent / "gradserve-client")
"""The path of the command."""


class Done(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        (line,) = self.out.splitlines()
        return json.loads(line)


Call: TypeAlias = Callable[..., Done]


def environment(url: str, **more: str) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("GRADSERVE_")}
    return {**ours, "GRADSERVE_URL": url, "TERM": "xterm", "COLUMNS": "80", **more}


def on_terminal(server: Client, *arguments: str | Path, types: str = "") -> Done:
    """Call the command on a terminal of 80 columns. `out` has all bytes that the terminal received."""
    ours, its = pty.openpty()
    termios.tcsetwinsize(its, (24, 80))
    variables = environment(server.url)
    del variables["COLUMNS"]
    with subprocess.Popen([COMMAND, *arguments], stdin=its, stdout=its, stderr=its, env=variables) as process:
        os.close(its)
        os.write(ours, types.encode())
        seen = b""
        while select.select([ours], [], [], 60)[0]:
            try:
                came = os.read(ours, 1 << 16)
            except OSError:  # the other side is closed
                break
            seen += came
            if not came:
                break
        else:
            process.kill()
    os.close(ours)
    return Done(process.returncode, seen.decode(), "")


def plain(text: str) -> str:
    """Return the text without colours and cursor movements."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
