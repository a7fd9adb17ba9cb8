"""A damaged store: the server refuses it with a clear message, or serves all buffers except the damaged one."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from service.buffers.packed import FORMAT
from tests.buffers.stores import entries_of
from tests.faults.servers import LONG, PATIENCE, SAFETENSORS, Client, Server, contents, kill, new_key, tensors
from tests.faults.test_uploads import ROWS, model, weights
from tests.serving import assert_problem, wait_until

SIZE = 20_000
"""Elements of a float64 buffer that has three chunks."""

PAGE = 4096


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a store with the buffers before, wounded and xanthic. All their numbers differ."""
    path = tmp_path_factory.mktemp("sound") / "store"
    with Server(path) as server, Client(server.url) as client:
        for number, name in enumerate(("before", "wounded", "xanthic")):
            client.create(name, (SIZE,))
            client.add(name, numbers(number))
    return path


@pytest.fixture
def store(sound: Path, tmp_path: Path) -> Path:
    """Return a copy of the sound store."""
    return shutil.copytree(sound, tmp_path / "store")


def numbers(which: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.arange(1.0, SIZE + 1) + which * SIZE


def cut(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


def overwrite_heads(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(range(256)) * (2 * PAGE // 256))


def flip(store: Path, text: bytes, place: int) -> None:
    """Flip a bit in the byte `place` after the start of each `text` in the files."""
    found = 0
    for path in store.iterdir():
        data = bytearray(path.read_bytes())
        start = data.find(text)
        while start >= 0:
            data[start + place] ^= 4
            found += 1
            start = data.find(text, start + 1)
        path.write_bytes(data)
    assert found


SIZES: list[Callable[[int], int]] = [
    lambda size: PAGE,
    lambda size: size // 2,
    *([lambda size: 0, lambda size: 100, lambda size: 2 * PAGE] if LONG else []),
]

DAMAGES: dict[str, Callable[[Path], None]] = {
    **{f"cut {number}": lambda data, to=to: cut(data, to(data.stat().st_size)) for number, to in enumerate(SIZES)},  # type: ignore[misc]
    "gone": Path.unlink,
    "heads overwritten": overwrite_heads,
    "a newer format": lambda data: flip(data.parent, f"format{FORMAT}".encode(), 6),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_store_is_refused_at_the_start(damage: str, store: Path, tmp_path: Path) -> None:
    DAMAGES[damage](store / "data.mdb")
    left = {path.name: path.stat().st_size for path in store.iterdir() if path.name != "lock.mdb"}
    server = Server(store, workers=1 + len(damage) % 2, log=tmp_path / "refusal")
    server.launch()
    status, said = server.ended()
    assert status not in (0, None)
    assert str(store) in said
    assert said.startswith("gradserve: ")
    assert said.count("\n") <= 3
    assert "Traceback" not in said
    assert {path.name: path.stat().st_size for path in store.iterdir() if path.name != "lock.mdb"} == left


@pytest.mark.parametrize("lost", [1, PAGE, 4 * PAGE] if LONG else [PAGE])
def test_a_truncated_store_is_refused_or_whole(lost: int, store: Path) -> None:
    data = store / "data.mdb"
    cut(data, data.stat().st_size - lost)
    server = Server(store)
    if not server.starts():
        assert server.log.read_text().startswith("gradserve: ")
        return
    with server, Client(server.url) as client:
        for more in range(5):
            for number, name in enumerate(("before", "wounded", "xanthic")):
                assert (client.value(name) == numbers(number) + more).all()
                client.add(name, np.ones(SIZE), key=new_key())


def test_a_truncated_or_missing_values_file_is_reported(sound: Path, tmp_path: Path) -> None:
    files = [path.name for path in sound.iterdir() if path.name not in ("data.mdb", "lock.mdb", "format")]
    for number, file in enumerate(2 * files):
        store = shutil.copytree(sound, tmp_path / f"{number}")
        if number < len(files):
            cut(store / file, (store / file).stat().st_size // 2)
        else:
            (store / file).unlink()
        server = Server(store)
        if not server.starts():
            said = server.log.read_text()
            assert said.startswith("gradserve: ")
            assert "Traceback" not in said
            continue
        with server, Client(server.url) as client:
            statuses = set()
            for which, name in enumerate(("before", "wounded", "xanthic")):
                answer = client.once("GET", f"/v1/buffers/{name}/value", headers={"Accept": SAFETENSORS})
                statuses.add(answer.status_code)
                if answer.status_code == 200:
                    assert (contents(answer)[1]["value"] == numbers(which)).all()
                else:
                    assert_problem(answer, 500, "buffer_corrupt")
            assert 500 in statuses
            assert "Traceback" not in server.log.read_text()


def test_a_damaged_value_is_reported_and_other_buffers_are_served(store: Path) -> None:
    flip(store, numbers(1)[12_345:12_350].tobytes(), 11)
    with Server(store) as server, Client(server.url) as client:
        gradient = tensors(gradient=np.ones(SIZE))
        for _ in range(2):
            for answer in (
                client.once("GET", "/v1/buffers/wounded/value"),
                client.once("POST", "/v1/buffers/value", params={"prefix": ""}),
                client.once("POST", "/v1/buffers/take", params={"prefix": ""}),
                client.once("POST", "/v1/buffers/wounded/accumulate", key=new_key(), **gradient),
                client.once("POST", "/v1/buffers/accumulate", **tensors(before=np.ones(SIZE), wounded=np.ones(SIZE))),
                client.once("POST", "/v1/ops/ReluGrad", params={"from": "dY:wounded"}, **tensors(X=np.ones(SIZE))),
            ):
                assert assert_problem(answer, 500, "buffer_corrupt")["buffer"] == "wounded"
        assert (client.value("before") == numbers(0)).all()
        assert client.add("xanthic", np.ones(SIZE))["count"] == 2
        assert (client.value("xanthic") == numbers(2) + 1).all()
        listed = client.done("GET", "/v1/buffers")["buffers"]
        assert [(one["name"], one["count"]) for one in listed] == [("before", 1), ("wounded", 1), ("xanthic", 2)]
        client.done("DELETE", "/v1/buffers/wounded")
        client.create("wounded", (SIZE,))
        assert client.add("wounded", np.ones(SIZE))["count"] == 1


def test_a_damaged_record_is_reported_and_other_buffers_are_served(store: Path) -> None:
    flip(store, b"wounded[{", 10)
    with Server(store) as server, Client(server.url) as client:
        gradient = tensors(gradient=np.ones(SIZE))
        assert_problem(client.once("GET", "/v1/buffers/wounded"), 500, "buffer_corrupt", "wounded")
        assert_problem(client.once("GET", "/v1/buffers/wounded/value"), 500, "buffer_corrupt", "wounded")
        refused = client.once("POST", "/v1/buffers/wounded/accumulate", key=new_key(), **gradient)
        assert_problem(refused, 500, "buffer_corrupt", "wounded")
        for what in ("zero", "take", "value"):
            refused = client.once("POST", f"/v1/buffers/{what}", params={"prefix": ""})
            assert_problem(refused, 500, "buffer_corrupt", "wounded")
        assert (client.value("before") == numbers(0)).all()
        assert client.add("xanthic", np.ones(SIZE))["count"] == 2
        assert (client.value("xanthic") == numbers(2) + 1).all()


def test_a_damaged_record_can_be_deleted(store: Path) -> None:
    flip(store, b"wounded[{", 10)
    with Server(store) as server, Client(server.url) as client:
        client.done("DELETE", "/v1/buffers/wounded")
        client.create("wounded", (SIZE,))


@pytest.mark.parametrize("removed_by", ["an add", "the idle writer"])
def test_an_expired_damaged_record_harms_no_other_buffer(tmp_path: Path, removed_by: str) -> None:
    path = tmp_path / "store"
    with Server(path) as server, Client(server.url) as client:
        client.create("sound", (SIZE,))
        client.create("wounded", (SIZE,), ttl_seconds=0.1)
    flip(path, b"wounded[{", 10)
    with Server(path) as server, Client(server.url, patience=10) as client:
        if removed_by == "the idle writer":
            wait_until(lambda: entries_of(path)["deadlines"] == 0)
        for count in range(1, 4):
            assert client.add("sound", np.ones(SIZE))["count"] == count


def test_workers_never_write_under_different_lock_files(tmp_path: Path) -> None:
    """`lock.mdb` is removed while the server runs; a worker that starts now makes another file."""
    with Server(tmp_path / "store", workers=2) as server:
        httpx.put(f"{server.url}/v1/buffers/a", json={"shape": [1]}).raise_for_status()
        (tmp_path / "store" / "lock.mdb").unlink()
        assert "lock.mdb" in httpx.get(f"{server.url}/v2/health/ready").json()["error"]
        kill(server.workers()[0])
        answers = Counter[int]()
        end = time.monotonic() + PATIENCE
        while min(answers[200], answers[503]) < 20 and time.monotonic() < end:
            try:  # each on a new connection
                answer = httpx.post(f"{server.url}/v1/buffers/a/accumulate", json={"gradient": [1]})
            except httpx.TransportError:  # the connection was the killed worker's
                continue
            answers[answer.status_code] += 1
            if answer.status_code != 200:
                assert_problem(answer, 503, "store_failed", "lock.mdb", "removed or replaced")
        assert answers[503] >= 20
        server.restart()
        assert httpx.get(f"{server.url}/v1/buffers/a").json()["count"] == answers[200] >= 20


def test_a_damaged_model_harms_one_graph(tmp_path: Path) -> None:
    """In a new life of the server, which has planned no graph yet."""
    path, numbers = tmp_path / "store", {name: weights(seed, ROWS) for seed, name in enumerate(("hurt", "well"))}
    with Server(path) as server, Client(server.url) as client:
        for name, each in numbers.items():
            client.done("PUT", f"/v1/graphs/{name}", content=model(each))
        server.kill()
        flip(path, numbers["hurt"][:2].tobytes(), 99)
        server.start()
        x: dict[str, Any] = {"json": {"x": [[1] * ROWS]}}
        answers = [client.once("POST", "/v1/graphs/hurt", **x), client.once("GET", "/v1/graphs/hurt/model")]
        for answer in answers:
            assert assert_problem(answer, 500, "graph_corrupt", "model of the graph 'hurt'")["graph"] == "hurt"
        assert [each["name"] for each in client.done("GET", "/v1/graphs")["graphs"]] == ["hurt", "well"]
        assert client.done("POST", "/v1/graphs/well", **x)["y"]["shape"] == [1, ROWS]
        client.done("DELETE", "/v1/graphs/hurt")
        assert client.done("PUT", "/v1/graphs/hurt", content=model(numbers["hurt"]))["bytes"] > numbers["hurt"].nbytes
