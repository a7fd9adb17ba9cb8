"""The watcher of changes by other servers."""

from __future__ import annotations

import threading

import pytest

from service.buffers.postgres import watcher
from service.buffers.postgres.connections import Database
from service.buffers.postgres.watcher import Watcher
from tests.buffers.postgres import Schema, until
from tests.buffers.stores import PATIENCE
from tests.network import Network


def test_a_silent_database_holds_up_no_close(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "CLOSING_SECONDS", 0.1)
    schema = Schema(postgres_url)
    with Network(int(postgres_url.rpartition(":")[2].partition("/")[0])) as network:
        watching = Watcher(Database(network.url, schema.name, replicated=False))
        until(lambda: watching.generation, "the watcher does not listen")
        network.stall()
        watching.tell()
        closing = threading.Thread(target=watching.close)
        closing.start()
        closing.join(PATIENCE)
        assert not closing.is_alive()
