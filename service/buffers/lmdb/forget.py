"""`gradserve keys-forget` over LMDB."""

from __future__ import annotations

from pathlib import Path

import lmdb

from service.buffers.lmdb.clock import clock_of
from service.buffers.lmdb.environment import Environment, as_client_error
from service.buffers.lmdb.format import microseconds
from service.buffers.lmdb.keys import KeyWriter
from service.buffers.lmdb.opening import open_environment
from service.buffers.room import store_full
from service.errors import StoreFailed

MOST_BY_TRY = (1000, 20, 1)
"""Keys that one transaction looks at. A full store has room for few: LMDB copies every page that it changes."""


def forget(store: Path, max_bytes: int, seconds: float, namespace: str | None) -> int:
    """Forget the keys of a namespace, None for all, that are at least this old. Return their number.

    A server may use the store meanwhile. Raises `StoreFailed` and `StoreFull`.
    """
    if not (store / "data.mdb").exists():
        raise StoreFailed(f"There is no store in {store}")
    env = open_environment(store, max_bytes=max_bytes)
    try:
        latest = microseconds(clock_of(env)() - seconds)
        forgotten, place = _forget_some(env, latest, namespace, b"")
        while place:
            more, place = _forget_some(env, latest, namespace, place)
            forgotten += more
        return forgotten
    except (lmdb.Error, OSError) as error:
        raise as_client_error(error, store, max_bytes) from None
    finally:
        env.close()


def _forget_some(env: Environment, latest: int, namespace: str | None, start: bytes) -> tuple[int, bytes]:
    """Forget keys in one transaction. Return their number, and the place to go on from, b"" at the end."""
    for most in MOST_BY_TRY:
        try:
            with env.writing() as txn:
                keys = KeyWriter(env, txn)
                done = keys.forget(latest, most, namespace, start)
                keys.finish()
            return done
        except lmdb.MapFullError:
            continue
    raise store_full(env.max_bytes)
