"""Two servers on one store with different limits: neither has to be restarted when the other makes the store larger."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from service.buffers.changes import Add
from service.buffers.lmdb import environment
from service.buffers.lmdb.store import LmdbStore
from service.errors import StoreFull
from tests.buffers.calls import PATIENCE, Clock, add, create, do, ones, open_lmdb, value
from tests.commands import called
from tests.serving import serving

SMALL = 1 << 18
NOTHING = Add(name="a", gradient=ones(2), do_update=False)

GROWS = """
import sys
from pathlib import Path
from service.buffers.lmdb import LmdbStore
from tests.buffers.calls import add, create, ones

store = LmdbStore(Path(sys.argv[1]), max_bytes=1 << 30)
names = [f"large{number}" for number in range(100)]
create(store, *names, shape=(12_000,))
for name in names:
    add(store, name, ones(12_000))
store.close()
"""


@pytest.fixture(autouse=True)
def _small_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the map of a small store here 1.5 MB, so that 5 MB outgrow it."""
    monkeypatch.setattr(environment, "MAP_MARGIN_BYTES", 1 << 20)


@pytest.fixture
def small(tmp_path: Path, clock: Clock) -> Iterator[LmdbStore]:
    """Yield a store whose limit is small, with the buffer "a"."""
    store = open_lmdb(tmp_path / "store", clock, max_bytes=SMALL)
    create(store, "a")
    add(store, "a", [1, 2])
    yield store
    store.close()


def grow(path: Path) -> None:
    """Let another process, whose limit is large, write more than the small map holds."""
    command = [sys.executable, "-c", GROWS, str(path)]
    subprocess.run(command, cwd=Path(__file__).parents[2], timeout=60, check=True)


def test_a_server_adopts_the_map_of_a_larger_one(small: LmdbStore, tmp_path: Path) -> None:
    grow(tmp_path / "store")
    assert value(small, "a").tolist() == [1, 2]
    assert set(value(small, "large99")) == {1.0}
    assert len(small.records("large")) == 100
    with pytest.raises(StoreFull, match=f"its limit of {SMALL} bytes"):
        add(small, "a", [1, 2])
    assert not do(small, NOTHING).receipts["a"]["updated"]


def test_the_writer_adopts_it_first(small: LmdbStore, tmp_path: Path) -> None:
    grow(tmp_path / "store")
    assert not do(small, NOTHING).receipts["a"]["updated"]
    assert small.size()[0] == 101


def test_threads_adopt_it_together(small: LmdbStore, tmp_path: Path) -> None:
    """The map must not move while another thread reads there."""
    grown = threading.Event()

    def repeat(use: Callable[[], object]) -> int:
        after = 0
        while after < 50:
            assert use()
            after += grown.is_set()
        return after

    uses = [*4 * [lambda: value(small, "a").tolist() == [1, 2]], lambda: do(small, NOTHING)]
    with ThreadPoolExecutor(len(uses)) as pool:
        futures = [pool.submit(repeat, use) for use in uses]
        try:
            grow(tmp_path / "store")
        finally:
            grown.set()
        assert sum(future.result(PATIENCE) for future in futures) == 50 * len(uses)


def test_servers_with_different_limits_share_a_store(tmp_path: Path) -> None:
    store = f"lmdb:{tmp_path}/store"
    with serving(store=store, store_bytes=SMALL) as url, httpx.Client(base_url=url, timeout=PATIENCE) as client:
        assert client.put("/v1/buffers/a", json={"shape": [2]}).status_code == 201
        grow(tmp_path / "store")
        assert client.get("/v2/health/ready").status_code == 200
        assert client.get("/v1/buffers/a").status_code == 200
        assert client.delete("/v1/buffers/large7").status_code == 204
        assert client.put("/v1/buffers/b", json={"shape": [2]}).status_code == 507
    assert called("doctor", "--store", store)[0] == 0
