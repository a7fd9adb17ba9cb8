"""The machine's time jumps: no request counts twice, and no buffer expires."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.faults.servers import Client, Server, kill, new_key
from tests.serving import wait_until
from tests.zygote import ROOT

DAYS = 24 * 3600.0
ONES = np.ones(3)


def set_ahead(file: Path, seconds: float) -> None:
    fresh = file.with_suffix(".new")
    fresh.write_text(str(seconds))
    fresh.replace(file)


@pytest.fixture
def ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file that says how far the servers' time is ahead, which is not at all."""
    file = tmp_path / "ahead"
    set_ahead(file, 0)
    monkeypatch.setenv("GRADSERVE_TEST_JUMP", str(file))
    return file


def exported(store: Path, file: Path) -> set[str]:
    """Return the names that an export of the machine with the wrong time writes."""
    command = [sys.executable, "-m", "tests.faults.jumping", "export", str(file), "--store", f"lmdb:{store}"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=30, stdout=subprocess.DEVNULL)
    data = file.read_bytes()
    return {*json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])} - {"__metadata__"}


def test_a_jump_counts_no_request_twice(ahead: Path, tmp_path: Path) -> None:
    """While two workers run, when one of them is replaced, and when the server is started again."""
    store, key = tmp_path / "store", new_key()
    with Server(store, workers=2, module="tests.faults.jumping") as server, Client(server.url) as client:
        client.create("a", (3,), ttl_seconds=3600)
        client.add("a", ONES, key=key)
        created = client.metadata("a")["created_at"]

        def repeat() -> None:
            for _ in range(4):
                client.add("a", ONES, key=key)
                client.add("a", ONES, do_update="false")
            found = client.metadata("a")
            assert (found["count"], found["created_at"]) == (1, created)

        set_ahead(ahead, 2 * DAYS)
        repeat()
        assert exported(store, tmp_path / "file") == {"a"}
        kill(server.workers()[0])
        wait_until(server.is_ready)
        repeat()
        server.restart()
        repeat()
        client.add("a", ONES, key=new_key())
        assert 0 <= client.metadata("a")["updated_at"] - created < 3600 / 2
