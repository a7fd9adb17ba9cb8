"""What every operator has done so far, in the Open Inference Protocol's terms: counts and nanoseconds."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field

PHASES = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")


@dataclass
class Record:
    """One operator's: for each phase a count and nanoseconds; when it ran last, in milliseconds since 1970."""

    last: int = 0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    nanoseconds: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))


class Statistics:
    """Records by operator name. Thread-safe."""

    def __init__(self) -> None:
        self._records: defaultdict[str, Record] = defaultdict(Record)
        self._lock = threading.Lock()

    def succeeded(self, operator: str, asked: int, started: int, decoded: int, computed: int, encoded: int) -> None:
        """Count a request, given the times, by `time.monotonic_ns`, at which each of its phases ended."""
        spent = {
            "success": encoded - asked,
            "queue": started - asked,
            "compute_input": decoded - started,
            "compute_infer": computed - decoded,
            "compute_output": encoded - computed,
        }
        self._add(operator, spent, time.time_ns() // 1_000_000)

    def failed(self, operator: str, asked: int) -> None:
        """Count a request that was answered with an error."""
        self._add(operator, {"fail": time.monotonic_ns() - asked}, None)

    def of(self, operator: str) -> Record:
        """A copy of the operator's record."""
        with self._lock:
            record = self._records[operator]
            return Record(record.last, dict(record.counts), dict(record.nanoseconds))

    def _add(self, operator: str, spent: dict[str, int], now: int | None) -> None:
        with self._lock:
            record = self._records[operator]
            for phase, nanoseconds in spent.items():
                record.counts[phase] += 1
                record.nanoseconds[phase] += nanoseconds
            if now is not None:
                record.last = now
