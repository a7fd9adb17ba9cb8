"""The commands about graphs, and those that write whole files over buffers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gradserve_client import Client
from onnx import load, numpy_helper
from safetensors.numpy import load_file, save_file

from tests.api.models import DOUBTS, doubtful, linear
from tests.clients.conftest import delete_all
from tests.clients.terminal import Call
from tests.serving import serving


@pytest.fixture(scope="module")
def server() -> Iterator[Client]:
    with serving() as url, Client(url) as client:
        yield client


@pytest.fixture
def model(tmp_path: Path) -> Path:
    file = tmp_path / "linear.onnx"
    file.write_bytes(linear())
    return file


def test_a_graph_is_put_shown_run_and_removed(call: Call, server: Client, model: Path, tmp_path: Path) -> None:
    put = call(server, "graphs", "put", "lin", model, "--loss", "MSELoss", "--train", "w", "--set", "parameters:m.p.*")
    assert put.out == call(server, "graphs", "show", "lin").out
    lines = [line.split() for line in put.out.splitlines()]
    assert lines[0][:2] == ["lin:", "training,"]
    assert ["inputs", "x", "float32", "[?,", "2]"] in lines
    assert ["gradients", "w", "float32", "[2,", "1]"] in lines
    assert call(server, "graphs", "show", "lin", "--json").json["options"] == {"loss": "MSELoss", "train": "w"}
    assert [line.split()[0] for line in call(server, "graphs", "ls").out.splitlines()] == ["name", "lin"]
    assert [one["name"] for one in call(server, "graphs", "ls", "x", "--json").json] == []
    save_file({"x": np.array([[1, 1]], np.float32)}, tmp_path / "in.safetensors")
    server.buffers.set({"m.p.w": [[0], [1]]})
    run = ["graphs", "run", "lin", tmp_path / "in.safetensors", "--outputs", "y"]
    assert call(server, *run).out == "y: float32 [1, 1]\n[[6.]]\n"
    made = tmp_path / "out.safetensors"
    from_buffers = call(server, *run, "--from", "parameters:m.p.*", "-o", made, "--json").json
    assert from_buffers == {"y": {"dtype": "float32", "shape": [1, 1]}}
    assert load_file(made)["y"].tolist() == [[2]]
    save_file(
        {"x": np.array([[1, 1]], np.float32), "target": np.array([[6]], np.float32)}, tmp_path / "test.safetensors"
    )
    evaluate = ["graphs", "run", "lin", tmp_path / "test.safetensors", "--evaluate"]
    assert call(server, *evaluate, "lin", "--outputs", "y").out == "loss: float32 []\n0.\ny: float32 [1, 1]\n[[6.]]\n"
    assert call(server, *evaluate, "lin", "--from", "parameters:m.p.*").out == "loss: float32 []\n16.\n"
    assert "The run 'none' has not begun" in call(server, *evaluate, "none").err
    file = tmp_path / "again.onnx"
    assert call(server, "graphs", "download", "lin", file).code == 0
    assert file.read_bytes() == model.read_bytes()
    assert call(server, "graphs", "download", "lin", file, "--parameters", "m.p.*", "--json").json["bytes"] == len(
        linear()
    )
    assert numpy_helper.to_array(load(file).graph.initializer[0]).tolist() == [[0], [1]]
    assert call(server, "graphs", "download", "lin", file, "--statistics", "m.p.*").code == 5
    assert call(server, "graphs", "put", "lin", model).code == 4
    wrong = call(server, "graphs", "put", "other", model, "--loss", "CTCLoss")
    assert (wrong.code, "loss is 'CTCLoss'" in wrong.err) == (5, True)
    assert "--set is 'weights:m.p.*'" in call(server, "graphs", "put", "other", model, "--set", "weights:m.p.*").err
    assert call(server, "graphs", "rm", "lin").code == 0
    assert call(server, "graphs", "rm", "lin").code == 3
    delete_all(server)


def test_a_file_is_written_over_buffers_and_back(call: Call, server: Client, tmp_path: Path) -> None:
    given, made = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    tensors = {"fc.w": np.array([[1, 2]], np.float32), "fc.b": np.array([3.0])}
    save_file(tensors, given)
    lines = call(server, "buffers", "set", "m.p.", given).out.splitlines()
    assert sorted(lines) == ["m.p.fc.b: step 0, count 1, weight 1", "m.p.fc.w: step 0, count 1, weight 1"]
    assert len(call(server, "--json", "buffers", "set", "m.p.", given, "--key", "k").json) == 2
    assert call(server, "buffers", "save", "m.p.", made).out.splitlines() == [
        f"{made}: fc.b float64 [1]",
        f"{made}: fc.w float32 [1, 2]",
    ]
    found = load_file(made)
    assert {name: (one.dtype, one.tolist()) for name, one in found.items()} == {
        name: (one.dtype, one.tolist()) for name, one in tensors.items()
    }
    assert call(server, "buffers", "save", "m.p.", made, "--json").json["fc.w"] == {"dtype": "float32", "shape": [1, 2]}
    assert call(server, "buffers", "save", "nothing.", made).code == 3
    assert load_file(made).keys() == tensors.keys()
    delete_all(server)


def test_doubts_are_shown_and_strict_refuses(call: Call, server: Client, tmp_path: Path) -> None:
    file = tmp_path / "twice.onnx"
    file.write_bytes(doubtful())
    put = ["graphs", "put", "twice", file, "--loss", "MSELoss"]
    refused = call(server, *put, "--strict")
    assert (refused.code, refused.out) == (5, "")
    assert DOUBTS[0] in refused.err
    assert call(server, *put).out.splitlines()[-2:] == [f"doubt: {one}" for one in DOUBTS]
    assert call(server, "graphs", "show", "twice", "--json").json["doubts"] == DOUBTS
