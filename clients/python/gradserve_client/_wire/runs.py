"""The calls of runs: what to send, and how to read the answer. Both clients share them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any

from gradserve_client._http.outcomes import Answer
from gradserve_client._http.policy import Call
from gradserve_client._wire import answers
from gradserve_client._wire.answers import JSON
from gradserve_client._wire.arguments import as_name
from gradserve_client._wire.bulk import PAGE_BUFFERS
from gradserve_client.models import RunInfo


def join(
    run: str,
    *,
    worker: str | None,
    token: str,
    prefix: str,
    buffer: str,
    form: Mapping[str, Any],
    start: Mapping[str, Any],
    life: str,
    again: bool,
) -> Call[RunInfo]:
    """Join a run, or begin it with this life."""
    own = {"worker": worker, "token": token, "prefix": prefix, "buffer": buffer, "form": form, "start": start}
    return _change(run, "join", {**own, "life": life, "again": again})


def finish(run: str, *, worker: str | None, life: str, outcome: str, error: str | None) -> Call[RunInfo]:
    """Finish a worker's part of a run."""
    return _change(run, "finish", {"worker": worker, "life": life, "outcome": outcome, "error": error})


def first_line(error: BaseException) -> str:
    """Return what a run says of the error that has ended it."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:1000]


def leave(run: str, *, worker: str | None, life: str) -> Call[RunInfo]:
    """Leave a run."""
    return _change(run, "leave", {"worker": worker, "life": life})


def _change(run: str, action: str, members: Mapping[str, Any]) -> Call[RunInfo]:
    """Return a call that may be repeated: what a worker has done once, it does not do again."""
    headers = {"Content-Type": JSON, "Accept": JSON}
    body: list[bytes | memoryview] = [json.dumps(members).encode()]
    return Call("POST", f"{_path(run)}/{action}", _info, headers=headers, body=body, key=uuid.uuid4().hex)


def info(run: str) -> Call[RunInfo]:
    """Read how a run is."""
    return Call("GET", _path(run), _info, headers={"Accept": JSON})


def delete(run: str) -> Call[None]:
    """Delete a run."""
    return Call("DELETE", _path(run), answers.deleted, headers={"Accept": JSON}, key=uuid.uuid4().hex)


def page(prefix: str, cursor: str) -> Call[tuple[list[RunInfo], str | None]]:
    """List some runs, and tell where the next ones begin."""

    def read(answer: Answer) -> tuple[list[RunInfo], str | None]:
        found = json.loads(answer.body)
        return [RunInfo.of(fields) for fields in found["runs"]], found["next_cursor"]

    query = {"prefix": prefix, "cursor": cursor, "limit": PAGE_BUFFERS}
    return Call("GET", "/v1/runs", read, query=query, headers={"Accept": JSON})


def _path(run: str) -> str:
    return f"/v1/runs/{as_name(run)}"


def _info(answer: Answer) -> RunInfo:
    return RunInfo.of(json.loads(answer.body))
