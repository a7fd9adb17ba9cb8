"""Runs of a graph: what belongs to a run, steps without weight, and micro-batches that overlap."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gradserve_client import AsyncClient, Client, Conflict, KeyReused, NotFound
from onnx import helper

from tests.api.models import linear
from tests.api.models import model as onnx_model
from tests.clients.both import connected
from tests.clients.conftest import delete_all
from tests.clients.graph_worker import batch

SGD = "SGDOptimizerV2"


@pytest.fixture
def server(url: str, kind: str) -> Any:
    """A client of a server without buffers and runs, with the graph `lin` of the parameters `w` and `b`."""
    with connected(kind, url, timeout=20) as client:
        with Client(url) as other:
            delete_all(other)
        for graph in client.graphs.list():
            client.graphs[graph.name].delete()
        for run in client.runs.list():
            client.runs.delete(run.name)
        client.graphs.put("lin", linear(), loss="MSELoss")
        yield client


def step(model: Any, number: int = 0) -> Any:
    model.forward_backward(batch(number, 0), weight=4)
    return model.optim_step(SGD, lr=0.1)


def test_a_run_belongs_to_one_graph(server: Any) -> None:
    a = server.graphs["lin"].join("run", worker="a", quorum=1)
    step(a)
    before = server.buffers.list("run.")
    server.graphs.put("other", linear(5), loss="MSELoss")
    server.graphs.put("frozen", linear(), loss="MSELoss", train="!b")
    for name in ("other", "frozen"):
        with pytest.raises(Conflict, match=r"^Give another run=, or delete this one, .*'run' of another form: "):
            server.graphs[name].join("run", worker="b", quorum=1).start()
    assert server.buffers.list("run.") == before
    assert step(a, 1).step == 1
    info = server.runs.info("run")
    assert (info.step, info.state, info.form["graph"]) == (2, "running", server.graphs["lin"].info().digest)


def test_a_worker_of_a_deleted_run_counts_nothing_in_the_next(server: Any) -> None:
    old = server.graphs["lin"].join("run", worker="a", quorum=2)
    old.start()
    server.runs.delete("run")
    new = server.graphs["lin"].join("run", worker="a", quorum=2)
    new.forward_backward(batch(0, 0))
    with pytest.raises(Conflict) as caught:
        old.forward_backward(batch(0, 1))
    assert caught.value.code == "run_replaced"
    with pytest.raises(Conflict) as caught:
        old.optim_step(SGD, lr=0.1)
    assert caught.value.code == "run_replaced"
    assert server.buffers["run.loss"].info().count == 1


def test_a_worker_that_is_behind_takes_no_place(server: Any) -> None:
    old, new = (server.graphs["lin"].join("run", worker="a", quorum=1) for _ in range(2))
    old.forward_backward(batch(0, 0), weight=4)
    step(new)
    with pytest.raises(Conflict, match="^Another process has joined the run 'run' as 'a' since") as caught:
        old.forward_backward(batch(0, 1))
    assert caught.value.code == "worker_replaced"
    assert step(new, 1).step == 1


@pytest.mark.parametrize("rules", [{}, {"quorum": 1}])
def test_a_step_without_weight_is_empty(server: Any, rules: Any) -> None:
    model, again = (server.graphs["lin"].join("run", worker="a", **rules) for _ in range(2))
    step(model)
    before = model.parameters()
    model.forward_backward(batch(1, 0), weight=0)
    empty = model.optim_step(SGD, lr=0.1)
    assert (empty.step, empty.weight, empty.loss, empty.replayed, model.step) == (1, 0.0, None, False, 2)
    assert all(np.array_equal(before[name], value) for name, value in model.parameters().items())
    assert again.start() == 2
    assert again.forward_backward(batch(2, 0), weight=4).counted
    done = again.optim_step(SGD, lr=0.1)
    assert (done.step, done.weight) == (2, 4.0)
    assert not np.array_equal(again.parameters()["w"], before["w"])


def test_a_step_without_weight_is_empty_for_all(server: Any) -> None:
    models = [server.graphs["lin"].join("run", worker=name, quorum=2) for name in "ab"]
    for model in models:
        model.forward_backward(batch(0, 0), weight=0)
    done = [model.optim_step(SGD, lr=0.1) for model in models]
    assert [(one.step, one.weight, one.replayed) for one in done] == [(0, 0.0, False), (0, 0.0, True)]
    assert server.buffers["run.p.w"].info().version == 2


def test_micro_batches_in_flight_together_all_count(url: str, server: Any) -> None:
    async def train() -> Any:
        async with AsyncClient(url) as client:
            model = client.graphs["lin"].join("together", worker="w0")
            await model.start()
            found = await asyncio.gather(*(model.forward_backward(batch(0, 0), weight=1) for _ in range(4)))
            found += await asyncio.gather(*(model.forward_backward(batch(0, n), weight=1) for n in range(4)))
            return found, await model.optim_step(SGD, lr=0.1)

    found, done = asyncio.run(train())
    assert [(one.counted, one.replayed) for one in found] == [(True, False)] * 8
    assert (done.weight, done.count) == (8.0, 8)


def test_threads_of_one_model_all_count(url: str, server: Any) -> None:
    with Client(url) as client, ThreadPoolExecutor(4) as pool:
        model = client.graphs["lin"].join("threads", worker="w0")
        model.start()
        found = [*pool.map(lambda number: model.forward_backward(batch(0, number)), range(4))]
        assert [one.replayed for one in found] == [False] * 4
        assert model.optim_step(SGD, lr=0.1).count == 4


def test_the_next_micro_batch_counts_after_another_has_its_number(server: Any) -> None:
    """As after an interrupt between the count and its answer."""
    first, again = (server.graphs["lin"].join("run", worker="w0", quorum=2) for _ in range(2))
    first.forward_backward(batch(0, 0))
    again.start()
    with pytest.raises(KeyReused, match="Micro-batch 0 of this worker's step has counted with other data"):
        again.forward_backward(batch(0, 1))
    assert again.forward_backward(batch(0, 1)).closed


def test_a_slow_worker_goes_on_where_the_run_is(server: Any) -> None:
    fast, slow = (server.graphs["lin"].join("run", worker=f"rank{rank}", quorum=1) for rank in range(2))
    slow.start()
    for number in range(6):
        fast.forward_backward(batch(number, 0))
        fast.optim_step(SGD, lr=0.1)
    assert not slow.forward_backward(batch(0, 1)).counted
    done = slow.optim_step(SGD, lr=0.1)
    assert (done.step, done.replayed, slow.step) == (5, True, 6)
    assert slow.forward_backward(batch(6, 1)).counted


def normalized() -> bytes:
    """Return a model with running statistics."""
    node = helper.make_node("BatchNormalization", ["x", "scale", "bias", "mean", "var"], ["y"], momentum=0.5)
    weights = {"scale": [1, 1], "bias": [0, 0], "mean": [0, 0], "var": [1, 1]}
    return onnx_model(node, inputs=[("x", ["n", 2])], outputs=[("y", ["n", 2])], **weights)


def test_a_checkpoint_is_of_one_step(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while a step has written its statistics, and not yet its parameters."""
    monkeypatch.setattr("gradserve_client._runs.checkpoint.PAUSE", 0.01)
    server.graphs.put("norm", normalized(), loss="MSELoss")
    model = server.graphs["norm"].join("run")
    given = {"x": np.ones((4, 2), np.float32), "target": np.zeros((4, 2), np.float32)}
    model.forward_backward(given, weight=4)
    model.optim_step(SGD, lr=0.1)
    assert model.save(tmp_path / "whole") == 1
    model.forward_backward(given, weight=4)
    server.buffers.close_step(model._run.summed, min_count=1, step=1)
    server.run(
        "InplaceClipGradNorm",
        {"gradients": server.buffers["run.t.*@1"]},
        {"max_norm": 1e300},
        reduce="mean",
        outputs=["total_norm"],
        set={"clipped_gradients": "run.s.*"},
    )
    with pytest.raises(Conflict, match="A step of 'run' is under way"):
        model.save(tmp_path / "torn")


def test_a_run_is_evaluated_by_its_running_statistics(server: Any) -> None:
    server.graphs.put("norm", normalized(), loss="MSELoss")
    model, other = server.graphs["norm"].join("run", worker="a"), server.graphs["norm"].join("run")
    given = {"x": np.array([[1, 2], [3, 4]], np.float32), "target": np.zeros((2, 2), np.float32)}
    assert server.graphs["norm"].evaluate(given, outputs=["y"])["y"] == pytest.approx(given["x"], rel=1e-5)
    with pytest.raises(NotFound, match=r"The run 'run' has not begun"):
        other.evaluate(given)
    model.forward_backward(given, weight=2)
    model.optim_step(SGD, lr=0.25)
    kept = {one.name: one.version for one in server.buffers.list()}
    model.forward_backward(given, weight=2)
    found = other.evaluate(given, outputs=["y"])
    scale, bias = (model.parameters()[name] for name in ("scale", "bias"))
    y = (given["x"] - [1, 1.5]) / np.sqrt(np.array([1, 1]) + 1e-5) * scale + bias
    np.testing.assert_allclose(found["y"], y, rtol=1e-5)
    np.testing.assert_allclose(found["loss"], (y**2).mean(), rtol=1e-5)
    assert model.evaluate(given)["loss"] == found["loss"]
    assert other.evaluate({**given, "parameters": {"scale": [0, 0], "bias": [0, 0]}}) == {"loss": 0}
    assert kept.keys() == {one.name for one in server.buffers.list()}
    assert server.buffers["run.loss"].info().count == 1
    assert server.runs.info("run").members == ("a",)
    server.runs.delete("run")


def test_a_graph_without_a_loss_is_evaluated_as_it_runs(server: Any) -> None:
    server.graphs.put("plain", linear())
    assert {name: one.tolist() for name, one in server.graphs["plain"].evaluate({"x": [[1, 1]]}).items()} == {
        "y": [[6]]
    }
