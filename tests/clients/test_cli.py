"""The command line against a server: in separate processes, on terminals, and, faster, in this process."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gradserve_client import Buffer, Client
from gradserve_client._wire.tensors import decode, encode
from safetensors.numpy import load_file, save_file

from service.kernels import OPERATORS
from tests.clients.proxy import Talker
from tests.clients.terminal import COMMAND, Call, environment, on_terminal, plain
from tests.serving import serving

README = Path(__file__).parent.parent.parent / "clients" / "python" / "README.md"

BF16 = ml_dtypes.bfloat16


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving(threads=2) as url:
        yield url


@pytest.fixture
def server(address: str) -> Iterator[Client]:
    with Client(address) as client:
        for one in client.buffers.list():
            client.buffers[one.name].delete()
        yield client


# ----- operators -----


def test_ops_lists_and_shows(call: Call, server: Client) -> None:
    lines = call(server, "ops").out.splitlines()
    assert [line.split()[0] for line in lines] == ["operator", *OPERATORS]
    shown = call(server, "ops", "GRUGrad").out
    operator = OPERATORS["GRUGrad"]
    for word in [operator.formula, "SL?", "int32, int64", "default forward", "hidden_size"]:
        assert word in shown
    assert [one["name"] for one in call(server, "ops", "--json").json] == list(OPERATORS)
    described = call(server, "--json", "ops", "SoftmaxGrad_13").json
    assert (described["inputs"][0]["name"], described["attributes"]) == ("dY", {"axis": -1})


@pytest.mark.processes
def test_ops_fits_a_terminal(server: Client) -> None:
    for arguments in ["ops"], ["ops", "GRUGrad"], ["run", "--help"]:
        done = on_terminal(server, *arguments)
        assert done.code == 0
        assert max(len(line) for line in plain(done.out).splitlines()) <= 80


def test_run_prints_or_writes(call: Call, server: Client, tmp_path: Path) -> None:
    given, made = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file({"dY": np.array([[1, 2, 3]], np.float32), "Y": np.array([[0.25, 0.25, 0.5]], np.float32)}, given)
    printed = call(server, "run", "SoftmaxGrad_13", given, "-a", "axis=-1")
    assert printed.out == "dX: float32 [1, 3]\n[[-0.3125 -0.0625  0.375 ]]\n"
    assert call(server, "run", "SoftmaxGrad_13", given, "--set", "axis=0", "--json").json == {
        "outputs": {"dX": {"dtype": "float32", "shape": [1, 3], "data": [[0.1875, 0.375, 0.75]]}},
        "receipts": {},
    }
    assert call(server, "run", "SoftmaxGrad_13", given, "-o", made).out == f"{made}: dX float32 [1, 3]\n"
    np.testing.assert_array_equal(load_file(made)["dX"], np.array([[-0.3125, -0.0625, 0.375]], np.float32))
    made.chmod(0o600)
    link = tmp_path / "link.safetensors"
    link.symlink_to(made)
    made.with_name(f"{made.name}.part").write_text("of another program")
    assert call(server, "run", "SoftmaxGrad_13", given, "-o", link).code == 0
    assert (link.is_symlink(), made.stat().st_mode & 0o777) == (True, 0o600)
    assert [path.read_text() for path in tmp_path.glob("*.part")] == ["of another program"]


def test_run_with_buffers_and_outputs(call: Call, server: Client, tmp_path: Path) -> None:
    server.buffers["acts"].create(2)
    server.buffers["acts"].accumulate([1, -1])
    server.buffers["sum"].create(2)
    save_file({"dY": np.ones(2, np.float32)}, tmp_path / "in.safetensors")
    run: list[str | Path]
    run = ["run", "ReluGrad", tmp_path / "in.safetensors", "--from", "X:acts", "--into", "dX:sum", "--weight", "2"]
    assert call(server, *run, "--step", "0", "--key", "k").out == "dX -> sum: step 0, count 1, weight 2\n"
    again = call(server, *run, "--step", "0", "--key", "k", "--json").json
    assert again["outputs"] == {}
    assert (again["receipts"]["dX"]["count"], again["receipts"]["dX"]["replayed"]) == (1, True)
    assert call(server, *run, "--step", "5").code == 4
    assert server.buffers["sum"].value().tolist() == [2, 0]
    both = call(server, "run", "ReluGrad", "--from", "X:acts", "--from", "dY:sum")
    assert both.out == "dX: float32 [2]\n[2. 0.]\n"


def test_a_list_is_an_attribute_given_several_times(call: Call, server: Client, tmp_path: Path) -> None:
    shapes = {"X": (1, 1, 1), "W": (1, 3, 1), "R": (1, 3, 1)}
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, tmp_path / "in.safetensors")
    run: list[str | Path]
    run = ["run", "GRUTraining", tmp_path / "in.safetensors", "--outputs", "HFinal", "-a", "activations=sigmoid"]
    assert call(server, *run, "-a", "activations=tanh").code == 0
    assert call(server, *run).code == 5


# ----- buffers -----


def test_the_life_of_a_buffer(call: Call, server: Client, tmp_path: Path) -> None:
    np.save(tmp_path / "g.npy", np.array([1.5, 2.5]))
    file = tmp_path / "g.npy"
    made = call(server, "buffers", "create", "b:heart:", "[2]", "--quorum", "3", "--keep", "2", "--ttl", "1000")
    assert made.out == "b:heart:: float32 [2], step 0, count 0 of 3\n"
    assert call(server, "buffers", "add", "b:heart:", file, "--weight", "-2").out.endswith("count 1, weight -2\n")
    assert call(server, "buffers", "put", "b:heart:", file, "--step", "0").out.endswith("count 1, weight 1\n")
    listed = call(server, "buffers", "ls", "b").out.splitlines()
    assert listed[0].split() == ["name", "shape", "dtype", "step", "count", "weight", "size"]
    assert listed[1].split() == "b:heart: [2] float32 0 1 of 3 1 8 B".split()
    assert call(server, "buffers", "ls", "nothing.", "--json").json == []
    shown = call(server, "buffers", "show", "b:heart:", "--json").json
    assert (shown["quorum"], shown["keep"], shown["ttl_seconds"], shown["shape"]) == (3, 2, 1000, [2])
    assert "closed steps  none" in call(server, "buffers", "show", "b:heart:").out
    assert call(server, "buffers", "get", "b:heart:").out == "b:heart:: float32 [2]\n[1.5 2.5]\n"
    taken = call(server, "buffers", "take", "b:heart:", "--min-count", "1", "--reduce", "mean", "--json").json
    assert (taken["step"], taken["closed"], taken["value"]["data"]) == (0, True, [1.5, 2.5])
    assert call(server, "buffers", "zero", "b:heart:").out == "b:heart:: step 2, count 0, weight 0\n"
    old = call(server, "buffers", "get", "b:heart:", "--step", "0", "--dtype", "float64", "--json").json
    assert old == {"name": "b:heart:", "dtype": "float64", "shape": [2], "data": [1.5, 2.5]}
    assert call(server, "buffers", "rm", "b:heart:").code == 0
    assert server.buffers.list() == []


def test_an_add_with_a_key_counts_once(call: Call, server: Client, tmp_path: Path) -> None:
    server.buffers["b"].create(())
    np.save(tmp_path / "g.npy", np.array(1.0))
    for _ in range(2):
        last = call(server, "buffers", "add", "b", tmp_path / "g.npy", "--key", "mine")
    assert last.out == "b: step 0, count 1, weight 1, done before\n"


def test_rows_in_a_file_are_a_sparse_gradient(call: Call, server: Client, tmp_path: Path) -> None:
    server.buffers["b"].create((3, 2))
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    rows: dict[str, Any] = {"emb/indices": np.array([2, -1]), "emb/rows": np.array([[1.0, 2.0], [3.0, 4.0]])}
    save_file(rows, one)
    save_file({**rows, "w": np.ones((3, 2)), "odd/rows": np.ones((3, 2))}, two)
    assert call(server, "buffers", "add", "b", one).code == 0
    assert server.buffers["b"].value().tolist() == [[0, 0], [0, 0], [4, 6]]
    assert call(server, "buffers", "add", "b", two, "--tensor", "emb", "--weight", "2").code == 0
    assert call(server, "buffers", "add", "b", two, "--tensor", "w").code == 0
    assert call(server, "buffers", "add", "b", two, "--tensor", "odd/rows").code == 0
    assert server.buffers["b"].value().tolist() == [[2, 2], [2, 2], [14, 20]]
    assert "odd/rows" in call(server, "buffers", "add", "b", two).err
    assert call(server, "buffers", "add", "b", two, "--tensor", "odd").code == 5
    assert call(server, "buffers", "put", "b", one).code == 5


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_a_whole_file_is_added_to_all_buffers_or_to_none(
    call: Call, server: Client, tmp_path: Path, key: str, suffix: str
) -> None:
    file = tmp_path / f"model{suffix}"
    tensors: dict[str, Any] = {"w": np.array([[1.0, 2.0]], np.float32), "b": np.array(3.0)}
    tensors |= {"emb/indices": np.array([2, -1]), "emb/rows": np.array([[1.0, 2.0], [3.0, 4.0]])}
    if suffix == ".npz":
        np.savez(file, **tensors)
    else:
        save_file(tensors, file)
    assert call(server, "buffers", "add", file, "--prefix", "m.").code == 3
    server.buffers.create_many({"m.w": {"shape": (1, 2)}, "m.b": {"shape": ()}, "m.emb": {"shape": (3, 2)}})
    for _ in range(2):
        added = call(server, "buffers", "add", file, "--prefix", "m.", "--weight", "2", "--key", key)
    assert added.out.splitlines() == [f"m.{name}: step 0, count 1, weight 2, done before" for name in ("b", "emb", "w")]
    values = {name: server.buffers[f"m.{name}"].value().tolist() for name in ("b", "emb", "w")}
    assert values == {"b": 6, "emb": [[0, 0], [0, 0], [8, 12]], "w": [[2, 4]]}
    receipts = call(server, "buffers", "add", file, "--prefix", "m.", "--json").json
    assert [(one["name"], one["count"]) for one in receipts] == [("m.b", 2), ("m.emb", 2), ("m.w", 2)]
    assert call(server, "buffers", "add", "m.w", file, "--tensor", "w").out == "m.w: step 0, count 3, weight 4\n"


def test_files_of_numpy_with_several_arrays(call: Call, server: Client, tmp_path: Path) -> None:
    given, got, made = (tmp_path / name for name in ("in.npz", "out.npz", "value.npz"))
    np.savez_compressed(given, dY=np.ones(2, np.float32), X=np.array([-1.0, 1.0], np.float32))
    assert call(server, "run", "ReluGrad", given, "-o", got).code == 0
    with np.load(got) as found:
        assert {name: found[name].tolist() for name in found.files} == {"dX": [0, 1]}
    server.buffers["b"].create(2, dtype="bfloat16")
    assert call(server, "buffers", "put", "b", given, "--tensor", "X").code == 0
    assert call(server, "buffers", "get", "b", "-o", made).code == 0
    with np.load(made) as found:
        np.testing.assert_array_equal(found["b"], np.array([-1, 1], np.float32), strict=True)


def test_bfloat16_in_files(call: Call, server: Client, tmp_path: Path) -> None:
    values = np.array([1.5, -np.inf, 3e38], BF16)
    given, got, array = (tmp_path / name for name in ("in.safetensors", "out.safetensors", "out.npy"))
    given.write_bytes(b"".join(encode({"g": values, "other": np.ones(1, np.float32)})))
    assert call(server, "buffers", "put", "b", given, "--tensor", "g").code == 3
    assert call(server, "buffers", "put", "b", given, "--tensor", "g", "--create").code == 0
    assert server.buffers["b"].info().dtype == "bfloat16"
    assert call(server, "buffers", "get", "b", "-o", got).code == 0
    assert call(server, "buffers", "take", "b", "-o", array).code == 0
    (read,) = decode(bytearray(got.read_bytes()))[0].values()
    assert read.dtype == BF16
    np.testing.assert_array_equal(read, values)
    np.testing.assert_array_equal(np.load(array), values.astype(np.float32), strict=True)
    printed = call(server, "buffers", "get", "b", "--step", "0", "--json").json
    assert printed["data"] == [1.5, "-Infinity", float(values[2])]


@pytest.mark.processes
def test_rm_asks_on_a_terminal(server: Client) -> None:
    server.buffers["b"].create(2)
    asked = on_terminal(server, "buffers", "rm", "b", types="n\n")
    assert asked.code == 1
    assert "Remove b, float32 [2], step 0, count 0?" in plain(asked.out)
    assert len(server.buffers.list()) == 1
    assert on_terminal(server, "buffers", "rm", "b", types="y\n").code == 0
    assert server.buffers.list() == []
    server.buffers["b"].create(2)
    sure = on_terminal(server, "buffers", "rm", "b", "--yes")
    assert (sure.code, sure.out) == (0, "")


# ----- watch -----


@pytest.mark.processes
def test_watch_counts_adds(server: Client) -> None:
    server.buffers["w.1"].create(2, quorum=8)
    server.buffers["other"].create(2)
    arguments = [COMMAND, "watch", "w.", "--json", "--interval", "0.05", "--count", "200"]
    with subprocess.Popen(arguments, env=environment(server.url), stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        (first,) = json.loads(watch.stdout.readline())["buffers"]
        server.buffers["w.1"].accumulate([3, 4])
        for line in watch.stdout:
            (then,) = json.loads(line)["buffers"]
            if then["count"]:
                break
        for line in watch.stdout:
            (after,) = json.loads(line)["buffers"]
            break
        watch.send_signal(signal.SIGINT)
    assert watch.returncode == 130
    assert (first["name"], first["count"], first["norm"], first["adds_per_second"]) == ("w.1", 0, 0, None)
    assert (then["count"], then["quorum"], then["norm"]) == (1, 8, 5)
    assert 0 < then["adds_per_second"] < 1 / 0.05
    assert (after["norm"], after["adds_per_second"]) == (5, 0)


@pytest.mark.processes
def test_watch_prints_lines_or_a_table(call: Call, server: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    server.buffers["w"].create(2, quorum=8)
    server.buffers["w"].accumulate([3, 4])
    monkeypatch.delattr(Buffer, "value")  # the norms are the server's: no sum is downloaded
    head, *lines = call(server, "watch", "--count", "2", "--interval", "0.05").out.splitlines()
    columns = "time name shape dtype step count weight norm adds/s deadline missing state"
    assert head.split("\t") == columns.split()
    assert [line.split("\t")[1:] for line in lines] == [
        ["w", "[2]", "float32", "0", "1 of 8", "1", "5", "", "", "", ""],
        ["w", "[2]", "float32", "0", "1 of 8", "1", "5", "0", "", "", ""],
    ]
    live = on_terminal(server, "watch", "--count", "2", "--interval", "0.05")
    assert live.code == 0
    assert "w     [2]    float32     0  1 of 8       1     5       0" in plain(live.out).splitlines()[-1]
    assert "\x1b[1A" in live.out  # the cursor moves up to draw the table again


# ----- what goes wrong -----


@pytest.mark.parametrize(
    ("arguments", "exit_code", "code"),
    [
        ("ops ReluGrat", 3, "unknown_operator"),
        ("run Nonsense", 3, "unknown_operator"),
        ("buffers show missing", 3, "unknown_buffer"),
        ("buffers create there 3", 4, "buffer_exists"),
        ("buffers take there --min-count 5", 4, "too_few_gradients"),
        ("buffers get there --step 0", 4, "step_open"),
        ("buffers get ? -o out.npy", 5, "invalid_parameter"),
        ("buffers get there --dtype float8", 5, "invalid_parameter"),
        ("buffers add there two.safetensors", 5, "unknown_tensor"),
        ("buffers add there two.safetensors --tensor c", 5, "unknown_tensor"),
        ("run ReluGrad junk.npy", 5, "invalid_file"),
        ("buffers add there junk.npy", 5, "invalid_file"),
        ("buffers add junk.npy", 5, "unknown_tensor"),
        ("buffers add empty.npz", 5, "unknown_tensor"),
        ("buffers add junk.npz", 5, "invalid_file"),
        ("buffers add objects.npz", 5, "invalid_file"),
        ("buffers add torn.npz", 5, "invalid_file"),
        ("buffers add two.safetensors", 3, "unknown_buffer"),
        ("buffers add there", 1, "file_error"),
        ("--url ftp://nowhere ops", 5, "invalid_input"),
        ("buffers add there missing.npy", 1, "file_error"),
        ("run ReluGrad missing.npz", 1, "file_error"),
        ("run ReluGradd missing.npz", 3, "unknown_operator"),
        ("buffers get there -o nowhere/x.npy", 1, "file_error"),
        ("--timeout 0.2 --url http://127.0.0.1:9 ops", 6, "connection_failed"),
    ],
)
def test_errors_have_exit_codes_and_codes(
    call: Call, server: Client, tmp_path: Path, arguments: str, exit_code: int, code: str
) -> None:
    server.buffers["there"].create(2)
    save_file({"a": np.ones(1, np.float32), "b": np.ones(2, np.float32)}, tmp_path / "two.safetensors")
    (tmp_path / "junk.npy").write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")
    (tmp_path / "junk.npz").write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")
    np.savez(tmp_path / "empty.npz")
    np.savez(tmp_path / "objects.npz", a=np.array([None]))
    np.savez_compressed(tmp_path / "torn.npz", a=np.arange(100))
    torn = bytearray((tmp_path / "torn.npz").read_bytes())
    torn[80:120] = bytes(40)
    (tmp_path / "torn.npz").write_bytes(torn)
    files = {path.name: path for path in tmp_path.iterdir()}
    given: list[str | Path] = [files.get(word, word) for word in arguments.split()]
    done = call(server, *given)
    assert (done.code, done.out) == (exit_code, "")
    assert re.fullmatch(rf"error: [^\n]+ \({code}\)\n", done.err), done.err


def test_errors_as_json(call: Call, server: Client) -> None:
    done = call(server, "buffers", "show", "missing", "--json")
    assert (done.code, done.out) == (3, "")
    error = json.loads(done.err)["error"]
    assert (error["code"], error["status"], error["context"]) == ("unknown_buffer", 404, {"buffer": "missing"})
    assert "'missing'" in error["detail"]
    assert error["request_id"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["--url"],
        ["--timeout", "0", "ops"],
        ["buffers", "create", "b", "2,q"],
        ["buffers", "create", "b", ""],
        ["buffers", "get", "b", "--reduce", "max"],
        ["run", "ReluGrad", "-a", "axis"],
        ["run", "ReluGrad", "-o", "x.npy"],
        ["buffers", "add"],
        ["buffers", "add", "x.npz", "--tensor", "a"],
        ["buffers", "add", "b", "x.npz", "--prefix", "m."],
    ],
)
def test_usage_errors(call: Call, arguments: list[str]) -> None:
    done = call("http://127.0.0.1:9", *arguments)
    assert (done.code, done.out) == (2, "")
    assert "Error" in done.err


def stubbed(connection: socket.socket, request: bytes) -> None:
    """Answer like a server that needs a key to list operators, sends values slowly, and cannot store."""

    def answer(status: int, body: bytes, at_once: int = 1000) -> None:
        connection.sendall(b"HTTP/1.1 %d Said\r\nContent-Length: %d\r\n\r\n" % (status, len(body)))
        for start in range(0, len(body), at_once):
            connection.sendall(body[start : start + at_once])
            time.sleep(0.5 * (at_once < len(body)))  # the server's slowness: there is nothing to wait for

    if request.startswith(b"GET /v1/buffers/slow/value"):
        answer(200, b"".join(encode({"value": np.arange(8, dtype=np.float32)})), at_once=16)
    elif request.startswith(b"POST"):
        answer(503, b'{"code": "store_failed", "detail": "No disk"}')
    elif b"\r\nauthorization: bearer good\r\n" in request.lower():
        answer(200, b'{"operators": []}')
    else:
        answer(401, b'{"code": "unauthorized", "detail": "No\\u001b[31m such\\nkey"}')


@pytest.fixture
def stub() -> Iterator[str]:
    with Talker(stubbed) as server:
        yield server.url


def test_the_key_and_options_anywhere(call: Call, stub: str) -> None:
    refused = call(stub, "ops")
    assert (refused.code, refused.err) == (5, "error: No [31m such key (unauthorized)\n")
    assert call(stub, "ops", GRADSERVE_API_KEY="good").code == 0
    assert call("http://127.0.0.1:9", "ops", "--api-key", "good", f"--url={stub}", "--json").json == []


def test_a_transfer_that_moves_outlasts_the_timeout(call: Call, stub: str) -> None:
    assert call(stub, "--timeout", "3", "buffers", "get", "slow", "--json").json["data"] == list(range(8))


def test_a_change_that_is_in_doubt_can_be_repeated(call: Call, stub: str) -> None:
    done = call(stub, "--timeout", "0.2", "buffers", "zero", "b", "--key", "mine")
    assert done.code == 6
    assert done.err == "error: No disk (store_failed); it may have been done: to be sure, repeat it with --key mine\n"


def test_a_file_that_cannot_be_written_is_reported(call: Call, server: Client, tmp_path: Path) -> None:
    server.buffers["b"].create(2)
    server.buffers["b"].accumulate([1, 2])
    old = tmp_path / "old.npy"
    old.write_text("precious")
    assert call(server, "buffers", "take", "missing", "-o", old).code == 3
    assert call(server, "buffers", "take", "b", "-o", tmp_path).code == 1
    assert (old.read_text(), os.listdir(tmp_path)) == ("precious", ["old.npy"])
    assert server.buffers["b"].info().step == 0
    if Path("/dev/full").exists():
        lost = call(server, "buffers", "take", "b", "-o", "/dev/full")
        assert lost.code == 1
        assert "gradserve-client buffers get b --step 0" in lost.err


@pytest.mark.processes
@pytest.mark.parametrize("arguments", [["watch", "--interval", "0.05"], ["ops"], ["ops", "--json"], ["--help"]])
def test_a_reader_that_goes_away_causes_no_error(server: Client, arguments: list[str]) -> None:
    ours, its = os.pipe()
    os.close(ours)
    done = subprocess.run(
        [COMMAND, *arguments], env=environment(server.url), stdout=its, stderr=subprocess.PIPE, timeout=60
    )
    os.close(its)
    assert done.stderr == b""


def interrupted(number: signal.Signals, place: Path, *arguments: str) -> tuple[int, bytes, bytes]:
    """Send the signal to a command whose request has no answer. Return its exit code, its errors and the request."""
    asked = threading.Event()

    def silent(connection: socket.socket, request: bytes) -> None:
        asked.set()
        connection.recv(1)  # until the command ends

    with Talker(silent) as server:
        given = environment(server.url)
        process = subprocess.Popen([COMMAND, *arguments], env=given, stderr=subprocess.PIPE, cwd=place)
        assert asked.wait(30)
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    return process.returncode, said, server.requests[0]


@pytest.mark.processes
def test_an_interrupt_while_waiting(tmp_path: Path) -> None:
    code, said, _ = interrupted(signal.SIGINT, tmp_path, "buffers", "get", "b", "--step", "0", "--timeout", "50")
    assert (code, said) == (130, b"")


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("as_json", [False, True])
def test_an_interrupted_change_can_be_repeated(tmp_path: Path, number: signal.Signals, as_json: bool) -> None:
    """The error names the key, which the command made."""
    arguments = [*["--json"] * as_json, "buffers", "take", "b", "-o", "taken.npy"]
    code, said, request = interrupted(number, tmp_path, *arguments)
    (key,) = re.findall(r"(?i)\r\nidempotency-key: (\S+)\r\n", request.decode())
    assert code == 130
    if as_json:
        error = json.loads(said)["error"]
        assert (error["code"], error["idempotency_key"], error["maybe_done"]) == ("interrupted", key, True)
    else:
        hint = f"it may have been done: to be sure, repeat it with --key {key}"
        assert said.decode() == f"error: Interrupted (interrupted); {hint}\n"
    assert os.listdir(tmp_path) == []


@pytest.mark.processes
@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_it_says_what_to_install(missing: str) -> None:
    code = f"import sys; sys.modules['{missing}'] = None; from gradserve_client.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "ops"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: the command line needs {missing}: pip install 'gradserve-client[cli]'\n"


def test_the_version_and_the_exit_codes_are_documented(call: Call) -> None:
    assert call("", "--version").out == f"gradserve-client {version('gradserve-client')}\n"
    shown = " ".join(call("", "--help").out.split())
    written = README.read_text()
    for number in (0, 1, 2, 3, 4, 5, 6, 130):
        assert re.search(rf"[:,] {number} \w", shown)
        assert f"\n| {number} |" in written


@pytest.mark.processes
def test_the_readme_is_true(server: Client, tmp_path: Path) -> None:
    section = README.read_text().split("\n## Command line\n")[1].split("\n## ")[0]
    blocks = re.findall(r"```(\w+)\n(.*?)```", section, re.DOTALL)
    assert [language for language, _ in blocks] == ["bash", "text"]
    script = blocks[0][1].replace("http://127.0.0.1:8000", server.url)
    assert server.url in script
    path = f"{Path(COMMAND).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", script], cwd=tmp_path, env=environment(server.url, PATH=path), capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == (blocks[1][1], "")
    assert load_file(tmp_path / "sum.safetensors")["w1"].tolist() == [[64, 128], [192, 256]]


@pytest.mark.parametrize(
    ("typed", "found"),
    [("buf", {"buffers"}), ("buffers s", {"save", "set", "set-rules", "show"}), ("buffers rm --pre", {"--prefix"})],
)
def test_it_completes_commands_in_a_shell(call: Call, typed: str, found: set[str]) -> None:
    asked = {"COMP_WORDS": f"gradserve-client {typed}", "COMP_CWORD": str(len(typed.split()))}
    done = call("", _GRADSERVE_CLIENT_COMPLETE="complete_bash", **asked)
    assert set(done.out.split()) == found, done.err
