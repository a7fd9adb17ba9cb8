"""The client where there is only what Windows has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

WITHOUT = """
import os, select, signal, socket, sys

def pair(*kind):  # as Python makes it on Windows
    with socket.create_server(("127.0.0.1", 0)) as door:
        mine = socket.create_connection(door.getsockname())
        return mine, door.accept()[0]

socket.socketpair = pair
for module in [one for one in sys.modules if one in ("grp", "pwd") or one.startswith("pathlib")]:
    del sys.modules[module]  # editable packages load pathlib at the start, which loads these from Python 3.13 on
for module in ["fcntl", "grp", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"]:
    assert module not in sys.modules, module
    sys.modules[module] = None
for module, names in (
    (os, ["fork", "forkpty", "register_at_fork", "getuid", "geteuid", "pread", "pwrite", "sched_getaffinity"]),
    (select, ["poll", "epoll"]),
    (signal, ["SIGALRM", "SIGHUP", "SIGKILL", "SIGQUIT", "SIGPIPE", "setitimer"]),
    (socket, ["AF_UNIX", "MSG_DONTWAIT", "SO_REUSEPORT"]),
):
    for name in names:
        module.__dict__.pop(name, None)
"""

CALLS = """
import asyncio
from gradserve_client import AsyncClient, Client

with Client(URL) as server:
    print(server.ops.relu_grad([1, 2], [0.5, -1]).tolist())
    buffer = server.buffers["windows"]
    buffer.create((2,))
    print(buffer.accumulate([1, 2], weight=3).count, buffer.take(reduce="mean").value.tolist())
    buffer.delete()

async def main():
    async with AsyncClient(URL) as server:
        print((await server.ops.relu_grad([1, 2], [0.5, -1])).tolist())

asyncio.run(main())
"""

COMMANDS = """
from gradserve_client.cli import main

sys.argv = ["gradserve-client", "--url", URL, "buffers", "ls", "no-name-begins-so", "--json"]
main()
"""


def run(program: str, url: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT + program.replace("URL", repr(url))],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_its_calls_need_nothing_else(url: str, tmp_path: Path) -> None:
    assert run(CALLS, url, tmp_path) == "[1.0, 0.0]\n1 [1.0, 2.0]\n[1.0, 0.0]\n"


def test_its_commands_need_nothing_else(url: str, tmp_path: Path) -> None:
    assert run(COMMANDS, url, tmp_path) == "[]\n"
