"""What a run of a graph sends: the names of its buffers, its keys, and the requests of a step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from gradserve_client._http.log import logger
from gradserve_client._http.outcomes import Answer
from gradserve_client._http.policy import Call
from gradserve_client._runs.losses import KEPT_LOSSES
from gradserve_client._runs.optimizers import OPTIMIZERS, Optimizer
from gradserve_client._runs.rules import FOLLOWS, canonical
from gradserve_client._wire import answers, bulk, calls, graphs
from gradserve_client._wire.tensors import MEDIA_TYPE, Array, TensorLike, decode
from gradserve_client.errors import Conflict, InvalidInput, NothingToAverage
from gradserve_client.graph_models import GraphInfo, GraphTensor, MicroBatch, Step
from gradserve_client.models import BufferInfo, BufferName, BufferSpec, Receipt

Values: TypeAlias = Mapping[str, tuple[Array, Mapping[str, Any]]]
"""Values of buffers by name, each with its receipt as the server writes it."""

STATE = {"parameters": "p", "statistics": "s", "momentums_1": "m", "momentums_2": "v"}
"""The groups that a run keeps from step to step, and their letters in the names of buffers."""

CLOSED_WAIT_SECONDS = 15.0
"""Seconds that the optimizer waits for the end of a step: alike in all workers, because their requests have one key."""

NO_CLIP = 1e300
"""A norm that no clipping reaches."""


@dataclass(frozen=True)
class Run:
    """A run of a graph that is joined."""

    prefix: str
    info: GraphInfo
    worker: str | None
    """The name of the worker, which the steps list."""
    sender: str
    """What the keys of the worker's micro-batches have: its name, or else what only this process knows."""
    life: str
    """The life of the run: another run of the same name has other keys, and nothing of this one counts in it."""
    first: int
    """The steps of the checkpoint that this run began with, whose own steps begin with 0."""
    closes_itself: bool
    """Whether steps close by a quorum or at a deadline."""

    @property
    def summed(self) -> list[str]:
        """The names of the buffers that sum what a step takes."""
        return [*summed(self.prefix, self.info)]

    def key(self, *what: object) -> str:
        """Return the idempotency key of a change of this run."""
        return key(self.prefix, self.life, *what)

    def micro_batch(
        self, tensors: Mapping[str, TensorLike], step: int, number: int, weight: float, outputs: Sequence[str]
    ) -> Call[MicroBatch]:
        """Compute the loss and the gradients of a micro-batch, and add them to the sums of its step."""
        into = {"gradients": "g.*", "loss": "loss", **({"statistics": "t.*"} if self.info.statistics else {})}
        inputs = {**calls.flat(tensors, graphs.GROUPS), **sources_of(self.prefix, self.info)}

        def read(answer: Answer) -> MicroBatch:
            values, metadata = decode(answer.body)
            receipt = answers.as_receipt(json.loads(metadata["receipts"])["loss"], answer)
            found: Any = {"replayed": receipt.replayed, "closed": receipt.closed}
            return MicroBatch(step=self.first + step, counted=True, outputs=values, **found)

        return calls.running(
            graphs.path_of(self.info.name),
            inputs,
            graphs.dtypes(self.info),
            read,
            outputs=list(dict.fromkeys(["loss", *outputs])),
            into={name: self.prefix + buffer for name, buffer in into.items()},
            weight=weight,
            step=step,
            contributor=self.worker,
            life=self.life,
            idempotency_key=self.key("batch", self.sender, step, number),
        )

    def mean_loss(self, step: int, timeout: float) -> Call[Values]:
        """Wait for the end of a step, and read the mean of its losses, with its receipt."""
        return self.values(["loss"], query={"step": step, "reduce": "mean", "life": self.life}, wait=timeout)

    def values(self, names: Sequence[str], **more: Any) -> Call[Values]:
        """Read these buffers of the run at one moment, with their receipts."""
        some = [self.prefix + name for name in names]
        return bulk.on_several(some, None, "value", answers.values_with_receipts, accept=MEDIA_TYPE, **more)

    def before_step(self, step: int, max_norm: float | None) -> list[Call[Any]]:
        """Return the requests that keep the mean of the statistics of a step, and its clipped gradients."""
        statistics = [self._clipped(step, f"t.*@{step}", "s", NO_CLIP)] if self.info.statistics else []
        return statistics + ([] if max_norm is None else [self._clipped(step, f"g.*@{step}", "c", max_norm)])

    def empty_step(self, step: int) -> list[Call[Any]]:
        """Return the requests of a step without weight: it counts, and leaves parameters and statistics as they are."""
        statistics = [self._clipped(step, "s.*", "s", NO_CLIP, is_closed=False)] if self.info.statistics else []
        weights = self._group("parameters")
        return [
            *statistics,
            self._step(
                "SGDOptimizerV2",
                {"lr": np.float64(0), "weights": weights, "gradients": weights},
                {},
                is_closed=False,
                outputs=["update_completed"],
                set={"updated_weights": weights.name},
                idempotency_key=self.key("step", step),
            ),
        ]

    def _clipped(self, step: int, source: str, target: str, max_norm: float, *, is_closed: bool = True) -> Call[Any]:
        """Write the means of a step, or other buffers, over some."""
        return self._step(
            "InplaceClipGradNorm",
            {"gradients": BufferName(f"{self.prefix}{source}")},
            {"max_norm": max_norm},
            is_closed=is_closed,
            outputs=["total_norm"],
            set={"clipped_gradients": f"{self.prefix}{target}.*"},
            idempotency_key=self.key(target, step),
        )

    def optimizer_step(self, optimizer: Optimizer, step: int, is_clipped: bool) -> Call[Any]:
        """Let the optimizer take a step."""
        moments = OPTIMIZERS[optimizer.operator]
        gradients = BufferName(self.prefix + ("c.*" if is_clipped else f"g.*@{step}"))
        sources = {"weights": self._group("parameters"), "gradients": gradients}
        written = {"weights": "parameters", **{name: name for name in moments}}
        inputs = {**optimizer.inputs, **sources, **{name: self._group(name) for name in moments}}
        if moments:
            inputs["step"] = np.int64(self.first + step + 1)
        return self._step(
            optimizer.operator,
            inputs,
            optimizer.attributes,
            is_closed=not is_clipped,
            outputs=["updated_flag" if moments else "update_completed"],
            set={f"updated_{output}": self._group(group).name for output, group in written.items()},
            idempotency_key=self.key("step", step),
        )

    def moments(self, optimizer: Optimizer) -> dict[str, BufferSpec]:
        """Return the specifications of what an optimizer keeps besides the parameters."""
        made = {}
        for group in OPTIMIZERS[optimizer.operator]:
            for buffer, spec in state(self.prefix, group, self.info.parameters):
                spec["life"] = self.life
                made[buffer] = spec
        return made

    def _step(
        self, op: str, inputs: Any, attributes: Mapping[str, Any], *, is_closed: bool = True, **more: Any
    ) -> Call[Any]:
        closed: Any = {"reduce": "mean", "timeout": CLOSED_WAIT_SECONDS} if is_closed else {}
        return calls.run(op, inputs, attributes, life=self.life, **closed, **more)

    def _group(self, name: str) -> BufferName:
        return BufferName(f"{self.prefix}{STATE[name]}.*")


def key(prefix: str, life: str, *what: object) -> str:
    """Return the idempotency key of a change of a run."""
    return hashlib.sha256("\n".join(map(str, (prefix, life, *what))).encode()).hexdigest()[:40]


def sources_of(prefix: str, info: GraphInfo, tensors: Mapping[str, Any] = {}) -> dict[str, BufferName]:
    """Return the buffers of a run's parameters and statistics, of those groups that `tensors` does not have."""
    given = {name.partition(".")[0] for name in tensors}
    groups = [one for one in graphs.GROUPS if one not in given and getattr(info, one)]
    return {one: BufferName(f"{prefix}{STATE[one]}.*") for one in groups}


def summed(prefix: str, info: GraphInfo, rules: Mapping[str, Any] | None = None) -> dict[str, BufferSpec]:
    """Return the buffers that sum what a step takes: gradients, new statistics, and the loss."""
    spec: Any = partial(BufferSpec, **(rules or {}))
    groups = {"g": info.gradients, "t": info.statistics}
    wide = {"float16": "float32", "bfloat16": "float32"}
    sums = {
        f"{prefix}{letter}.{name}": spec(shape=shape_of(name, one), dtype=wide.get(one.dtype, one.dtype))
        for letter, some in groups.items()
        for name, one in some.items()
    }
    return {**sums, f"{prefix}loss": spec(shape=(), dtype="float64", keep=KEPT_LOSSES)}


def state(prefix: str, group: str, tensors: Mapping[str, GraphTensor]) -> list[tuple[str, BufferSpec]]:
    """Return the buffers of a group that a run keeps from step to step."""
    return [
        (f"{prefix}{STATE[group]}.{name}", BufferSpec(shape=shape_of(name, one), dtype=one.dtype))
        for name, one in tensors.items()
    ]


def shape_of(name: str, tensor: GraphTensor) -> tuple[int, ...]:
    """Return the shape of a parameter. Raises `InvalidInput` if the model leaves it open."""
    if tensor.shape is None or None in tensor.shape:
        raise InvalidInput(f"The parameter {name!r} has the shape {tensor.shape}, but a run needs every length")
    return tuple(length or 0 for length in tensor.shape)


def form(info: GraphInfo) -> dict[str, Any]:
    """Return what all workers of a run of this graph have alike."""
    tensors = {f"parameter {name}": f"{one.dtype}{[*shape_of(name, one)]}" for name, one in info.parameters.items()}
    return {**tensors, "graph": info.digest, "loss": info.options.get("loss"), "train": info.options.get("train")}


def is_started(prefix: str, info: GraphInfo, found: Mapping[str, BufferInfo]) -> bool:
    """Whether the run has all its buffers, and its parameters have values."""
    needed = [name for group in ("parameters", "statistics") for name, _ in state(prefix, group, getattr(info, group))]
    return all(name in found and found[name].version > 0 for name in needed) and summed(prefix, info).keys() <= {*found}


def check_trains(info: GraphInfo) -> None:
    """Raise `InvalidInput` for a graph without gradients."""
    if not info.gradients:
        raise InvalidInput(f"The graph {info.name!r} gives no gradients: upload it with loss=, as put(..., loss='...')")


def own_groups(prefix: str, info: GraphInfo, given: Mapping[str, Array]) -> dict[str, str]:
    """Return the buffers of the groups whose values are the model's own."""
    prefixes = {group: f"{prefix}{STATE[group]}." for group in graphs.GROUPS if getattr(info, group)}
    return {
        group: f"{start}*" for group, start in prefixes.items() if not any(name.startswith(start) for name in given)
    }


def no_weights(info: GraphInfo) -> InvalidInput:
    """Return the error of a run that begins without weights."""
    return InvalidInput(f"The model {info.name!r} has no weights of its own for all parameters: give start(weights)")


def under_way(run: str) -> Conflict:
    """Return the error of a step that has written statistics, and no parameters, for long."""
    return Conflict(f"A step of {run!r} is under way: its statistics are written, its parameters not")


def follow(prefix: str, rules: Mapping[str, Any], found: Mapping[str, BufferInfo]) -> None:
    """Warn in the log if the run has other rules than this worker gives."""
    given = canonical(rules)
    its = canonical(asdict(next(one for name, one in found.items() if name.startswith(f"{prefix}g."))))
    names = [name for name in given if name in rules and its[name] != given[name]]
    if differing := [f"{name} is {its[name]}, not {given[name]}" for name in names]:
        logger.warning(FOLLOWS, prefix, ", ".join(differing))


def steps_done(prefix: str, info: GraphInfo, found: Mapping[str, BufferInfo]) -> int:
    """Return the number of steps of this run that are done: each writes every parameter once."""
    return min(found[name].version for name, _ in state(prefix, "parameters", info.parameters)) - 1


def joined(
    prefix: str,
    info: GraphInfo,
    found: Mapping[str, BufferInfo],
    worker: str | None,
    sender: str,
    life: str,
    first: Mapping[str, Array],
) -> Run:
    """Return the run of these buffers. `first` has the steps of its checkpoint, if it began with one.

    Raises `InvalidInput` if parameters have no values.
    """
    if not is_started(prefix, info, found):
        raise no_weights(info)
    loss = found[f"{prefix}loss"]
    rules = loss.quorum, loss.quorum_weight, loss.deadline_seconds
    before = sum(int(value) for value in first.values())
    return Run(prefix, info, worker, sender, life, before, any(rule is not None for rule in rules))


def step_of(step: int, results: Mapping[str, Array | Receipt], ended: Values | None) -> Step:
    """Return what is known of a step that is done."""
    replayed = any(isinstance(one, Receipt) and one.replayed for one in results.values())
    if not ended:
        return Step(step=step, replayed=replayed)
    ((loss, receipt),) = ended.values()
    names = ("count", "weight", "contributors", "closed_by")
    return Step(step=step, replayed=replayed, loss=float(loss), **{name: receipt.get(name) for name in names})


def empty_step_of(step: int, results: Mapping[str, Array | Receipt], error: NothingToAverage) -> Step:
    """Return what is known of a step without weight."""
    receipt = error.context.get("receipt") or {}
    names = ("count", "contributors", "closed_by")
    found: Any = {name: receipt.get(name) for name in names}
    return replace(step_of(step, results, None), weight=0.0, **found)
