"""Metrics: counted in every process, and reported by any process in Prometheus' text format.

Each process counts in a table of doubles. Several processes share their tables as files in one directory, and the
process that is scraped adds them up. When a process ends, its counters stay and its gauges go.

prometheus_client's multi-process mode would do the same, but is too slow. It counts a ReluGrad of 256 elements in
19.7 us of processor time, this table in 2.9 us: the difference is 15 % of the request's 110 us, and 3 % would be fine.
Each of its values takes a lock, asks for the process id, and packs bytes.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from service.api.http.call import GRAPHS, Call
from service.api.telemetry.processes import describe
from service.api.telemetry.tables import new_table, read_tables
from service.errors import Busy, NotReady, tree
from service.kernels import OPERATORS

logger = logging.getLogger(__name__)

METRICS_DIRECTORY = "GRADSERVE_METRICS_DIRECTORY"
"""The environment variable with the directory that worker processes share."""

ROUTES = (
    *("ops", "infer", "accumulate", "take", "value", "zero", "buffers", "graphs", "runs"),
    *("health", "metrics", "page", "other"),
)
"""The values of the label `route`. Operators have metrics of their own; buffers are too many to count by. `page` are
the static files of the pages at `/` and `/docs`."""

_FAILURES = (400, 401, 403, 404, 405, 406, 408, 409, 410, 412, 413, 415, 422, 429, 499, 500, 501, 503, 507)
STATUSES = (200, 201, 204, 304, *_FAILURES)
_ALL_STATUSES = (*STATUSES, "other")

CODES = tuple(sorted({error.code for error in tree()}))
"""The values of the label `code`: the codes of all errors."""

PHASES = ("read", "queue", "decode", "kernel", "encode", "store", "write")
"""The steps of a request: receive the body, wait for a thread, decode tensors, compute, encode the answer, commit its
changes to the store, and send the answer."""

SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
NANOSECONDS = tuple(round(bound * 1e9) for bound in SECONDS)
_SUM = len(SECONDS) + 1  # the place of the sum in a histogram of seconds
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


Labels: TypeAlias = tuple[str, ...]
"""A value for each label of a metric."""


class Family:
    """A metric: its kind, name and meaning, the values of its labels, and the buckets of a histogram."""

    size = 0
    """The numbers of all families, which lie in a table one after another."""

    def __init__(
        self,
        kind: str,
        name: str,
        help: str,
        labels: Mapping[str, tuple[object, ...]] = MappingProxyType({}),
        buckets: tuple[float, ...] = (),
    ) -> None:
        self.kind, self.name, self.help, self.labels, self.buckets = kind, name, help, labels, buckets
        self.width = len(buckets) + 2 if buckets else 1
        """Numbers for a set of labels. A histogram has a number for each bucket, one for larger values, and the sum."""
        sets: list[Labels] = [tuple(map(str, values)) for values in product(*labels.values())]
        self.places = {one: Family.size + self.width * number for number, one in enumerate(sets)}
        """Where in the table the numbers of each set of labels begin."""
        self.at = {one[0]: self.places[one] for one in reversed(sets) if one}
        """Where the numbers of the first set with each value of the first label begin."""
        self.start = Family.size
        Family.size += self.width * len(sets)


REQUESTS = Family("counter", "gradserve_requests", "Requests answered.", {"route": ROUTES, "status": _ALL_STATUSES})
REQUEST_SECONDS = Family(
    "histogram", "gradserve_request_seconds", "Seconds from head to answer.", {"route": ROUTES}, SECONDS
)
PHASE_SECONDS = Family(
    "histogram", "gradserve_phase_seconds", "Seconds in each phase of requests.", {"phase": PHASES}, SECONDS
)
OPERATOR_REQUESTS = Family(
    "counter",
    "gradserve_operator_requests",
    "Requests to operators that were admitted.",
    {"op": (*OPERATORS, GRAPHS), "status": _ALL_STATUSES},
)
KERNEL_SECONDS = Family(
    "histogram", "gradserve_kernel_seconds", "Seconds of kernels.", {"op": (*OPERATORS, GRAPHS)}, SECONDS
)
RECEIVED_BYTES = Family("counter", "gradserve_received_bytes", "Bytes of request bodies received.")
SENT_BYTES = Family("counter", "gradserve_sent_bytes", "Bytes of answer bodies sent.")
REFUSED = Family("counter", "gradserve_refused", "Requests refused with 429, to be tried again.")
ERRORS = Family("counter", "gradserve_errors", "Requests answered with an error.", {"code": CODES})
COMMIT_REQUESTS = Family("histogram", "gradserve_commit_requests", "Requests in each commit of the store.", {}, SIZES)
COMMIT_SECONDS = Family("histogram", "gradserve_commit_seconds", "Seconds of each commit of the store.", {}, SECONDS)
IN_FLIGHT = Family("gauge", "gradserve_in_flight", "Requests without an answer yet.")
IN_FLIGHT_BYTES = Family(
    "gauge", "gradserve_in_flight_bytes", "Bytes that large requests hold, until the client has the answer."
)
GRAPH_CACHE_BYTES = Family(
    "gauge",
    "gradserve_graph_cache_bytes",
    "Bytes of planned graphs and of parameters that are kept for later requests.",
)
WAITING = Family("gauge", "gradserve_waiting", "Requests that wait for a thread.")
WORKERS = Family("gauge", "gradserve_workers", "Processes that serve requests.")

FAMILIES = (
    *(REQUESTS, REQUEST_SECONDS, PHASE_SECONDS, OPERATOR_REQUESTS, KERNEL_SECONDS, RECEIVED_BYTES, SENT_BYTES, REFUSED),
    *(ERRORS, COMMIT_REQUESTS, COMMIT_SECONDS, IN_FLIGHT, IN_FLIGHT_BYTES, GRAPH_CACHE_BYTES),
    *(WAITING, WORKERS),
)

GAUGES = {
    "gradserve_buffers": "Buffers in the store.",
    "gradserve_store_bytes": "Bytes in use in the store.",
    "gradserve_store_limit_bytes": "Bytes that the store may hold, at most.",
    "gradserve_disk_free_bytes": "Bytes that are free on the disk of the store.",
    "gradserve_disk_bytes": "Bytes of the disk of the store.",
    "gradserve_database_connections": "Connections to the PostgreSQL database, of all clients.",
    "gradserve_database_connections_limit": "Connections that PostgreSQL takes, at most.",
    "gradserve_database_standbys": "Synchronous standbys that follow the database.",
    "gradserve_database_lag_bytes": "Bytes of the database's log that no synchronous standby has yet.",
    "gradserve_database_loose_bytes": "Bytes in the database that are staged, or wait to be deleted.",
    "gradserve_database_unfolded_bytes": "Bytes of gradients in the database that are not added up yet.",
}
"""Gauges that are read when a client asks for the metrics. LMDB has those of a disk, PostgreSQL those of a database."""


_STATUSES = {status: number for number, status in enumerate(STATUSES)}


class Observer:
    """Sees every request begin and end, in the event loop. An observer must neither fail nor wait."""

    def began(self, call: Call) -> None:
        """Note that a request has come. Nothing in it is checked yet."""

    def ended(self, call: Call, nanoseconds: int, bug: str | None) -> None:
        """Note that a request has ended after this time. `bug` is the class of an unexpected error."""

    def close(self) -> None:
        """Finish: the server has stopped."""


class Totals(NamedTuple):
    """What all processes have counted."""

    numbers: Mapping[str, Mapping[Labels, Sequence[float]]]
    """The numbers of each family, as many as it is wide, by its labels. Gauges are those of living processes."""
    pids: Sequence[int]
    """The processes that live."""


class Metrics(Collector, Observer):
    """The metrics of this process, and of the `workers` processes that share `directory`."""

    def __init__(self, directory: Path | None = None, workers: int = 1) -> None:
        self._directory, self._workers = directory, workers
        self._numbers: Any = [0.0] * Family.size
        if directory is not None:
            try:
                self._numbers = new_table(directory, Family.size)
            except OSError as error:
                logger.warning("Process %s is not counted, so the server is not ready: %s", os.getpid(), error)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self.gauges: dict[str, float] = {}
        """What the store said when a client last asked for the metrics, by name."""

    def set(self, family: Family, value: float) -> None:
        """Set a gauge."""
        self._numbers[family.start] = value

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Count this process among those that serve meanwhile, or until it ends: then its table loses its lock."""
        self.set(WORKERS, 1)
        yield
        self.set(WORKERS, 0)

    def check_workers(self) -> None:
        """Raise `NotReady` unless all processes serve."""
        if self._directory is not None:
            check_workers(self._directory, self._workers)

    def began(self, call: Call) -> None:
        self._numbers[IN_FLIGHT.start] += 1

    def ended(self, call: Call, nanoseconds: int, bug: str | None) -> None:
        numbers = self._numbers
        numbers[IN_FLIGHT.start] -= 1
        status = _STATUSES.get(call.status, len(STATUSES))
        numbers[REQUESTS.at[call.label] + status] += 1
        if call.status >= 400:
            self._failed(call)
        numbers[RECEIVED_BYTES.start] += call.received
        numbers[SENT_BYTES.start] += call.sent
        times = [(PHASE_SECONDS.at[phase], spent) for phase, spent in call.spent.items()]
        times.append((REQUEST_SECONDS.at[call.label], nanoseconds))
        if call.operator is not None:
            numbers[OPERATOR_REQUESTS.at[call.operator] + status] += 1
            if "kernel" in call.spent:
                times.append((KERNEL_SECONDS.at[call.operator], call.spent["kernel"]))
        for place, spent in times:
            numbers[place + bisect_left(NANOSECONDS, spent)] += 1
            numbers[place + _SUM] += spent * 1e-9

    def _failed(self, call: Call) -> None:
        if call.status == Busy.status:
            self._numbers[REFUSED.start] += 1
        if call.code is not None:
            self._numbers[ERRORS.at[call.code]] += 1

    def committed(self, requests: int, seconds: float) -> None:
        self._observe(COMMIT_REQUESTS.start, SIZES, requests)
        self._observe(COMMIT_SECONDS.start, SECONDS, seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all processes, added up."""
        totals = self.totals()
        for family in FAMILIES:
            yield _metric(family, totals.numbers[family.name])
        for name, meaning in GAUGES.items():
            if name in self.gauges:
                yield GaugeMetricFamily(name, meaning, self.gauges[name])
        yield from describe(totals.pids)

    def totals(self) -> Totals:
        """Return the numbers of all processes, added up. It reads files. Raises OSError."""
        own = [(self._numbers, os.getpid())]
        tables = own if self._directory is None else [*read_tables(self._directory, Family.size)]
        sums = _added(numbers for numbers, _ in tables)
        living = _added(numbers for numbers, pid in tables if pid is not None)
        found: dict[str, dict[Labels, list[float]]] = {}
        for family in FAMILIES:
            numbers = living if family.kind == "gauge" else sums
            found[family.name] = {one: numbers[at : at + family.width] for one, at in family.places.items()}
        return Totals(found, [pid for _, pid in tables if pid is not None])

    def _observe(self, place: int, buckets: Sequence[float], value: float) -> None:
        numbers = self._numbers
        numbers[place + bisect_left(buckets, value)] += 1
        numbers[place + len(buckets) + 1] += value


def check_workers(directory: Path, count: int) -> None:
    """Raise `NotReady` unless `count` processes that share the directory serve. Raises OSError."""
    tables = read_tables(directory, Family.size)
    missing = count - sum(round(numbers[WORKERS.start]) for numbers, pid in tables if pid is not None)
    if missing > 0:
        verb = "is" if missing == 1 else "are"
        raise NotReady(f"{missing} of {count} worker processes {verb} starting, or being replaced")


def _added(tables: Iterable[Sequence[float]]) -> list[float]:
    return [sum(column) for column in zip([0.0] * Family.size, *tables, strict=True)]


def _metric(family: Family, totals: Mapping[Labels, Sequence[float]]) -> Metric:
    names = list(family.labels)
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(family.name, family.help, labels=names)
        for labels, (*counts, total) in totals.items():
            cumulated = [sum(counts[: k + 1]) for k in range(len(counts))]
            bounds = [*(str(float(bound)) for bound in family.buckets), "+Inf"]
            histogram.add_metric(labels, list(zip(bounds, cumulated, strict=True)), total)
        return histogram
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = kind(family.name, family.help, labels=names)
    for labels, (value,) in totals.items():
        if value or not names:
            metric.add_metric(labels, value)
    return metric
