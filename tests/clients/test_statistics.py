"""Statistics of buffers in both clients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gradserve_client import NotFound, StepOpen

from tests.clients.both import connected
from tests.serving import serving


def test_statistics_of_one_buffer(server: Any) -> None:
    server.buffers["w"].create((2, 2), quorum=2)
    server.buffers["w"].accumulate([[3, 4], [0, np.nan]], contributor="rank0")
    found: Any = server.buffers["w"].statistics(heat_map=2)
    assert (found.norm, found.nan, found.zeros, found.max, found.count) == (5.0, 1, 1, 4.0, 1)
    assert sum(found.histogram["counts"]) == 2
    np.testing.assert_array_equal(found.heat_map, [[3, 4], [0, np.nan]])
    server.buffers["w"].accumulate(0.0)
    closed = server.buffers["w"].statistics(step=0)
    assert (closed.norm, closed.count, closed.heat_map) == (5.0, 2, None)
    assert [(one["step"], one["norm"], one["nonfinite"]) for one in closed.steps] == [(0, 5.0, 1)]
    assert server.buffers["w"].statistics().norm == 0.0
    with pytest.raises(StepOpen):
        server.buffers["w"].statistics(step=1)
    with pytest.raises(NotFound):
        server.buffers["none"].statistics()


def test_statistics_of_several_buffers(server: Any) -> None:
    for number in range(3):
        server.buffers[f"w.{number}"].create(2)
        server.buffers[f"w.{number}"].accumulate([3.0 * number, 4.0 * number])
    assert {name: one.norm for name, one in server.buffers.statistics(prefix="w.").items()} == {
        "w.0": 0.0,
        "w.1": 5.0,
        "w.2": 10.0,
    }
    assert [*server.buffers.statistics(["w.2", "w.0"])] == ["w.2", "w.0"]
    with pytest.raises(NotFound):
        server.buffers.statistics(["w.2", "none"])


def test_statistics_of_several_servers(kind: str) -> None:
    with serving() as one, serving() as two, connected(kind, [one, two]) as server:
        names = [f"w.{number}" for number in range(8)]
        for name in names:
            server.buffers[name].create(2)
            server.buffers[name].accumulate([3, 4])
        for found in (server.buffers.statistics(names), server.buffers.statistics(prefix="w.")):
            assert {name: one.norm for name, one in found.items()} == dict.fromkeys(names, 5.0)
