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


def finish(run: str, *, worker: str | None, life: str, error: BaseException | None) -> Call[RunInfo]:
    """Finish a worker's part of a run. With an error, the run has failed."""
    outcome = "finished" if error is None else "failed"
    text = None if error is None else f"{type(error).__name__}: {error}".splitlines()[0][:1000]
    return _change(run, "finish", {"worker": worker, "life": life, "outcome": outcome, "error": text})


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


def _path(run: str) -> str:
    return f"/v1/runs/{as_name(run)}"


def _info(answer: Answer) -> RunInfo:
    return RunInfo.of(json.loads(answer.body))
