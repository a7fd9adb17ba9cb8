"""The runs of a server."""

from __future__ import annotations

from gradserve_client._http.runner import Runner
from gradserve_client._wire import bulk, runs
from gradserve_client.errors import NotFound
from gradserve_client.models import RunInfo


class Runs:
    """The runs of a server, or of several: a run of several servers has a part on each."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def list(self, prefix: str = "") -> list[RunInfo]:
        """Return the runs whose names begin with `prefix`, ordered by name.

        >>> server.graphs["linear"].join("exp8").start()
        0
        >>> [run.name for run in server.runs.list("exp8")]
        ['exp8']
        """
        found: dict[str, RunInfo] = {}
        for shard in self._runner.shards:
            cursor: str | None = ""
            while cursor is not None:
                page, cursor = shard.run(bulk.page("runs", RunInfo.of, prefix, cursor))
                found = {one.name: one for one in page} | found
        return [found[name] for name in sorted(found)]

    def info(self, run: str) -> RunInfo:
        """Return how a run is. Raises `NotFound`.

        >>> server.graphs["linear"].join("exp9").start()
        0
        >>> server.runs.info("exp9").state
        'joining'
        """
        missing: NotFound | None = None
        for shard in self._runner.shards:
            try:
                return shard.run(runs.info(run))
            except NotFound as error:
                missing = error
        assert missing is not None
        raise missing

    def delete(self, run: str) -> None:
        """Delete a run with all its buffers. Workers of the run are refused from then on. Raises `NotFound`.

        >>> server.graphs["linear"].join("exp10").start()
        0
        >>> server.runs.delete("exp10")
        """
        gone: list[NotFound] = []
        for shard in self._runner.shards:
            try:
                shard.run(runs.delete(run))
            except NotFound as error:
                gone.append(error)
        if len(gone) == len(self._runner.shards):
            raise gone[0]
