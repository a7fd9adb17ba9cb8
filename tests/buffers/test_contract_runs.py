"""The contract of every store for runs: their lives, and whom their steps wait for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from service.buffers.changes import Add, Create, Delete, Take
from service.buffers.graphs import digest_of
from service.buffers.packed import pack_record, unpack_record
from service.buffers.perform import Outcome, Request, Wide
from service.buffers.rules import CloseIfDue
from service.buffers.runs import Expect, Join, Leave, Remove, RemoveOf, StoredRun, as_form
from service.buffers.sets import Set
from service.buffers.store import Store
from service.errors import BufferExists, RunEnded, RunExists, RunReplaced, UnknownRun, WorkerReplaced
from tests.buffers.calls import add, create, do, fails_alone, ones, spec, value
from tests.buffers.stores import PATIENCE, Clock

LIFE, OTHER = "line@0123456789abcdef", "line@00000000000000ff"

THREE: Any = {"contributors": ("x", "y", "z"), "quorum": 3, "deadline_seconds": 10.0, "min_count": 2, "life": LIFE}


def join(store: Store, worker: str | None = "x", form: Any = None, **more: Any) -> Outcome:
    given = {"token": f"of {worker}", "prefix": "line.", "steps": "line.a", "life": LIFE, **more}
    digest = digest_of(repr(form).encode())
    change = Join(name="line", worker=worker, form=as_form(form or {}, {}), digest=digest, **given)
    return _with_expected(store, change, worker, is_expected=True)


def leave(store: Store, worker: str | None, life: str = LIFE, **more: Any) -> Outcome:
    return _with_expected(store, Leave(name="line", worker=worker, life=life, **more), worker, is_expected=False)


def _with_expected(store: Store, change: Join | Leave, worker: str | None, *, is_expected: bool) -> Outcome:
    def expect(name: str) -> Expect:
        return Expect(name=name, contributor=worker, run="line", is_expected=is_expected)

    wide = Wide("line.", expect, may_fit_none=True)
    return store.submit(Request([expect(name) for name in store.names("line.")], wide=wide, hidden=change)).result(60)


def delete(store: Store) -> None:
    removed = [RemoveOf(name=name, run="line") for name in store.names("line.")]
    store.submit(Request(removed, hidden=Remove(name="line", last=True))).result(PATIENCE)


def run_of(store: Store) -> StoredRun:
    return store.run("line")[0]


def push(store: Store, *workers: str) -> Any:
    """Add a gradient of each worker to both buffers. Return the last receipt of the first."""
    receipt = None
    for worker in workers:
        receipt = add(store, "line.a", [1, 2], contributor=worker, life=LIFE)
        add(store, "line.b", [1, 2], contributor=worker, life=LIFE)
    return receipt


@pytest.fixture
def line(store: Store) -> Store:
    """A store with a run of three workers in step 0, and a buffer of somebody else with its prefix."""
    for worker in "xyz":
        join(store, worker)
    create(store, "line.a", "line.b", **THREE)
    create(store, "line.other", contributors=("x", "y", "z"), quorum=3)
    return store


def passed(store: Store, clock: Clock) -> None:
    """Let the deadline pass."""
    clock.advance(11)
    do(store, CloseIfDue(name="line.a"), CloseIfDue(name="line.b"))


# ----- whom a step waits for -----


def test_a_dead_worker_costs_one_deadline(line: Store, clock: Clock) -> None:
    push(line, "x", "y", "z")
    push(line, "x", "y")
    passed(line, clock)
    assert line.record("line.a").step == 2
    for _ in range(5):
        receipt = push(line, "x", "y")
        assert (receipt["closed_by"], receipt["contributors"]) == ("members", {"x": 1, "y": 1})
    record = line.record("line.b")
    assert (record.step, record.awaited, record.missing, [*record.left_out]) == (7, ["x", "y"], ["x", "y", "z"], ["z"])


def test_a_worker_that_joins_is_awaited_at_once(line: Store, clock: Clock) -> None:
    push(line, "x", "y", "z", "x", "y")
    passed(line, clock)
    push(line, "x")
    clock.advance(1)
    join(line, "z")
    assert line.record("line.a").awaited == ["y", "z"]
    assert not push(line, "y")["closed"]
    assert push(line, "z")["closed_by"] == "quorum"
    push(line, "x", "y")
    assert line.record("line.a").as_json()["missing_since"] == {"z": line.record("line.a").closed_at}
    passed(line, clock)
    assert push(line, "x", "y")["closed_by"] == "members", "a joiner that dies costs one deadline"


def test_a_worker_that_pushes_is_awaited_again(line: Store, clock: Clock) -> None:
    push(line, "x", "y", "z", "x", "y")
    passed(line, clock)
    push(line, "z")
    assert not push(line, "x")["closed"]
    assert push(line, "y")["closed_by"] == "quorum"
    assert not push(line, "x", "y")["closed"], "z is awaited"


def test_min_count_is_the_floor(line: Store, clock: Clock) -> None:
    push(line, "x", "y", "z", "x", "y")
    passed(line, clock)
    leave(line, "y")
    assert not push(line, "x")["closed"]
    passed(line, clock)
    assert line.record("line.a").step == 2
    assert push(line, "y")["closed"]


def test_a_worker_that_leaves_costs_no_deadline(line: Store) -> None:
    push(line, "x", "y", "z", "x", "y")
    outcome = leave(line, "z")
    assert outcome.receipts["line.a"]["closed_by"] == "members"
    assert not outcome.receipts["line.other"]["updated"]
    assert push(line, "x", "y")["closed"]
    assert leave(line, "z").receipts["line.a"]["updated"] is False, "to leave again changes nothing"


def test_a_worker_that_pushes_and_leaves_costs_no_deadline(line: Store) -> None:
    push(line, "x", "y")
    leave(line, "x")
    assert push(line, "z")["closed_by"] == "quorum"
    assert line.record("line.a").left_out == {"x"}
    assert push(line, "y", "z")["closed_by"] == "members"
    join(line, "x")
    assert not push(line, "y", "z")["closed"]
    assert push(line, "x")["closed_by"] == "quorum"


def test_the_first_step_waits_for_all(line: Store, clock: Clock) -> None:
    push(line, "x", "y")
    passed(line, clock)
    record = line.record("line.a")
    assert (record.step, record.missing, record.deadline_at) == (0, ["z"], None)
    assert push(line, "z")["closed_by"] == "quorum"
    assert push(line, "x", "y")["step"] == 1
    assert line.record("line.a").deadline_at is not None


def test_a_run_of_many_workers(store: Store) -> None:
    names = [f"rank{number}" for number in range(500)]
    for name in names:
        join(store, name)
    rules: Any = {"contributors": tuple(names), "quorum": 500, "deadline_seconds": 10.0, "min_count": 250}
    create(store, "line.a", "line.b", life=LIFE, **rules)
    assert push(store, *names)["closed_by"] == "quorum"
    for name in names[250:]:
        leave(store, name)
    assert push(store, *names[:250])["closed_by"] == "members"
    assert len(run_of(store).workers) == 250


def test_the_first_step_does_not_count_one_worker_for_another(store: Store) -> None:
    join(store)
    create(store, "line.a", "line.b", **{**THREE, "per_contributor": 9})
    assert not push(store, "x", "x", "x")["closed"]
    assert not push(store, "y")["closed"]
    assert push(store, "z")["closed_by"] == "quorum"


def test_who_leaves_before_the_first_step_is_not_awaited(line: Store) -> None:
    leave(line, "z")
    assert not push(line, "x")["closed"]
    assert push(line, "y")["closed_by"] == "members"


def test_a_worker_with_several_pushes_has_its_share(store: Store, clock: Clock) -> None:
    join(store)
    create(store, "line.a", "line.b", **{**THREE, "quorum": 6, "min_count": 4, "per_contributor": 2})
    push(store, *"xyzxyz", *"xyxy")
    passed(store, clock)
    assert store.record("line.a").step == 2
    assert not push(store, *"xyx")["closed"]
    assert push(store, "y")["closed_by"] == "members"


def test_a_run_without_names_waits_for_its_quorum(store: Store, clock: Clock) -> None:
    join(store, None)
    create(store, "line.a", "line.b", quorum=2, deadline_seconds=5.0, life=LIFE)
    add(store, "line.a", 1)
    passed(store, clock)
    assert store.record("line.a").step == 0
    assert add(store, "line.a", 1)["closed_by"] == "quorum"
    add(store, "line.a", 1)
    passed(store, clock)
    assert store.record("line.a").step == 2


def test_a_buffer_without_a_run_pays_every_deadline(store: Store, clock: Clock) -> None:
    create(store, "line.a", "line.b", **{**THREE, "life": None})
    for worker in "xy":
        add(store, "line.a", 1, contributor=worker)
    clock.advance(11)
    do(store, CloseIfDue(name="line.a"))
    assert store.record("line.a").step == 1
    add(store, "line.a", 1, contributor="x")
    assert not add(store, "line.a", 1, contributor="y")["closed"]


def test_who_is_left_out_is_stored(line: Store) -> None:
    leave(line, "z")
    record = line.record("line.a")
    assert sorted(record.left_out) == ["z"]
    assert unpack_record(record.full_name, pack_record(record)) == record


# ----- lives -----


def test_a_worker_of_a_deleted_run_is_refused(line: Store) -> None:
    push(line, "x")
    delete(line)
    assert line.names("") == ["line.other"]
    fails_alone(line, RunReplaced, _add(LIFE))
    with pytest.raises(UnknownRun):
        line.run("line")
    join(line, "x", life=OTHER)
    create(line, "line.a", "line.b", **{**THREE, "life": OTHER})
    fails_alone(line, RunReplaced, _add(LIFE))
    fails_alone(line, RunReplaced, Take(name="line.a", life=LIFE))
    fails_alone(line, RunReplaced, Set(name="line.a", gradient=ones(2), spec=spec(life=LIFE), life=LIFE))
    fails_alone(line, RunReplaced, Create(name="line.a", spec=spec(**THREE), life=LIFE))
    fails_alone(line, RunReplaced, Create(name="line.new", spec=spec(**THREE), life=LIFE))
    fails_alone(line, BufferExists, Create(name="line.a", spec=spec(**{**THREE, "life": None})))
    with pytest.raises(RunReplaced):
        join(line, "y", again_only=True)
    with pytest.raises(RunReplaced):
        leave(line, "x")
    assert value(line, "line.a").tolist() == [0, 0]
    do(line, _add(OTHER))


def _add(life: str) -> Add:
    return Add(name="line.a", gradient=ones(2), life=life)


def test_no_buffer_is_made_without_its_run(store: Store) -> None:
    fails_alone(store, RunReplaced, Create(name="line.a", spec=spec(life=LIFE), life=LIFE))
    fails_alone(store, RunReplaced, Set(name="line.a", gradient=ones(2), spec=spec(life=LIFE), life=LIFE))


def test_a_run_that_is_being_deleted_takes_nobody(line: Store) -> None:
    line.submit(Request([], hidden=Remove(name="line", last=False))).result(PATIENCE)
    for made in (lambda: join(line, "x"), lambda: create(line, "line.c", **THREE), lambda: leave(line, "x")):
        with pytest.raises(RunReplaced):
            made()
    delete(line)
    assert line.names("") == ["line.other"]


# ----- workers and their end -----


def test_a_run_has_one_form(line: Store) -> None:
    before = line.run("line")
    for changed in ({"form": {"a": 1}}, {"prefix": "li"}):
        with pytest.raises(RunExists):
            join(line, "x", **changed)
    assert line.run("line") == before == (run_of(line), b'{"form":{},"start":{}}')


def test_a_process_that_joins_later_takes_the_place(line: Store) -> None:
    join(line, "x", again_only=True)
    join(line, "x", token="new")
    with pytest.raises(WorkerReplaced):
        join(line, "x", again_only=True)
    join(line, "x", token="new", again_only=True)
    assert run_of(line).workers == {"x": "new", "y": "of y", "z": "of z"}


@pytest.mark.parametrize("outcome", ["finished", "failed"])
def test_the_last_worker_ends_the_run(line: Store, clock: Clock, outcome: Any) -> None:
    push(line, "x", "y", "z", "x", "y")
    passed(line, clock)  # z is dead
    leave(line, "x", outcome="finished")
    assert run_of(line).ended is None
    leave(line, "y", outcome=outcome, error=None if outcome == "finished" else "KeyError: 3")
    ended = run_of(line).ended
    assert ended is not None
    assert (ended["outcome"], ended["worker"], ended["at"]) == (outcome, "y", clock.now)
    with pytest.raises(RunEnded):
        join(line, "z")


def test_states(line: Store, clock: Clock) -> None:
    def state() -> str:
        return run_of(line).state(line.record("line.a"), clock.now)

    assert (run_of(line).state(None, clock.now), state()) == ("joining", "joining")
    push(line, "x", "y", "z")
    assert state() == "running"
    push(line, "x", "y")
    assert state() == "waiting"
    clock.advance(601)
    assert state() == "idle"


def test_runs_are_listed_and_are_no_buffers(line: Store) -> None:
    size = line.size()[0]
    for name in ("b", "a"):
        change = Join(
            name=name, worker=None, token="t", prefix="a", steps="a", form=np.zeros(0, bool), digest="", life=""
        )
        line.submit(Request([], hidden=change)).result(PATIENCE)
    assert [run.name for run in line.runs()] == ["a", "b", "line"]
    assert [run.name for run in line.runs("li")] == ["line"]
    assert line.size()[0] == size == 3
    assert line.within("ann").runs() == []


def test_many_runs(store: Store) -> None:
    names = [f"run{number:04}" for number in range(1000)]
    joins = [
        Join(
            name=name, worker="x", token="t", prefix=name, steps=name, form=as_form({}, {}), digest="", life=f"{name}@x"
        )
        for name in names
    ]
    for done in [store.submit(Request([], hidden=one)) for one in joins]:
        done.result(PATIENCE)
    found = [store.runs("run", names[at - 1] if at else "", 100) for at in range(0, 1000, 100)]
    assert [one.name for page in found for one in page] == names


@pytest.mark.parametrize("how", ["deleted", "expired"])
def test_a_run_without_its_buffers_begins_again(store: Store, clock: Clock, how: str) -> None:
    """But not while its first worker creates them."""
    join(store, "x")
    join(store, "y", life=OTHER)
    assert run_of(store).life == LIFE
    create(store, "line.a", "line.b", **{**THREE, "ttl_seconds": 100.0})
    join(store, "z", life=OTHER)
    assert (run_of(store).life, {*run_of(store).workers}) == (LIFE, {"x", "y", "z"})
    leave(store, "x", outcome="failed")
    if how == "deleted":
        do(store, Delete(name="line.a"), Delete(name="line.b"))
    clock.advance(101)
    with pytest.raises(RunReplaced):
        join(store, "x", again_only=True)
    join(store, "x", life=OTHER, form={"other": 1})
    assert (run_of(store).life, {*run_of(store).workers}) == (OTHER, {"x"})
    fails_alone(store, RunReplaced, Create(name="line.a", spec=spec(**THREE)))
    create(store, "line.a", **{**THREE, "life": OTHER})


def test_a_buffer_of_another_run_is_named(line: Store) -> None:
    with pytest.raises(RunReplaced, match=r"'line.a' belongs to the run 'line', not 'two'"):
        add(line, "line.a", 1, life=f"two@{'0' * 16}")
