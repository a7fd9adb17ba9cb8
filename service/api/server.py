"""The server: uvicorn with one process or several. A signal stops it gracefully, and a second signal at once."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from socket import AF_UNIX, socket
from tempfile import TemporaryDirectory
from types import FrameType

import uvicorn
from uvicorn.supervisors.multiprocess import Multiprocess, Process

from service.api import graphs, health, runs, static
from service.api.app import Application
from service.api.buffers import many, pushes, routes
from service.api.dashboard import buffers as buffer_statistics
from service.api.dashboard import limits, service
from service.api.dashboard.history import History
from service.api.dashboard.statistics import BufferStatistics
from service.api.http.connection import Connection
from service.api.http.descriptors import raise_limit
from service.api.operators import catalogue, open_inference, rest, shared_memory
from service.api.operators.statistics import OperatorStatistics
from service.api.start_line import start_line
from service.api.telemetry import logs
from service.api.telemetry.metrics import METRICS_DIRECTORY, Metrics, Observer, check_workers
from service.errors import NotReady
from service.host import tcp, unix_socket
from service.host.files import locked
from service.host.shared_memory import Regions
from service.host.system import collect_rarely, keep_freed_memory
from service.settings import Settings

logger = logging.getLogger("gradserve")


STARTED_AT = "GRADSERVE_STARTED_AT"
"""The environment variable with the time when the server of these processes started, in seconds since 1970."""


def create_app(settings: Settings) -> Application:
    """Return the application, which `Connection` serves. Its engine and its store live from startup to shutdown."""
    shared = Path(given) if settings.workers > 1 and (given := os.environ.get(METRICS_DIRECTORY)) else None
    metrics, statistics = Metrics(shared, settings.workers), OperatorStatistics()
    history = History(metrics, settings.store_bytes)
    started_at = float(os.environ.get(STARTED_AT, time.time())) if shared else time.time()
    observers: list[Observer] = [metrics, statistics]
    if settings.tracing:
        from service.api.telemetry.tracing import Tracer  # it needs the extra otel

        observers.append(Tracer())
    if settings.access_log:
        observers.append(logs.AccessLog())
    routers = [
        rest.router,
        open_inference.router,
        catalogue.routes(statistics),
        shared_memory.router,
        shared_memory.cuda,
        routes.router,
        many.router,
        pushes.router,
        graphs.router,
        runs.router,
        buffer_statistics.routes(BufferStatistics()),
        health.routes(metrics),
        limits.router,
        service.routes(history, started_at),
        static.routes(lambda: app.openapi()),
    ]
    regions = Regions(shared) if settings.shared_memory else None
    app = Application(settings, routers, observers, metrics, history, regions)
    return app


def in_worker() -> Application:
    """Return the application of a worker process, with the settings of the environment."""
    _stop_without_parent()
    for number in (signal.SIGINT, *ALSO_STOPPING):  # a terminal signals every process; the parent stops the workers
        signal.signal(number, signal.SIG_IGN)
    settings = Settings()
    keep_freed_memory(settings.reuse_bytes)
    app = create_app(settings)
    collect_rarely()
    return app


def _stop_without_parent() -> None:
    """Send SIGTERM to this worker process when its parent ends: a killed parent cannot."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
        _begin_to_stop(Settings().drain_timeout)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def server_config(settings: Settings) -> uvicorn.Config:
    """Return uvicorn's configuration of the server and its application."""
    return uvicorn.Config(
        create_app(settings) if settings.workers == 1 else "service.api.server:in_worker",
        factory=settings.workers > 1,
        workers=settings.workers,
        loop="service.api.http.connection:Loop" if settings.tls_certificate else "auto",
        timeout_graceful_shutdown=settings.drain_timeout,
        timeout_keep_alive=settings.keep_alive,
        timeout_worker_healthcheck=SILENT_SECONDS,
        http=Connection,
        ws="none",
        access_log=False,  # `logs` writes the access log
        log_config=logs.config(settings),
        proxy_headers=False,
        server_header=False,
        headers=[("X-Content-Type-Options", "nosniff")],  # of all answers
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
    )


@contextmanager
def listening(settings: Settings) -> Iterator[list[socket]]:
    """Yield the sockets of the server: one for each address of the host, and the UNIX socket.

    Raises `AddressInvalid`, and OSError if an address is in use.
    """
    with ExitStack() as stack:
        sockets = stack.enter_context(tcp.bound(settings.host, settings.port)) if settings.uses_tcp else []
        if settings.socket is not None:
            sockets.append(stack.enter_context(unix_socket.listening(settings.socket, settings.socket_mode)))
        yield sockets


SILENT_SECONDS = 30
"""Seconds after which a silent worker is replaced. A busy machine may take ten to import what a worker needs."""

ALSO_STOPPING = (signal.SIGHUP, signal.SIGQUIT)
"""Signals that stop the server besides SIGTERM and SIGINT, unless the process ignores them, as under nohup."""

STOPPING = (signal.SIGINT, signal.SIGTERM, *ALSO_STOPPING)
"""All signals that stop the server."""

_CRASHES = {-number: number.name for number in (signal.SIGABRT, signal.SIGBUS, signal.SIGSEGV)}
"""How workers die of a fault in native code, by their exit status: LMDB reads damaged pages as they are."""

_ADVICE = (
    "Worker processes die of %s, as they do if the buffer store is damaged. Stop the server and run gradserve doctor."
    " If it finds damage, move the store away and restore the buffers from an export (gradserve import)"
)

_STOPPING = "gradserve stops; requests in flight have %d seconds to finish"

LAST_SECONDS = 5
"""Seconds after GRADSERVE_DRAIN_TIMEOUT at which the server ends, whatever it still does. Kernels that stop because
nobody waits for them any more take about one."""

_ENDED = "Work goes on %d seconds after GRADSERVE_DRAIN_TIMEOUT, so gradserve ends without it. Nothing answered is lost"

SAME_SECONDS = 0.25
"""Seconds until a repeated signal counts as a second one: `timeout`, say, signals a process and then its group."""


def run(settings: Settings, sockets: list[socket], buffers: int) -> None:
    """Serve on `sockets` until SIGTERM, SIGINT, SIGHUP or SIGQUIT. The store has `buffers` buffers at the start."""
    raise_limit()
    config, line = server_config(settings), start_line(settings, _port(sockets[0]), buffers)
    for number in ALSO_STOPPING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: signal.raise_signal(signal.SIGTERM))
    if settings.workers == 1:
        collect_rarely()
        _Server(config, line).run(sockets)
    else:
        with TemporaryDirectory(prefix="gradserve-") as directory, locked(Path(directory)):
            # without the lock, systemd-tmpfiles would remove old files of the directory
            os.environ[METRICS_DIRECTORY], os.environ[STARTED_AT] = directory, str(time.time())
            _Workers(config, sockets, line, Path(directory)).run()
    for number in STOPPING:  # the same signal may come again, as SAME_SECONDS says
        signal.signal(number, signal.SIG_IGN)


def _begin_to_stop(drain_seconds: int | None, processes: Sequence[Process] = ()) -> None:
    """Log that the server stops. If these processes or this one work on after the drain, end all with status 1."""

    def end() -> None:
        logger.error(_ENDED, LAST_SECONDS)
        for process in processes:
            process.kill()
        os._exit(1)

    logger.info(_STOPPING, drain_seconds)
    timer = threading.Timer((drain_seconds or 0) + LAST_SECONDS, end)
    timer.daemon = True
    timer.start()


def _port(listener: socket) -> int:
    """Return the port that a socket listens on; 0 for a UNIX socket."""
    return 0 if listener.family == AF_UNIX else int(listener.getsockname()[1])


class _Server(uvicorn.Server):
    _signalled_at = 0.0

    def __init__(self, config: uvicorn.Config, line: str) -> None:
        super().__init__(config)
        self._line = line

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Log the start line once the server listens."""
        await super().startup(sockets)
        logger.info(self._line)

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        _begin_to_stop(self.config.timeout_graceful_shutdown)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            self.should_exit = True  # not uvicorn's own handler, which would raise the signal again at the end
            self._signalled_at = time.monotonic()
        elif time.monotonic() > self._signalled_at + SAME_SECONDS:
            os._exit(1)  # all that was acknowledged is on the disk


class _Workers(Multiprocess):
    """The parent of the worker processes. It logs the start line once all serve, and replaces a worker that dies."""

    _signalled_at = 0.0

    def __init__(self, config: uvicorn.Config, sockets: list[socket], line: str, directory: Path) -> None:
        self._line: str | None = line
        self._directory = directory
        self._crashes: set[int] = set()  # how workers died, by their exit status
        ignored = [number for number in ALSO_STOPPING if signal.getsignal(number) is signal.SIG_IGN]
        super().__init__(config, sockets=sockets)
        for number in STOPPING:
            signal.signal(number, signal.SIG_IGN if number in ignored else self._stop_gracefully)

    def _stop_gracefully(self, number: int, frame: FrameType | None) -> None:
        self.signal_queue.append(number)  # which uvicorn reads twice a second
        self._signalled_at = time.monotonic()
        for stopping in STOPPING:
            if signal.getsignal(stopping) is not signal.SIG_IGN:
                signal.signal(stopping, self._stop_at_once)

    def keep_subprocess_alive(self) -> None:
        """Replace workers that died or hang. Say what to do if a second worker dies of the same crash."""
        if self._line is not None and self._all_serve():
            logger.info(self._line)
            self._line = None
        for process in self.processes:
            process.child_conn.close()  # so that a ping fails once the worker has died, not after SILENT_SECONDS
        before = [*self.processes]
        super().keep_subprocess_alive()
        for gone in [process.process for process in before if process not in self.processes]:
            logger.warning("Worker process %s ended with status %s, and is replaced", gone.pid, gone.exitcode)
            if gone.exitcode in _CRASHES:
                if gone.exitcode in self._crashes:
                    logger.error(_ADVICE, _CRASHES[gone.exitcode])
                self._crashes.add(gone.exitcode)

    def handle_ttin(self) -> None:
        """Ignore SIGTTIN: the number of workers is fixed, or the server would never be ready."""

    def handle_ttou(self) -> None:
        """Ignore SIGTTOU, for the same reason."""

    def _all_serve(self) -> bool:
        try:
            check_workers(self._directory, self.processes_num)
        except NotReady:
            return False
        return True

    def _stop(self) -> None:
        _begin_to_stop(self.config.timeout_graceful_shutdown, self.processes)
        self.should_exit.set()
        for listener in self.sockets:
            listener.close()  # else connections would queue up that no worker accepts

    handle_hup = handle_int = handle_quit = handle_term = _stop

    def _stop_at_once(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() <= self._signalled_at + SAME_SECONDS:
            return
        for process in self.processes:
            process.kill()
        os._exit(1)
