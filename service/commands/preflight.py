"""The checks before the server starts: a fault is reported once and at once, rather than by every worker."""

from __future__ import annotations

import ipaddress
import os
import ssl
from importlib import import_module
from pathlib import Path

from service.errors import shown
from service.host import tcp, unix_socket
from service.host.files import open_regular
from service.host.shared_memory import OBJECTS
from service.keys import KeyFileInvalid, load
from service.settings import VARIABLES, Settings

OF_CLIENTS = frozenset({"GRADSERVE_URL", "GRADSERVE_API_KEY"})
"""Variables that the clients read."""


class UsageError(Exception):
    """The arguments or settings are wrong. `args` holds one line for each fault."""


def check(settings: Settings) -> None:
    """Raise `UsageError` or `AddressInvalid` if no server can or may start with these settings."""
    if settings.uses_tcp:
        tcp.addresses(settings.host, settings.port)
    _check_access(settings)
    _check_certificate(settings)
    _check_tracing(settings)
    _check_shared_memory(settings)


def check_backup(path: Path | None, store: Path | None) -> None:
    """Raise `UsageError` if a backup at `path` would be lost with the store: it would lie in the store's directory."""
    if path and store and Path(os.path.realpath(path)).is_relative_to(os.path.realpath(store)):
        raise UsageError(
            f"{path} would be in {store}, the directory of the store, and be lost with it: name a file elsewhere, or"
            " write to stdout (-)"
        )


def unused_variables() -> list[str]:
    """Return the GRADSERVE_ variables that neither the server nor a client reads, sorted."""
    used = VARIABLES | OF_CLIENTS
    return sorted(name for name in os.environ if name.startswith("GRADSERVE_") and name.upper() not in used)


def _check_access(settings: Settings) -> None:
    """Raise `UsageError` if anyone on the network could use the service, or if the keys cannot be read."""
    if settings.keys is None:
        if settings.allow_anonymous:
            return
        if settings.uses_tcp and not _is_loopback(settings.host):
            raise UsageError(
                f"GRADSERVE_HOST is {shown(settings.host)}, which other machines can reach, and without API keys anyone"
                " there could use the service. Set GRADSERVE_KEYS (see gradserve keys add --help), or listen on"
                " 127.0.0.1, or set GRADSERVE_ALLOW_ANONYMOUS=true to allow it"
            )
        if settings.socket is not None and not unix_socket.is_private(settings.socket_mode):
            raise UsageError(
                f"GRADSERVE_SOCKET_MODE is {settings.socket_mode}, which lets other users open the socket, and without"
                " API keys they could use the service. Set GRADSERVE_KEYS (see gradserve keys add --help), or use 0600,"
                " or set GRADSERVE_ALLOW_ANONYMOUS=true to allow it"
            )
    elif not settings.keys.exists():
        raise UsageError(f"GRADSERVE_KEYS is {settings.keys}, which does not exist; gradserve keys add NAME creates it")
    else:
        try:
            load(settings.keys)
        except KeyFileInvalid as error:
            raise UsageError(str(error)) from None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_certificate(settings: Settings) -> None:
    certificate, key = settings.tls_certificate, settings.tls_key
    if certificate is None and key is None:
        return
    if certificate is None or key is None:
        missing, other = ("KEY", "CERTIFICATE") if key is None else ("CERTIFICATE", "KEY")
        raise UsageError(f"GRADSERVE_TLS_{missing} is not set, but GRADSERVE_TLS_{other} is: HTTPS needs both")
    try:
        for file in (certificate, key):
            os.close(open_regular(file))
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, bytes)
    except OSError as error:
        raise UsageError(
            f"GRADSERVE_TLS_CERTIFICATE is {certificate} and GRADSERVE_TLS_KEY is {key}, but they must be PEM files of"
            f" a certificate and its key, not encrypted: {error}"
        ) from None


def _check_tracing(settings: Settings) -> None:
    if settings.tracing:
        try:
            import_module("service.api.telemetry.tracing")
        except ModuleNotFoundError as missing:
            raise UsageError(f"GRADSERVE_TRACING needs {missing.name}: pip install 'gradserve[otel]'") from None


def _check_shared_memory(settings: Settings) -> None:
    if settings.shared_memory and not OBJECTS.is_dir():
        raise UsageError(f"GRADSERVE_SHARED_MEMORY needs {OBJECTS}, which this system does not have")
