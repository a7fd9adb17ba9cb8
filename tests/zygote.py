"""A process that has imported the service once and forks servers from it, in a tenth of the time of the imports.

The servers fork their worker processes, too.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from multiprocessing import util
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[1]

PRELOADED = ["service.commands.cli", "service.api.server", "service.buffers.postgres", "uvicorn.lifespan.on"]
"""The modules that the process imports before it forks. The module that a server runs must not be among them."""

POLL_SECONDS = 0.01


class Zygote:
    """The process that forks. It ends with this process, and kills the servers that this process has left."""

    def __init__(self) -> None:
        here, there = socket.socketpair()
        with there, here:
            command = [sys.executable, "-m", "tests.zygote"]
            self._process = subprocess.Popen(command, cwd=ROOT, stdin=there.fileno(), stdout=subprocess.DEVNULL)
            self._lines = here.makefile("rw")
        self._lock = threading.Lock()

    def ask(self, **question: Any) -> int | None:
        """Ask for the id of a new server process, or for the exit status of one with this id."""
        with self._lock:
            print(json.dumps(question), file=self._lines, flush=True)
            answer: int | None = json.loads(self._lines.readline())
            return answer

    def close(self) -> None:
        self._lines.close()
        self._process.wait()


@cache
def zygote() -> Zygote:
    """Return the zygote of this process. It starts when the first test needs it."""
    made = Zygote()
    atexit.register(made.close)
    return made


class Forked:
    """A server that the zygote has forked, with the methods of `subprocess.Popen`."""

    def __init__(self, module: str, environment: Mapping[str, str], log: Path) -> None:
        self._lock, self.returncode = threading.Lock(), None
        pid = zygote().ask(module=module, environment=dict(environment), log=str(log))
        assert pid is not None
        self.pid: int = pid

    returncode: int | None

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                self.returncode = zygote().ask(ended=self.pid)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("service", timeout or 0)
            time.sleep(POLL_SECONDS)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def main() -> None:
    """Answer the questions of `Zygote`. In a forked process, run the server and end as it does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of the group; this one ends after them
    for name in PRELOADED:
        importlib.import_module(name)
    running: set[int] = set()
    with socket.socket(fileno=os.dup(0)) as asking, asking.makefile("rw") as lines:
        while line := lines.readline():
            question = json.loads(line)
            answer: int | None
            if "ended" in question:
                answer = _ended(question["ended"], running)
            elif answer := _fork():
                running.add(answer)
            else:
                break  # this is the new process
            print(json.dumps(answer), file=lines, flush=True)
        else:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            return
    _serve(**question)


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # NumPy has threads, which OpenBLAS ends before a fork
        return os.fork()


def _ended(pid: int, running: set[int]) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        return None
    running.discard(pid)
    return os.waitstatus_to_exitcode(status)


def _serve(module: str, environment: Mapping[str, str], log: str) -> None:
    """Do what `python -m module serve` does in a new process."""
    os.environ.clear()
    os.environ.update(environment)
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, os.devnull, os.O_WRONLY),
        (2, log, os.O_WRONLY | os.O_APPEND | os.O_CREAT),
    ):
        opened = os.open(path, flags, 0o666)
        os.dup2(opened, number)
        os.close(opened)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    util.spawnv_passfds = _spawn
    sys.argv = [module, "serve"]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


_execute = util.spawnv_passfds


def _spawn(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """Start a process for `multiprocessing`, which has no other way to start one. Fork if it is a worker process."""
    if "--multiprocessing-fork" not in args:
        return _execute(path, args, passfds)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # until the new process has no handlers
    pid = _fork()
    if not pid:
        _work(args, passfds, mask)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid


def _work(command: Sequence[Any], descriptors: Sequence[int], mask: Iterable[int]) -> NoReturn:
    """Do what a new process does with this command: it has these descriptors only, and no handlers of signals."""
    gc.freeze()  # the files of the server are closed here, but their objects must not close their numbers once more
    kept = sorted({0, 1, 2, *descriptors})
    for last, following in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(last + 1, following)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    code = command.index("-c") + 1
    sys.argv = ["-c", *command[code + 1 :]]
    try:
        exec(command[code])  # it ends with SystemExit
    except SystemExit as ended:
        os._exit(ended.code if isinstance(ended.code, int) else 1)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


if __name__ == "__main__":
    main()
