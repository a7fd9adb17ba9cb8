"""Stores of each kind that tests open, close and look into, their clock, and what stops them half-way."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import lmdb
import pytest

from service.buffers import failpoints
from service.buffers.doctor import examine
from service.buffers.lmdb import LmdbStore, opened_readonly, value_writer, values
from service.buffers.names import pushes_of
from service.buffers.perform import Outcome, Request
from service.buffers.postgres import PostgresStore
from service.buffers.store import Store

S = TypeVar("S", bound=Store)

KEY_SECONDS = 1000.0
MAX_BYTES = 64 << 20
SMALL_CHUNK = 16
"""Bytes of a chunk where a value of a few elements must have several chunks."""
PATIENCE = 60
"""Seconds after which a pending future makes a test fail instead of hang."""


class Clock:
    """A clock of seconds since 1970 that only a test advances."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


Reopen: TypeAlias = Callable[..., LmdbStore]
"""A function that closes a store on the disk and opens it again."""


def open_lmdb(path: Path, clock: Callable[[], float], *, max_bytes: int = MAX_BYTES, **limits: Any) -> LmdbStore:
    return LmdbStore(path, max_bytes=max_bytes, key_seconds=KEY_SECONDS, clock=clock, **limits)


def reopening(open_store: Callable[..., S], damage: Callable[[bytes], object] = bytes) -> Iterator[Callable[..., S]]:
    """Yield a function that closes the store and opens it again; before, it damages all that holds a given pattern."""
    opened: list[S] = []

    def reopen(pattern: bytes | None = None, **options: Any) -> S:
        for store in opened:
            store.close()
        if pattern is not None:
            damage(pattern)
        opened.append(open_store(**options))
        return opened[-1]

    yield reopen
    for store in opened:
        store.close()


def shrink_lmdb(patch: pytest.MonkeyPatch) -> None:
    """Store values of a few elements outside LMDB, in several chunks."""
    for module in (values, value_writer):
        patch.setattr(module, "CHUNK_BYTES", SMALL_CHUNK)
    patch.setattr(value_writer, "INLINE_BYTES", SMALL_CHUNK // 2)


def open_postgres(
    url: str, clock: Callable[[], float], *, schema: str, max_bytes: int = MAX_BYTES, **limits: Any
) -> PostgresStore:
    return PostgresStore(url, schema=schema, max_bytes=max_bytes, key_seconds=KEY_SECONDS, clock=clock, **limits)


def entries_of(path: Path) -> dict[str, int]:
    """Return the number of entries in each database of the environment, of pushes apart from other buffers."""
    with lmdb.open(str(path), max_dbs=9, readonly=True) as env, env.begin() as txn:
        names = [bytes(name) for name, _ in txn.cursor()]
        databases = {name.decode(): env.open_db(name, txn=txn, create=False) for name in names}
        entries = {name: txn.stat(database)["entries"] for name, database in databases.items()}
        keys = map(bytes, txn.cursor(db=databases["buffers"]).iternext(values=False))
        pushes = sum(key.startswith(pushes_of("").encode(), 1) for key in keys)
        return entries | {"buffers": entries["buffers"] - pushes, "pushes": pushes}


def wrong(path: Path) -> list[str]:
    """Return the faults that the doctor finds in a closed store, lost slots included."""
    lines = [*examine(f"lmdb:{path}", MAX_BYTES)]
    with opened_readonly(path, MAX_BYTES) as opened, opened.reading() as reader:
        slots = reader.slot_count()
    used, free = (int(line.split()[place]) for line in lines if " slots in use, " in line for place in (0, 4))
    if used + free != slots:
        lines.append(f"WRONG: of {slots} slots {used} are used and {free} free")
    return [line for line in lines if line.startswith("WRONG")]


def flip(directory: Path, pattern: bytes) -> None:
    """Flip a bit in the middle of each occurrence of `pattern` in the files of a closed LMDB store."""
    flipped = 0
    for path in (directory / "data.mdb", directory / "values"):
        data = bytearray(path.read_bytes())
        place = data.find(pattern)
        while place >= 0:
            data[place + len(pattern) // 2] ^= 1
            place, flipped = data.find(pattern, place + 1), flipped + 1
        path.write_bytes(data)
    assert flipped


class Gate:
    """A gate that holds the writer before a commit: requests submitted meanwhile share one batch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, point: str = "before commit") -> None:
        self._point = point
        self._wanted, self._held, self._opened = False, threading.Event(), threading.Event()
        monkeypatch.setattr(failpoints, "action", self._hold)

    def _hold(self, point: str) -> None:
        if point == self._point and self._wanted:
            self._wanted = False
            self._held.set()
            self._opened.wait(PATIENCE)

    def together(self, store: Store, requests: Sequence[Request]) -> list[Future[Outcome]]:
        with self.holding(store):
            return [store.submit(request) for request in requests]

    @contextmanager
    def holding(self, store: Store) -> Iterator[None]:
        """Hold the writer until the context is left: what is submitted inside waits together."""
        self._held.clear()
        self._opened.clear()
        self._wanted = True
        first = store.submit(Request([]))
        assert self._held.wait(PATIENCE)
        yield
        self._opened.set()
        first.result(PATIENCE)


def waiting(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a process that runs the code. Return the process once it has said that it is ready; it waits for a line."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process: subprocess.Popen[str] = subprocess.Popen(command, cwd=Path(__file__).parents[2], **pipes)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def start(process: subprocess.Popen[str]) -> None:
    """Let a process that waits go on."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
