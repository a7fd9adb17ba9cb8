"""Flips of bits in pages that a store uses, each in a process of its own: -m tests.buffers.flipping STORE FROM TO.

It makes a store in the directory STORE. For each seed from FROM up to, but without, TO, it flips a bit in two copies,
and writes a line of JSON: what the doctor found in one copy, and what was wrong without an error in the other.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import lmdb
import numpy as np

from service.buffers.changes import Add, Change, Delete
from service.buffers.lmdb import LmdbStore
from service.errors import GradserveError
from tests.buffers.calls import create, do, key, ones
from tests.buffers.damaging import HEAD, PAGE, Errors, apart, examined
from tests.buffers.stores import MAX_BYTES

SIZES = {**{f"b{number}": 5 for number in range(40)}, "large": 100_000, "huge": 300_000, "middle": 3000}
KEYS = 3
"""Adds with a key to each buffer."""

NUMBERS = ("meta", "keys", "free")
"""The databases that half of the flips hit: they are small, and everything depends on them."""


def prepare(path: Path) -> None:
    """Make a store with free slots, keys and sums: 3 in each element of each buffer."""
    store = LmdbStore(path, max_bytes=MAX_BYTES)
    for name, size in SIZES.items():
        create(store, name, shape=(size,))
        for turn in range(KEYS):
            do(store, Add(name=name, gradient=ones(size)), key=key(f"{name} {turn}"))
    create(store, "gone", shape=(800_000,))
    do(store, Add(name="gone", gradient=ones(800_000)))
    do(store, Delete(name="gone"))
    store.close()


def pages_of(data: bytes, root: int) -> list[int]:
    """Return the pages of a tree, without the pages that large data has of its own."""
    start = root * PAGE
    flags, low = struct.unpack_from("<HH", data, start + 10)
    pages = [root]
    for place in struct.unpack_from(f"<{(low - HEAD) // 2}H", data, start + HEAD) if flags & 1 else ():
        one, two, three = struct.unpack_from("<HHH", data, start + place)
        pages += pages_of(data, one | two << 16 | three << 32)
    return pages


def used(path: Path) -> dict[str, list[int]]:
    """Return the pages that each database uses, and the main tree and the free tree."""
    data = (path / "data.mdb").read_bytes()
    with lmdb.open(str(path), max_dbs=9, readonly=True) as env, env.begin() as txn:
        trees = {name.decode(): tree for name, tree in txn.cursor()}
    newest = max((0, PAGE), key=lambda start: int.from_bytes(data[start + 144 : start + 152], "little"))
    trees |= {"free pages": data[newest + 40 : newest + 88], "main": data[newest + 88 : newest + 136]}
    roots = {name: int.from_bytes(tree[40:48], "little") for name, tree in trees.items()}
    return {name: pages_of(data, root) for name, root in roots.items() if root < len(data) // PAGE}


def flip(path: Path, seed: int, pages: dict[str, list[int]]) -> str:
    """Flip a bit of a page in use: of its head, of its places, or of its nodes. Return where."""
    chance, file = random.Random(seed), path / "data.mdb"
    name = chance.choice(NUMBERS if seed % 2 else [*pages])
    data = bytearray(file.read_bytes())
    start = chance.choice(pages[name]) * PAGE
    low, high = struct.unpack_from("<HH", data, start + 12)
    place = chance.choice([*range(low), *range(high, PAGE)])
    data[start + place] ^= 1 << chance.randrange(8)
    file.write_bytes(data)
    return f"page {start // PAGE} of {name} at {place}, which is used up to {low} and from {high} on"


def misled(path: Path) -> Errors:
    """Use the store. Return what is wrong without an error: sums, or requests that count twice."""
    silent = Errors()
    store = LmdbStore(path, max_bytes=MAX_BYTES)
    sums = dict.fromkeys(SIZES, 3.0)

    def done(work: Callable[[], object]) -> bool:
        try:
            work()
        except GradserveError:
            return False
        return True

    def change(change: Change) -> bool:
        return done(lambda: do(store, change))

    def compare(when: str) -> None:
        for name, number in sums.items():
            done(lambda name=name, number=number: agree(name, number, when))  # type: ignore[misc]

    def agree(name: str, number: float, when: str) -> None:
        if not np.array_equal(store.read([name])[0].value, np.full(SIZES.get(name, 200_000), number, np.float32)):
            silent.add(f"{when} {name} is wrong")

    def retry(name: str, turn: int) -> None:
        if not do(store, Add(name=name, gradient=ones(SIZES[name])), key=key(f"{name} {turn}")).replayed:
            silent.add(f"the add {turn} to {name} counted twice")
            sums[name] += 1

    compare("before,")
    for number in range(4):
        new = f"new{number}"
        if done(lambda new=new: create(store, new, shape=(200_000,))):  # type: ignore[misc]
            sums[new] = float(change(Add(name=new, gradient=ones(200_000))))
    for name in ("b7", "middle", "large", "huge", "b31"):
        sums[name] += change(Add(name=name, gradient=ones(SIZES[name])))
    for name in SIZES:
        for turn in range(KEYS):
            done(lambda name=name, turn=turn: retry(name, turn))  # type: ignore[misc]
    compare("afterwards,")
    done(store.close)
    return silent


def used_apart(path: Path) -> Errors:
    """Return what `misled` does, nothing for a store that cannot be opened."""
    try:
        return misled(path)
    except GradserveError:
        return Errors()


def main(sound: Path, seeds: range) -> None:
    prepare(sound)
    pages = used(sound)
    for seed in seeds:
        with tempfile.TemporaryDirectory(dir=sound.parent) as directory:
            found: dict[str, object] = {"seed": seed}
            for name, work in (("doctor", examined), ("silent", used_apart)):
                path = Path(shutil.copytree(sound, Path(directory) / name))
                found["how"] = flip(path, seed, pages)
                found[name] = apart(work, path)
        sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), range(int(sys.argv[2]), int(sys.argv[3])))
