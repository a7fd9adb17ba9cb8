"""Training a graph of a server: micro-batches that count once, and steps that happen once."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

from gradserve_client._http.runner import Runner
from gradserve_client._runs import checkpoint, training
from gradserve_client._runs.names import checked_prefix, first_new_run, run_name
from gradserve_client._runs.optimizers import optimizer_of
from gradserve_client._wire import files, graphs, runs
from gradserve_client._wire.arguments import as_contributor, as_name
from gradserve_client._wire.calls import Input, Inputs
from gradserve_client._wire.tensors import Array, TensorLike
from gradserve_client.buffers import Buffers
from gradserve_client.errors import (
    Conflict,
    GradserveError,
    InvalidInput,
    KeyReused,
    NotFound,
    NothingToAverage,
    StaleStep,
    StepGone,
    explained,
    led,
)
from gradserve_client.graph_models import GraphInfo, MicroBatch, Step
from gradserve_client.models import BufferRules, BufferSpec

MOST_MICRO_BATCHES = 10**9
"""Micro-batches of a worker in a step, by default: the most that the server allows."""


SAVE_LOOKS = 50
"""How often `save` looks whether a step that is under way has ended."""

SAVE_PAUSE = 0.1
"""Seconds between two of these looks."""


class Model:
    """A graph by its name, and a worker's place in a run that trains it. Each worker has a model of its own.

    Parameters, gradients and the optimizer's state are buffers on the server, with a common `prefix`. Every micro-batch
    counts once, and every step happens once, through retries, kills and failover.
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
        self._prefix = checked_prefix(name if run is None else run, None)
        self._worker = None if worker is None else as_contributor(worker, "worker")
        self._sender = uuid.uuid4().hex if worker is None else worker
        self._timeout, self._rules = timeout, rules or {}
        self._buffers = Buffers(runner)
        self._info: GraphInfo | None = None
        self._run: training.Run | None = None
        self._step = self._number = self._running = 0
        self._free: list[int] = []
        """Numbers below `_number` of micro-batches that failed: the same call takes its number again."""
        self._kept: set[str] = set()
        self._name = run_name(name if run is None else run)
        self._token, self._life = uuid.uuid4().hex, f"{self._name}@{uuid.uuid4().hex[:16]}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, prefix={self.prefix!r} at {self._runner.place_of(self.name)})"

    @property
    def prefix(self) -> str:
        """What the names of the run's buffers begin with."""
        return self._prefix

    @property
    def step(self) -> int:
        """The number of steps that are done, as far as this worker knows; 0 before `start`, which asks the server."""
        return self._step if self._run is None else self._run.first + self._step

    def join(
        self,
        run: str,
        *,
        worker: str | None = None,
        timeout: float = 600.0,
        keep: int = 1,
        nonfinite: str = "allow",
        **rules: Unpack[BufferRules],
    ) -> Model:
        """Return the model of a worker in this run. Without it, the run has the graph's name, and a single worker.

        A micro-batch that the `worker` repeats after a restart counts once. A step ends when it has the `quorum`
        of micro-batches, or by the other rules of buffers, such as `deadline_seconds`; without any, the worker that
        calls `optim_step` ends it. `timeout` is how long that waits. If the run exists, its own rules stay.

        >>> server.graphs["linear"].join("exp1", worker="rank0", quorum=3).prefix
        'exp1.'
        """
        spec: Any = {"per_contributor": MOST_MICRO_BATCHES, **rules, "keep": keep, "nonfinite": nonfinite}
        return Model(self._runner, self.name, run, worker, timeout, spec)

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
        given = {} if self._run is None else training.sources_of(self._prefix, info, tensors)
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
        given = {**tensors, **training.sources_of(self._prefix, info, tensors)}
        try:
            return self._runner.run(graphs.run(info, given, wanted, form="inference"))
        except NotFound as error:
            if error.code != "unknown_buffer":
                raise
            if self._name != run_name(self.name):
                raise explained(error, f"The run {self._name!r} has not begun: start() begins it") from None
        return self._runner.run(graphs.run(info, tensors, wanted, form="inference"))

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
        outcome = "finished" if error is None else "failed"
        text = None if error is None else runs.first_line(error)
        self._runner.run(runs.finish(self._name, worker=self._worker, life=self._life, outcome=outcome, error=text))

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

    def forward_backward(
        self, tensors: Mapping[str, TensorLike], *, weight: float = 1.0, outputs: Sequence[str] = ()
    ) -> MicroBatch:
        """Compute the loss of a micro-batch, and add `weight` times its gradients to those of the step.

        The weight of a mean loss is the number of its samples. `outputs` names outputs to return besides the loss. A
        worker with a name that is started again in the middle of a step sends the same micro-batches in the same order:
        those that have counted do not count again, and have the same loss. After an error the same call counts once.

        >>> model.forward_backward({"x": [[1, 2]], "target": [[8]]}, weight=1).loss
        1.0
        """
        run, step, number = self._joined(), self._step, self._next_number()  # before it waits: calls may overlap
        call = run.micro_batch(tensors, step, number, weight, outputs)
        try:
            return self._runner.run(call)
        except StaleStep as error:
            if error.context.get("step", step) < step:
                raise explained(
                    error,
                    "Others than the run's steps have written over its parameters: to go on with other weights, save()"
                    " and start() a new run with the file",
                ) from None
            self._running = error.context.get("step", step)
            self._enter(run.info)  # so that the running step waits for this worker
            return MicroBatch(step=run.first + step, counted=False)
        except KeyReused as error:
            raise explained(
                error,
                f"Micro-batch {number} of this worker's step has counted with other data: go on with the next. A worker"
                " that is started again sends the micro-batches of its step once more, in the same order",
            ) from None
        except BaseException:
            if step == self._step:
                self._free.append(number)  # the same call counts once
            raise

    def _next_number(self) -> int:
        if self._free:
            self._free.sort()
            return self._free.pop(0)
        self._number += 1
        return self._number - 1

    def optim_step(
        self,
        optimizer: str = "AdamWOptimizer",
        *,
        lr: float,
        max_norm: float | None = None,
        groups: Mapping[str, Mapping[str, float]] | None = None,
        momentum: float = 0.0,
        **attributes: Any,
    ) -> Step:
        """Let the optimizer take the step, with the mean of its gradients, once for all workers that ask for it.

        `optimizer` is AdamWOptimizer or SGDOptimizerV2, and `attributes` are those of the operator. All workers give
        the same. With `max_norm`, gradients of a larger norm are scaled to it. `momentum` is that of SGD. Waits for the
        quorum, or closes the step where nothing else does.

        `groups` gives parameters an `lr` or a `weight_decay` of their own, by patterns of names as in `train=`. Of
        several that fit, the last counts: `groups={"*.bias": {"weight_decay": 0}, "head.*": {"lr": 1e-2}}`.

        If the weights of the step sum to zero, it counts, and leaves all as it is. Raises `StepOpen` after `timeout`
        seconds, and `KeyReused` if another worker gave other arguments.

        >>> batch = model.forward_backward({"x": [[1, 2]], "target": [[8]]})
        >>> model.optim_step("SGDOptimizerV2", lr=0.05).loss, model.step
        (1.0, 1)
        """
        run, step = self._joined(), self._step
        chosen = optimizer_of(optimizer, run.info.parameters, lr, groups, momentum, attributes)
        if self._running > step + 1:  # this worker is slow: it goes on where the run is
            self.start()
            if self._step > step:
                return Step(step=run.first + self._step - 1, replayed=True)
        missing = {name: spec for name, spec in run.moments(chosen).items() if name not in self._kept}
        if missing:
            self._buffers.create_many(missing)
            self._kept |= missing.keys()
        try:
            ended = self._ended(run)
        except NothingToAverage as error:
            for call in run.empty_step(step):
                results = self._runner.run(call)
            return self._next(training.empty_step_of(run.first + step, results, error))
        try:
            for call in run.before_step(step, max_norm):
                self._runner.run(call)
            results = self._runner.run(run.optimizer_step(chosen, step, max_norm is not None))
        except StepGone:  # others have done this step so long ago that the server does not know its key
            self.start()
            if self._step <= step:
                raise
            return Step(step=run.first + step, replayed=True)
        except KeyReused as error:
            raise explained(error, "All workers of a run give optim_step the same arguments") from None
        return self._next(training.step_of(run.first + step, results, ended))

    def _next(self, done: Step) -> Step:
        """Begin the next step."""
        self._step, self._number = self._step + 1, 0
        self._free.clear()
        return done

    def parameters(self) -> dict[str, Array]:
        """Return the parameters by name, all of the same step.

        >>> model.parameters()["b"]
        array([1.], dtype=float32)
        """
        self._joined()
        prefix = f"{self._prefix}{training.STATE['parameters']}."
        values = self._buffers.value(prefix=prefix)
        return {name.removeprefix(prefix): value for name, value in values.items()}

    def save(self, path: str | Path) -> int:
        """Write a checkpoint, a safetensors file, and return the number of steps that it has.

        The parameters have their own names. What the optimizer keeps, statistics, and the number of steps have names
        that begin with `::`. All are of the same step. `start` reads the file. Raises `Conflict` if a step is under way
        for long: its worker may be dead, and another one has to call `optim_step`.

        >>> model.save("/dev/null")
        0
        """
        run = self._joined()
        found = self._buffers.list(self._prefix)
        with files.writing(Path(path)) as write:
            values = self._runner.run(run.values(checkpoint.kept(self._prefix, found)))
            for _ in range(SAVE_LOOKS):
                if not run.is_between(values):
                    break
                time.sleep(SAVE_PAUSE)
                values = self._runner.run(run.values(checkpoint.kept(self._prefix, found)))
            else:
                raise training.under_way(self._name)
            step, tensors = run.checkpoint(values)
            write(tensors)
        return step

    def export(self, path: str | Path) -> int:
        """Write the ONNX model with the run's parameters and statistics, and return the number of steps that they have.

        ONNX Runtime computes from the file what `evaluate` does. It joins no run. Raises `NotFound` if the run has not
        begun, and what `save` raises.

        >>> model.start(), model.export("/dev/null")
        (0, 0)
        """
        buffers = training.sources_of(self._prefix, self._info or self.info())
        with files.writing(Path(path)) as write:
            for _ in range(SAVE_LOOKS):
                content, versions = self._runner.run(graphs.content(self.name, buffers))
                if versions["parameters"] >= versions.get("statistics", 0):
                    break
                time.sleep(SAVE_PAUSE)
            else:
                raise training.under_way(self._name)
            first = [one.name for one in self._buffers.list(f"{self._prefix}::first")]
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

    def _ended(self, run: training.Run) -> Any:
        """Wait for the end of the step, or end it. Return its mean loss and receipt, None if they are gone."""
        step = self._step
        if not run.closes_itself:
            with suppress(StaleStep):
                self._buffers.close_step(run.summed, min_count=1, step=step, idempotency_key=run.key("close", step))
        with suppress(StepGone):
            return self._runner.run(run.mean_loss(step, self._timeout))
        return None
