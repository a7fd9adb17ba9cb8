"""The line that the server logs once it takes requests."""

from __future__ import annotations

from importlib.metadata import version

from service.buffers.url import path_of, without_password
from service.settings import Settings


def start_line(settings: Settings, port: int, buffers: int) -> str:
    """Return the version, the address, and what the server has: the buffers in its store, and threads."""
    scheme = "http" if settings.tls_certificate is None else "https"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    threads = _counted(settings.threads, "thread")
    if settings.workers > 1:
        threads = f"{settings.workers} workers with {threads} each"
    return (
        f"gradserve {version('gradserve')} at {scheme}://{host}:{port}, page at /, docs at /docs,"
        f" store {_place(settings.store)} ({_counted(buffers, 'buffer')}), {threads}"
    )


def _place(url: str) -> str:
    """Return where the store is: an absolute path, a URL without password, or memory."""
    path = path_of(url)
    if path is not None:
        return str(path.absolute())
    return "in memory" if url == "memory:" else without_password(url)


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
