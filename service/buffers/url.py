"""URLs of stores."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from service.buffers.lmdb import LmdbStore
from service.buffers.lmdb import opened_readonly as opened_lmdb
from service.buffers.lmdb.forget import forget as forget_in_lmdb
from service.buffers.memory import MemoryStore
from service.buffers.readonly import ReadOnlyStore
from service.buffers.store import Store
from service.errors import StoreFailed, shown

SCHEMES = ("postgresql", "postgres")
"""The schemes of libpq's URLs."""

_PASSWORD = re.compile(r"(?<=://)([^:@/]*:)[^/]*(?=@)")
"""A password before the host, behind the user: libpq takes `?` and `#` for parts of it."""

_PARAMETER = re.compile(r"(?:(?<=[?&])|^)([^=&?]*)=[^&]*")
"""A parameter of a URL. libpq decodes its name."""

_SECRETS = ("password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key")
"""The parameters of libpq that hold a secret, rather than the path of a file with one."""


def is_postgres(url: str) -> bool:
    """Return whether the URL is that of a PostgreSQL database."""
    return url.partition("://")[0] in SCHEMES


def without_password(url: str) -> str:
    """Return the URL as people may see it."""

    def hidden(found: re.Match[str]) -> str:
        return f"{found[1]}=***" if unquote(found[1]) in _SECRETS else found[0]

    return _PARAMETER.sub(hidden, _PASSWORD.sub(r"\1***", url))


def path_of(url: str) -> Path | None:
    """Return the directory of an LMDB store; None for one in memory or a database. Raises `StoreFailed` else."""
    kind, _, place = url.partition(":")
    if kind == "lmdb" and place:
        return Path(place)
    if url == "memory:" or is_postgres(url):
        return None
    found = shown(without_password(url))
    raise StoreFailed(f"GRADSERVE_STORE is {found}, but must be lmdb:PATH, postgresql://HOST/DATABASE or memory:")


def opened_readonly(url: str, *, max_bytes: int, schema: str = "gradserve") -> AbstractContextManager[ReadOnlyStore]:
    """Open the store at `url` to read it. Servers may use it. Raises `StoreFailed`, for a store in memory too."""
    if is_postgres(url):
        with installed():
            from service.buffers.postgres import opened_readonly as opened
        return opened(url, schema)
    return opened_lmdb(_directory(url), max_bytes)


def forget(url: str, seconds: float, namespace: str | None, *, max_bytes: int, schema: str) -> int:
    """Forget the keys of a namespace, None for all, that are at least this old. Return their number.

    Servers may use the store at `url` meanwhile. Raises `StoreFailed` and `StoreFull`.
    """
    if is_postgres(url):
        with installed():
            from service.buffers.postgres.janitor import forget as forget_in_postgres
        return forget_in_postgres(url, schema, seconds, namespace)
    return forget_in_lmdb(_directory(url), max_bytes, seconds, namespace)


def _directory(url: str) -> Path:
    """Return the directory of an LMDB store. Raises `StoreFailed`, for a store in memory too."""
    path = path_of(url)
    if path is None:
        raise StoreFailed("GRADSERVE_STORE is memory:, which no other process can read")
    return path


def open_store(url: str, *, schema: str = "gradserve", replicated: bool = False, **options: Any) -> Store:
    """Open or create the store at `url`, with the `options` of every store. Raises `StoreFailed`.

    `schema` and `replicated` are for PostgreSQL.
    """
    if is_postgres(url):
        with installed():
            from service.buffers.postgres import PostgresStore
        return PostgresStore(url, schema=schema, replicated=replicated, **options)
    path = path_of(url)
    return MemoryStore(**options) if path is None else LmdbStore(path, **options)


@contextmanager
def installed() -> Iterator[None]:
    """Raise `StoreFailed` if a package is missing that a PostgreSQL store needs."""
    try:
        yield
    except ImportError as error:
        raise StoreFailed(
            f"GRADSERVE_STORE is a PostgreSQL database, but {error.name} is not installed: pip install"
            " 'gradserve[postgres]'"
        ) from None
