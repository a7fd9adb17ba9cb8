"""`gradserve export` and `import` beside a running server, and both commands and `doctor` on damaged stores."""

from __future__ import annotations

import json
import os
import pty
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, TextIO

import httpx
import lmdb
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load, load_file, save_file

from service.__main__ import main
from service.buffers.changes import Create
from service.buffers.doctor import examine
from service.buffers.lmdb.store import LmdbStore
from service.buffers.perform import Request
from service.buffers.record import Spec
from service.codecs.safetensors import decode
from service.dtypes import FLOAT32
from service.errors import MalformedBody
from service.keys import add as add_key
from service.limits import Limits
from tests.commands import add, adding, called, put, run
from tests.serving import serving, wait_until

LARGE = 100_003


def metadata(client: httpx.Client, name: str) -> dict[str, Any]:
    found: dict[str, Any] = client.get(f"/v1/buffers/{name}").json()
    return {name: value for name, value in found.items() if name not in ("updated_at", "closed_steps", "closed_at")}


def test_an_export_restores_every_buffer_in_another_store(tmp_path: Path) -> None:
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
    assert called("import", str(file), "--store", other) == (0, "3 buffers\n", "")
    status, _, complaint = called("import", str(file), "--store", other)
    assert (status, "net.large, net.never, net.w" in complaint) == (1, True)
    with serving(store=other) as url, httpx.Client(base_url=url) as client:
        assert {name: metadata(client, name) for name in before} == before
        add(client, "net.w", 1)
        assert client.get("/v1/buffers/net.w/value").json()["value"]["data"] == [[1.5, 2, 2.5]] * 2


def test_what_is_sent_again_after_an_import_is_new(tmp_path: Path) -> None:
    """An export has no idempotency keys: docs/operations.md says what protects a sum instead."""
    stores, file = (f"lmdb:{tmp_path}/a", f"lmdb:{tmp_path}/b"), str(tmp_path / "saved.safetensors")
    key, body, path = {"Idempotency-Key": "k"}, {"gradient": 1}, "/v1/buffers/w/accumulate"

    def part(client: httpx.Client, number: int) -> Any:
        query: dict[str, str | int] = {"push": "p", "part": number, "parts": 2}
        return client.post("/v1/buffers/accumulate", params=query, json={f"x{number}": 1}).json()

    with serving(store=stores[0]) as url, httpx.Client(base_url=url) as client:
        for name in ("w", "x1", "x2"):
            put(client, name, shape=[2])
        assert part(client, 1)["staged"] == [1]
        assert client.post(path, json=body, headers=key).json()["count"] == 1
        assert client.post("/v1/buffers/w/take").status_code == 200
        tag = client.get("/v1/buffers/w").headers["ETag"]
        add(client, "w", 1, contributor="x")
    assert called("export", file, "--store", stores[0])[0] == 0
    assert called("import", file, "--store", stores[1])[0] == 0
    with serving(store=stores[1]) as url, httpx.Client(base_url=url) as client:

        def refused(answer: httpx.Response) -> tuple[int, str]:
            return answer.status_code, answer.json()["code"]

        assert refused(client.get("/v1/buffers/w/value?step=0")) == (410, "step_gone")
        assert refused(client.post(path, json=body, headers=key | {"If-Match": tag})) == (412, "precondition_failed")
        for query, code in (("contributor=x", "duplicate_contributor"), ("step=0", "stale_step")):
            assert refused(client.post(f"{path}?{query}", json=body, headers=key)) == (409, code)
        assert refused(client.post("/v1/buffers/w/take?step=0", headers=key)) == (409, "stale_step")
        again = client.post(path, json=body, headers=key)
        assert (again.json()["count"], again.json()["step"]) == (2, 1)
        assert part(client, 2)["staged"] == [2]
        assert part(client, 1)["buffers"]["x2"]["count"] == 1


def test_an_export_is_a_snapshot_of_one_moment(tmp_path: Path) -> None:
    store = f"lmdb:{tmp_path}/a"
    with serving(store=store) as url, httpx.Client(base_url=url) as client:
        for name in ("a", "b"):
            put(client, name, shape=[LARGE])
        with adding(url, "ab"):
            for number in range(2):
                file = tmp_path / f"{number}.safetensors"
                assert run("export", str(file), "--store", store)[0] == 0
                tensors = load_file(file)
                assert len(set(tensors["a"].tolist() + tensors["b"].tolist())) == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"nonsense", "header"),
        ({"a": np.zeros(2, np.float32)}, "not written by gradserve export"),
        (None, "No such file"),
    ],
)
def test_an_invalid_file_is_not_imported(tmp_path: Path, content: Any, words: str) -> None:
    file, store = tmp_path / "x", f"lmdb:{tmp_path}/a"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        save_file(content, file)
    status, out, complaint = called("import", str(file), "--store", store)
    assert (status, out) == (1, "")
    assert complaint.startswith("gradserve: ")
    assert words in complaint
    assert not (tmp_path / "a").exists()


def test_an_export_follows_links_and_writes_into_pipes(tmp_path: Path) -> None:
    store = f"lmdb:{tmp_path}/a"
    with serving(store=store) as url, httpx.Client(base_url=url) as client:
        put(client, "a", shape=[3])
        add(client, "a", [1, 2, 3])
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    target.touch(0o600)
    link.symlink_to("target")
    others = {tmp_path / "target.unfinished": "mine"}
    for path, text in others.items():
        path.write_text(text)
    assert called("export", str(link), "--store", store)[:2] == (0, f"1 buffers, {target.stat().st_size} bytes\n")
    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o600
    assert load_file(target)["a"].tolist() == [1, 2, 3]
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as pool:
        read = pool.submit(pipe.read_bytes)
        assert called("export", str(pipe), "--store", store)[:2] == (0, "")
        assert read.result(30) == target.read_bytes()
        written = pool.submit(pipe.write_bytes, target.read_bytes())
        assert called("import", str(pipe), "--store", f"lmdb:{tmp_path}/b")[:2] == (0, "1 buffers\n")
        written.result(30)
    new = tmp_path / "new"
    assert called("export", str(new), "--store", f"lmdb:{tmp_path}/b")[0] == 0
    assert (new.stat().st_mode & 0o777, load_file(new)["a"].tolist()) == (0o600, [1, 2, 3])
    assert pipe.is_fifo()
    status, _, complaint = called("export", str(tmp_path), "--store", store)
    assert (status, str(tmp_path) in complaint, "directory" in complaint) == (1, True, True)
    assert {path: path.read_text() for path in others} == others
    there = ["a", "b", "link", "new", "pipe", "target", "target.unfinished"]
    assert sorted(path.name for path in tmp_path.iterdir()) == there


def test_stdout_and_stdin_carry_an_export(tmp_path: Path) -> None:
    with serving(store=f"lmdb:{tmp_path}/a") as url, httpx.Client(base_url=url) as client:
        put(client, "a", shape=[LARGE])
        add(client, "a", 2)
    command = [sys.executable, "-m", "service"]
    piped = subprocess.run([*command, "export", "-", "--store", f"lmdb:{tmp_path}/a"], capture_output=True, check=True)
    assert load(piped.stdout)["a"].tolist() == [2] * LARGE
    assert piped.stderr == f"1 buffers, {len(piped.stdout)} bytes\n".encode()
    importing = [*command, "import", "-", "--store", f"lmdb:{tmp_path}/b"]
    assert subprocess.run(importing, input=piped.stdout, capture_output=True, check=True).stdout == b"1 buffers\n"

    (tmp_path / "redirected").write_bytes(b"first: ")
    with open(tmp_path / "redirected", "a") as file, redirect_stdout(file):
        assert main(["export", "-", "--store", f"lmdb:{tmp_path}/a"]) == 0
    assert (tmp_path / "redirected").read_bytes() == b"first: " + piped.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "redirected"}

    ours, theirs = socket.socketpair()  # a socket has no path to open again
    with ours, theirs, theirs.makefile() as stdin:

        def send() -> None:
            ours.sendall(piped.stdout)
            ours.shutdown(socket.SHUT_WR)

        sending = threading.Thread(target=send)
        sending.start()
        assert reading(stdin, "import", "-", "--store", f"lmdb:{tmp_path}/c")[:2] == (0, "1 buffers\n")
        sending.join()
    with open(tmp_path / "redirected") as rest:
        os.lseek(rest.fileno(), len(b"first: "), os.SEEK_SET)
        assert reading(rest, "import", "-", "--store", f"lmdb:{tmp_path}/d")[:2] == (0, "1 buffers\n")
    (tmp_path / "wrong").write_bytes(b"wrong")
    with open(tmp_path / "wrong") as wrong:
        status, _, complaint = reading(wrong, "import", "-", "--store", f"lmdb:{tmp_path}/d")
    assert (status, complaint[:43]) == (1, "gradserve: stdin is not a safetensors file:")


def reading(stdin: TextIO, *arguments: str) -> tuple[int, str, str]:
    """Call a command that reads this file as stdin."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", stdin)
        return called(*arguments)


def test_a_file_may_be_named_like_stdout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = _empty(tmp_path)
    monkeypatch.chdir(tmp_path)
    for command in ("export", "import"):
        status, out, _ = called(command, "./-", "--store", f"lmdb:{store}")
        assert (status, out[:9]) == (0, "0 buffers")
    assert load_file(tmp_path / "-") == {}


def test_a_closed_stream_or_a_terminal_is_refused(tmp_path: Path) -> None:
    command, store = f"{sys.executable} -m service", f"--store lmdb:{_empty(tmp_path)}"
    for line, words in (
        (f"{command} export - {store} >&-", "stdout is closed"),
        (f"{command} import - {store} <&-", "stdin is closed"),
    ):
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (1, f"gradserve: {words}\n")
    ours, terminal = pty.openpty()
    try:
        exporting = [sys.executable, "-m", "service", "export", "-", "--store", f"lmdb:{tmp_path}/empty"]
        done = subprocess.run(exporting, stdout=terminal, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
        assert (done.returncode, "terminal" in done.stderr) == (2, True)
    finally:
        os.close(ours)
        os.close(terminal)


@pytest.mark.parametrize("place", ["store", "store/in", "link", "store/out.link"])
def test_an_export_into_the_directory_of_the_store_is_refused(place: str, tmp_path: Path) -> None:
    """In the image the store is the data volume, with which such a backup would be lost."""
    store = _empty(tmp_path).rename(tmp_path / "store")
    (store / "in").mkdir()
    (tmp_path / "link").symlink_to(store)
    (store / "out.link").symlink_to(tmp_path)
    file = tmp_path / place / "backup"
    before = sorted(store.rglob("*"))
    status, out, complaint = called("export", str(file), "--store", f"lmdb:{store}")
    if place.endswith("out.link"):
        assert (status, (tmp_path / "backup").exists()) == (0, True)
        return
    assert (status, out) == (2, "")
    assert complaint == (
        f"gradserve: {file} would be in {store}, the directory of the store, and be lost with it: name a file"
        " elsewhere, or write to stdout (-)\n"
    )
    assert sorted(store.rglob("*")) == before


def test_an_interrupted_export_leaves_no_file(tmp_path: Path) -> None:
    store = f"lmdb:{tmp_path}/a"
    with serving(store=store) as url, httpx.Client(base_url=url) as client:
        for number in range(60):
            put(client, f"a{number}", shape=[1 << 20])
            add(client, f"a{number}", 1)
    for number in (signal.SIGTERM, signal.SIGINT):
        export = subprocess.Popen(
            [sys.executable, "-m", "service", "export", tmp_path / "x", "--store", store], stderr=subprocess.PIPE
        )
        wait_until(lambda: any("unfinished" in path.name for path in tmp_path.iterdir()))
        export.send_signal(number)
        assert (export.wait(30), export.communicate()[1]) == (128 + number, b"")
        assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_store_is_readable_by_its_user_only(tmp_path: Path) -> None:
    """API keys guard buffers over HTTP; other users must not read the files instead."""
    with serving(store=f"lmdb:{tmp_path}/a") as url, httpx.Client(base_url=url) as client:
        put(client, "large", shape=[LARGE])
        add(client, "large", 1)
    modes = {path.name: path.stat().st_mode & 0o077 for path in [tmp_path / "a", *(tmp_path / "a").iterdir()]}
    assert {"a", "data.mdb", "lock.mdb", "values"} <= modes.keys()
    assert {name: mode for name, mode in modes.items() if mode and name != "format"} == {}


def test_an_export_without_buffers_replaces_no_file(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"dear")
    status, out, complaint = called("export", str(file), "--prefix", "typo.", "--store", f"lmdb:{_empty(tmp_path)}")
    assert (status, out) == (1, "")
    assert complaint == "gradserve: There is no buffer and no graph whose name begins with 'typo.'\n"
    assert file.read_bytes() == b"dear"
    assert called("export", str(file), "--store", f"lmdb:{_empty(tmp_path)}")[0] == 0
    assert load_file(file) == {}


@pytest.mark.parametrize(("prefix", "call"), [("\udcff", run), ("ä", called)])
def test_a_prefix_that_is_not_ascii_is_refused(tmp_path: Path, prefix: str, call: Callable[..., Any]) -> None:
    store = f"lmdb:{_empty(tmp_path)}"
    status, _, complaint = call("export", str(tmp_path / "x"), "--prefix", prefix, "--store", store)
    assert (status, complaint) == (2, f"gradserve: --prefix is {prefix!r}, but buffer names are ASCII\n")


def test_a_failed_export_leaves_no_file(tmp_path: Path) -> None:
    with serving(store=f"lmdb:{tmp_path}/a"):
        pass
    status, _, complaint = called("export", str(tmp_path / "no" / "x"), "--store", f"lmdb:{tmp_path}/a")
    assert (status, complaint.endswith(f"No such file or directory: '{tmp_path}/no/x'\n")) == (1, True)
    status, _, complaint = called("export", str(tmp_path / "x"), "--store", f"lmdb:{tmp_path}/none")
    assert (status, complaint) == (1, f"gradserve: There is no store in {tmp_path}/none\n")
    assert not (tmp_path / "x").exists()
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("target", ["/dev/full", "file", "-"])
def test_a_full_disk_is_named_by_the_file(tmp_path: Path, target: str) -> None:
    """A limit of a file's size stands for the disk that holds a regular file."""
    with serving(store=f"lmdb:{tmp_path}/a") as url, httpx.Client(base_url=url) as client:
        put(client, "a", shape=[1 << 16])
        add(client, "a", 1)
    path = str(tmp_path / "file") if target == "file" else target
    with Path("/dev/full").open("wb") as full:
        export = subprocess.run(
            [sys.executable, "-m", "service", "export", path, "--store", f"lmdb:{tmp_path}/a"],
            stdout=full,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16)),
        )
    words = "File too large" if target == "file" else "No space left on device"
    named = "stdout" if target == "-" else path
    assert (export.returncode, export.stderr.decode().partition("] ")[2]) == (1, f"{words}: '{named}'\n")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_an_import_names_the_directory_that_its_copy_does_not_fit(tmp_path: Path) -> None:
    """stdin is a pipe, which is copied."""
    with subprocess.Popen(
        [sys.executable, "-m", "service", "import", "-", "--store", f"lmdb:{tmp_path}/a"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16)),
    ) as importing:
        _, complaint = importing.communicate(bytes(1 << 20))
    assert (importing.returncode, complaint.decode().partition("] ")[2]) == (1, f"File too large: '{tmp_path}'\n")


def damage(path: Path, database: bytes, key: bytes | None = None) -> None:
    """Flip a bit in the middle of the entry of `key`, or of the first entry."""
    with lmdb.open(str(path), max_dbs=8) as env, env.begin(write=True) as txn:
        db = env.open_db(database, txn=txn)
        cursor = txn.cursor(db=db)
        assert cursor.set_key(key) if key is not None else cursor.first()
        entry = bytearray(cursor.value())
        entry[len(entry) // 2] ^= 1
        txn.put(cursor.key(), bytes(entry), db=db)


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Return a store with the buffers a, b and c. The add to b had a key."""
    path = tmp_path / "three"
    with serving(store=f"lmdb:{path}") as url, httpx.Client(base_url=url) as client:
        for name in "abc":
            put(client, name, shape=[4])
        client.post("/v1/buffers/b/accumulate", json={"gradient": 1}, headers={"Idempotency-Key": "k"})
    return path


@pytest.mark.parametrize(
    ("database", "key", "wrong"),
    [
        (b"buffers", b"b", ["the buffer 'b' is damaged", "value 4 belongs to no buffer and no graph that can be read"]),
        (b"values", None, ["the running value of the buffer 'b' is damaged"]),
        (b"keys", None, ["1 idempotency keys are damaged: a retry with one is found all the same, or fails"]),
    ],
)
def test_damage_is_reported_once_and_not_exported(
    three: Path, tmp_path: Path, database: bytes, key: bytes | None, wrong: list[str]
) -> None:
    damage(three, database, key)
    status, out, _ = called("doctor", "--store", f"lmdb:{three}")
    assert status == 1
    assert [line.removeprefix("WRONG: ") for line in out.splitlines() if line.startswith("WRONG: ")] == wrong
    status, out, complaint = called("export", str(tmp_path / "x"), "--store", f"lmdb:{three}")
    if database == b"keys":
        assert (status, out.startswith("3 buffers")) == (0, True)
    else:
        assert (status, "'b'" in complaint, (tmp_path / "x").exists()) == (1, True, False)
        assert called("export", str(tmp_path / "x"), "--store", f"lmdb:{three}", "--prefix", "c")[0] == 0


def test_commands_refuse_the_memory_store(tmp_path: Path) -> None:
    file = str(tmp_path / "saved")
    assert called("export", file, "--store", f"lmdb:{_empty(tmp_path)}")[0] == 0
    for command in (["doctor"], ["export", "x"], ["import", file]):
        status, _, complaint = called(*command, "--store", "memory:")
        assert (status, "memory:" in complaint) == (2, True)


def _empty(path: Path) -> Path:
    LmdbStore(path / "empty", max_bytes=1 << 24).close()
    return path / "empty"


def test_an_import_keeps_the_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, other = tmp_path / "saved.safetensors", f"lmdb:{tmp_path}/b"
    with serving(store=f"lmdb:{tmp_path}/a") as url, httpx.Client(base_url=url) as client:
        for name in ("one", "two", "three.long"):
            put(client, name, shape=[1, 2])
    assert main(["export", str(file), "--store", f"lmdb:{tmp_path}/a"]) == 0
    for setting, limit in (("MAX_BUFFERS", 2), ("MAX_NAME_LENGTH", 5), ("MAX_DIMENSIONS", 1), ("MAX_TENSOR_BYTES", 7)):
        monkeypatch.setenv(f"GRADSERVE_{setting}", str(limit))
        capsys.readouterr()
        assert main(["import", str(file), "--store", other]) == 1
        assert f"GRADSERVE_{setting}" in capsys.readouterr().err
        monkeypatch.delenv(f"GRADSERVE_{setting}")
        lines = [*examine(other, 1 << 24)]
        assert "0 buffers" in " ".join(lines)
        assert not any(line.startswith("WRONG") for line in lines)
    monkeypatch.setenv("GRADSERVE_MAX_BUFFERS", "3")
    monkeypatch.setenv("GRADSERVE_MAX_TENSORS", "1")  # the limit of a request does not hold for an import
    assert main(["import", str(file), "--store", other]) == 0


def test_a_file_may_have_more_buffers_than_a_request(tmp_path: Path) -> None:
    """The header of the file exceeds a request's limit of values, too."""
    file, names = tmp_path / "saved.safetensors", [f"layer.{number}.weight" for number in range(17_000)]
    store = LmdbStore(tmp_path / "a", max_bytes=1 << 28)
    store.submit(Request([Create(name=name, spec=Spec((1,), FLOAT32)) for name in names])).result(60)
    store.close()
    assert called("export", str(file), "--store", f"lmdb:{tmp_path}/a")[0] == 0
    with pytest.raises(MalformedBody, match="more than 262144 values"):
        decode(memoryview(file.read_bytes()), Limits(1 << 30))
    assert called("import", str(file), "--store", f"lmdb:{tmp_path}/b") == (0, "17000 buffers\n", "")


def test_buffers_of_namespaces_stay_apart(tmp_path: Path) -> None:
    file, keys = tmp_path / "saved.safetensors", tmp_path / "keys"
    secrets = {name: add_key(keys, name, ["buffers:read", "buffers:write"], name) for name in ("ann", "bob")}
    for store in ("a", "b"):
        with serving(store=f"lmdb:{tmp_path}/{store}", keys=keys) as url:
            for number, (name, secret) in enumerate(secrets.items()):
                with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {secret}"}) as client:
                    if store == "a":
                        put(client, "x", shape=[1])
                        add(client, "x", number)
                    assert client.get("/v1/buffers/x/value").json()["value"]["data"] == [number], name
        if store == "a":
            assert called("export", str(file), "--store", f"lmdb:{tmp_path}/a")[0] == 0
            assert called("import", str(file), "--store", f"lmdb:{tmp_path}/b") == (0, "2 buffers\n", "")
