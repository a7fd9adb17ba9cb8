"""A worker's place in a run that trains a graph."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gradserve_client._http.runner import Runner
from gradserve_client._runs import checkpoint, training
from gradserve_client._runs.names import first_new_run
from gradserve_client._wire import files, graphs, runs
from gradserve_client._wire.arguments import as_contributor
from gradserve_client._wire.tensors import TensorLike
from gradserve_client.errors import Conflict, GradserveError, InvalidInput, KeyReused, explained, led
from gradserve_client.graph import Graph
from gradserve_client.graph_models import GraphInfo
from gradserve_client.models import BufferSpec


class Worker(Graph):
    """A graph, and the place of a worker in a run that trains it: it joins the run, or begins it, and leaves it."""

    def __init__(
        self,
        runner: Runner,
        name: str,
        run: str | None = None,
        worker: str | None = None,
        timeout: float = 600.0,
        rules: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(runner, name, run)
        self._worker = None if worker is None else as_contributor(worker, "worker")
        self._sender = uuid.uuid4().hex if worker is None else worker
        self._timeout, self._rules = timeout, rules or {}
        self._run: training.Run | None = None
        self._step = self._number = self._running = 0
        self._free: list[int] = []
        """Numbers below `_number` of micro-batches that failed: the same call takes its number again."""
        self._kept: set[str] = set()
        self._token, self._life = uuid.uuid4().hex, f"{self._name}@{uuid.uuid4().hex[:16]}"

    @property
    def step(self) -> int:
        """The number of steps that are done, as far as this worker knows; 0 before `start`, which asks the server."""
        return self._step if self._run is None else self._run.first + self._step

    def _joined(self) -> training.Run:
        if self._run is None:
            self.start()
        assert self._run is not None
        return self._run

    def start(self, weights: Mapping[str, TensorLike] | str | Path | None = None) -> int:
        """Begin the run with these weights, or join it, and return the number of steps that are done.

        The weights are those of all parameters by name, a safetensors or .npz file of them, or a checkpoint that `save`
        has written, whose steps are counted on. Without any, they are the model's own. A run that has begun keeps its
        weights. The first call of the other methods starts the run, too.

        Raises `InvalidInput` for weights that do not fit, and `KeyReused` if another worker begins with other weights.

        >>> server.graphs["linear"].join("exp2").start({"w": [[0], [0]], "b": [1]})
        0
        """
        info = self._info or self.info()
        training.check_trains(info)
        self._enter(info)
        found = {one.name: one for one in self._buffers.list(self._prefix)}
        if training.is_started(self._prefix, info, found):
            training.follow(self._prefix, self._rules, found)
        else:
            self._begin(info, files.read_all(Path(weights)) if isinstance(weights, str | Path) else weights)
            found = {one.name: one for one in self._buffers.list(self._prefix)}
        names = [name for name in found if name == f"{self._prefix}::first"]
        first = self._buffers.value(names) if names else {}
        self._run = training.joined(self._prefix, info, found, self._worker, self._sender, self._life, first)
        self._has_begun = True
        self._kept, self._step, self._number = {*found}, training.steps_done(self._prefix, info, found), 0
        self._free.clear()
        return self.step

    def _enter(self, info: GraphInfo) -> None:
        """Join the run, or begin it. Raises `Conflict` for a run of another graph."""
        call = runs.join(
            self._name,
            worker=self._worker,
            token=self._token,
            prefix=self._prefix,
            buffer=f"{self._prefix}loss",
            form=training.form(info),
            start={},
            life=self._life,
            again=False,
        )
        try:
            joined = self._runner.run(call)
        except Conflict as error:
            raise led(error, first_new_run(self._name)) from None
        self._life = joined.life

    def _begin(self, info: GraphInfo, weights: Mapping[str, TensorLike] | None) -> None:
        """Create the buffers of the run, and write the weights."""
        given = {} if weights is None else checkpoint.in_buffers(self._prefix, info, weights)
        specs = {name: BufferSpec(shape=array.shape, dtype=array.dtype) for name, array in given.items()}
        specs |= training.summed(self._prefix, info, self._rules)
        for spec in specs.values():
            spec["life"] = self._life
        self._buffers.create_many(specs)
        key = training.key(self._prefix, self._life, "start")
        try:
            if own := training.own_groups(self._prefix, info, given):
                content, _ = self._runner.run(graphs.content(self.name))
                self._runner.run(graphs.put(self.name, content, info.options, own, None, self._life))
            if given:
                self._buffers.accumulate(given, idempotency_key=key)
        except KeyReused as error:
            raise explained(error, "Another worker has begun this run with other weights") from None
        except InvalidInput as error:
            if error.context.get("parameter") != "set":
                raise
            raise training.no_weights(info) from None

    def finish(self) -> None:
        """Say that this worker has done its part, and leave the run: no step waits for it. The last worker ends it.

        A `with` block starts the run, and does this at its end; after an exception the run has failed.

        >>> server.graphs["linear"].join("exp7").finish()
        """
        self._joined()
        self._finish(None)

    def _finish(self, error: BaseException | None) -> None:
        self._runner.run(runs.finish(self._name, worker=self._worker, life=self._life, error=error))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._finish(None)
        else:
            with suppress(GradserveError):  # the program has another error already
                self._finish(error)
