"""`/v1/runs`: what the workers of a training have in common, who of them is awaited, and how it ends."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, cast

import orjson
from fastapi import APIRouter, Query
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictStr
from typing_extensions import TypedDict

from service.api.buffers.models import ListQuery, NextCursor
from service.api.buffers.preconditions import refuse_headers
from service.api.buffers.request import parse_model, receive, receive_no_body, reserved
from service.api.buffers.specs import Contributor
from service.api.http.answer import Answer, JsonAnswer
from service.api.http.call import Call, CurrentCall
from service.api.http.negotiation import check_no_query
from service.api.http.routing import access, body
from service.buffers.graphs import digest_of
from service.buffers.lives import run_of
from service.buffers.names import LIFE, NAME, BufferName, check_length, check_name
from service.buffers.perform import Wide
from service.buffers.record import Record
from service.buffers.runs import Expect, Join, Leave, Remove, RemoveOf, RunChange, StoredRun, as_form, is_kept
from service.buffers.store import Store
from service.errors import InvalidParameter, TooManyTensors, shown

READ, WRITE = "buffers:read", "buffers:write"

MAX_FORM_BYTES = 1 << 22
"""Bytes of a request to join: 400 for each of ten thousand tensors."""

MOST_REMOVED = 1000
"""Buffers of a run that one transaction removes: the requests of others have their turns between."""

router = APIRouter(prefix="/v1/runs", tags=["runs"])

Name = Annotated[StrictStr, Field(pattern=f"^{NAME.pattern}$")]
Worker = Annotated[Contributor, Field(description="The worker's name, by which steps expect it; null without one.")]
Life = Annotated[StrictStr, Field(pattern=f"^{LIFE.pattern}$", description="The life of the run that is meant.")]


def _kept(members: dict[str, Any]) -> dict[str, Any]:
    if not is_kept(members):
        raise ValueError("it should have finite numbers and integers of 64 bits alone")
    return members


Kept = Annotated[dict[str, Any], AfterValidator(_kept)]


class NewWorker(BaseModel):
    """A worker that comes to a run."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"example": {"worker": "rank0", "token": "5f1c", "prefix": "line.", "buffer": "line.weight"}},
    )

    worker: Worker = None
    token: StrictStr = Field(
        min_length=1, max_length=64, description="A text of the worker's process. A later process takes its place."
    )
    prefix: Name = Field(description="What the names of the run's buffers begin with.")
    buffer: Name = Field(description="The buffer, with the prefix, whose steps are those of the run.")
    form: Kept = Field(
        default_factory=dict, description="What all workers have alike, such as the shapes of parameters."
    )
    start: Kept = Field(default_factory=dict, description="What the first worker begins with: every join answers it.")
    life: Life | None = Field(None, description="The life of a new run, or that of the run which was joined before.")
    again: bool = Field(False, description="Whether this process has joined the run before, so that it begins none.")


class LeavingWorker(BaseModel):
    """A worker that leaves a run."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"example": {"worker": "rank0", "life": "line@5f1cbd6d43a08e29"}}
    )

    worker: Worker = None
    life: Life


class FinishedWorker(LeavingWorker):
    """A worker that has done its part of a run."""

    outcome: Literal["finished", "failed"] = "finished"
    error: Annotated[StrictStr, Field(max_length=1000)] | None = Field(
        None, description="The first line of the error of a worker that has failed."
    )


class Ended(TypedDict):
    """How a run has ended."""

    outcome: Literal["finished", "failed"]
    at: Annotated[float, Field(description="Seconds since 1970.")]
    worker: str | None
    error: str | None


class Run(TypedDict):
    """A run."""

    name: str
    life: Annotated[str, Field(description="What tells the run from others of its name, before and after.")]
    state: Annotated[
        Literal["joining", "running", "waiting", "idle", "finished", "failed"],
        Field(description="joining: in step 0. waiting: for workers. idle: nobody has added for ten minutes."),
    ]
    step: Annotated[int, Field(description="The running step.")]
    members: Annotated[list[str], Field(description="The workers that the running step waits for.")]
    missing: Annotated[list[str] | None, Field(description="Those of them that are not in; null if nobody knows them.")]
    left_out: Annotated[list[str], Field(description="Expected workers that missed a deadline, or left.")]
    prefix: str
    buffer: str
    created_at: Annotated[float, Field(description="Seconds since 1970.")]
    updated_at: Annotated[float, Field(description="When a worker joined, left, or added last.")]
    ended: Ended | None


class RunWithForm(Run):
    """A run with what its workers have alike, and what the first of them began with."""

    form: dict[str, Any]
    start: dict[str, Any]


class RunList(TypedDict):
    """A page of runs, in the order of their names."""

    runs: list[Run]
    next_cursor: NextCursor


@router.get("", summary="List the runs")
@access(READ, label="runs")
async def list_runs(call: CurrentCall, query: Annotated[ListQuery, Query()]) -> JsonAnswer[RunList]:
    """In the order of their names, a page at a time."""
    return await call.offload(False, _listed, call.store, query)


def _listed(store: Store, query: ListQuery) -> JsonAnswer[RunList]:
    found = store.runs(query.prefix, query.cursor, query.limit + 1)
    cursor = found[query.limit - 1].name if len(found) > query.limit else None
    return JsonAnswer({"runs": _described(store, found[: query.limit]), "next_cursor": cursor})


@router.get("/{run}", summary="Describe a run")
@access(READ, label="runs")
async def get_run(call: CurrentCall, run: str) -> JsonAnswer[RunWithForm]:
    """Its workers, its step, its state and its form. Raises `unknown_run`."""
    return await call.offload(False, _answer, call.store, check_name(run, "run"))


def _answer(store: Store, name: str, status: int = 200) -> JsonAnswer[RunWithForm]:
    run, form = store.run(name)
    (described,) = _described(store, [run])
    return JsonAnswer(cast(RunWithForm, {**described, **orjson.loads(form)}), status)


@router.post(
    "/{run}/join",
    summary="Join a run, or begin it",
    responses={201: {"description": "The new run", "model": RunWithForm}},
    dependencies=[body(NewWorker)],
)
@access(WRITE, label="runs")
async def join(call: CurrentCall, run: str) -> JsonAnswer[RunWithForm]:
    """The running step waits for the worker. To join again changes nothing. Raises `run_exists` for another form,
    `run_ended`, and `run_replaced` and `worker_replaced` to a process that has joined before.
    """
    check_no_query(call)
    refuse_headers(call, "If-Match")
    received = await receive(call, changes=False)
    new = await call.offload(len(received.body) < 1 << 12, parse_model, received, NewWorker, MAX_FORM_BYTES)
    check_length(check_name(run, "run"), call.settings.max_name_length, "run")
    if not new.buffer.startswith(new.prefix):
        problem = f"buffer is {shown(new.buffer)}, but must begin with the prefix, {shown(new.prefix)}"
        raise InvalidParameter(problem, parameter="buffer")
    check_run(run, new.life)
    if new.again and new.life is None:
        raise InvalidParameter("life is missing, but again is true: a join answers the life", parameter="life")
    change = Join(
        name=run,
        worker=new.worker,
        token=new.token,
        prefix=new.prefix,
        steps=new.buffer,
        form=as_form(new.form, new.start),
        digest=digest_of(orjson.dumps(new.form, option=orjson.OPT_SORT_KEYS)),
        life=new.life or f"{run}@{secrets.token_hex(8)}",
        again_only=new.again,
    )
    is_new = await _change(call, change, new.prefix, new.worker, is_expected=True)
    return await call.offload(False, _answer, call.store, run, 201 if is_new else 200)


@router.post("/{run}/leave", summary="Leave a run", dependencies=[body(LeavingWorker)])
@access(WRITE, label="runs")
async def leave(call: CurrentCall, run: str) -> JsonAnswer[RunWithForm]:
    """Steps no longer wait for the worker, without a deadline. Raises `unknown_run` and `run_replaced`."""
    return await _left(call, run, LeavingWorker)


@router.post("/{run}/finish", summary="Finish a run", dependencies=[body(FinishedWorker)])
@access(WRITE, label="runs")
async def finish(call: CurrentCall, run: str) -> JsonAnswer[RunWithForm]:
    """The worker leaves. The last one awaited ends the run, with its outcome. Raises `unknown_run`, `run_replaced`."""
    return await _left(call, run, FinishedWorker)


def check_run(name: str, life: str | None) -> None:
    """Raise `InvalidParameter` unless the life is one of this run."""
    if life is not None and run_of(life) != name:
        problem = f"life is {shown(life)}, but must be one of the run {shown(name)}, as its join answers it"
        raise InvalidParameter(problem, parameter="life")


async def _left(call: Call, name: str, model: type[LeavingWorker]) -> JsonAnswer[RunWithForm]:
    check_no_query(call)
    refuse_headers(call, "If-Match")
    leaving = parse_model(await receive(call, changes=False), model, MAX_FORM_BYTES)
    check_run(name, leaving.life)
    run, _ = await call.offload(False, call.store.run, check_name(name, "run"))
    change = Leave(name=name, worker=leaving.worker, life=leaving.life)
    if isinstance(leaving, FinishedWorker):
        change = replace(change, outcome=leaving.outcome, error=leaving.error)
    await _change(call, change, run.prefix, leaving.worker, is_expected=False)
    return await call.offload(False, _answer, call.store, name)


async def _change(call: Call, change: RunChange, prefix: str, worker: str | None, *, is_expected: bool) -> bool:
    """Change a run, and whom its buffers expect. Return whether the run is new."""

    def expect(name: str) -> Expect:
        return Expect(name=name, contributor=worker, run=change.name, is_expected=is_expected)

    most = call.engine.limits.max_tensors
    names = await call.offload(False, call.store.names, prefix, most + 1)
    if len(names) > most:
        problem = f"The prefix {shown(prefix)} has more than {most} buffers, the limit (GRADSERVE_MAX_TENSORS)"
        raise TooManyTensors(problem, limit=most)
    wide = Wide(prefix, expect, may_fit_none=True)
    async with reserved(call, names, growth=0):
        outcome = await call.submit([expect(name) for name in names], None, wide=wide, hidden=change)
    return outcome.is_new


@router.delete("/{run}", summary="Delete a run", status_code=204)
@access(WRITE, label="runs")
async def delete_run(call: CurrentCall, run: str) -> Answer:
    """All its buffers go, too, a thousand at a time if there are more: it has ended for its workers from the first on.
    Raises `unknown_run`.
    """
    check_no_query(call)
    await receive_no_body(call)
    found, _ = await call.offload(False, call.store.run, check_name(run, "run"))
    names = await call.offload(False, call.store.names, found.prefix, None)
    parts = [names[at : at + MOST_REMOVED] for at in range(0, len(names), MOST_REMOVED)] or [[]]
    if len(parts) > 1:
        await call.submit([], None, hidden=Remove(name=run, last=False))
    for part in parts:
        last = Remove(name=run, last=True) if part is parts[-1] else None
        async with reserved(call, part, growth=0):
            await call.submit([RemoveOf(name=name, run=run) for name in part], None, hidden=last)
    return Answer(status=204)


def _described(store: Store, runs: Sequence[StoredRun]) -> list[Run]:
    """Return the runs with the states of their steps."""
    names = {run.name: BufferName(store.namespace, run.buffer) for run in runs}
    records, now = store.look([*names.values()]), store.now()
    return [_one(run, records.get(names[run.name]), now) for run in runs]


def _one(run: StoredRun, steps: Record | None, now: float) -> Run:
    steps = steps if steps is not None and steps.spec.life == run.life else None
    left_out = () if steps is None else steps.left_out
    expected = [*run.workers] if steps is None else steps.spec.contributors or steps.known_contributors
    found: Any = {
        "name": run.name,
        "life": run.life,
        "state": run.state(steps, now),
        "step": 0 if steps is None else steps.step,
        "members": [name for name in expected if name not in left_out],
        "missing": None if steps is None else steps.awaited,
        "left_out": [name for name in expected if name in left_out],
        "prefix": run.prefix,
        "buffer": run.buffer,
        "created_at": run.created,
        "updated_at": run.updated if steps is None else max(run.updated, steps.updated),
        "ended": run.ended,
    }
    return cast(Run, found)
