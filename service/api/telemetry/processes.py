"""What the metrics say of the build and of the processes that serve."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator
from functools import partial
from importlib.metadata import version

import numpy as np
from prometheus_client import ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.platform_collector import PLATFORM_COLLECTOR

BUILD = {"version": version("gradserve"), "python": platform.python_version(), "numpy": np.__version__}
"""The labels of `gradserve_build_info`."""

INFORMATION = {
    "gradserve_build_info": (tuple(BUILD), "Always 1: the versions of gradserve and of what it computes with."),
    "python_info": (
        ("version", "implementation", "major", "minor", "patchlevel"),
        "Always 1: the Python that runs gradserve.",
    ),
}
"""The labels and the meanings of the metrics that only carry labels."""


def describe(pids: Iterable[int]) -> Iterator[Metric]:
    """Yield the metrics of the build, of Python, and of these processes. A process that has ended has none.

    Prometheus' names have no label, for one process. A sum over the processes would fall when a process ends, and
    `rate` would take that for a restart of them all. Descriptors have a limit in each process. So there is a label.
    """
    build = GaugeMetricFamily("gradserve_build_info", INFORMATION["gradserve_build_info"][1], labels=[*BUILD])
    build.add_metric([*BUILD.values()], 1)
    yield build
    yield from PLATFORM_COLLECTOR.collect()
    found: dict[str, Metric] = {}
    for pid in pids:
        for metric in ProcessCollector(pid=partial(str, pid), registry=None).collect():
            family = found.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            for sample in metric.samples:
                family.add_sample(sample.name, {"pid": str(pid)}, sample.value)
    yield from found.values()
