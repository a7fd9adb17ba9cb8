"""Power cuts, approximated by copies of a store in use: each copy opens and has every acknowledged add."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count, takewhile
from pathlib import Path

import numpy as np
import pytest

from service.buffers.changes import Add
from service.buffers.lmdb.store import LmdbStore
from service.buffers.perform import Request
from tests.faults.servers import LONG, PATIENCE, Client, Server, moments, new_key

CLIENTS = 4
CUTS = 200 if LONG else 20
NAMES = ("a", "b", "c", *(f"n{number}" for number in range(30)))
SIZES = (1, 10_000, 40_000, *(6000 for _ in range(30)))
"""Elements of the float64 buffers: in LMDB, in one slot, in several slots, and many of 48 KB in LMDB."""

PAGE = 4096
META = 2
"""Pages at the beginning of data.mdb that name the last commits by turns."""

Files = dict[str, bytes]


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Yield a directory on a disk: where a sync takes no time, a cut hits no commit."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        yield Path(directory)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop all threads of the process meanwhile."""
    # The file is copied while no thread writes. A copy of a changing file is the state of no instant: its meta pages,
    # copied first, may name pages that later commits have reused. A power cut leaves all writes up to one instant,
    # less some writes since the last sync. Copying a stopped process gives the first part; `torn` makes the second.
    os.kill(pid, signal.SIGSTOP)
    try:
        end = time.monotonic() + PATIENCE
        while not all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in _tasks(pid)):
            assert time.monotonic() < end
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _tasks(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/task").glob("*/stat"))


def files_of(store: Path) -> Files:
    return {path.name: path.read_bytes() for path in store.iterdir() if path.name != "lock.mdb"}


def last_commit(files: Files) -> int:
    """Return the number of the last transaction in the meta pages."""
    data = files["data.mdb"]
    return max(int.from_bytes(data[page * PAGE + 144 : page * PAGE + 152], "little") for page in range(META))


def torn(before: Files, after: Files, chance: random.Random) -> Files:
    """Return files that a power cut may leave: `before`, with some unsynced writes that `after` has.

    LMDB writes and syncs the pages of a commit, and then the meta page. So with the meta pages of `before`, any subset
    of the pages of the next commit may have reached the disk.
    """
    result = {}
    for name, new in after.items():
        old = before.get(name, b"")
        pages = bytearray(old) + bytes(max(0, len(new) - len(old)))
        for start in range(META * PAGE if name == "data.mdb" else 0, len(new), PAGE):
            if chance.random() < 0.5:
                pages[start : start + PAGE] = new[start : start + PAGE]
        result[name] = bytes(pages)
    return result


def check(files: Files, path: Path, least: int, most: int) -> None:
    """Check that a store of these files opens, takes an add, and has the same number of adds in all buffers."""
    path.mkdir()
    for name, data in files.items():
        (path / name).write_bytes(data)
    store = LmdbStore(path, max_bytes=1 << 30)
    try:
        for more in range(3):
            snapshots = store.read(NAMES)
            count = snapshots[0].record.count
            assert least + more <= count <= most + more
            for snapshot in snapshots:
                assert (snapshot.record.count, snapshot.record.version) == (count, count)
                assert (snapshot.value == count).all()
            changes = [Add(name=name, gradient=np.ones(size)) for name, size in zip(NAMES, SIZES, strict=True)]
            store.submit(Request(changes)).result(PATIENCE)
    finally:
        store.close()
    shutil.rmtree(path)


class Adders:
    """Clients that add ones to all buffers, at once and in parts by turns. They count begun and acknowledged adds."""

    def __init__(self, url: str) -> None:
        self.url, self.stop, self.lock = url, threading.Event(), threading.Lock()
        self.started = self.answered = 0

    def run(self) -> None:
        gradients = {name: np.ones(size) for name, size in zip(NAMES, SIZES, strict=True)}
        with Client(self.url) as client:
            for turn in takewhile(lambda _: not self.stop.is_set(), count()):
                with self.lock:
                    self.started += 1
                if turn % 2:
                    client.push(gradients, push=new_key())
                else:
                    client.add_many(gradients, key=new_key())
                with self.lock:
                    self.answered += 1


def test_a_power_cut_leaves_every_acknowledged_add_and_no_partial_one(tmp_path: Path) -> None:
    chance = random.Random(5)
    tears = 0
    with Server(tmp_path / "store") as server, Client(server.url) as client, ThreadPoolExecutor(CLIENTS) as threads:
        for name, size in zip(NAMES, SIZES, strict=True):
            client.create(name, (size,))
        adders, pid = Adders(server.url), server.process.pid
        running = [threads.submit(adders.run) for _ in range(CLIENTS)]
        try:
            for cut in moments(chance, CUTS, 0.0, 0.05):
                with stopped(pid):
                    least, before, most = adders.answered, files_of(tmp_path / "store"), adders.started
                time.sleep(chance.uniform(0, 0.004))
                with stopped(pid):
                    after = files_of(tmp_path / "store")
                check(before, tmp_path / f"{cut}", least, most)
                # The second commit after `before` is the first that may reuse its pages.
                if before != after and last_commit(after) <= last_commit(before) + 1:
                    tears += 1
                    check(torn(before, after, chance), tmp_path / f"{cut}.torn", least, most)
        finally:
            adders.stop.set()
        for one in running:
            one.result(PATIENCE)
        assert client.metadata("a")["count"] == adders.started
    assert tears >= CUTS // 5
