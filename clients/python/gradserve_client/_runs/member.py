"""A worker's membership of a run: it joins, joins again after a step that closed without it, and finishes."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from gradserve_client._http.runner import Runner
from gradserve_client._runs.names import new_run, quoted, unjoined
from gradserve_client._wire import runs
from gradserve_client.client import Client
from gradserve_client.errors import Conflict
from gradserve_client.models import RunInfo


class Member:
    """A worker in a run. Each server of a run has its part, of the same life.

    `buffers` names a buffer of each server, by the URL, whose steps are those of the run there.
    """

    def __init__(
        self,
        server: Client,
        run: str,
        prefix: str,
        worker: str | None,
        form: Mapping[str, Any],
        start: Mapping[str, Any],
    ) -> None:
        self.run, self._worker, self._server = quoted(run), worker, server
        self._own: dict[str, Any] = {"token": uuid.uuid4().hex, "prefix": prefix, "form": form, "start": start}
        self._parts: Sequence[tuple[Runner, str]] = ()
        self.life = f"{self.run}@{uuid.uuid4().hex[:16]}"
        self.has_begun = False
        """Whether this worker has begun the run: then its weights are those of the run."""
        self.urls: Sequence[str] = ()
        """The servers that have a part of the run."""

    def join(self, buffers: Mapping[str, str]) -> RunInfo:
        """Join the run, or begin it. Raises `Conflict`."""
        shards = dict(zip(self._server.urls, self._server.buffers._runner.shards, strict=True))
        self._parts, self.urls = [(shards[url], buffer) for url, buffer in buffers.items()], [*buffers]
        infos, proposed = [], self.life
        for part in self._parts:
            infos.append(self._joined(*part, again=False))
            self.life = infos[0].life
        if len({info.life for info in infos}) > 1:
            raise Conflict(
                f"The run {self.run!r} was deleted on some of its servers only: {new_run(self.run)}",
                code="run_replaced",
            )
        self.has_begun = self.life == proposed
        return infos[0]

    def again(self) -> None:
        """Let the running step wait for this worker: of a run that has ended, none does.

        Raises `Conflict` if another process has taken the worker's place.
        """
        for part in self._parts:
            try:
                self._joined(*part, again=True)
            except Conflict as error:
                if error.code != "run_ended":
                    raise

    def _joined(self, runner: Runner, buffer: str, *, again: bool) -> RunInfo:
        given = {**self._own, "worker": self._worker, "buffer": buffer, "life": self.life, "again": again}
        try:
            return runner.run(runs.join(self.run, **given))
        except Conflict as error:
            raise unjoined(error, self.run) from None

    def finish(self, error: BaseException | None = None) -> None:
        """End this worker's part: the last worker ends the run."""
        for runner, _ in self._parts:
            runner.run(runs.finish(self.run, worker=self._worker, life=self.life, error=error))
