"""A store behind a network may block: the event loop calls none of its look-ups."""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from service.buffers.memory import MemoryStore
from tests.api.models import linear
from tests.serving import serving

LOOK_UPS = ("record", "durable", "now", "look", "names", "records", "read", "recall", "generation", "size")
GRAPHS = ("graph", "graphs", "graph_content")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the calls of each look-up. A call in an event loop counts as `in the loop`."""
    counts: Counter[str] = Counter()

    def watched(name: str) -> Any:
        look_up = getattr(MemoryStore, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            counts[name] += 1
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                return look_up(*arguments, **keywords)
            counts["in the loop"] += 1
            raise AssertionError(f"{name} was called in the event loop")

        return call

    for name in (*LOOK_UPS, *GRAPHS):
        monkeypatch.setattr(MemoryStore, name, watched(name))
    monkeypatch.setattr(MemoryStore, "blocks", True)
    return counts


def test_a_graph_makes_no_look_up_in_the_event_loop(calls: Counter[str]) -> None:
    with serving() as url, httpx.Client(base_url=url, timeout=30) as http:
        http.put("/v1/graphs/g?set=parameters:m.p.*", content=linear()).raise_for_status()
        for query in ("", "?from=parameters:m.p.*"):
            http.post(f"/v1/graphs/g{query}", json={"x": [[1, 2]]}).raise_for_status()
        for path in ("/v1/graphs", "/v1/graphs/g", "/v1/graphs/g/model", "/v2/models/g"):
            http.get(path).raise_for_status()
        http.post("/v2/repository/index").raise_for_status()
        http.delete("/v1/graphs/g").raise_for_status()
    assert all(calls[name] for name in GRAPHS)
    assert not calls["in the loop"]


def test_a_step_makes_no_look_up_in_the_event_loop(calls: Counter[str]) -> None:
    query = "from=gradients:g.*@1&from=weights:p.*&set=updated_weights:p.*&timeout=30"
    with serving() as url, httpx.Client(base_url=url, timeout=30) as http, ThreadPoolExecutor(1) as pool:
        for name in ("p.w", "g.w"):
            http.put(f"/v1/buffers/{name}", json={"shape": [2], "quorum": 2}).raise_for_status()
        step = pool.submit(
            http.post, f"/v1/ops/SGDOptimizerV2?{query}", json={"lr": 1}, headers={"Idempotency-Key": "k"}
        )
        for _ in range(4):
            http.post("/v1/buffers/g.w/accumulate", json={"gradient": [1, 2]}).raise_for_status()
        assert step.result(30).json()["updated_weights"].keys() == {"w"}
        again = http.post(f"/v1/ops/SGDOptimizerV2?{query}", json={"lr": 1}, headers={"Idempotency-Key": "k"})
        assert again.headers["Idempotency-Replayed"] == "true"
    assert not calls["in the loop"]


def test_the_event_loop_makes_no_look_up(calls: Counter[str]) -> None:
    keyed = {"Idempotency-Key": "k"}
    with serving() as url, httpx.Client(base_url=url, timeout=30) as http, ThreadPoolExecutor(2) as pool:
        for name in ("a", "b"):
            http.put(f"/v1/buffers/{name}", json={"shape": [2], "quorum": 2}).raise_for_status()
        waiting = pool.submit(http.get, "/v1/buffers/a/value?step=0&timeout=30")
        many = pool.submit(http.post, "/v1/buffers/value?step=0&timeout=30", json={"names": ["a", "b"]})
        for _ in range(2):
            relu = {"dY": [1, 2], "X": [1, 1]}
            http.post("/v1/ops/ReluGrad?into=dX:a", json=relu).raise_for_status()
            http.post("/v1/buffers/b/accumulate?return=value", json={"gradient": [1, 2]}).raise_for_status()
        assert waiting.result(30).json()["value"]["data"] == [2.0, 4.0]
        assert many.result(30).json()["buffers"].keys() == {"a", "b"}
        for _ in range(2):
            http.post("/v1/ops/ReluGrad?into=dX:a", json=relu, headers=keyed).raise_for_status()
        http.post("/v1/ops/ReluGrad?from=dY:a", json={"X": [1, 1]}).raise_for_status()
        for path in ("/v1/buffers", "/v1/buffers/a", "/v1/buffers/a/value", "/v2/health/ready", "/metrics"):
            assert http.get(path).status_code == 200, path
        http.put("/v1/buffers/c", json={"shape": [2], "deadline_seconds": 0.1}).raise_for_status()
        http.post("/v1/buffers/c/accumulate", json={"gradient": [1, 2]}).raise_for_status()
        for path in ("/v1/buffers/c", "/v1/buffers/c?step=0&timeout=30", "/v1/buffers/c/value?step=0"):
            assert http.get(path).status_code == 200, path
        http.patch("/v1/buffers/c", json={"quorum": 3}).raise_for_status()
        assert http.get("/v1/buffers/a/statistics?heat_map=2").json()["count"] == 1
        assert http.post("/v1/buffers/statistics?prefix=").json()["statistics"].keys() == {"a", "b", "c"}
        for path in ("zero?prefix=a", "take?prefix=b", "value?prefix="):
            http.post(f"/v1/buffers/{path}", headers={} if "value" in path else keyed | {"Idempotency-Key": path})
        for path in ("/v1/buffers/a/take", "/v1/buffers/b/zero"):
            http.post(path).raise_for_status()
    assert not calls["in the loop"]
    assert all(calls[name] for name in LOOK_UPS), calls
