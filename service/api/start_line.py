"""The line that the server logs once it takes requests."""

from __future__ import annotations

from importlib.metadata import version

from service.buffers.url import path_of, without_password
from service.settings import Settings


def start_line(settings: Settings, port: int, buffers: int) -> str:
    """Return the version, the addresses, and what the server has: the buffers in its store, and threads."""
    threads = _counted(settings.threads, "thread")
    if settings.workers > 1:
        threads = f"{settings.workers} workers with {threads} each"
    return (
        f"gradserve {version('gradserve')} at {_address(settings, port)}, page at /, docs at /docs,"
        f" store {_place(settings.store)} ({_counted(buffers, 'buffer')}), {threads}"
    )


def _address(settings: Settings, port: int) -> str:
    """Return the URL of the port, and the UNIX socket; one of them if there is only one."""
    addresses = []
    if settings.uses_tcp:
        scheme = "http" if settings.tls_certificate is None else "https"
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        addresses.append(f"{scheme}://{host}:{port}")
    if settings.socket is not None:
        addresses.append(f"unix:{settings.socket.absolute()}")
    return " and ".join(addresses)


def _place(url: str) -> str:
    """Return where the store is: an absolute path, a URL without password, or memory."""
    path = path_of(url)
    if path is not None:
        return str(path.absolute())
    return "in memory" if url == "memory:" else without_password(url)


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
