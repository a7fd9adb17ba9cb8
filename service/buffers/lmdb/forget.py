"""`gradserve keys-forget` over LMDB."""

from __future__ import annotations

from pathlib import Path

import lmdb

from service.buffers.lmdb.clock import clock_of
from service.buffers.lmdb.environment import Environment, as_client_error
from service.buffers.lmdb.format import microseconds
from service.buffers.lmdb.keys import KeyWriter
from service.errors import StoreFailed

MOST_AT_ONCE = 1000
"""Keys that one transaction looks at: a server waits for it."""


def forget(store: Path, max_bytes: int, seconds: float, namespace: str | None) -> int:
    """Forget the keys of a namespace, None for all, that are at least this old. Return their number.

    A server may use the store meanwhile. Raises `StoreFailed` and `StoreFull`.
    """
    if not (store / "data.mdb").exists():
        raise StoreFailed(f"There is no store in {store}")
    env = Environment(store, max_bytes=max_bytes)
    try:
        latest = microseconds(clock_of(env)() - seconds)
        forgotten, place, ended = 0, b"", False
        while not ended:
            with env.writing() as txn:
                keys = KeyWriter(env, txn)
                more, place = keys.forget(latest, MOST_AT_ONCE, namespace, place)
                keys.finish()
            forgotten, ended = forgotten + more, not place
        return forgotten
    except (lmdb.Error, OSError) as error:
        raise as_client_error(error, store, max_bytes) from None
    finally:
        env.close()
