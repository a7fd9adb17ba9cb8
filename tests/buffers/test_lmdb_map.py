"""LMDB's map of a store: one size for all servers, and what a process says that cannot have it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.buffers.stores import PATIENCE, Clock, open_lmdb
from tests.commands import called
from tests.serving import serving

SMALL = 1 << 18
ROOT = Path(__file__).parents[2]


GROW = """
import sys
from pathlib import Path

import numpy as np

from service.buffers.changes import Add, Create
from service.buffers.lmdb import LmdbStore
from service.buffers.perform import Request
from service.buffers.record import Spec
from service.dtypes import FLOAT32

store = LmdbStore(Path(sys.argv[1]), max_bytes=1 << 30)
for number in range(100):
    name = f"large{number}"
    made = Create(name=name, spec=Spec((12_000,), FLOAT32)), Add(name=name, gradient=np.ones(12_000, np.float32))
    for change in made:
        store.submit(Request([change])).result(60)
store.close()
"""
"""Writes more into a store than a server with a small limit would, as a server with a large limit."""


def test_servers_with_different_limits_share_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.buffers.lmdb.reader.MARGIN_BYTES", 1 << 20)
    store = f"lmdb:{tmp_path}/store"
    with serving(store=store, store_bytes=SMALL) as url, httpx.Client(base_url=url, timeout=PATIENCE) as client:
        assert client.put("/v1/buffers/a", json={"shape": [2]}).status_code == 201
        subprocess.run([sys.executable, "-c", GROW, f"{tmp_path}/store"], cwd=ROOT, check=True)
        assert client.get("/v2/health/ready").status_code == 200
        assert client.get("/v1/buffers/a").status_code == 200
        assert client.delete("/v1/buffers/large7").status_code == 204
        assert client.put("/v1/buffers/b", json={"shape": [2]}).status_code == 507
    assert called("doctor", "--store", store)[0] == 0


@pytest.mark.parametrize("command", [["serve"], ["doctor"], ["export", "-"]])
def test_a_process_with_little_address_space_says_what_it_lacks(tmp_path: Path, command: list[str]) -> None:
    open_lmdb(tmp_path / "store", Clock()).close()
    done = subprocess.run(
        [sys.executable, "-m", "service", *command],
        env={**os.environ, "GRADSERVE_STORE": f"lmdb:{tmp_path}/store"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (32 << 30, 32 << 30)),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "LMDB needs 1 TiB of address space" in done.stderr
    assert "`ulimit -v unlimited`" in done.stderr
    assert done.stderr.count("\n") == 1
