"""Counting a small request, in our table and in prometheus_client's multi-process mode: `python -m benchmarks.metrics`.

Both count the same in files that other processes read. prometheus_client's labels are looked up beforehand, as in the
fastest program that could use it. The times are of the thread's processor, medians by turns.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_DIRECTORY = tempfile.TemporaryDirectory()
os.environ["PROMETHEUS_MULTIPROC_DIR"] = _DIRECTORY.name  # which prometheus_client reads when it is imported

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram  # noqa: E402

from service.api.telemetry.metrics import FAMILIES, SECONDS, Metrics  # noqa: E402

REQUEST_MICROSECONDS = 110
"""What a ReluGrad of 256 elements takes of the server."""

TURNS = 1000
CALLS = 100
"""Requests in each turn."""

CALL: Any = SimpleNamespace(
    label="infer",
    status=200,
    code=None,
    received=2200,
    sent=1200,
    operator="ReluGrad",
    spent={"read": 9000, "queue": 0, "decode": 8000, "kernel": 7000, "encode": 9000, "write": 12_000},
)
"""What the metrics see of such a request."""


def theirs() -> Callable[[], None]:
    """Return a call that counts a request as `Metrics` does, with the metrics of prometheus_client."""
    kinds: dict[str, Any] = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}
    registry, made = CollectorRegistry(), {}
    for family in FAMILIES:
        more = {"buckets": SECONDS} if family.kind == "histogram" else {}
        made[family.name] = kinds[family.kind](family.name, family.help, [*family.labels], registry=registry, **more)
    requests = {("infer", 200): made["gradserve_requests"].labels("infer", "200")}
    seconds = {"infer": made["gradserve_request_seconds"].labels("infer")}
    phases = {phase: made["gradserve_phase_seconds"].labels(phase) for phase in CALL.spent}
    answered = {("ReluGrad", 200): made["gradserve_operator_requests"].labels("ReluGrad", "200")}
    kernels = {"ReluGrad": made["gradserve_kernel_seconds"].labels("ReluGrad")}
    in_flight, received, sent = (made[f"gradserve_{one}"] for one in ("in_flight", "received_bytes", "sent_bytes"))

    def count() -> None:
        in_flight.inc()
        in_flight.dec()
        requests[CALL.label, CALL.status].inc()
        received.inc(CALL.received)
        sent.inc(CALL.sent)
        seconds[CALL.label].observe(110e-6)
        for phase, spent in CALL.spent.items():
            phases[phase].observe(spent * 1e-9)
        answered[CALL.operator, CALL.status].inc()
        kernels[CALL.operator].observe(CALL.spent["kernel"] * 1e-9)

    return count


def ours(directory: Path) -> Callable[[], None]:
    metrics = Metrics(directory)

    def count() -> None:
        metrics.began(CALL)
        metrics.ended(CALL, 110_000, None)

    return count


def microseconds(count: Callable[[], None]) -> float:
    """Return the processor time of counting a request."""
    start = time.thread_time_ns()
    for _ in range(CALLS):
        count()
    return (time.thread_time_ns() - start) / 1000 / CALLS


def main() -> None:
    """Print both times, and the difference as a share of a request."""
    with _DIRECTORY as directory:
        counts = ours(Path(directory)), theirs()
        turns = [[microseconds(count) for count in counts] for _ in range(TURNS)]
    table, client = (statistics.median(times) for times in zip(*turns, strict=True))
    share = (client - table) / REQUEST_MICROSECONDS
    print(f"our table {table:.1f} us, prometheus_client {client:.1f} us: {share:.0%} of a request more")


if __name__ == "__main__":
    main()
