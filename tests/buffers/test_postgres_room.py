"""A PostgreSQL store that is full, and one behind PgBouncer."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import psycopg
import pytest

from service.buffers.changes import Add, Delete, Zero
from service.buffers.perform import Request
from service.buffers.postgres import janitor
from service.buffers.postgres.exchange import Execution
from service.buffers.postgres.janitor import forget
from service.buffers.postgres.statements import KEY_BYTES
from service.buffers.store import Store
from service.errors import KeysFull, StoreFull
from tests.buffers.calls import add, create, do, key, ones, part, value
from tests.buffers.postgres import Schema, until, until_changed
from tests.buffers.stores import PATIENCE
from tests.ports import free_port
from tests.postgres import NOBODY

SIZE = 100_000
"""Elements of a float32 gradient: 400 KB."""

ROOM_BYTES = 8 << 20


@pytest.fixture
def tablespace(postgres_url: str) -> Iterator[str]:
    """Make a tablespace on a small file system; return the URL of the database for tables in it."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        path.chmod(0o755)
        mounting = ["mount", "-t", "tmpfs", "-o", f"size={ROOM_BYTES},uid={NOBODY},gid={NOBODY},mode=700", "tmpfs"]
        mounted = subprocess.run([*mounting, path], capture_output=True, text=True, timeout=30)
        if mounted.returncode:
            pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
        try:
            with psycopg.connect(postgres_url, autocommit=True) as connection:
                connection.execute(f"create tablespace small location '{path}'".encode())
            yield f"{postgres_url}?options=-c%20default_tablespace%3Dsmall"
            with psycopg.connect(postgres_url, autocommit=True) as connection:
                connection.execute("drop tablespace small")
        finally:
            subprocess.run(["umount", path], check=True, timeout=30)


def fill(schema: Schema, name: str) -> int:
    """Add until the store refuses, each time with a key of its own. Return the count of the adds."""
    for count in range(1000):
        sent = Request([Add(name=name, gradient=ones(SIZE))], key(f"{name} {count}"))
        try:
            schema.stores[0].submit(sent).result(PATIENCE)
        except StoreFull:
            return count
    raise AssertionError("it does not get full")


def test_a_full_disk_refuses_adds_and_changes_nothing(tablespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(janitor, "ROUND_SECONDS", 0.1)
    schema = Schema(tablespace)
    store = schema.open()
    create(store, "w", "gone", shape=(SIZE,))
    create(store, "small")
    add(store, "gone", ones(SIZE))
    part(store, 1, {"small": 1})
    count = fill(schema, "w")
    assert count > 3
    assert store.record("w").count == count
    assert (value(store, "w") == count).all()
    for _ in range(3):
        with pytest.raises(StoreFull, match="No space left on device"):
            add(store, "w", np.ones(4 * SIZE, np.float32)[:SIZE])
    with pytest.raises(StoreFull, match="No space left on device"):
        part(store, 2, {"w": ones(SIZE)})
    assert [push.numbers for _, push in store.pushes()] == [[1]]
    assert store.record("w").count == count
    assert schema.faults() == []
    schema.close()
    schema.ask("drop schema " + schema.name + " cascade")


def test_a_full_store_refuses_adds_until_there_is_room(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(janitor, "ROUND_SECONDS", 0.02)
    monkeypatch.setattr(janitor, "ROUNDS_AT_REST", 1)
    store = schema.open(max_bytes=4 << 20)
    create(store, "w", "other", shape=(SIZE,))
    add(store, "other", ones(SIZE))
    count = fill(schema, "w")
    assert 0 < count < 100
    assert store.record("w").count == count
    assert (value(store, "w") == count).all()
    do(store, Zero(name="w"))
    do(store, Delete(name="other"))
    until(lambda: store.size()[1] < 1 << 20, "the store stays full")
    again = Request([Add(name="w", gradient=ones(SIZE))], key(f"w {count}"))

    def is_added() -> bool:
        with suppress(StoreFull):
            return not store.submit(again).result(PATIENCE).replayed
        return False

    until(is_added, "the store refuses an add for which it has room")
    assert store.record("w").count == 1


def test_one_server_counts_for_all(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """A count reads all keys and gradients, so that many servers must not make it each for itself."""
    monkeypatch.setattr(janitor, "ROUND_SECONDS", 0.02)
    monkeypatch.setattr(janitor, "ROUNDS_AT_REST", 1_000_000)
    counts: list[int] = []

    def counted(*arguments: object) -> Execution:
        counts.append(len(counts))
        return KEY_BYTES(*arguments)

    monkeypatch.setattr(janitor, "KEY_BYTES", counted)
    monkeypatch.setattr(janitor, "BYTES_PER_KEY", 1 << 20)
    stores = [schema.open(max_bytes=64 << 20) for _ in range(4)]
    until(lambda: counts, "nobody counts")
    until(lambda: schema.ask("select 1 from counts") == [(1,)], "the counts are not stored")
    made = len(counts)  # one, and more if a busy machine ends a count before it is stored
    create(stores[0], "w")
    for number in range(50):
        do(stores[number % 4], Add(name="w", gradient=ones(2)), key=key(f"{number}"))
    assert len(counts) == made
    schema.ask("update counts set due = 0")
    until(lambda: len(counts) > made, "nobody counts again")
    for store in stores:
        until(lambda store=store: is_refused(store), "a server does not know that the keys are full")  # type: ignore[misc]
    assert len(counts) == made + 1
    assert forget(schema.url, schema.name, 0.0, "ann") >= 50
    until(lambda: len(counts) == 3, "nobody counts what is left")
    for store in stores:
        until(lambda store=store: not is_refused(store), "a server does not know that there is room")  # type: ignore[misc]


def is_refused(store: Store) -> bool:
    """Return whether the keys of a namespace have taken their share."""
    try:
        do(store, Zero(name="w"), key=key(uuid.uuid4().hex))
    except KeysFull:
        return True
    return False


@pytest.fixture
def pooler(postgres_url: str, tmp_path: Path) -> Iterator[str]:
    """Start a PgBouncer in transaction mode, with fewer connections than a store uses, and return its URL."""
    if shutil.which("pgbouncer") is None:
        pytest.skip("needs pgbouncer")
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        place.chmod(0o755)
        port, target = free_port(), postgres_url.rpartition(":")[2].partition("/")[0]
        users, configuration = place / "users", place / "configuration"
        users.write_text('"postgres" ""\n')
        configuration.write_text(
            f"""[databases]
postgres = host=127.0.0.1 port={target} dbname=postgres
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = trust
auth_file = {users}
pool_mode = transaction
default_pool_size = 5
max_client_conn = 200
"""
        )
        user = {"user": NOBODY, "group": NOBODY} if os.geteuid() == 0 else {}
        command = [shutil.which("pgbouncer") or "", configuration]
        log = tmp_path / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, **user)  # type: ignore[call-overload]
        url = f"postgresql://postgres@127.0.0.1:{port}/postgres"

        def answers() -> bool:
            assert process.poll() is None, log.read_text()
            with suppress(psycopg.OperationalError), psycopg.connect(url, connect_timeout=5):
                return True
            return False

        try:
            until(answers, "PgBouncer does not start")
            yield url
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(PATIENCE)


def test_pgbouncer_in_transaction_mode_works(schema: Schema, pooler: str) -> None:
    stores = [schema.open(pooler), schema.open(pooler), schema.open()]
    create(stores[0], "w", "x", shape=(SIZE,))
    create(stores[1], "small", quorum=30)
    sent = [
        store.submit(Request([Add(name=name, gradient=ones(SIZE)) for name in names], key(f"{number}")))
        for number in range(10)
        for store, names in zip(stores, ["w", "wx", "x"], strict=True)
    ]
    made = [one.exception(PATIENCE) is None and not one.result().replayed for one in sent]
    assert sum(made) == 10  # each key is used for three requests: one is made, the others are refused or replayed
    assert stores[1].record("w").count + stores[2].record("x").count >= 10
    for number in range(30):
        before = stores[1].generation()
        add(stores[number % 3], "small", 1.0)
        until_changed(stores[1], before)
    assert (value(stores[1], "small", step=0) == 30).all()
    with psycopg.connect(pooler, autocommit=True) as other:  # no setting has stuck to a connection
        for name, expected in {"synchronous_commit": "on", "lock_timeout": "0"}.items():
            assert other.execute(f"show {name}".encode()).fetchall() == [(expected,)]
