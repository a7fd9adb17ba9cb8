"""Training a graph of a server: micro-batches that count once, and steps that happen once."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Unpack

from gradserve_client._runs import checkpoint, training
from gradserve_client._runs.optimizers import optimizer_of
from gradserve_client._wire import files
from gradserve_client._wire.tensors import Array, TensorLike
from gradserve_client.errors import KeyReused, NothingToAverage, StaleStep, StepGone, explained
from gradserve_client.graph_models import MicroBatch, Step
from gradserve_client.models import BufferRules
from gradserve_client.worker import Worker

MOST_MICRO_BATCHES = 10**9
"""Micro-batches of a worker in a step, by default: the most that the server allows."""


class Model(Worker):
    """A graph by its name, and a worker's place in a run that trains it. Each worker has a model of its own.

    Parameters, gradients and the optimizer's state are buffers on the server, with a common `prefix`. Every micro-batch
    counts once, and every step happens once, through retries, kills and failover.
    """

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
            self._enter(run.info, again=True)  # so that the running step waits for this worker
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
        prefix = f"{self.prefix}{training.STATE['parameters']}."
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
        found = self._buffers.list(self.prefix)
        with files.writing(Path(path)) as write:
            values = self._runner.run(run.values(checkpoint.kept(self.prefix, found)))
            for _ in range(checkpoint.LOOKS):
                if not checkpoint.is_between(self.prefix, values):
                    break
                time.sleep(checkpoint.PAUSE)
                values = self._runner.run(run.values(checkpoint.kept(self.prefix, found)))
            else:
                raise training.under_way(self._name)
            step, tensors = checkpoint.of_values(run, values)
            write(tensors)
        return step

    def _ended(self, run: training.Run) -> Any:
        """Wait for the end of the step, or end it. Return its mean loss and receipt, None if they are gone."""
        step = self._step
        if not run.closes_itself:
            with suppress(StaleStep):
                self._buffers.close_step(run.summed, min_count=1, step=step, idempotency_key=run.key("close", step))
        with suppress(StepGone):
            return self._runner.run(run.mean_loss(step, self._timeout))
        return None
