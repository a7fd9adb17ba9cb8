"""Metrics: counts over one process or several, few labels, and a rule for the clients that may read them."""

from __future__ import annotations

import errno
import gc
import os
import platform
import re
import socket
import uuid
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from safetensors.numpy import save

from service.api.telemetry.metrics import FAMILIES, GAUGES, IN_FLIGHT, PHASES, ROUTES, STATUSES, WORKERS, Metrics
from service.api.telemetry.processes import INFORMATION
from service.kernels import OPERATORS
from service.keys import add
from tests.documentation import PROCESSES
from tests.faults.servers import Server
from tests.serving import serving, wait_until

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scraped(url: str, *, store: str = "memory", **headers: str) -> Samples:
    """Return the metrics of a server with a store in memory, on a disk or in a database. Each has gauges of its own."""
    answer = httpx.get(f"{url}/metrics", headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"  # some scrapers read no other
    families = list(text_string_to_metric_families(answer.text))
    gauges = [name for name in GAUGES if name != "gradserve_database_lag_bytes"]  # there is no standby
    gauges = [name for name in gauges if f"_{store}_" in name or not re.search("_(disk|database)_", name)]
    names = [*gauges, *(family.name for family in FAMILIES), *(name.removesuffix("_total") for name in PROCESSES)]
    assert sorted(family.name for family in families) == sorted([*names, *INFORMATION])
    assert all(family.documentation for family in families)
    return {(one.name, frozenset(one.labels.items())): one.value for family in families for one in family.samples}


def of(samples: Samples, name: str, **labels: str) -> float:
    return samples.get((name, frozenset(labels.items())), 0.0)


@pytest.fixture
def url() -> Iterator[str]:
    with serving() as url:
        yield url


def test_requests_are_counted_by_route_and_status(url: str) -> None:
    with httpx.Client(base_url=url) as client:
        client.put("/v1/buffers/a", json={"shape": [2]})
        for _ in range(3):
            client.post("/v1/buffers/a/accumulate", json={"gradient": [1, 2]})
        client.post("/v1/buffers/accumulate", json={"a": [1, 2]})
        client.post("/v1/buffers/a/take")
        client.get("/v1/buffers/a/value")
        client.get("/v1/buffers/none")
        client.post("/v1/ops/ReluGrad", json={"dY": [1], "X": [1]})
        client.post("/v1/ops/ReluGrad", json={"dY": [1], "X": [1, 2]})
        inputs = [{"name": name, "shape": [2], "datatype": "FP32", "data": [1, 2]} for name in ("dY", "X")]
        client.post("/v2/models/ReluGrad/infer", json={"inputs": inputs})
        client.post("/v2/models/ReluGrad/infer", json={"inputs": []})
        for number in range(20):
            client.get(f"/nothing/{number}")
        client.get("/v2/health/live")
    samples = scraped(url)
    counts = {
        ("buffers", "201"): 1,
        ("accumulate", "200"): 4,
        ("take", "200"): 1,
        ("value", "200"): 1,
        ("buffers", "404"): 1,
        ("ops", "200"): 1,
        ("ops", "422"): 1,
        ("infer", "200"): 1,
        ("infer", "400"): 1,
        ("other", "404"): 20,
        ("health", "200"): 1,
    }
    found = {key: value for key, value in samples.items() if key[0] == "gradserve_requests_total" and value}
    expected = {
        ("gradserve_requests_total", frozenset({("route", route), ("status", status)})): count
        for (route, status), count in counts.items()
    }
    assert found == expected
    for route in {route for route, _ in counts}:
        answered = sum(count for (one, _), count in counts.items() if one == route)
        assert of(samples, "gradserve_request_seconds_count", route=route) == answered
        assert of(samples, "gradserve_request_seconds_bucket", route=route, le="+Inf") == answered
        assert of(samples, "gradserve_request_seconds_sum", route=route) > 0
    assert of(samples, "gradserve_commit_requests_count") == 6
    assert of(samples, "gradserve_commit_requests_sum") == 6
    assert of(samples, "gradserve_in_flight") == 1  # the scrape itself
    assert of(samples, "gradserve_buffers") == 1
    assert 0 < of(samples, "gradserve_store_bytes") < of(samples, "gradserve_store_limit_bytes")
    assert of(samples, "gradserve_workers") == 1


def test_a_store_on_a_disk_has_metrics_of_the_disk(tmp_path: Path) -> None:
    with serving(store=f"lmdb:{tmp_path}/store") as url:
        samples = scraped(url, store="disk")
    disk = os.statvfs(tmp_path)
    assert of(samples, "gradserve_disk_bytes") == disk.f_blocks * disk.f_frsize
    assert 0 < of(samples, "gradserve_disk_free_bytes") <= of(samples, "gradserve_disk_bytes")


def test_a_store_in_a_database_has_metrics_of_the_database(postgres_url: str) -> None:
    with (
        serving(store=postgres_url, postgres_schema=f"test_{uuid.uuid4().hex}") as url,
        httpx.Client(base_url=url) as client,
    ):
        client.put("/v1/buffers/a", json={"shape": [100_000], "nonfinite": "reject"})
        before = scraped(url, store="database")
        for _ in range(2):
            client.post("/v1/buffers/a/accumulate", json={"gradient": [1] * 100_000})
        client.post("/v1/buffers/a/accumulate", json={"gradient": [3.4e38] * 100_000}, params={"weight": 2})
        after = scraped(url, store="database")  # the last gradient was refused for its sum, after it was staged
    for name, expected in (("unfolded_bytes", 800_000), ("loose_bytes", 400_000), ("standbys", 0)):
        name = f"gradserve_database_{name}"
        assert (of(before, name), of(after, name)) == (0, expected)
    assert 3 <= of(after, "gradserve_database_connections") < of(after, "gradserve_database_connections_limit") == 200


def test_errors_are_counted_by_code(url: str) -> None:
    with httpx.Client(base_url=url) as client:
        client.put("/v1/buffers/a", json={"shape": [2]})
        client.put("/v1/buffers/a", json={"shape": [3]})
        for path in ("/v1/buffers/none", "/v1/buffers/none/value", "/nothing", "/v1/ops/None"):
            client.get(path)
        client.post("/v1/ops/ReluGrad", json={"dY": [1], "X": [1, 2]})
        client.post("/v2/models/ReluGrad/infer", content=b"{")
        client.delete("/v1/limits")
    with socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0), timeout=30) as connection:
        head = "POST /v1/buffers/a/accumulate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(f"{head}no length\r\n".encode())
        assert connection.recv(12) == b"HTTP/1.1 400"
    wait_until(lambda: of(scraped(url), "gradserve_in_flight") == 1)
    samples = scraped(url)
    found = {dict(labels)["code"]: n for (name, labels), n in samples.items() if name == "gradserve_errors_total"}
    once = ("buffer_exists", "not_found", "unknown_operator", "shape_mismatch", "method_not_allowed")
    assert found == {"unknown_buffer": 2, "malformed_body": 2, **dict.fromkeys(once, 1)}
    failed = [
        n
        for (name, labels), n in samples.items()
        if name == "gradserve_requests_total" and dict(labels)["status"] >= "400"
    ]
    assert sum(failed) == sum(found.values())


def test_operators_are_counted_by_status_and_their_kernels_are_timed(url: str) -> None:
    with httpx.Client(base_url=url) as client:
        for _ in range(3):
            client.post("/v1/ops/ReluGrad", json={"dY": [1], "X": [1]})
        client.post("/v1/ops/ReluGrad", json={"dY": [1], "X": [1, 2]})
        inputs = [{"name": name, "shape": [2], "datatype": "FP32", "data": [1, 2]} for name in ("dY", "Y")]
        client.post("/v2/models/TanhGrad/infer", json={"inputs": inputs})
        client.post("/v2/models/TanhGrad/infer", json={"inputs": []})
        client.post("/v1/ops/Nothing", json={})
        client.put("/v1/buffers/a", json={"shape": [1]})
        client.post("/v1/ops/ReluGrad?into=dX:a", json={"dY": [1], "X": [1]})
    samples = scraped(url)
    found = {
        (dict(labels)["op"], dict(labels)["status"]): count
        for (name, labels), count in samples.items()
        if name == "gradserve_operator_requests_total"
    }
    assert found == {("ReluGrad", "200"): 4, ("ReluGrad", "422"): 1, ("TanhGrad", "200"): 1, ("TanhGrad", "400"): 1}
    assert of(samples, "gradserve_kernel_seconds_count", op="ReluGrad") == 4
    assert of(samples, "gradserve_kernel_seconds_count", op="TanhGrad") == 1
    timed = {
        dict(labels)["op"]: seconds
        for (name, labels), seconds in samples.items()
        if name == "gradserve_kernel_seconds_sum"
    }
    assert {op for op, seconds in timed.items() if seconds} == {"ReluGrad", "TanhGrad"}
    in_phase = of(samples, "gradserve_phase_seconds_sum", phase="kernel")
    assert sum(timed.values()) == pytest.approx(in_phase)
    assert timed.keys() == {*OPERATORS, "graphs"}


def test_the_versions_and_the_process_are_told(url: str) -> None:
    samples = scraped(url)
    versions = {"version": version("gradserve"), "python": platform.python_version(), "numpy": np.__version__}
    assert of(samples, "gradserve_build_info", **versions) == 1
    (python,) = (dict(labels) for name, labels in samples if name == "python_info")
    assert python["version"] == platform.python_version()
    pid = str(os.getpid())
    assert of(samples, "process_resident_memory_bytes", pid=pid) > 1 << 20
    assert of(samples, "process_open_fds", pid=pid) > 2
    assert (
        of(scraped(url), "process_cpu_seconds_total", pid=pid) >= of(samples, "process_cpu_seconds_total", pid=pid) > 0
    )


@pytest.mark.parametrize(
    ("route", "head"),
    [
        ("value", "GET /v1/buffers/a/value?step=0&timeout=60 HTTP/1.1\r\nHost: x\r\n\r\n"),
        ("accumulate", "POST /v1/buffers/a/accumulate HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf"),
    ],
)
def test_a_client_that_left_before_the_answer_is_counted_as_499(url: str, route: str, head: str) -> None:
    httpx.put(f"{url}/v1/buffers/a", json={"shape": [2]}).raise_for_status()
    with socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0)) as connection:
        connection.sendall(head.encode())
        wait_until(lambda: of(scraped(url), "gradserve_in_flight") == 2)
    wait_until(lambda: of(scraped(url), "gradserve_in_flight") == 1)
    samples = scraped(url)
    found = {labels for (name, labels), value in samples.items() if name == "gradserve_requests_total" and value}
    assert {dict(one)["status"] for one in found if dict(one)["route"] == route} == {"499"}
    assert not any(name == "gradserve_errors_total" for name, _ in samples)


def test_phases_and_bytes_are_counted(url: str) -> None:
    body = b'{"dY": [1, 2, 3], "X": [1, 2, 3]}'
    answer = httpx.post(f"{url}/v1/ops/ReluGrad", content=body, headers={"Content-Type": "application/json"})
    made = httpx.put(f"{url}/v1/buffers/a", json={"shape": []})
    samples = scraped(url)
    assert of(samples, "gradserve_received_bytes_total") == len(body) + len(b'{"shape":[]}')
    assert of(samples, "gradserve_sent_bytes_total") == len(answer.content) + len(made.content)
    for phase in PHASES:
        assert of(samples, "gradserve_phase_seconds_count", phase=phase) == {"read": 2, "write": 2}.get(phase, 1), phase


NUMBERS = np.linspace(-1, 1, 300_000, dtype=np.float32)
WEIGHTS = {name: np.ones((1, 3, 1), np.float32) for name in ("W", "R")}
FILE = {"Content-Type": "application/vnd.safetensors"}
LONGEST: dict[str, tuple[str, dict[str, Any]]] = {
    "decode": ("ReluGrad?encoding=base64", {"json": {"dY": NUMBERS.tolist(), "X": NUMBERS.tolist()}}),
    "kernel": ("GRUTraining", {"content": save({"X": np.ones((3000, 1, 1), np.float32), **WEIGHTS}), "headers": FILE}),
    "encode": (
        "ReluGrad?encoding=list",
        {"content": save({"dY": NUMBERS, "X": NUMBERS}), "headers": {**FILE, "Accept": "application/json"}},
    ),
}


@pytest.mark.parametrize("phase", LONGEST)
def test_time_is_counted_in_its_phase(url: str, phase: str) -> None:
    path, request = LONGEST[phase]
    computing = ("queue", "decode", "kernel", "encode")

    def longest() -> str:
        """Return the phase with the most seconds after another request. A busy machine may queue one for long."""
        httpx.post(f"{url}/v1/ops/{path}", **request).raise_for_status()
        samples = scraped(url)
        return max(computing, key=lambda one: of(samples, "gradserve_phase_seconds_sum", phase=one))

    wait_until(lambda: longest() == phase)


def test_buckets_only_grow(url: str) -> None:
    for _ in range(20):
        httpx.post(f"{url}/v1/ops/ReluGrad", json={"dY": [1], "X": [1]})
    samples = scraped(url)
    buckets = sorted(
        (float(dict(labels)["le"]), value)
        for (name, labels), value in samples.items()
        if name == "gradserve_request_seconds_bucket" and ("route", "ops") in labels
    )
    assert [value for _, value in buckets] == sorted(value for _, value in buckets)
    assert buckets[-1] == (float("inf"), 20)


def test_unknown_paths_add_few_labels(url: str) -> None:
    before = len(scraped(url))
    for path in ("/v1/ops/x", "/v2/models/y/infer", "/v1/buffers/z/value", "/v1/buffers/a/b/c", "/%00", "//"):
        for method in ("GET", "POST", "PATCH"):
            httpx.request(method, url + path)
    assert len(scraped(url)) - before <= len(ROUTES) * len(STATUSES)


def test_a_full_disk_does_not_end_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing to a memory map without room behind the map raises SIGBUS."""

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    metrics = Metrics(tmp_path / "gone")
    metrics.committed(1, 0.1)
    assert os.listdir(tmp_path / "gone") == []


def test_workers_count_together(tmp_path: Path) -> None:
    with Server(tmp_path / "store", workers=2) as server:
        httpx.put(f"{server.url}/v1/buffers/a", json={"shape": [2]})
        for _ in range(40):  # each on a new connection, which either process may accept
            httpx.post(f"{server.url}/v1/buffers/a/accumulate", json={"gradient": [1, 2]})
        counted = {"route": "accumulate", "status": "200"}  # a request counts once its answer is sent
        wait_until(lambda: of(scraped(server.url, store="disk"), "gradserve_requests_total", **counted) == 40)
        for _ in range(3):
            samples = scraped(server.url, store="disk")
            assert of(samples, "gradserve_requests_total", **counted) == 40
            assert of(samples, "gradserve_commit_requests_sum") == 41
            assert of(samples, "gradserve_workers") == 2
            assert of(samples, "gradserve_buffers") == 1
            pids = {int(dict(labels)["pid"]) for name, labels in samples if name == "process_open_fds"}
            assert len(pids) == 2
            assert all(of_parent(pid) == server.process.pid for pid in pids)


def of_parent(pid: int) -> int:
    """Return the id of the process's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize(
    ("rule", "near", "forwarded"), [("loopback", 200, 401), ("always", 200, 200), ("never", 401, 401)]
)
def test_metrics_open_decides_who_reads_the_metrics(tmp_path: Path, rule: str, near: int, forwarded: int) -> None:
    admin, other = (add(tmp_path / "keys", name, [name]) for name in ("admin", "ops"))
    with serving(keys=tmp_path / "keys", metrics_open=rule) as url:
        assert httpx.get(f"{url}/metrics").status_code == near
        for header in ("X-Forwarded-For", "X-Real-IP", "Forwarded"):
            assert httpx.get(f"{url}/metrics", headers={header: "for=203.0.113.9"}).status_code == forwarded
        asked = {"X-Forwarded-For": "203.0.113.9", "Authorization": f"Bearer {admin}"}
        assert httpx.get(f"{url}/metrics", headers=asked).status_code == 200
        asked["Authorization"] = f"Bearer {other}"
        assert httpx.get(f"{url}/metrics", headers=asked).status_code == (200 if rule == "always" else 403)


def test_a_new_process_keeps_the_counts_of_an_ended_one(tmp_path: Path) -> None:
    before = Metrics(tmp_path)
    before.committed(1, 0.1)
    before.set(IN_FLIGHT, 1)
    del before  # as if its process had ended
    gc.collect()
    now = Metrics(tmp_path)
    now.committed(1, 0.1)
    now.set(WORKERS, 1)
    found = {one.name: one.value for family in now.collect() for one in family.samples}
    assert found["gradserve_commit_requests_count"] == 2
    assert (found["gradserve_in_flight"], found["gradserve_workers"]) == (0, 1)
    assert [len(family.samples) for family in now.collect() if family.name == "process_open_fds"] == [1]
