"""The workers of a run: whom a step waits for, how they end, and what the client and the command line say of runs."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gradserve_client import Client, Conflict, NotFound, StaleStep
from gradserve_client.arrays import GradientAccumulator

from tests.clients.both import connected
from tests.clients.terminal import Call
from tests.serving import serving

DEADLINE = 1.0


@pytest.fixture
def run() -> str:
    return f"run-{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="module", params=["one server", "two servers"])
def server(request: pytest.FixtureRequest, url: str) -> Iterator[Client]:
    if request.param == "one server":
        with Client(url) as client:
            yield client
        return
    with serving() as other, Client([url, other]) as client:
        yield client


def joined(server: Client, run: str, worker: str | None, size: int = 2, **more: Any) -> GradientAccumulator:
    rules: Any = {"quorum": 3, "contributors": ["x", "y", "z"], "min_count": 1, "deadline_seconds": DEADLINE}
    model = {name: np.zeros(size) for name in ("v", "w")}
    return GradientAccumulator(model, server, run=run, worker=worker, start="any", **{**rules, **more})


def push(*workers: GradientAccumulator, size: int = 2) -> None:
    for one in workers:
        one.push({"v": np.ones(size), "w": np.ones(size)})


def step(*workers: GradientAccumulator, size: int = 2) -> set[str | None]:
    """Let the workers make a step. Return what closed it."""
    push(*workers, size=size)
    for one in workers:
        one.pull()
    return {None if one.pulled is None else one.pulled.closed_by for one in workers}


def test_a_dead_worker_costs_one_deadline(server: Client, run: str) -> None:
    x, y, z = (joined(server, run, name) for name in "xyz")
    assert step(x, y, z) == {"quorum"}
    assert step(x, y) == {"deadline"}
    assert [step(x, y) for _ in range(5)] == [{"members"}] * 5
    info = server.runs.info(run)
    assert (info.step, info.members, info.left_out) == (7, ("x", "y"), ("z",))
    again = joined(server, run, "z")
    assert (again.step, server.runs.info(run).members) == (7, ("x", "y", "z"))
    assert step(x, y, again) == {"quorum"}
    with pytest.raises(Conflict, match="Another process has joined the run") as caught:
        push(z)
    assert caught.value.code == "worker_replaced"


def test_pushes_in_parts_go_on_without_a_dead_worker(server: Client, run: str) -> None:
    x, y, z = (joined(server, run, name, 2000, request_bytes=5000) for name in "xyz")
    assert step(x, y, z, size=2000) == {"quorum"}
    assert [step(x, y, size=2000) for _ in range(3)] == [{"deadline"}, {"members"}, {"members"}]
    again = joined(server, run, "z", 2000, request_bytes=5000)
    assert step(x, y, again, size=2000) == {"quorum"}


def test_a_worker_that_comes_too_late_is_awaited_in_the_next_step(server: Client, run: str) -> None:
    x, y, z = (joined(server, run, name) for name in "xyz")
    step(x, y, z)
    assert step(x, y) == {"deadline"}
    with pytest.raises(StaleStep):
        push(z)
    z.pull()
    push(x, y)
    assert set(server.runs.info(run).missing or ()) == {"z"}
    push(z)
    for one in (x, y, z):
        one.pull()
    assert x.pulled is not None
    assert x.pulled.closed_by == "quorum"


def test_the_first_step_waits_for_all(server: Client, run: str) -> None:
    x, y = (joined(server, run, name, timeout=3 * DEADLINE) for name in "xy")
    push(x, y)
    with pytest.raises(Conflict, match="z is missing"):
        x.pull()
    push(joined(server, run, "z"))
    x.pull()
    assert (x.pulled is not None and x.pulled.count) == 3


def test_with_ends_a_run(server: Client, run: str) -> None:
    with joined(server, run, "x") as x, joined(server, run, "y") as y, joined(server, run, "z") as z:
        step(x, y, z)
    info = server.runs.info(run)
    assert (info.state, info.ended and info.ended["worker"]) == ("finished", "x")
    with pytest.raises(Conflict, match=f"^Give another run=, or delete this one, .*runs delete {run}`.* has finished"):
        joined(server, run, "x")


def test_an_exception_is_said(server: Client, run: str) -> None:
    with pytest.raises(KeyError), joined(server, run, None, contributors=None, quorum=1, deadline_seconds=None):
        raise KeyError("no\nsuch")
    info = server.runs.info(run)
    assert (info.state, info.ended and info.ended["error"]) == ("failed", r"KeyError: 'no\nsuch'")


def test_a_worker_that_finishes_costs_no_deadline(server: Client, run: str) -> None:
    x, y, z = (joined(server, run, name, deadline_seconds=600) for name in "xyz")
    step(x, y, z)
    push(x, y)
    z.finish()
    x.pull()
    assert (x.pulled is not None and x.pulled.closed_by) == "members"
    y.pull()
    assert step(x, y) == {"members"}


def test_a_worker_of_a_deleted_run_is_refused(server: Client, run: str) -> None:
    x = joined(server, run, "x")
    push(x)
    server.runs.delete(run)
    new = [joined(server, run, name) for name in "xyz"]
    for _ in range(2):
        with pytest.raises(Conflict, match="was deleted since, or replaced") as caught:
            push(x)
        assert caught.value.code == "run_replaced"
    assert step(*new) == {"quorum"}
    assert server.runs.info(run).step == 1


def test_a_model_of_another_form_is_refused(server: Client, run: str) -> None:
    joined(server, run, "x")
    words = rf"^Give another run=, .*There is a run '{run}' of another form: .*{run}\.v is 'float64\[3\]' here"
    with pytest.raises(Conflict, match=words):
        GradientAccumulator({name: np.zeros(3) for name in ("v", "w")}, server, run=run)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_runs_are_listed_and_deleted(url: str, run: str, kind: str) -> None:
    with connected(kind, url) as server:
        with Client(url) as client:
            for end in "ba":
                joined(client, f"{run}.{end}", "x")
        listed = server.runs.list(f"{run}.")
        assert [(one.name, one.state, one.step, one.members) for one in listed] == [
            (f"{run}.{end}", "joining", 0, ("x", "y", "z")) for end in "ab"
        ]
        info = server.runs.info(f"{run}.a")
        assert (info.prefix, info.form["loss"], info.buffer) == (f"{run}:2Ea.", False, f"{run}:2Ea.v")
        server.runs.delete(f"{run}.a")
        for call in (server.runs.info, server.runs.delete):
            with pytest.raises(NotFound):
                call(f"{run}.a")
        assert [one.name for one in server.runs.list(f"{run}.")] == [f"{run}.b"]


def test_the_command_line_lists_shows_and_deletes(call: Call, url: str, run: str) -> None:
    with Client(url) as server:
        x, y, z = (joined(server, run, name) for name in "xyz")
        step(x, y, z)
        step(x, y)
        head, row = call(server, "runs", "ls", run).out.splitlines()
        assert head.split("  ")[0] == "name"
        assert row.split()[:3] == [run, "running", "2"]
        assert "x, y" in row
        assert call(server, "runs", "ls", run, "--json").json[0]["left_out"] == ["z"]
        shown = call(server, "runs", "show", run).out
        assert f"{run}.*" in shown
        assert "float64[2]" in shown
        with pytest.raises(KeyError), joined(server, run, "z"):
            raise KeyError(3)
        assert call(server, "runs", "show", run, "--json").json["state"] == "running"
        assert call(server, "runs", "delete", run) == (0, "", "")
        assert call(server, "runs", "show", run).code == 3
        assert call(server, "runs", "delete", run).code == 3
        assert server.buffers.list(run) == []
