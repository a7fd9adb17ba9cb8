"""GradientAccumulator of arrays on real servers, compared with sums here."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from gradserve_client import (
    Client,
    Conflict,
    ConnectionFailed,
    DuplicateContributor,
    InvalidInput,
    KeyReused,
    NothingToAverage,
    StaleStep,
    StepGone,
    StepOpen,
)
from gradserve_client.arrays import GradientAccumulator

from tests.clients.arrays.training import LIBRARIES, assert_close, full, gradient, mean, model, same
from tests.clients.torch.training import Watched

BATCHES = [(8, 1), (3, 2), (5, 3)]

# ----- one worker -----


@LIBRARIES
def test_micro_batches_are_as_one_batch(server: Client, run: str, library: Any) -> None:
    weights = model(library)
    worker = GradientAccumulator(weights, server, run=run)
    for step in range(2):
        gradients = [gradient(weights, size, seed) for size, seed in BATCHES]
        for number, ((size, _), one) in enumerate(zip(BATCHES, gradients, strict=True)):
            pushed = worker.push(one, weight=size)
            assert (pushed.step, pushed.count, pushed.closed, pushed.replayed) == (step, number + 1, False, False)
        found = worker.pull()
        assert_close(found, mean(gradients, [8, 3, 5]))
        assert type(found["dense"]["bias"]) is type(weights["dense"]["bias"])
        assert worker.step == step + 1
        assert worker.pulled is not None
        assert (worker.pulled.step, worker.pulled.count, worker.pulled.weight) == (step, 3, 16)
    names = {one.name.removeprefix(f"{run}.") for one in server.buffers.list(run)}
    assert {name for name in names if "::" not in name} == {"dense.kernel", "dense.bias"}


def test_a_push_is_one_request_and_so_is_a_pull(url: str, run: str) -> None:
    transport = Watched()
    with Client(url, transport=transport) as server:
        worker = GradientAccumulator(model(), server, run=run)
        transport.sent.clear()
        worker.push(gradient(model(), 4, 1))
        worker.pull()
    assert [path for path, _ in transport.sent] == ["/v1/buffers/accumulate", "/v1/buffers/take"]


def test_sums_in_place_of_means(server: Client, run: str) -> None:
    worker = GradientAccumulator(np.zeros(2), server, run=run, reduce="sum")
    for weight in (2, 3):
        worker.push(np.array([1.0, weight]), weight=weight)
    assert worker.pull().tolist() == [5, 13]


def test_a_step_without_weight_has_no_gradients(server: Client, run: str) -> None:
    worker = GradientAccumulator(model(), server, run=run, quorum=2)
    worker.push(None, weight=0)
    worker.push(full(model(), math.nan), weight=0)
    assert worker.pull() == {"dense": {"kernel": None, "bias": None}}
    assert worker.pulled is not None
    assert worker.pulled.weight == 0


# ----- several workers -----


@LIBRARIES
def test_workers_get_the_same_bits(one_or_three: Client, run: str, library: Any) -> None:
    weights = model(library)
    workers = [
        GradientAccumulator(
            weights, one_or_three, run=run, quorum=4, worker=f"rank{rank}", contributors=["rank0", "rank1"]
        )
        for rank in range(2)
    ]
    gradients = [gradient(weights, size, size) for size in (1, 2, 3, 4)]
    for number, one in enumerate(gradients):
        workers[number % 2].push(one, weight=number + 1)
    found = [worker.pull() for worker in workers]
    assert same(*found)
    assert_close(found[0], mean(gradients, [1, 2, 3, 4]))
    assert workers[0].pulled == workers[1].pulled
    assert workers[0].pulled is not None
    assert workers[0].pulled.contributors == {"rank0": 2, "rank1": 2}


def test_workers_that_torchrun_has_started(server: Client, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    workers = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        workers.append(GradientAccumulator.from_env({"w": np.zeros(1)}, server, run=run))
        workers[rank].push({"w": np.full(1, float(rank))})
    for worker in workers:
        assert worker.pull()["w"].tolist() == [0.5]
        assert worker.pulled is not None
        assert worker.pulled.contributors == {"rank0": 1, "rank1": 1}


def test_workers_that_are_late_missing_or_too_eager(server: Client, run: str) -> None:
    names = ["rank0", "rank1"]
    fast, slow = [
        GradientAccumulator(np.zeros(1), server, run=run, quorum=2, worker=name, contributors=names, per_contributor=1)
        for name in names
    ]
    fast.push(np.ones(1))
    with pytest.raises(DuplicateContributor):
        fast.push(np.ones(1))
    fast._timeout = 0.05
    with pytest.raises(StepOpen) as caught:
        fast.pull()
    assert caught.value.missing == ("rank1",)
    fast.set_rules(quorum=1)
    assert fast.pull().tolist() == [1]
    with pytest.raises(StaleStep, match=r"pull\(\) fetches its mean"):
        slow.push(np.ones(1))
    fast.push(np.ones(1))
    fast.pull()
    with pytest.raises(StepGone, match="broadcast_parameters"):
        slow.pull()


def test_different_scales_are_noticed(server: Client, run: str) -> None:
    workers = [GradientAccumulator(np.zeros(1), server, run=run, quorum=2) for _ in range(2)]
    for number, worker in enumerate(workers):
        worker.push(np.ones(1), scale=1024.0 * (1 + number))
    for worker in workers:
        with pytest.raises(Conflict, match="different scales"):
            worker.pull()
        assert worker.step == 1


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_weights_that_cancel(server: Client, run: str, reduce: Any) -> None:
    worker = GradientAccumulator({"a": np.zeros(1), "b": np.zeros(1)}, server, run=run, quorum=2, reduce=reduce)
    worker.push({"a": np.full(1, 1.0), "b": None})
    worker.push({"a": np.full(1, 10.0), "b": None}, weight=-1)
    if reduce == "mean":
        with pytest.raises(NothingToAverage, match="weights of step 0 sum to 0"):
            worker.pull()
    else:
        found = worker.pull()
        assert (found["a"].tolist(), found["b"]) == ([-9], None)
    assert worker.step == 1


def test_runs_do_not_mix(server: Client, run: str) -> None:
    for value, name in enumerate([f"{run}-one", f"{run}-two"]):
        worker = GradientAccumulator(np.zeros(1), server, run=name)
        assert worker.push(np.full(1, float(value))).count == 1
        assert worker.pull().tolist() == [value]
    with pytest.raises(Conflict, match="belongs to the run .*-two', not 'other'"):
        GradientAccumulator(np.zeros(1), server, run="other", prefix=worker.prefix)


# ----- restarts -----


def trainer(server: Client, run: str, **options: Any) -> GradientAccumulator:
    return GradientAccumulator(model(), server, run=run, worker="rank0", **options)


def test_a_restarted_trainer_repeats_its_pushes(one_or_three: Client, run: str) -> None:
    gradients = [gradient(model(), size, seed) for size, seed in BATCHES]
    worker = trainer(one_or_three, run)
    state = worker.state_dict()
    for (size, _), one in zip(BATCHES[:2], gradients, strict=False):
        worker.push(one, weight=size)
    worker = trainer(one_or_three, run)
    worker.load_state_dict(state)
    pushed = [worker.push(one, weight=size) for (size, _), one in zip(BATCHES, gradients, strict=True)]
    assert [(one.count, one.replayed) for one in pushed] == [(1, True), (2, True), (3, False)]
    assert_close(worker.pull(), mean(gradients, [8, 3, 5]))


def test_a_restarted_trainer_with_other_gradients_learns_that_its_push_counts(server: Client, run: str) -> None:
    trainer(server, run).push(gradient(model(), 4, 1))
    worker = trainer(server, run)
    with pytest.raises(KeyReused, match="push 0 of step 0 before.*that push counts"):
        worker.push(gradient(model(), 4, 2))
    assert worker.push(gradient(model(), 4, 3)).count == 2


def test_a_worker_that_comes_later_needs_the_weights_of_the_run(server: Client, run: str) -> None:
    worker = trainer(server, run)
    worker.push(gradient(model(), 4, 1))
    worker.pull()
    state = worker.state_dict()
    late = trainer(server, run)
    with pytest.raises(Conflict, match="in step 1, and this worker has not got its weights"):
        late.push(gradient(model(), 4, 2))
    late.load_state_dict(state)
    assert late.push(gradient(model(), 4, 2)).count == 1
    assert GradientAccumulator(model(), server, run=run, start="any").push(None, weight=0).count == 2


# ----- the same start -----


def test_other_trees_and_other_weights_are_refused(server: Client, run: str) -> None:
    GradientAccumulator(model(), server, run=run)
    halved = {"dense": {name: one.astype(np.float16) for name, one in model()["dense"].items()}}
    for other in (model()["dense"], {**model(), "more": np.zeros(1)}, halved):
        with pytest.raises(Conflict, match="^Give another run=.*of another form"):
            GradientAccumulator(other, server, run=run)
    with pytest.raises(Conflict, match="began with other weights"):
        GradientAccumulator(model(seed=1), server, run=run)
    turned = {"dense": dict(reversed(model()["dense"].items()))}
    GradientAccumulator(turned, server, run=run)
    GradientAccumulator(model(jnp), server, run=run)


def test_another_shape_of_as_many_numbers_is_refused(server: Client, run: str) -> None:
    """Also if its rows are larger than a request, so that the buffers are the same."""
    GradientAccumulator(np.zeros((2, 100)), server, run=run, request_bytes=400)
    with pytest.raises(Conflict, match="all parameters and buffers is"):
        GradientAccumulator(np.zeros((4, 50)).reshape(1, 200), server, run=run, request_bytes=400)


# ----- how gradients travel -----


@LIBRARIES
def test_a_push_that_does_not_wait(url: str, run: str, library: Any) -> None:
    """Its arrays may be overwritten at once, and a push that failed is sent again."""
    transport, weights = Watched(), model(library)
    with Client(url, transport=transport, max_retries=0) as server:
        worker = GradientAccumulator(weights, server, run=run)
        transport.left = 0
        one = gradient(weights, 4, 1)
        expected = mean([one], [1])
        assert worker.push(one, wait=False) is None
        if library is np:
            for array in one["dense"].values():
                array[...] = math.nan
        with pytest.raises(ConnectionFailed):
            worker.pull()
        transport.left = 1 << 30
        assert_close(worker.pull(), expected)
        worker.push(one, weight=0, wait=False)
        state = worker.state_dict()
        assert (state["step"], state["pushes"]) == (1, 1)


@LIBRARIES
@pytest.mark.parametrize("wire", ["float16", "bfloat16", jnp.bfloat16, np.float16], ids=str)
def test_half_precision_on_the_wire_both_ways(url: str, run: str, library: Any, wire: Any) -> None:
    weights, transport = {"w": library.zeros((100, 50), np.float32)}, Watched()
    with Client(url, transport=transport) as server:
        worker = GradientAccumulator(weights, server, run=run, wire_dtype=wire)
        transport.sent.clear()
        transport.answered.clear()
        worker.push({"w": library.full((100, 50), 1.5, np.float32)})
        found = worker.pull()["w"]
    assert found.dtype == np.float32
    assert (np.asarray(found) == 1.5).all()
    pushed, *_ = [size for path, size in transport.sent if path.endswith("accumulate")]
    assert 10_000 < pushed < 12_000
    assert 10_000 < sum(transport.answered) < 12_500


@LIBRARIES
def test_half_precision_on_the_wire_makes_no_infinity(server: Client, run: str, library: Any) -> None:
    worker = GradientAccumulator(library.zeros(3, np.float32), server, run=run, reduce="sum", wire_dtype="float16")
    for _ in range(3):
        worker.push(library.asarray([30000, 70000, math.inf], np.float32))
    assert worker.pull().tolist() == [90000, 210000, math.inf]
    half = GradientAccumulator(library.zeros(2, np.float16), server, run=f"{run}-half", reduce="sum")
    for _ in range(3):
        half.push(library.asarray([30000, 1], np.float16))
    assert half.pull().tolist() == [math.inf, 3]


def test_a_wire_dtype_of_full_precision_is_refused(server: Client) -> None:
    with pytest.raises(InvalidInput, match="wire_dtype is 'float32', but must be one of 'float16', 'bfloat16'"):
        GradientAccumulator(np.zeros(1), server, run="wide", wire_dtype="float32")


def test_a_worker_dies_between_requests_and_repeats_its_push(url: str, run: str) -> None:
    shapes = [(100, 60), (10,), (40, 7, 5), (1,)]
    tree = [np.zeros(shape) for shape in shapes]
    random = np.random.default_rng(0)
    gradients = [random.normal(size=shape) for shape in shapes]
    transport = Watched()
    for done in range(1, 4):
        options: Any = {"run": f"{run}-{done}", "worker": "rank0", "request_bytes": 5000}
        with Client(url, transport=transport, max_retries=0) as mortal:
            worker = GradientAccumulator(tree, mortal, **options)
            state, transport.left = worker.state_dict(), done
            with pytest.raises(ConnectionFailed):
                worker.push(gradients)
            transport.left = 1 << 30
            worker = GradientAccumulator(tree, mortal, **options)
            worker.load_state_dict(state)
            transport.sent.clear()
            assert worker.push(gradients).count == 1
            sizes = [size for path, size in transport.sent if path.endswith("accumulate")]
            assert len(sizes) > 10
            assert max(sizes) < 5000 + 4 * 320
            assert same(worker.pull(), gradients)


# ----- imports -----


def test_numpy_alone_needs_neither_jax_nor_torch(url: str, run: str) -> None:
    code = (
        "import sys, numpy as np; from gradserve_client import Client\n"
        "from gradserve_client.arrays import GradientAccumulator\n"
        f"with Client({url!r}) as server:\n"
        f"    gradients = GradientAccumulator({{'w': [np.zeros(2)]}}, server, run={run!r})\n"
        "    gradients.push({'w': [np.ones(2)]})\n"
        "    assert gradients.pull()['w'][0].tolist() == [1, 1]\n"
        "assert not {'jax', 'torch'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
