"""Processes that have imported much once, and fork servers or scripts from it, in a tenth of the time of the imports.

The servers fork their worker processes, too.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import resource
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
from types import ModuleType
from typing import Any, NoReturn

ROOT = Path(__file__).parents[1]

PRELOADED = (
    *("service.commands.cli", "service.api.server", "service.buffers.postgres", "uvicorn.lifespan.on"),
    *("gradserve_client", "gradserve_client.arrays"),
)
"""The modules that the process imports before it forks. The module that a server runs must not be among them."""

POLL_SECONDS = 0.01


class Zygote:
    """The process that forks. It ends with this process, and kills the servers that this process has left."""

    def __init__(self, preloaded: Sequence[str]) -> None:
        here, there = socket.socketpair()
        with there, here:
            command = [sys.executable, "-m", "tests.zygote", *preloaded]
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
def zygote(*preloaded: str) -> Zygote:
    """Return the zygote of this process with these modules. It starts when the first test needs it."""
    made = Zygote(preloaded)
    atexit.register(made.close)
    return made


class Forked:
    """`python -m module serve` or `python -W error path arguments`, forked, with the methods of `subprocess.Popen`.

    The file `out` gets stdout, and the file `log` gets stderr. `descriptors` are the soft and the hard limit.
    """

    def __init__(
        self,
        run: str,
        environment: Mapping[str, str],
        log: Path,
        *,
        arguments: Sequence[str] = ("serve",),
        out: str = os.devnull,
        preloaded: Sequence[str] = PRELOADED,
        descriptors: tuple[int, int] | None = None,
    ) -> None:
        self._lock, self.returncode, self._zygote = threading.Lock(), None, zygote(*preloaded)
        given = {"arguments": arguments, "environment": dict(environment), "descriptors": descriptors}
        pid = self._zygote.ask(run=run, out=out, log=str(log), **given)
        assert pid is not None
        self.pid: int = pid

    returncode: int | None

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                self.returncode = self._zygote.ask(ended=self.pid)
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
    for name in sys.argv[1:]:
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
    _run(**question)


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


def _run(
    run: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    out: str,
    log: str,
    descriptors: tuple[int, int] | None,
) -> None:
    """Do what `python -W error path arguments` or `python -m module arguments` does in a new process."""
    if descriptors is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, descriptors)
    os.environ.clear()
    os.environ.update(environment)
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, out, os.O_WRONLY | os.O_CREAT),
        (2, log, os.O_WRONLY | os.O_APPEND | os.O_CREAT),
    ):
        opened = os.open(path, flags, 0o666)
        os.dup2(opened, number)
        os.close(opened)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [run, *arguments]
    util.spawnv_passfds = _spawn
    if run.endswith(".py"):
        _run_script(run)
    runpy.run_module(run, run_name="__main__", alter_sys=True)


def _run_script(path: str) -> NoReturn:
    """Run the script as the main module, also for `multiprocessing`."""
    sys.warnoptions.append("error")
    warnings.simplefilter("error")
    sys.path[0] = os.path.dirname(path)
    main = sys.modules["__main__"] = sys.modules["__mp_main__"] = ModuleType("__main__")
    main.__file__ = path
    status = 0
    try:
        exec(compile(Path(path).read_text(), path, "exec"), main.__dict__)
    except SystemExit as ended:
        status = 1 if isinstance(ended.code, str) else ended.code or 0
        sys.stderr.write(f"{ended}\n" * isinstance(ended.code, str))
    except BaseException:
        status = 1
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)  # Python would take a second to delete what was imported


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
