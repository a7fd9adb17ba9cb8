"""A graph of a server, and a worker's place in a run that trains it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gradserve_client._http.runner import Runner
from gradserve_client._runs import checkpoint, training
from gradserve_client._runs.names import checked_prefix, quoted, unjoined
from gradserve_client._wire import files, graphs, runs
from gradserve_client._wire.arguments import as_contributor, as_name
from gradserve_client._wire.calls import Input, Inputs
from gradserve_client._wire.tensors import Array, TensorLike
from gradserve_client.buffers import Buffers
from gradserve_client.errors import Conflict, GradserveError, InvalidInput, KeyReused, NotFound, explained
from gradserve_client.graph_models import GraphInfo
from gradserve_client.models import BufferSpec


class Worker:
    """A graph, and the place of a worker in a run that trains it: it joins the run, or begins it, and leaves it.

    `info`, `delete`, `run`, `evaluate`, `export` and `download` join no run, and change none. They take the parameters
    of the run, or the graph's own.
    """

    def __init__(
        self,
        runner: Runner,
        name: str,
        run: str | None = None,
        worker: str | None = None,
        timeout: float = 600.0,
        rules: Mapping[str, Any] | None = None,
    ) -> None:
        self._runner, self.name = runner, as_name(name)
        own = name if run is None else run
        self.prefix = checked_prefix(own, None)
        """What the names of the run's buffers begin with."""
        self._name = quoted(own)
        self._buffers = Buffers(runner)
        self._info: GraphInfo | None = None
        self._worker = None if worker is None else as_contributor(worker, "worker")
        self._sender = uuid.uuid4().hex if worker is None else worker
        self._timeout, self._rules = timeout, rules or {}
        self._run: training.Run | None = None
        self._step = self._number = self._running = 0
        self._free: list[int] = []
        """Numbers below `_number` of micro-batches that failed: the same call takes its number again."""
        self._kept: set[str] = set()
        self._token, self._life = uuid.uuid4().hex, f"{self._name}@{uuid.uuid4().hex[:16]}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, prefix={self.prefix!r} at {self._runner.place_of(self.name)})"

    @property
    def step(self) -> int:
        """The number of steps that are done, as far as this worker knows; 0 before `start`, which asks the server."""
        return self._step if self._run is None else self._run.first + self._step

    def info(self) -> GraphInfo:
        """Return what the graph takes and gives. Raises `NotFound`.

        >>> server.graphs["linear"].info().outputs["y"]
        GraphTensor(dtype='float32', shape=(None, 1))
        """
        self._info = self._runner.run(graphs.info(self.name))
        return self._info

    def delete(self, *, idempotency_key: str | None = None) -> None:
        """Delete the graph. Buffers stay: `server.buffers.delete(prefix=model.prefix)` deletes those of the run.

        >>> server.graphs["linear"].delete()
        """
        return self._runner.run(graphs.delete(self.name, idempotency_key))

    def run(
        self, tensors: Mapping[str, Input | Inputs], *, outputs: Sequence[str] | None = None, seed: int | None = None
    ) -> dict[str, Array]:
        """Run the graph, and return its outputs by name, or some of them.

        Without `parameters` in `tensors`, they are those of the run once it has started, else the model's own. Other
        buffers take their place, too: `{"parameters": server.buffers["exp1.p.*"]}`.

        >>> server.graphs["linear"].run({"x": [[1, 2]]}, outputs=["y"])
        {'y': array([[9.]], dtype=float32)}
        """
        info = self._info or self.info()
        given = {} if self._run is None else training.sources_of(self.prefix, info, tensors)
        return self._runner.run(graphs.run(info, {**tensors, **given}, outputs, seed))

    def evaluate(self, tensors: Mapping[str, Input | Inputs], *, outputs: Sequence[str] = ()) -> dict[str, Array]:
        """Return the loss of these tensors and some outputs, by name, with the run's parameters as they are now.

        Dropout is off, and BatchNormalization takes the running statistics. One request: it counts nothing, changes
        nothing, and joins no run. If the graph's own run, without `join`, has not begun, the parameters are the
        model's own. Raises `NotFound` for another run that has not begun.

        >>> server.graphs["linear"].evaluate({"x": [[1, 2]], "target": [[8]]}, outputs=["y"])
        {'loss': array(1., dtype=float32), 'y': array([[9.]], dtype=float32)}
        """
        info = self._info or self.info()
        wanted = [*dict.fromkeys([*(["loss"] if "loss" in info.outputs else []), *outputs])] or None
        given = {**tensors, **training.sources_of(self.prefix, info, tensors)}
        try:
            return self._runner.run(graphs.run(info, given, wanted, form="inference"))
        except NotFound as error:
            if error.code != "unknown_buffer":
                raise
            if self._name != quoted(self.name):
                raise explained(error, f"The run {self._name!r} has not begun: start() begins it") from None
        return self._runner.run(graphs.run(info, tensors, wanted, form="inference"))

    def export(self, path: str | Path) -> int:
        """Write the ONNX model with the run's parameters and statistics, and return the number of steps that they have.

        ONNX Runtime computes from the file what `evaluate` does. It joins no run. Raises `NotFound` if the run has not
        begun, and what `save` raises.

        >>> model.start(), model.export("/dev/null")
        (0, 0)
        """
        buffers = training.sources_of(self.prefix, self._info or self.info())
        with files.writing(Path(path)) as write:
            for _ in range(checkpoint.LOOKS):
                content, versions = self._runner.run(graphs.content(self.name, buffers))
                if versions["parameters"] >= versions.get("statistics", 0):
                    break
                time.sleep(checkpoint.PAUSE)
            else:
                raise training.under_way(self._name)
            first = [one.name for one in self._buffers.list(f"{self.prefix}::first")]
            before = self._buffers.value(first) if first else {}
            write(content)
        return sum(map(int, before.values())) + versions["parameters"] - 1

    def download(self, *, parameters: str | None = None, statistics: str | None = None) -> bytes:
        """Return the ONNX model as it was uploaded, or with the values of buffers, such as `"exp1.p.*"`.

        >>> server.graphs["linear"].download() == content
        True
        """
        given = {"parameters": parameters, "statistics": statistics}
        buffers = {group: buffer for group, buffer in given.items() if buffer is not None}
        file, _ = self._runner.run(graphs.content(self.name, buffers))
        return file

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
        self._enter(info, again=False)
        found = {one.name: one for one in self._buffers.list(self.prefix)}
        if training.is_started(self.prefix, info, found):
            training.follow(self.prefix, self._rules, found)
        else:
            self._begin(info, files.read_all(Path(weights)) if isinstance(weights, str | Path) else weights)
            found = {one.name: one for one in self._buffers.list(self.prefix)}
        names = [name for name in found if name == f"{self.prefix}::first"]
        first = self._buffers.value(names) if names else {}
        self._run = training.joined(self.prefix, info, found, self._worker, self._sender, self._life, first)
        self._kept, self._step, self._number = {*found}, training.steps_done(self.prefix, info, found), 0
        self._free.clear()
        return self.step

    def _enter(self, info: GraphInfo, *, again: bool) -> None:
        """Join the run. Begin it if it is not there, unless `again`. Raises `Conflict` for a run of another graph."""
        call = runs.join(
            self._name,
            worker=self._worker,
            token=self._token,
            prefix=self.prefix,
            buffer=f"{self.prefix}loss",
            form=training.form(info),
            start={},
            life=self._life,
            again=again,
        )
        try:
            joined = self._runner.run(call)
        except Conflict as error:
            raise unjoined(error, self._name) from None
        self._life = joined.life

    def _begin(self, info: GraphInfo, weights: Mapping[str, TensorLike] | None) -> None:
        """Create the buffers of the run, and write the weights."""
        given = {} if weights is None else checkpoint.in_buffers(self.prefix, info, weights)
        specs = {name: BufferSpec(shape=array.shape, dtype=array.dtype) for name, array in given.items()}
        specs |= training.summed(self.prefix, info, self._rules)
        for spec in specs.values():
            spec["life"] = self._life
        self._buffers.create_many(specs)
        key = training.key(self.prefix, self._life, "start")
        try:
            if own := training.own_groups(self.prefix, info, given):
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
