"""The statistics of operators count the requests of both APIs."""

from __future__ import annotations

import gzip
import time
from typing import Any

import httpx

BODY = {"dY": [1.0], "Y": [0.5]}


def inputs(*names: str) -> dict[str, Any]:
    return {"inputs": [{"name": name, "datatype": "FP32", "shape": [1], "data": [0.5]} for name in names]}


def of(client: httpx.Client, op: str) -> Any:
    (model,) = client.get(f"/v2/models/{op}/stats").json()["model_stats"]
    return model


def counts(client: httpx.Client, op: str) -> tuple[int, int]:
    stats = of(client, op)["inference_stats"]
    return stats["success"]["count"], stats["fail"]["count"]


def test_both_apis_count_runs_and_failures(client: httpx.Client) -> None:
    succeeded, failed = counts(client, "SigmoidGrad")
    client.post("/v1/ops/SigmoidGrad", json=BODY)
    client.post("/v2/models/SigmoidGrad/infer", json=inputs("dY", "Y"))
    client.post("/v2/models/SigmoidGrad/versions/1/infer", json=inputs("dY", "Y"))
    client.post("/v2/models/SigmoidGrad/infer", content=gzip.compress(b"{}"), headers={"Content-Encoding": "gzip"})
    client.post("/v1/ops/SigmoidGrad", json={"dY": [1.0]})
    client.post("/v1/ops/SigmoidGrad", content=b" " * (3 << 20), headers={"Content-Type": "application/json"})
    assert counts(client, "SigmoidGrad") == (succeeded + 3, failed + 3)


def test_requests_that_run_no_operator_are_not_counted(client: httpx.Client) -> None:
    before = client.get("/v2/models/stats").json()
    client.post("/v2/models/ReluGard/infer", json=inputs("dY", "Y"))
    client.get("/v2/models/SigmoidGrad")
    client.get("/v1/ops/SigmoidGrad")
    assert client.get("/v2/models/stats").json() == before


def test_the_times_of_the_phases_add_up(client: httpx.Client) -> None:
    start = time.time_ns() // 1_000_000
    client.post("/v2/models/QuickGeluGrad/infer", json=inputs("dY", "X"))
    model = of(client, "QuickGeluGrad")
    stats = model["inference_stats"]
    phases = [stats[name] for name in ("queue", "compute_input", "compute_infer", "compute_output")]
    assert {phase["count"] for phase in phases} == {stats["success"]["count"]} == {model["inference_count"]}
    assert stats["success"]["ns"] == sum(phase["ns"] for phase in phases)
    assert all(phase["ns"] > 0 for phase in phases[1:])
    assert start <= model["last_inference"] <= time.time_ns() // 1_000_000


def test_a_failure_is_counted_in_no_phase(client: httpx.Client) -> None:
    client.post("/v2/models/QuickGeluGrad/infer", json=inputs("dY", "X"))
    before = of(client, "QuickGeluGrad")
    client.post("/v2/models/QuickGeluGrad/infer", json=inputs("dY"))
    after = of(client, "QuickGeluGrad")
    for stats in (before["inference_stats"], after["inference_stats"]):
        stats.pop("fail")
    assert after == before
    assert of(client, "QuickGeluGrad")["inference_stats"]["fail"]["ns"] > 0
