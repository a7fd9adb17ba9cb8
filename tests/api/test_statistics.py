"""What is counted, and when: over both APIs, whatever is asked of an operator."""

from __future__ import annotations

import gzip
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from service.api.operators.statistics import Record, Statistics

BODY = {"dY": [1.0], "Y": [0.5]}


def inputs(*names: str) -> dict[str, Any]:
    return {"inputs": [{"name": name, "datatype": "FP32", "shape": [1], "data": [0.5]} for name in names]}


def of(client: httpx.Client, op: str) -> Any:
    (model,) = client.get(f"/v2/models/{op}/stats").json()["model_stats"]
    return model


def counts(client: httpx.Client, op: str) -> tuple[int, int]:
    stats = of(client, op)["inference_stats"]
    return stats["success"]["count"], stats["fail"]["count"]


def test_both_apis_count(client: httpx.Client) -> None:
    succeeded, failed = counts(client, "SigmoidGrad")
    client.post("/v1/ops/SigmoidGrad", json=BODY)
    client.post("/v2/models/SigmoidGrad/infer", json=inputs("dY", "Y"))
    client.post("/v2/models/SigmoidGrad/versions/1/infer", json=inputs("dY", "Y"))
    client.post("/v2/models/SigmoidGrad/infer", content=gzip.compress(b"{}"), headers={"Content-Encoding": "gzip"})
    client.post("/v1/ops/SigmoidGrad", json={"dY": [1.0]})
    client.post("/v1/ops/SigmoidGrad", content=b" " * (3 << 20), headers={"Content-Type": "application/json"})
    assert counts(client, "SigmoidGrad") == (succeeded + 3, failed + 3)


def test_what_asks_no_operator_counts_nowhere(client: httpx.Client) -> None:
    before = client.get("/v2/models/stats").json()
    client.post("/v2/models/ReluGard/infer", json=inputs("dY", "Y"))
    client.get("/v2/models/SigmoidGrad")
    client.get("/v1/ops/SigmoidGrad")
    assert client.get("/v2/models/stats").json() == before


def test_times_of_the_phases_add_up(client: httpx.Client) -> None:
    start = time.time_ns() // 1_000_000
    client.post("/v2/models/QuickGeluGrad/infer", json=inputs("dY", "X"))
    model = of(client, "QuickGeluGrad")
    stats = model["inference_stats"]
    phases = [stats[name] for name in ("queue", "compute_input", "compute_infer", "compute_output")]
    assert {phase["count"] for phase in phases} == {stats["success"]["count"]} == {model["inference_count"]}
    assert stats["success"]["ns"] == sum(phase["ns"] for phase in phases)
    assert all(phase["ns"] > 0 for phase in phases[1:])
    assert start <= model["last_inference"] <= time.time_ns() // 1_000_000


def test_a_failure_changes_no_phase(client: httpx.Client) -> None:
    client.post("/v2/models/QuickGeluGrad/infer", json=inputs("dY", "X"))
    before = of(client, "QuickGeluGrad")
    client.post("/v2/models/QuickGeluGrad/infer", json=inputs("dY"))
    after = of(client, "QuickGeluGrad")
    for stats in (before["inference_stats"], after["inference_stats"]):
        stats.pop("fail")
    assert after == before
    assert of(client, "QuickGeluGrad")["inference_stats"]["fail"]["ns"] > 0


def test_threads_lose_no_count() -> None:
    statistics = Statistics()

    def count(_: int) -> None:
        for _ in range(500):
            statistics.succeeded("a", 0, 1, 3, 6, 10)
            statistics.failed("b", time.monotonic_ns())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(count, range(4)))
    record = statistics.of("a")
    times = record.queue, record.compute_input, record.compute_infer, record.compute_output
    assert (record.succeeded, *times) == (2000, 2000, 4000, 6000, 8000)
    assert (record.failed, statistics.of("b").failed, statistics.of("b").succeeded) == (0, 2000, 0)
    assert statistics.of("c") == Record()


def test_a_record_is_a_copy() -> None:
    statistics = Statistics()
    statistics.of("a").succeeded = 5
    assert statistics.of("a").succeeded == 0
