"""Workers train a graph of ONNX. They, their server and its database are killed; the parameters are those without."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
import pytest
import xxhash
from gradserve_client._runs.training import key
from onnx.helper import make_graph, make_model, make_node, make_opsetid, make_tensor_value_info
from safetensors.numpy import save
from threadpoolctl import threadpool_limits

from service.dtypes import FLOAT32, Array
from service.graphs.graph import Graph
from service.kernels.accumulate import add, converted
from service.kernels.optimizers import adamw_optimizer
from tests.faults.cluster import Pair, replicas, wait
from tests.faults.graph_trainer import EPSILON, RATE, WEIGHTS, batch
from tests.faults.killing import ORDER
from tests.faults.servers import LONG, SAFETENSORS, Client, Server, contents
from tests.faults.workers import Fault, Workers

STEPS, FAILOVERS = (200, 2) if LONG else (15, 0)

POINTS = ["committed", "made", "computed"]
"""Points at which the server dies. Only after the first has anything happened."""

KILLS_OF_WORKERS, KILLS_OF_SERVERS, KILLS_AT_POINTS = (4, 3, 3) if LONG else (2, 1, 1)

STEPS_TO_KILL = 10 if LONG else 4
"""Steps in which a server comes three times to a point."""

LINES = 8
"""Lines that a worker writes in a step: about: two for each request."""

MODELS = Path(__file__).parents[1] / "graphs" / "models"


@cache
def mlp() -> bytes:
    """Return a model with Dropout, as an exporter writes it."""
    chance = np.random.default_rng(0)
    sizes = {"w1": (32, 64), "b1": (64,), "w2": (64, 10), "b2": (10,)}
    weights = {name: chance.normal(0, 0.2, size).astype(np.float32) for name, size in sizes.items()}
    own = [*weights.items(), ("ratio", np.array(0.25, np.float32)), ("training", np.array(True))]
    nodes = [
        make_node("Gemm", ["x", "w1", "b1"], ["h"]),
        make_node("Tanh", ["h"], ["a"]),
        make_node("Dropout", ["a", "ratio", "training"], ["d"]),
        make_node("Gemm", ["d", "w2", "b2"], ["scores"]),
    ]
    x, y = (
        make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", n]) for name, n in {"x": 32, "scores": 10}.items()
    )
    graph = make_graph(nodes, "mlp", [x], [y], [onnx.numpy_helper.from_array(one, name) for name, one in own])
    return bytes(make_model(graph, opset_imports=[make_opsetid("", 17)], ir_version=8).SerializeToString())


class Model:
    """A graph, and its weights before the first step. `mlp` is differentiated; the other is of `generate_artifacts`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.content = mlp() if kind == "mlp" else (MODELS / f"{kind}.onnx").read_bytes()
        self.loss = "SoftmaxCrossEntropyLoss" if kind == "mlp" else None
        self.graph = Graph.read(self.content, loss=self.loss)
        found = self.graph.initial if kind == "mlp" else np.load(MODELS / f"{kind}.npz")
        group = "parameters" if kind == "mlp" else "parameter"
        self.weights = {name: found[f"{group}.{name}"] for name in self.graph.signature()["gradients"]}

    def write(self, place: Path) -> None:
        """Write the files of a worker."""
        (place / f"{self.kind}.onnx").write_bytes(self.content)
        (place / WEIGHTS).write_bytes(save(self.weights))

    def trained(self, life: str, workers: int, batches: int) -> tuple[Mapping[str, Array], list[float]]:
        """Return the weights and the losses of the steps in a single process."""
        weights: Mapping[str, Array] = self.weights
        moments: list[Mapping[str, Array]] = [{name: np.zeros_like(one) for name, one in weights.items()}] * 2
        losses = []
        for step in range(STEPS):
            means, loss = self._means(
                life, weights, [(rank, step, n) for rank in range(workers) for n in range(batches)]
            )
            arguments: Any = (weights, means, *moments)
            _, weights, *moments = adamw_optimizer(np.array(RATE), np.array(step + 1), *arguments, epsilon=EPSILON)
            losses.append(loss)
        return weights, losses

    def _means(
        self, life: str, weights: Mapping[str, Array], batches: Sequence[tuple[int, int, int]]
    ) -> tuple[Mapping[str, Array], float]:
        """Return the means of the gradients and of the loss over a step's micro-batches, in their order."""
        totals = {name: np.zeros_like(one) for name, one in weights.items()}
        whole, loss = 0, 0.0
        for one in batches:
            inputs, weight = batch(self.kind, *one)
            given = inputs | {f"parameters.{name}": value for name, value in weights.items()}
            attributes = {"seed": seed_of(life, *one)} if self.kind == "mlp" else {}
            outputs = self.graph.operator(self.kind)(given, attributes, ["loss", "gradients"])
            for name, total in totals.items():
                add(total, total, outputs[f"gradients.{name}"], weight)
            whole, loss = whole + weight, loss + weight * float(outputs["loss"])
        return {name: converted(total, FLOAT32, whole) for name, total in totals.items()}, loss / whole


def seed_of(life: str, rank: int, step: int, number: int) -> int:
    """Return the seed of a micro-batch, which follows from its key in the run of this life."""
    return xxhash.xxh32_intdigest(key("run.", life, "batch", f"rank{rank}", step, number).encode()) >> 1


class Run(Workers):
    """Workers that train a graph, and servers that die at points of a commit, too."""

    def __init__(self, model: Model, batches: int, servers: Sequence[Server], place: Path, order: Path) -> None:
        self._model, self._batches, self._count, self._order = model, batches, len(servers), order
        model.write(place)
        given = model.kind, len(servers), batches, STEPS
        super().__init__(
            servers, place, STEPS, "tests.faults.graph_trainer", *given, preloaded=["tests.faults.graph_trainer"]
        )

    def kill_at(self, point: str, rank: int) -> None:
        """Let the server die that is the next to reach the point, the next but one or the third, and start it again."""
        done = self._order.with_suffix(".done")
        done.unlink(missing_ok=True)
        self._order.write_text(f"{point}:{rank + 1}")
        self.open(self.gate + STEPS_TO_KILL)
        wait(done.exists, "no server dies")
        wait(lambda: any(one.process.poll() is not None for one in self.servers), "the server does not end")
        for number, one in enumerate(self.servers):
            if one.process.poll() is not None:
                self.kill_server(number)

    def kills(self) -> list[Fault]:
        """Return the kills of a run, each for `suffer`."""
        at_points = [partial(self.kill_at, point) for point in POINTS[:KILLS_AT_POINTS]]
        return [*[self.kill_worker] * KILLS_OF_WORKERS, *[self.kill_server] * KILLS_OF_SERVERS, *at_points]

    def check(self, tolerance: float) -> float:
        """Let the workers make the last step. Check parameters and losses, and that all has happened once.

        Return the largest difference of a parameter from that of a single process.
        """
        self.finish()
        with Client(self.servers[0].url) as client:
            life = client.metadata("run.loss")["life"]
            with threadpool_limits(1, user_api="blas"):
                weights, losses = self._model.trained(life, self._count, self._batches)
            for step, loss in enumerate(losses):
                assert self._loss(client, step) == pytest.approx(loss, abs=tolerance)
            names = {letter: [f"run.{letter}.{name}" for name in weights] for letter in "pmvg"}
            receipts, values = client.values(*[name for group in names.values() for name in group])
        assert {receipts[name]["version"] for name in names["p"]} == {1 + STEPS}
        assert {receipts[name]["version"] for name in names["m"] + names["v"]} == {STEPS}
        assert {(receipts[name]["step"], receipts[name]["count"]) for name in names["g"]} == {(STEPS, 0)}
        worst = max(float(np.abs(values[f"run.p.{name}"] - one).max()) for name, one in weights.items())
        assert worst <= tolerance
        return worst

    def _loss(self, client: Client, step: int) -> float:
        """Return the mean loss of a step, after a check that each micro-batch is in the sums once."""
        names = [*[f"run.g.{name}" for name in self._model.weights], "run.loss"]
        query, accept = {"step": step, "reduce": "mean"}, {"Accept": SAFETENSORS}
        answer = client.send("POST", "/v1/buffers/value", params=query, json={"names": names}, headers=accept)
        receipts, values = contents(answer)
        expected = {f"rank{rank}": self._batches for rank in range(self._count)}
        for receipt in receipts.values():
            assert (receipt["count"], receipt["contributors"]) == (self._count * self._batches, expected)
        return float(values["run.loss"])

    def __enter__(self) -> Run:
        return self


@pytest.fixture
def order(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that orders a server's death. Servers learn its name when they start."""
    monkeypatch.setenv(ORDER, str(place / "order"))
    return place / "order"


Service: TypeAlias = tuple[list[Server], list[Fault]]
"""The server of each worker, and the faults that come beside kills."""


@contextmanager
def lmdb(workers: int, place: Path) -> Iterator[Service]:
    """Yield one server for all workers."""
    with Server(place / "store", module="tests.faults.killing") as server:
        yield [server] * workers, []


@contextmanager
def postgres(workers: int, place: Path) -> Iterator[Service]:
    """Yield a replica for each worker, and the failovers of their database."""
    with Pair(place) as pair:
        own: dict[str, Any] = {"durability": "replicated", "module": "tests.faults.killing"}
        with replicas(workers, place, pair.url, **own) as servers:
            yield servers, [lambda _: pair.fail_over()] * FAILOVERS


RUNS = [(lmdb, "lstm_tagger", 1, 1, 0.0), (lmdb, "mlp", 3, 2, 1e-6)]
if LONG:
    RUNS += [(lmdb, "mlp", 1, 1, 0.0), (lmdb, "lstm_tagger", 3, 2, 1e-6)]
    RUNS += [(postgres, "mlp", 1, 1, 0.0), (postgres, "mlp", 3, 2, 1e-6)]


@pytest.mark.parametrize(("store", "kind", "workers", "batches", "tolerance"), RUNS)
def test_a_run_outlives_kills(
    store: Callable[[int, Path], AbstractContextManager[Service]],
    kind: str,
    workers: int,
    batches: int,
    tolerance: float,
    place: Path,
    order: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """One worker with a micro-batch a step has the parameters of a single process to the bit."""
    with store(workers, place) as (servers, faults), Run(Model(kind), batches, servers, place, order) as run:
        run.suffer(random.Random(workers), [*run.kills(), *faults], LINES, KILLS_AT_POINTS * STEPS_TO_KILL)
        record_property("largest difference", run.check(tolerance))
