"""The statistics of every operator, as the Open Inference Protocol defines them: counts and nanoseconds."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass

from service.api.http.call import Call
from service.api.http.problems import CLIENT_GONE
from service.api.operators.protocol_models import Duration, OneModelStatistics
from service.api.telemetry.metrics import Observer


@dataclass
class OperatorRecord:
    """The counts and the nanoseconds of an operator's requests; of successful requests, by phase."""

    succeeded: int = 0
    queue: int = 0
    compute_input: int = 0
    compute_infer: int = 0
    compute_output: int = 0
    failed: int = 0
    fail: int = 0
    last: int = 0
    """When the last successful request ended, in milliseconds since 1970."""

    def succeed(self, spent: dict[str, int]) -> None:
        self.succeeded += 1
        self.queue += spent["queue"]
        self.compute_input += spent["decode"]
        self.compute_infer += spent["kernel"]
        self.compute_output += spent["encode"]
        self.last = time.time_ns() // 1_000_000

    def as_json(self, operator: str, version: str) -> OneModelStatistics:
        def spent(*phases: int) -> Duration:
            return {"count": self.succeeded, "ns": sum(phases)}

        phases = self.queue, self.compute_input, self.compute_infer, self.compute_output
        return {
            "name": operator,
            "version": version,
            "last_inference": self.last,
            "inference_count": self.succeeded,
            "execution_count": self.succeeded,
            "inference_stats": {
                "success": spent(*phases),
                "queue": spent(self.queue),
                "compute_input": spent(self.compute_input),
                "compute_infer": spent(self.compute_infer),
                "compute_output": spent(self.compute_output),
                "fail": {"count": self.failed, "ns": self.fail},
                "cache_hit": {"count": 0, "ns": 0},
                "cache_miss": {"count": 0, "ns": 0},
            },
            "batch_stats": [],
        }


class OperatorStatistics(Observer):
    """Records by namespace and operator. Only the event loop uses them."""

    def __init__(self) -> None:
        self._records: defaultdict[tuple[str, str], OperatorRecord] = defaultdict(OperatorRecord)

    def ended(self, call: Call, nanoseconds: int, bug: str | None) -> None:
        """Count a request that ran an operator, unless its client has left."""
        if call.operator is None:
            return
        record = self._records[call.caller.namespace, call.operator]
        if "encode" in call.spent:
            record.succeed(call.spent)
        elif call.status >= 400 and call.status != CLIENT_GONE:
            record.failed += 1
            record.fail += nanoseconds - call.spent.get("read", 0)

    def of(self, namespace: str, operator: str) -> OperatorRecord:
        return self._records.get((namespace, operator), OperatorRecord())
