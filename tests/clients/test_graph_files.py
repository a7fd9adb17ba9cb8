"""The files of graphs through the client: written with the weights of a run, and read with the files beside them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from gradserve_client import Conflict, InvalidInput, NotFound
from gradserve_client._wire.onnx_files import read_model

from tests.api.models import linear
from tests.clients.both import connected
from tests.clients.conftest import delete_all
from tests.clients.graph_worker import batch
from tests.clients.test_graph_steps import normalized
from tests.serving import serving

SGD = "SGDOptimizerV2"


@pytest.fixture(scope="module")
def address() -> Any:
    with serving() as url:
        yield url


@pytest.fixture
def server(address: str, kind: str) -> Any:
    """A client of a server without buffers, runs and graphs."""
    with connected(kind, address, timeout=20) as client:
        delete_all(client)
        for graph in client.graphs.list():
            client.graphs[graph.name].delete()
        for run in client.runs.list():
            client.runs.delete(run.name)
        yield client


def convolutional() -> bytes:
    """Return a model of PyTorch's with Dropout, running statistics, and a loss over four classes."""
    torch = pytest.importorskip("torch")
    import io
    import warnings

    net = torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 3),
        torch.nn.BatchNorm2d(3),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Dropout(0.5),
        torch.nn.Linear(3 * 16, 4),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names: Any = {"input_names": ["x"], "output_names": ["output"], "dynamic_axes": {"x": {0: "n"}}}
        names |= {"training": torch.onnx.TrainingMode.PRESERVE, "do_constant_folding": False}
        torch.onnx.export(net.eval(), torch.zeros(2, 2, 6, 6), file := io.BytesIO(), dynamo=False, **names)
    return file.getvalue()


def test_onnx_runtime_computes_what_a_trained_run_does(server: Any, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    torch, path = pytest.importorskip("torch"), tmp_path / "trained.onnx"
    torch.manual_seed(0)
    server.graphs.put("conv", content := convolutional(), loss="SoftmaxCrossEntropyLoss")
    model, draw = server.graphs["conv"].join("run"), np.random.default_rng(0)
    with pytest.raises(NotFound):
        model.export(path)
    assert not path.exists()
    for step in range(4):
        x = draw.normal(1, 2, (8, 2, 6, 6)).astype(np.float32)
        model.forward_backward({"x": x, "labels": draw.integers(0, 4, 8)}, weight=8)
        model.optim_step(lr=0.05)
        assert server.graphs["conv"].join("run").export(path) == step + 1
    expected = model.evaluate({"x": x, "labels": draw.integers(0, 4, 8)}, outputs=["output"])["output"]
    before, after = (runtime.InferenceSession(one).run(["output"], {"x": x})[0] for one in (content, str(path)))
    np.testing.assert_allclose(after, expected, rtol=1e-5, atol=1e-5)
    assert np.abs(before - expected).max() > 0.1


def test_an_exported_run_counts_the_steps_of_its_checkpoint(server: Any, tmp_path: Path) -> None:
    server.graphs.put("lin", linear(), loss="MSELoss")
    model = server.graphs["lin"]
    for step in range(2):
        model.forward_backward(batch(step, 0))
        model.optim_step(SGD, lr=0.1)
    assert model.save(tmp_path / "lin.safetensors") == model.export(tmp_path / "lin.onnx") == 2
    other = server.graphs["lin"].join("resumed")
    other.start(tmp_path / "lin.safetensors")
    assert other.export(tmp_path / "again.onnx") == 2
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "lin.onnx").read_bytes() != linear()
    assert server.graphs["lin"].download(parameters="lin.p.*") == (tmp_path / "lin.onnx").read_bytes()
    assert server.graphs["lin"].download() == linear()


def test_an_exported_run_is_of_one_step(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while a step has written its statistics, and not yet its parameters."""
    monkeypatch.setattr("gradserve_client._runs.checkpoint.PAUSE", 0.01)
    server.graphs.put("norm", normalized(), loss="MSELoss")
    model = server.graphs["norm"].join("run")
    given = {"x": np.ones((4, 2), np.float32), "target": np.zeros((4, 2), np.float32)}
    model.forward_backward(given, weight=4)
    model.optim_step(SGD, lr=0.1)
    mean = server.buffers["run.s.mean"].value()
    server.buffers.set({"mean": mean, "var": mean + 1}, prefix="run.s.")
    with pytest.raises(Conflict, match="A step of 'run' is under way"):
        model.export(tmp_path / "torn")
    assert [*tmp_path.iterdir()] == []


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of y = x w + b whose weights are in the file `weights` beside it."""
    path = tmp_path / "model.onnx"
    where: Any = {"save_as_external_data": True, "location": "weights", "size_threshold": 0}
    onnx.save(onnx.load_from_string(linear()), path, **where)
    return path


def test_weights_in_a_file_beside_the_model_are_sent_with_it(server: Any, model: Path) -> None:
    info = server.graphs.put("beside", str(model), loss="MSELoss")
    assert [*info.parameters] == ["w", "b"]
    assert server.graphs["beside"].run({"x": [[1, 10]]}, outputs=["y"])["y"].tolist() == [[33]]
    assert b"weights" not in server.graphs["beside"].download()


def test_weights_that_are_not_beside_the_model_are_refused_before_anything_is_sent(server: Any, model: Path) -> None:
    weights = model.parent / "weights"
    weights.rename(model.parent / "other")
    with pytest.raises(InvalidInput, match=r"model.onnx has weights in other files, which cannot be read: .*weights"):
        server.graphs.put("beside", model)
    outside = model.parent / "folder" / "model.onnx"
    outside.parent.mkdir()
    outside.write_bytes(model.read_bytes().replace(b"weights", b"../othr"))
    weights.with_name("other").rename(weights.with_name("othr"))
    with pytest.raises(InvalidInput, match=r"which cannot be read: .*\.\./othr"):
        server.graphs.put("beside", outside)
    proto = onnx.load(model, load_external_data=False)
    for tensor in proto.graph.initializer:
        next(entry for entry in tensor.external_data if entry.key == "length").value = str(1 << 30)
    model.write_bytes(proto.SerializeToString())
    with pytest.raises(InvalidInput, match=r"has 21\d{8} bytes with the files beside it, .* fewer than 2147483648"):
        server.graphs.put("beside", model)
    assert server.graphs.list() == []


def test_without_the_package_the_server_says_how(server: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "onnx", None)
        content = read_model(model)
    assert content == model.read_bytes()
    with pytest.raises(InvalidInput, match=r"'w' has its data in another file: .*onnx\.save.*gradserve-client\[onnx"):
        server.graphs.put("beside", content)
