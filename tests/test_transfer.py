"""`gradserve export`, `import` and `doctor`, on the store of a server that runs."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tests.serving import serving

LARGE = 100_003


def run(*arguments: str) -> tuple[int, str, str]:
    """The status and output of the command, which runs in a process of its own, beside the server's."""
    done = subprocess.run([sys.executable, "-m", "service", *arguments], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def put(client: httpx.Client, name: str, **spec: Any) -> None:
    assert client.put(f"/v1/buffers/{name}", json=spec).status_code == 201


def add(client: httpx.Client, name: str, gradient: object, **query: float) -> None:
    answer = client.post(f"/v1/buffers/{name}/accumulate", json={"gradient": gradient}, params=query)
    assert answer.status_code == 200, answer.text


def metadata(client: httpx.Client, name: str) -> dict[str, Any]:
    found: dict[str, Any] = client.get(f"/v1/buffers/{name}").json()
    return {name: value for name, value in found.items() if name not in ("updated_at", "closed_epochs")}


def test_out_of_one_server_and_into_another(tmp_path: Path) -> None:
    file, other = tmp_path / "saved.safetensors", f"lmdb:{tmp_path}/b"
    with serving(store=f"lmdb:{tmp_path}/a") as url, httpx.Client(base_url=url) as client:
        put(client, "net.w", shape=[2, 3], dtype="float64", quorum=9, keep=3, nonfinite="reject")
        put(client, "net.large", shape=[LARGE])
        put(client, "net.never", shape=[0, 3], dtype="float16")
        put(client, "else", shape=[1])
        add(client, "net.w", 5.5)
        client.post("/v1/buffers/net.w/take")
        add(client, "net.w", [1, 2, 3], weight=0.5)
        add(client, "net.large", 3)
        assert run("export", str(file), "--prefix", "net.", "--store", f"lmdb:{tmp_path}/a")[0] == 0
        before = {name: metadata(client, name) for name in ("net.w", "net.large", "net.never")}
    tensors = load_file(file)
    assert tensors["net.w"].tolist() == [[0.5, 1, 1.5]] * 2
    assert tensors["net.large"].tolist() == [3] * LARGE
    assert tensors["net.never"].shape == (0, 3)
    assert tensors["net.never"].dtype == np.float16
    assert set(tensors) == before.keys()
    with safe_open(file, "numpy") as opened:
        assert json.loads(opened.metadata()["buffers"])["net.w"]["count"] == 1
    assert run("import", str(file), "--store", other) == (0, "3 buffers\n", "")
    status, _, complaint = run("import", str(file), "--store", other)
    assert (status, "net.large, net.never, net.w" in complaint) == (1, True)
    with serving(store=other) as url, httpx.Client(base_url=url) as client:
        assert {name: metadata(client, name) for name in before} == before
        add(client, "net.w", 1)
        assert client.get("/v1/buffers/net.w/value").json()["value"]["data"] == [[1.5, 2, 2.5]] * 2


def test_an_export_is_of_one_moment(tmp_path: Path) -> None:
    store = f"lmdb:{tmp_path}/a"
    with serving(store=store) as url, httpx.Client(base_url=url) as client:
        for name in ("a", "b"):
            put(client, name, shape=[LARGE])
        done = threading.Event()

        def keep_adding() -> None:
            with httpx.Client(base_url=url) as own:
                while not done.is_set():
                    assert own.post("/v1/buffers/accumulate", json={"a": 1, "b": 1}).status_code == 200

        adding = threading.Thread(target=keep_adding)
        adding.start()
        try:
            for number in range(4):
                file = tmp_path / f"{number}.safetensors"
                assert run("export", str(file), "--store", store)[0] == 0
                tensors = load_file(file)
                assert len(set(tensors["a"].tolist() + tensors["b"].tolist())) == 1
        finally:
            done.set()
            adding.join()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"nonsense", "header"),
        ({"a": np.zeros(2, np.float32)}, "not written by gradserve export"),
        (None, "No such file"),
    ],
)
def test_files_that_cannot_be_imported(tmp_path: Path, content: Any, words: str) -> None:
    file, store = tmp_path / "x", f"lmdb:{tmp_path}/a"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        save_file(content, file)
    status, out, complaint = run("import", str(file), "--store", store)
    assert (status, out) == (1, "")
    assert complaint.startswith("gradserve: ")
    assert words in complaint
    assert "0 buffers" in run("doctor", "--store", store)[1]


def test_an_export_that_fails_leaves_no_file(tmp_path: Path) -> None:
    with serving(store=f"lmdb:{tmp_path}/a"):
        pass
    assert run("export", str(tmp_path / "no" / "x"), "--store", f"lmdb:{tmp_path}/a")[0] == 1
    status, _, complaint = run("export", str(tmp_path / "x"), "--store", f"lmdb:{tmp_path}/none")
    assert (status, complaint) == (1, f"gradserve: There is no store in {tmp_path}/none\n")
    assert not (tmp_path / "x").exists()
    assert not (tmp_path / "none").exists()


def test_the_doctor(tmp_path: Path) -> None:
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
        for words in ("format 1", "4 buffers", "1 idempotency keys", "nothing is wrong"):
            assert words in out
    values = tmp_path / "a" / "values"
    damaged = bytearray(values.read_bytes())
    damaged[1000] ^= 1
    values.write_bytes(damaged)
    status, out, _ = run("doctor", "--store", store)
    assert status == 1
    assert len([line for line in out.splitlines() if line.startswith("WRONG: ")]) == 1
    assert "1 things are wrong" in out


def test_memory_has_nothing_to_look_at() -> None:
    for command in (["doctor"], ["export", "x"]):
        status, _, complaint = run(*command, "--store", "memory:")
        assert (status, "memory:" in complaint) == (1, True)
