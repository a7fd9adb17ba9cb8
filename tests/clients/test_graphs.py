"""Training a graph through the client: micro-batches that count once, and steps that happen once."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gradserve_client import Conflict, InvalidInput, KeyReused, NotFound, StaleStep, StepOpen
from gradserve_client._runs import training
from onnx import helper

from tests.api.models import DOUBTS, doubtful, linear, trained
from tests.api.models import model as onnx_model
from tests.clients.both import connected
from tests.clients.conftest import delete_all
from tests.clients.graph_worker import batch
from tests.serving import serving

SGD = "SGDOptimizerV2"


@pytest.fixture(scope="module")
def address() -> Any:
    with serving() as url:
        yield url


@pytest.fixture
def server(address: str, kind: str) -> Any:
    """A client of a server without buffers, with the graph `lin`: its loss is the mean of (x w + b - target)²."""
    with connected(kind, address, timeout=20) as client:
        delete_all(client)
        for graph in client.graphs.list():
            client.graphs[graph.name].delete()
        client.graphs.put("lin", linear(), loss="MSELoss")
        yield client


def reference(steps: int, workers: int, lr: float) -> tuple[Any, list[float]]:
    """Return the parameters and the losses of one process, in float64."""
    w, b = np.array([[2.0], [3.0]]), np.array([1.0])
    losses = []
    for step in range(steps):
        some = [batch(step, worker) for worker in range(workers)]
        x, target = (np.concatenate([one[name] for one in some]).astype(np.float64) for name in ("x", "target"))
        error = x @ w + b - target
        losses.append(float((error**2).mean()))
        w, b = w - lr * 2 * x.T @ error / len(x), b - lr * 2 * error.mean(0)
    return {"w": w, "b": b}, losses


def test_a_graph_is_put_listed_run_and_deleted(server: Any, tmp_path: Path) -> None:
    file = tmp_path / "linear.onnx"
    file.write_bytes(linear(5))
    info = server.graphs.put("five", str(file))
    assert (info.kind, [*info.inputs], [*info.parameters], info.options) == ("inference", ["x"], ["w", "b"], {})
    assert [one.name for one in server.graphs.list()] == ["five", "lin"]
    assert [one.name for one in server.graphs.list("l")] == ["lin"]
    model = server.graphs["five"]
    assert model.info() == info
    assert model.run({"x": [[1, 1]]})["y"].tolist() == [[9]]
    assert model.run({"x": [[1, 1]], "parameters": {"w": [[0], [1]], "b": [0]}}, outputs=["y"])["y"].tolist() == [[1]]
    with pytest.raises(Conflict, match="five"):
        server.graphs.put("five", linear())
    with pytest.raises(InvalidInput, match="no gradients"):
        model.start()
    model.delete()
    with pytest.raises(NotFound):
        model.info()


def test_one_worker_trains(server: Any) -> None:
    model = server.graphs["lin"]
    for step in range(4):
        found = model.forward_backward(batch(step, 0), weight=4)
        assert (found.step, found.counted, found.replayed) == (step, True, False)
        done = model.optim_step(SGD, lr=0.1)
        assert (done.step, done.count, done.weight, done.closed_by) == (step, 1, 4, "take")
        assert done.loss == found.loss
        assert model.step == step + 1
    expected, losses = reference(4, 1, 0.1)
    assert done.loss == pytest.approx(losses[-1], rel=1e-5)
    kept = [server.buffers["lin.loss"].value(step=step, reduce="mean").item() for step in range(4)]
    assert kept == pytest.approx(losses, rel=1e-5)
    for name, value in model.parameters().items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5)


def test_a_worker_that_is_started_again_repeats_its_micro_batches(server: Any) -> None:
    def joined(worker: str) -> Any:
        return server.graphs["lin"].join("exp1", worker=worker, quorum=3)

    first, second = joined("rank0"), joined("rank1")
    losses = [first.forward_backward(batch(0, 0, number)).loss for number in range(2)]
    first = joined("rank0")
    again = [first.forward_backward(batch(0, 0, number)) for number in range(2)]
    assert [(one.loss, one.counted, one.replayed) for one in again] == [(loss, True, True) for loss in losses]
    assert second.forward_backward(batch(0, 1)).closed
    assert not second.optim_step(lr=0.1).replayed
    parameters = second.parameters()
    first = joined("rank0")
    assert first.start() == 1
    stale = server.graphs["lin"].join("exp1", worker="rank2")
    assert stale.start() == 1
    assert server.buffers["exp1.p.w"].info().version == 2
    np.testing.assert_array_equal(first.parameters()["w"], parameters["w"])


def test_a_worker_that_comes_late_repeats_the_step_and_its_loss(server: Any) -> None:
    fast, slow = (server.graphs["lin"].join("exp1", worker=f"rank{rank}", quorum=1) for rank in range(2))
    slow.start()
    loss = fast.forward_backward(batch(0, 0)).loss
    done = fast.optim_step(lr=0.1, weight_decay=0.0)
    late = slow.forward_backward(batch(0, 1))
    assert (late.counted, late.loss) == (False, None)
    again = slow.optim_step(lr=0.1, weight_decay=0.0)
    assert (again.replayed, again.loss, again.contributors) == (True, loss, {"rank0": 1})
    assert done.loss == loss
    assert slow.step == fast.step == 1
    fast.forward_backward(batch(1, 0))
    fast.optim_step(lr=0.1)
    with pytest.raises(KeyReused, match="same arguments"):
        slow.optim_step(lr=0.2)


def test_a_worker_that_was_away_for_long_goes_on_where_the_run_is(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow = (server.graphs["lin"].join("exp1", worker=f"rank{rank}", quorum=1) for rank in range(2))
    slow.start()
    for step in range(3):
        fast.forward_backward(batch(step, 0))
        fast.optim_step(lr=0.1)
    monkeypatch.setattr(training.Run, "key", lambda *_: uuid.uuid4().hex)  # as if the server had forgotten all keys
    assert not slow.forward_backward(batch(0, 1)).counted
    done = slow.optim_step(lr=0.1)
    assert (done.step, done.replayed, done.loss, slow.step) == (2, True, None, 3)
    assert server.buffers["exp1.p.w"].info().version == 4
    assert slow.forward_backward(batch(3, 1)).counted
    assert slow.optim_step(lr=0.1).contributors == {"rank1": 1}


def test_a_step_that_cannot_end_says_why(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(StepOpen):
        server.graphs["lin"].optim_step(lr=0.1)
    names = ["rank0", "rank1"]
    model = server.graphs["lin"].join("exp1", worker="rank0", timeout=0.1, quorum=2, contributors=names)
    model.forward_backward(batch(0, 0))
    with pytest.raises(StepOpen) as caught:
        model.optim_step(lr=0.1)
    assert caught.value.missing == ("rank1",)
    with pytest.raises(InvalidInput, match="optimizer is 'Adam', but must be one of 'AdamWOptimizer'"):
        model.optim_step("Adam", lr=0.1)
    other = server.graphs["lin"]
    loss = other.forward_backward(batch(0, 0)).loss
    with pytest.raises(InvalidInput, match="weight_decoy"):
        other.optim_step(lr=0.1, weight_decoy=1)
    done = other.optim_step(lr=0.1, weight_decay=1)
    assert (done.step, done.loss, done.count, done.replayed) == (0, loss, 1, False)
    with pytest.raises(InvalidInput, match="worker is 'a\\\\nb'"):
        server.graphs["lin"].join("exp1", worker="a\nb")
    late = server.graphs["lin"].join("exp1", worker="rank1")
    assert late.start() == 0
    server.buffers.set({"w": [[1], [1]], "b": [1]}, prefix="exp1.p.")
    with pytest.raises(StaleStep, match="written over its parameters"):
        server.graphs["lin"].join("exp1", worker="rank1").forward_backward(batch(0, 1))
    assert late.forward_backward(batch(0, 1)).closed
    assert not caplog.messages


def test_other_micro_batches_than_before_are_refused(server: Any) -> None:
    for number in range(2):
        model = server.graphs["lin"].join("exp1", worker="rank0", quorum=2)
        if number:
            with pytest.raises(KeyReused, match="same order"):
                model.forward_backward(batch(0, 0, number))
        else:
            model.forward_backward(batch(0, 0, number))


@pytest.mark.parametrize("worker", [None, "rank0"])
def test_gradients_are_clipped_to_a_norm(server: Any, worker: str | None) -> None:
    model = server.graphs["lin"].join("exp1", worker=worker)
    before = {name: value.copy() for name, value in model.parameters().items()}
    model.forward_backward(batch(0, 0))
    model.optim_step(SGD, lr=1, max_norm=0.25)
    change = [value - before[name] for name, value in model.parameters().items()]
    assert np.sqrt(sum((one**2).sum() for one in change)) == pytest.approx(0.25, rel=1e-5)
    model.forward_backward(batch(1, 0))
    model.optim_step(SGD, lr=0.1, max_norm=1e9)
    model.forward_backward(batch(2, 0))
    assert model.optim_step(SGD, lr=0.1).step == 2


def test_a_run_that_exists_keeps_its_rules(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    server.graphs["lin"].join("exp1", quorum=2).start()
    assert not caplog.messages
    other = server.graphs["lin"].join("exp1", quorum=3)
    other.start()
    assert "quorum is 2, not 3" in caplog.text
    assert [other.forward_backward(batch(0, 0, number)).closed for number in range(2)] == [False, True]
    assert other.optim_step(SGD, lr=0.1).closed_by == "quorum"


def test_a_trained_model_runs_with_its_parameters(server: Any) -> None:
    model = server.graphs["lin"]
    inputs = {"x": [[1, 1]], "parameters": {"w": [[0], [0]], "b": [1]}}
    assert model.run({"x": [[1, 1]]}, outputs=["y"])["y"] == 6
    model.start({"w": [[0], [0]], "b": [5]})
    assert model.run({"x": [[1, 1]]}, outputs=["y"])["y"] == 5
    assert model.run(inputs, outputs=["y"])["y"] == 1
    assert server.graphs["lin"].run({"x": [[1, 1]]}, outputs=["y"])["y"] == 6


def test_a_checkpoint_has_the_state_of_the_optimizer(server: Any, tmp_path: Path) -> None:
    model, file = server.graphs["lin"], tmp_path / "lin.safetensors"
    for step in range(3):
        model.forward_backward(batch(step, 0))
        model.optim_step(lr=0.1)
    assert model.save(file) == 3
    other = server.graphs["lin"].join("resumed")
    assert other.start(file) == 3
    for one in (model, other):
        one.forward_backward(batch(3, 0))
        assert one.optim_step(lr=0.1).step == 3
    for name, value in model.parameters().items():
        np.testing.assert_array_equal(value, other.parameters()[name])
    assert other.save(tmp_path / "again.safetensors") == 4


def test_a_training_graph_of_onnx_runtime_needs_weights(server: Any) -> None:
    content, step = trained()
    server.graphs.put("dlrm", content)
    model = server.graphs["dlrm"]
    with pytest.raises(InvalidInput, match="start\\(weights\\)"):
        model.start()
    with pytest.raises(InvalidInput, match="lacks"):
        model.start({})
    with pytest.raises(InvalidInput, match="has 'more'"):
        model.start({**step["parameter"], "more": [1]})
    assert model.start(step["parameter"]) == 0
    found = model.forward_backward(step["input"], weight=2)
    assert found.loss == pytest.approx(float(step["loss"][""]), rel=1e-5)
    gradients = server.buffers.value(prefix=f"{model.prefix}g.")
    for name, right in step["gradient"].items():
        np.testing.assert_allclose(gradients[f"{model.prefix}g.{name}"] / 2, right, atol=4e-6 * np.abs(right).max())


def test_running_statistics_are_the_mean_of_the_micro_batches(server: Any, tmp_path: Path) -> None:
    node = helper.make_node("BatchNormalization", ["x", "scale", "bias", "mean", "var"], ["y"], momentum=0.5)
    weights = {"scale": [1, 1], "bias": [0, 0], "mean": [0, 0], "var": [1, 1]}
    content = onnx_model(node, inputs=[("x", ["n", 2])], outputs=[("y", ["n", 2])], **weights)
    server.graphs.put("norm", content, loss="MSELoss")
    model = server.graphs["norm"].join("exp1", worker="a", quorum=2)
    mean = np.zeros(2)
    for step in range(2):
        some = [batch(step, 0, number)["x"] for number in range(2)]
        for x in some:
            model.forward_backward({"x": x, "target": np.zeros_like(x)})
        model.optim_step(SGD, lr=0.1)
        mean = (mean + np.mean([x.mean(0) for x in some], 0)) / 2
        np.testing.assert_allclose(server.buffers["exp1.s.mean"].value(), mean, rtol=1e-5)
    file = tmp_path / "norm.npz"
    assert model.save(file) == 2
    other = server.graphs["norm"].join("exp2")
    assert other.start(file) == 2
    np.testing.assert_array_equal(server.buffers["exp2.s.mean"].value(), server.buffers["exp1.s.mean"].value())
    plain = server.graphs["norm"].join("exp3")
    assert plain.start({"scale": [2, 2], "bias": [1, 1]}) == 0
    assert server.buffers["exp3.s.var"].value().tolist() == [1, 1]


def test_workers_that_begin_at_once_have_the_same_weights(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"w": [[1], [2]], "b": [3]}
    server.graphs["lin"].join("exp1").start(weights)
    answers = [False, True, False, True, True]
    monkeypatch.setattr(training, "is_started", lambda *_: answers.pop(0))
    assert server.graphs["lin"].join("exp1").start(weights) == 0
    with pytest.raises(KeyReused, match="other weights"):
        server.graphs["lin"].join("exp1").start({"w": [[1], [2]], "b": [4]})
    assert server.graphs["lin"].join("exp1").parameters()["b"] == [3]


def test_the_log_warns_of_a_model_with_doubts(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    info = server.graphs.put("twice", doubtful(), loss="MSELoss")
    assert info.doubts == DOUBTS
    *warnings, way = [
        record.message for record in caplog.records if "graph" in record.message or "export" in record.message
    ]
    assert warnings == [f"graph twice may train another model than the exported one: {doubt}" for doubt in DOUBTS]
    assert "dynamo=True, optimize=False" in way
    server.graphs["twice"].delete()
    with pytest.raises(InvalidInput, match="strict=true, and 'w' is read by LayerNormalization in 2 modules"):
        server.graphs.put("twice", doubtful(), loss="MSELoss", strict=True)
