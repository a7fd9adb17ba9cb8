from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import ssl
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import certifi
import httpx
import hypothesis
import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG
from xdist.workermanage import NodeManager  # type: ignore[import-untyped]

from tests.postgres import cluster
from tests.temporary import use_memory

hypothesis.settings.register_profile(
    "busy machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy machine")


EXIT_SECONDS = 60
"""How long a process of pytest may take to end. Then it shows its stacks, before pytest-xdist kills it."""

NodeManager.EXIT_TIMEOUT = EXIT_SECONDS + 30

for part in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, part, 60)  # httpx gives up after 5 seconds, which a busy machine may take


def pytest_configure(config: pytest.Config) -> None:
    """Keep temporary files in memory. Processes of pytest-xdist have those of the first process."""
    if not hasattr(config, "workerinput") and "TMPDIR" not in os.environ:
        use_memory()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave modules that are no tests alone, unless they are named: else pytest imports all, to look for doctests."""
    named = collection_path.name in {Path(argument.partition("::")[0]).name for argument in config.args}
    is_test = collection_path.name.startswith(("test_", "__init__", "conftest"))
    return True if collection_path.suffix == ".py" and not is_test and not named else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of modules that start server processes."""
    for item in items:
        if hasattr(getattr(item, "module", None), "Server"):
            item.add_marker("processes")


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Fail the run if a process of pytest-xdist does not end by itself. It waits until all tests have run."""
    manager = getattr(session.config.pluginmanager.getplugin("dsession"), "nodemanager", None)
    processes = [gateway._io.popen for gateway in manager.group] if manager is not None else []
    timer = threading.Timer(EXIT_SECONDS, abort, [processes])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    if any(process.returncode for process in processes):
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


def abort(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End processes. They show their stacks."""
    for process in processes:
        process.send_signal(signal.SIGABRT)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Show the stacks of a process that does not end, and end it."""
    if hasattr(config, "workerinput"):
        faulthandler.enable()
    else:
        faulthandler.dump_traceback_later(EXIT_SECONDS, exit=True)


@pytest.fixture(scope="session", autouse=True)
def signals() -> None:
    """Restore default signal handlers: a shell ignores some signals for background jobs, and servers must not."""
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def authorities() -> Iterator[None]:
    """Load the certificates of authorities once: httpx takes 20 ms to load them for every client and `httpx.get`."""
    create, usual = ssl.create_default_context, os.environ.get("SSL_CERT_FILE") or certifi.where()
    context = create(cafile=usual)

    def create_once(*args: Any, **named: Any) -> ssl.SSLContext:
        return context if (args, named) == ((), {"cafile": usual}) else create(*args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", create_once)
        yield


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """Yield the URL of a server whose limits are small enough to reach."""
    from tests.serving import serving  # here: without the service, test_scipy_private.py can tell why it fails

    with serving(max_body_bytes=2 << 20, max_inflated_bytes=2 << 20, max_tensor_bytes=1 << 20, threads=2) as url:
        yield url


@pytest.fixture(scope="session")
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=30) as client:
        yield client


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """Yield the URL of a PostgreSQL server that all tests of the session share."""
    with cluster() as made:
        yield made.url


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Make a self-signed certificate of localhost and 127.0.0.1, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    place = tmp_path_factory.mktemp("tls")
    key, made = place / "key.pem", place / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    named = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", key, "-out", made, *named], check=True, capture_output=True)
    return made, key
