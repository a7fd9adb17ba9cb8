"""`gradserve doctor` beside a running server and on a damaged store."""

from __future__ import annotations

from pathlib import Path

import httpx
import lmdb
import numpy as np

from service.buffers.changes import Create
from service.buffers.lmdb import LmdbStore
from service.buffers.lmdb.format import COUNT, TIME
from service.buffers.packed import FORMAT, seal, seed_of
from service.buffers.perform import Request
from service.buffers.record import Spec
from service.dtypes import FLOAT32
from tests.commands import add, called, put, run
from tests.serving import serving

LARGE = 100_003


def test_the_doctor_checks_a_store_in_use_and_finds_damage(tmp_path: Path) -> None:
    store = f"lmdb:{tmp_path}/a"
    with serving(store=store) as url, httpx.Client(base_url=url) as client:
        for name, size in (("small", 50), ("large", LARGE), ("taken", LARGE)):
            put(client, name, shape=[size])
            add(client, name, 7)
        client.post("/v1/buffers/taken/take", headers={"Idempotency-Key": "k"})
        rows = {"shape": [LARGE, 2], "indices": [1, 5], "grad": [[1, 2], [3, 4]]}
        put(client, "rows", shape=[LARGE, 2])
        assert client.post("/v1/ops/GatherGrad?into=output:rows", json=rows).status_code == 200
        status, out, _ = run("doctor", "--store", store)
        assert status == 0
        for words in (f"format {FORMAT}", "4 buffers", "1 idempotency keys", "no problems found"):
            assert words in out
    values = tmp_path / "a" / "values"
    damaged = bytearray(values.read_bytes())
    damaged[1000] ^= 1
    values.write_bytes(damaged)
    status, out, _ = called("doctor", "--store", store)
    assert status == 1
    assert len([line for line in out.splitlines() if line.startswith("WRONG: ")]) == 1
    assert "problems found: 1" in out


def test_the_doctor_names_the_namespace_of_a_damaged_buffer(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path / "a", max_bytes=1 << 24)
    for namespace in ("", "ann"):
        store.within(namespace).submit(Request([Create(name="w", spec=Spec((2,), FLOAT32))])).result(20)
    store.close()
    with lmdb.open(str(tmp_path / "a"), max_dbs=8) as env, env.begin(write=True) as txn:
        buffers = env.open_db(b"buffers", txn=txn)
        for key in (b"w", b"~ann/w"):
            txn.put(key, b"damaged by a test", db=buffers)
    status, out, _ = called("doctor", "--store", f"lmdb:{tmp_path}/a")
    assert status == 1
    assert [line for line in out.splitlines() if line.startswith("WRONG: ")] == [
        "WRONG: the buffer 'w' is damaged",
        "WRONG: the buffer 'w' of the namespace 'ann' is damaged",
    ]


def test_the_doctor_checks_the_free_slots(tmp_path: Path) -> None:
    path, store = tmp_path / "a", f"lmdb:{tmp_path}/a"

    def change(name: str) -> None:
        with serving(store=store) as url, httpx.Client(base_url=url) as client:
            put(client, name, shape=[200_000])
            for _ in range(3):
                add(client, name, 1)
            assert set(client.get(f"/v1/buffers/{name}/value").json()["value"]["data"]) == {3}

    change("x")
    assert called("doctor", "--store", store)[0] == 0
    with lmdb.open(str(path), max_dbs=8) as env, env.begin(write=True) as txn:
        free = txn.cursor(env.open_db(b"free", txn=txn))
        assert free.first()
        slots = np.frombuffer(free.value()[:-8], "<i8") ^ 1
        free.put(free.key(), slots.tobytes() + free.value()[-8:])
    status, out, _ = called("doctor", "--store", store)
    lines = [line for line in out.splitlines() if line.startswith("WRONG: ")]
    assert status == 1
    assert lines == ["WRONG: the slots in use or free are damaged: -1 is none of the 12"]
    assert f"{slots.size} slots of 262144 bytes are lost" in out
    change("y")
    assert called("doctor", "--store", store)[0] == 0


def test_the_doctor_checks_the_counts(tmp_path: Path) -> None:
    path, store = tmp_path / "a", f"lmdb:{tmp_path}/a"
    with serving(store=store) as url, httpx.Client(base_url=url) as client:
        for name in ("x", "y"):
            put(client, name, shape=[1])

    def change(name: bytes, value: bytes) -> None:
        with lmdb.open(str(path), max_dbs=8) as env, env.begin(write=True) as txn:
            txn.put(name, value, db=env.open_db(b"meta", txn=txn))

    assert called("doctor", "--store", store)[0] == 0
    change(COUNT, seal(TIME.pack(1), seed_of(COUNT)))
    change(COUNT + b"ann", seal(TIME.pack(7), seed_of(COUNT + b"ann")))
    status, out, _ = called("doctor", "--store", store)
    lines = [line for line in out.splitlines() if line.startswith("WRONG: ")]
    assert (status, len(lines)) == (1, 2)
    for line, words in zip(lines, ("'' has 2 buffers, not 1", "'ann' has 0 buffers, not 7"), strict=True):
        assert words in line
    with serving(store=store) as url, httpx.Client(base_url=url) as client:
        add(client, "x", 1)
    assert "no problems found" in called("doctor", "--store", store)[1]
