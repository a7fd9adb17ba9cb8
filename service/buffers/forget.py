"""`gradserve keys-forget`: forget idempotency keys, so that a full store has room again."""

from __future__ import annotations

from service.buffers.lmdb.forget import forget as forget_in_lmdb
from service.buffers.url import installed, is_postgres, path_of
from service.errors import StoreFailed

UNIT_SECONDS = {"m": 60.0, "h": 3600.0, "d": 86400.0}
"""The units of an age."""


def age(text: str) -> float:
    """Return the seconds of an age in minutes, hours or days. Raises ValueError.

    >>> age("90m"), age("1.5h"), age("2d")
    (5400.0, 5400.0, 172800.0)
    """
    seconds = float(text[:-1]) * UNIT_SECONDS.get(text[-1:], float("nan"))
    if not 0 <= seconds < float("inf"):
        raise ValueError(text)
    return seconds


def forget(url: str, seconds: float, namespace: str | None, *, max_bytes: int, schema: str) -> int:
    """Forget the keys of a namespace, None for all, that are at least this old. Return their number.

    Servers may use the store at `url` meanwhile. Raises `StoreFailed` and `StoreFull`.
    """
    if is_postgres(url):
        with installed():
            from service.buffers.postgres.janitor import forget as forget_in_postgres
        return forget_in_postgres(url, schema, seconds, namespace)
    path = path_of(url)
    if path is None:
        raise StoreFailed("GRADSERVE_STORE is memory:, which no other process can read")
    return forget_in_lmdb(path, max_bytes, seconds, namespace)
