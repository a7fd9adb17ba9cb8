"""Workers that train a graph and keep nothing, killed in the middle of steps and started again; and a killed server."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from gradserve_client import Client

from tests.api.models import linear
from tests.clients.graph_worker import MICRO_BATCHES, RATE, WORKERS, batch
from tests.clients.killed import Workers, until
from tests.faults.servers import LONG, Server

STEPS, KILLS = (200, 10) if LONG else (12, 3)


def lines(folder: Path) -> Iterator[list[str]]:
    """Yield what the workers have written, without the last line of one that was killed meanwhile."""
    for rank in range(WORKERS):
        path = folder / f"rank{rank}"
        for line in (path.read_text() if path.exists() else "").splitlines(keepends=True):
            if line.endswith("\n"):
                yield [f"{rank} {line.split()[0]}", *line.split()[1:]]


def is_in(folder: Path, step: int) -> bool:
    """Whether a worker is in this step."""
    return any(f" {step}/" in line[0] for line in lines(folder))


@pytest.mark.processes
def test_killed_workers_and_a_killed_server_make_each_step_once(tmp_path: Path) -> None:
    chance = random.Random(0)
    with Server(tmp_path / "store") as server, Client(server.url) as client:
        client.graphs.put("lin", linear(), loss="MSELoss")
        arguments = [[server.url, str(rank), str(STEPS), str(tmp_path / f"rank{rank}")] for rank in range(WORKERS)]
        with Workers("tests.clients.graph_worker", arguments, tmp_path / "log") as workers:
            for number in range(KILLS):
                until(partial(is_in, tmp_path, (number + 1) * STEPS // (KILLS + 1)))
                time.sleep(chance.uniform(0, 0.02))
                workers.kill(chance.randrange(WORKERS))
                if number % 3 == 1:
                    server.restart()
            assert workers.end() == [0] * WORKERS
        check_losses(tmp_path)
        infos = {one.name: one for one in client.buffers.list("killed.")}
        versions = {kind: {infos[f"killed.{kind}.{name}"].version for name in "wb"} for kind in "pmv"}
        assert versions == {"p": {STEPS + 1}, "m": {STEPS}, "v": {STEPS}}  # the first version has the weights
        assert {infos[name].step for name in ("killed.g.w", "killed.g.b", "killed.loss")} == {STEPS}
        alone = client.graphs["lin"].join("alone")
        for step in range(STEPS):
            for rank in range(WORKERS):
                for number in range(MICRO_BATCHES):
                    alone.forward_backward(batch(step, rank, number), weight=4)
            alone.optim_step(lr=RATE)
        killed = client.graphs["lin"].join("killed").parameters()
        for name, value in alone.parameters().items():
            np.testing.assert_allclose(killed[name], value, rtol=1e-5)


def check_losses(folder: Path) -> None:
    """Check that a repeated micro-batch has the same loss, and that a step has all of them and is done once.

    A worker that is killed between an answer and its line leaves none.
    """
    seen = defaultdict[str, list[list[str]]](list)
    for place, *found in lines(folder):
        seen[place if "/" in place else place.partition(" ")[2]].append(found)
    for place, some in seen.items():
        assert len({found[0] for found in some}) == 1, place
        if "/" not in place:
            assert {found[1] for found in some} == {str(WORKERS * MICRO_BATCHES)}, place
            assert [found[2] for found in some].count("False") <= 1, place
    assert [*map(str, range(STEPS))] == sorted((place for place in seen if "/" not in place), key=int)
