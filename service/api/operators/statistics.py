"""What every operator has done so far, in the Open Inference Protocol's terms: counts and nanoseconds."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from dataclasses import dataclass, replace


@dataclass
class Record:
    """One operator's requests, and the nanoseconds that they took: those that succeeded phase by phase."""

    succeeded: int = 0
    queue: int = 0
    compute_input: int = 0
    compute_infer: int = 0
    compute_output: int = 0
    failed: int = 0
    fail: int = 0
    last: int = 0
    """When the last one that succeeded ended, in milliseconds since 1970."""


class Statistics:
    """Records by operator name. Thread-safe."""

    def __init__(self) -> None:
        self._records: defaultdict[str, Record] = defaultdict(Record)
        self._lock = threading.Lock()

    def succeeded(self, operator: str, asked: int, started: int, decoded: int, computed: int, encoded: int) -> None:
        """Count a request, given the times, by `time.perf_counter_ns`, at which each of its phases ended."""
        with self._lock:
            record = self._records[operator]
            record.succeeded += 1
            record.queue += started - asked
            record.compute_input += decoded - started
            record.compute_infer += computed - decoded
            record.compute_output += encoded - computed
            record.last = time.time_ns() // 1_000_000

    def failed(self, operator: str, asked: int) -> None:
        """Count a request that was answered with an error."""
        with self._lock:
            record = self._records[operator]
            record.failed += 1
            record.fail += time.perf_counter_ns() - asked

    def of(self, operator: str) -> Record:
        """A copy of the operator's record."""
        with self._lock:
            return replace(self._records[operator])
