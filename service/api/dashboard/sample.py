"""A sample: what the service did in a step of two seconds, from the totals of the metrics at its two ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pydantic import BaseModel, Field

from service.api.telemetry.metrics import SECONDS, Totals


class Percentiles(BaseModel):
    """Percentiles of a time in seconds, interpolated within the buckets of its histogram."""

    p50: float
    p95: float
    p99: float


class Sample(BaseModel):
    """The work of a step. Routes, codes and phases without requests are left out."""

    at: float = Field(description="The end of the step, in seconds since 1970.")
    requests: dict[str, float] = Field(description="Requests per second, by route.")
    errors: dict[str, float] = Field(description="Errors per second, by code.")
    received_bytes: float = Field(description="Bytes of request bodies per second.")
    sent_bytes: float = Field(description="Bytes of answer bodies per second.")
    seconds: Percentiles | None = Field(
        description="The time of the requests that ended, without those of the route `page`; null without any."
    )
    phases: dict[str, Percentiles] = Field(description="The time in each phase.")
    in_flight: int = Field(description="Requests without an answer yet.")
    in_flight_bytes: int = Field(description="Bytes that large requests hold.")
    waiting: int = Field(description="Requests that wait for a thread.")
    commits: float = Field(description="Commits of the store per second.")
    buffers: int | None = Field(description="Buffers in the store; null until the store has said it.")
    store_bytes: int | None = Field(description="Bytes in use in the store; null until the store has said it.")
    store_limit_bytes: int = Field(description="Bytes that the store may hold, at most.")
    workers: int = Field(description="Processes that serve requests.")
    database: dict[str, float] = Field(description="Numbers of a PostgreSQL database, as in the metrics.")


class StoreState(NamedTuple):
    """What a store says of itself: None as long as it has said nothing."""

    limit_bytes: int
    buffers: int | None = None
    bytes: int | None = None
    database: Mapping[str, float] = {}


def sample_of(before: Totals, after: Totals, seconds: float, at: float, store: StoreState) -> Sample:
    """Return the sample of a step of these seconds, which ended `at`."""
    grown = _Growth(before, after)
    phases = {phase: percentiles(grown.histogram("gradserve_phase_seconds", phase)) for phase in grown.phases}

    def rate(count: float) -> float:
        return round(count / seconds, 3)

    def now(name: str) -> int:
        return round(after.numbers[name][()][0])

    return Sample(
        at=round(at, 6),
        requests={route: rate(count) for route, count in grown.by_first_label("gradserve_requests").items()},
        errors={code: rate(count) for code, count in grown.by_first_label("gradserve_errors").items()},
        received_bytes=rate(grown.of("gradserve_received_bytes", ())),
        sent_bytes=rate(grown.of("gradserve_sent_bytes", ())),
        seconds=percentiles(grown.histogram("gradserve_request_seconds", but="page")),
        phases={phase: found for phase, found in phases.items() if found is not None},
        in_flight=now("gradserve_in_flight"),
        in_flight_bytes=now("gradserve_in_flight_bytes"),
        waiting=now("gradserve_waiting"),
        commits=rate(sum(grown.histogram("gradserve_commit_seconds"))),
        buffers=store.buffers,
        store_bytes=store.bytes,
        store_limit_bytes=store.limit_bytes,
        workers=now("gradserve_workers"),
        database=dict(store.database),
    )


class _Growth:
    """What counters and histograms have grown by. A counter never falls: a table that is gone counts as 0."""

    def __init__(self, before: Totals, after: Totals) -> None:
        self._before, self._after = before.numbers, after.numbers
        self.phases = [phase for (phase,) in self._after["gradserve_phase_seconds"]]

    def of(self, name: str, labels: tuple[str, ...], place: int = 0) -> float:
        return max(0.0, self._after[name][labels][place] - self._before[name][labels][place])

    def by_first_label(self, name: str) -> dict[str, float]:
        """Return the growth by the first label, of those that have grown."""
        grown: defaultdict[str, float] = defaultdict(float)
        for labels in self._after[name]:
            grown[labels[0]] += self.of(name, labels)
        return {label: count for label, count in grown.items() if count}

    def histogram(self, name: str, *labels: str, but: str | None = None) -> list[float]:
        """Return the growth of each bucket, of these labels, or of all `but` those that have this one."""
        chosen = [labels] if labels else [one for one in self._after[name] if but not in one]
        width = len(self._after[name][chosen[0]]) - 1  # without the sum
        return [sum(self.of(name, one, place) for one in chosen) for place in range(width)]


def percentiles(counts: Sequence[float]) -> Percentiles | None:
    """Return the percentiles of a histogram whose buckets end at `SECONDS`; None if it is empty.

    Within a bucket the times count as evenly spread. A time beyond the last bound counts as this bound.
    """
    total = sum(counts)
    if not total:
        return None
    return Percentiles(**{f"p{part}": round(_percentile(counts, total * part / 100), 6) for part in (50, 95, 99)})


def _percentile(counts: Sequence[float], rank: float) -> float:
    lower, passed = 0.0, 0.0
    for count, upper in zip(counts[:-1], SECONDS, strict=True):
        if count and passed + count >= rank:
            return lower + (upper - lower) * (rank - passed) / count
        lower, passed = upper, passed + count
    return SECONDS[-1]
