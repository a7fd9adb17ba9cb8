"""Uses of damaged copies of a store, each in a process of its own: python -m tests.buffers.damaging STORE FROM TO.

It makes a store in the directory STORE. For each seed from FROM up to, but without, TO, it damages two copies in the
same way, and writes a line of JSON: what the doctor found in one copy, and what came of using the other.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np

from service.buffers.changes import Add, Create, Delete, Take, Zero
from service.buffers.doctor import examine
from service.buffers.lmdb import LmdbStore
from service.buffers.perform import Request
from service.buffers.readonly import WRONG
from service.buffers.record import Key
from service.errors import GradserveError
from service.kernels.gather import GatheredRows
from tests.buffers.calls import add, create, do, ones, part, spec
from tests.buffers.stores import MAX_BYTES, PATIENCE

PAGE = 4096
HEAD = 16
NAMESPACES = ("", "ann")
NAMES = [f"b{number}" for number in range(40)]


def key(store: LmdbStore, text: str) -> Key:
    return Key(store.namespace, text, bytes(16))


def prepare(path: Path) -> None:
    """Make a store with something in each database."""
    store = LmdbStore(path, max_bytes=MAX_BYTES)
    for namespace in NAMESPACES:
        own = store.within(namespace)
        create(own, *NAMES, shape=(5,), ttl_seconds=9e8)
        create(own, "large", shape=(300, 400), keep=3)
        create(own, "middle", shape=(3000,))
        for turn in range(3):
            do(own, *[Add(name=name, gradient=ones(5)) for name in NAMES], key=key(own, f"many {turn}"))
            do(own, Add(name="middle", gradient=ones(3000)), key=key(own, f"middle {turn}"))
            do(own, Add(name="large", gradient=ones(300, 400)), key=key(own, f"large {turn}"))
            do(own, Take(name="large"), key=key(own, f"take {turn}"))
        for turn in range(40):
            do(own, Zero(name=NAMES[turn]), key=key(own, f"zero {turn}"))
        add(own, "large", ones(300, 400))
        index = np.array([[1, 2], [0, 1]], np.int64)
        do(own, Add(name="large", gradient=GatheredRows.of((300, 400), index, ones(2, 400))))
        for push in ("waits", "stays"):
            part(own, 1, {"large": ones(300, 400), "middle": ones(3000)}, push=push, request="one")
        part(own, 2, {}, push="waits")
    store.close()


def damage(path: Path, seed: int) -> str:
    """Damage data.mdb in one of several ways. Return how."""
    chance = random.Random(seed)
    file = path / "data.mdb"
    data = bytearray(file.read_bytes())
    page = chance.randrange(len(data) // PAGE)
    start = page * PAGE
    ways: dict[str, Callable[[], tuple[int, bytes]]] = {
        "bit": lambda: (at := chance.randrange(len(data)), bytes([data[at] ^ 1 << chance.randrange(8)])),
        "bytes": lambda: (chance.randrange(len(data) - 64), chance.randbytes(chance.randrange(1, 64))),
        "head": lambda: (start + (at := chance.randrange(HEAD)), chance.randbytes(chance.randrange(1, HEAD - at + 1))),
        "head bit": lambda: (at := start + chance.randrange(HEAD), bytes([data[at] ^ 1 << chance.randrange(8)])),
        "places": lambda: (start + HEAD + 2 * chance.randrange(40), chance.randbytes(2)),
        "zeros": lambda: (start, bytes(PAGE)),
        "another page": lambda: (start, bytes(data[(at := PAGE * chance.randrange(len(data) // PAGE)) : at + PAGE])),
    }
    way = [*ways][seed % len(ways)]
    place, new = ways[way]()
    data[place : place + len(new)] = new
    file.write_bytes(data)
    return f"{way} of page {place // PAGE} at {place % PAGE}"


class Errors(set[str]):
    """The errors of uses."""

    def attempt(self, work: Callable[..., object], *arguments: object) -> None:
        try:
            work(*arguments)
        except GradserveError as error:
            self.add(type(error).__name__)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            self.add(f"BUG {error!r} {Path(place.filename).name}:{place.lineno}")


def use(path: Path) -> Errors:
    """Use the store in all ways. Return the errors."""
    errors, opened = Errors(), list[LmdbStore]()
    errors.attempt(lambda: opened.append(LmdbStore(path, max_bytes=MAX_BYTES)))
    for store in opened:
        errors.attempt(store.size)
        for namespace in NAMESPACES:
            use_namespace(store.within(namespace), errors)
        errors.attempt(store.generation)
        errors.attempt(store.close)
    return errors


def use_namespace(store: LmdbStore, errors: Errors) -> None:
    errors.attempt(store.records)
    errors.attempt(store.read, NAMES)
    for name in (*NAMES[::8], "large", "middle"):
        errors.attempt(store.record, name)
        for step in (None, 0, 2):
            errors.attempt(store.read, [name], step)
    errors.attempt(store.pushes)
    for number in (1, 2):
        errors.attempt(lambda number: part(store, number, {}, push="stays", request="one"), number)
    for text in ("many 1", "middle 1", "large 1", "zero 7"):
        errors.attempt(store.recall, key(store, text))
    for change, text in (
        (Add(name="b1", gradient=ones(5)), "new 1"),
        (Add(name="b1", gradient=ones(5)), "zero 1"),
        (Add(name="large", gradient=ones(300, 400)), "new 2"),
        (Take(name="large"), "new 3"),
        (Zero(name="middle"), "new 4"),
        (Delete(name="b2"), "new 5"),
        (Delete(name="large"), "new 6"),
        (Create(name="fresh", spec=spec((5,), ttl_seconds=1.0)), "new 7"),
    ):
        errors.attempt(lambda request: store.submit(request).result(PATIENCE), Request([change], key(store, text)))


def examined(path: Path) -> Errors:
    """Return what the doctor finds."""
    errors = Errors()

    def examine_all() -> None:
        errors.update(line for line in examine(f"lmdb:{path}", MAX_BYTES) if line.startswith(WRONG))

    errors.attempt(examine_all)
    return errors


def apart(work: Callable[[Path], Errors], path: Path) -> tuple[int, list[str]]:
    """Call `work` in a process of its own. Return its exit status, and the errors."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(60)  # damaged pages may form a circle
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # LMDB writes there what it asserts
        os.write(writer, json.dumps(sorted(work(path))[:20]).encode()[:60_000])
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        said = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status, json.loads(said or b"[]")


def main(sound: Path, seeds: range) -> None:
    prepare(sound)
    for seed in seeds:
        with tempfile.TemporaryDirectory(dir=sound.parent) as directory:
            found: dict[str, object] = {"seed": seed}
            for name, work in (("doctor", examined), ("use", use)):
                path = Path(shutil.copytree(sound, Path(directory) / name))
                found["how"] = damage(path, seed)
                found[name] = apart(work, path)
        sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), range(int(sys.argv[2]), int(sys.argv[3])))
