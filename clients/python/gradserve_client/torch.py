"""The gradients of a PyTorch model, summed on a server."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, Unpack, overload

from gradserve_client._torch import torch
from gradserve_client._torch.broadcast import Broadcast
from gradserve_client._torch.model import Model
from gradserve_client._torch.names import checked_prefix
from gradserve_client._torch.parameters import HALF_DTYPES
from gradserve_client._torch.pushes import Pushes
from gradserve_client._torch.register import FirstWorker, fitting
from gradserve_client._torch.sums import Sums, explained
from gradserve_client._wire.arguments import as_contributor, check_choice
from gradserve_client._wire.specs import Reduce, rules_json
from gradserve_client.client import Client
from gradserve_client.errors import Conflict, EpochGone, InvalidInput, KeyReused, mistaken
from gradserve_client.models import BufferRules, Pulled, Pushed

__all__ = ["GradientAccumulator", "Pulled", "Pushed"]

MOST_PUSHES = 10**9
"""Pushes of a worker in an epoch, by default: the most that the server allows, so micro-batches need no limit."""


class GradientAccumulator:
    """Sums the gradients of a model's parameters in buffers on a server: over micro-batches, workers, or both.

    `push`, after `loss.backward()`, sends the gradients. `pull`, before `optimizer.step()`, sets the gradients to their
    weighted mean. Without a `quorum`, a pull closes the epoch, which suits a single worker. With a `quorum` (workers
    times micro-batches), the `quorum`th push closes the epoch, and every worker pulls the same bits.

    Workers that give the same `run` sum together. Each may join at any time, and again after a restart.

    ===================  ===============================================================================================
    `run`                the name of the run; another run takes another name
    `prefix`             what the names of the buffers begin with, by default the run and a dot
    `worker`             the worker's own name: a push that it repeats after a restart then counts once
    `quorum`             the number of pushes that closes an epoch
    `keep`               the number of closed epochs that can be pulled
    `timeout`            the seconds that `pull` waits
    `start`              "same": all workers have the same weights in epoch 0; "any": `broadcast_parameters` sends them
    `reduce`             "mean" or "sum": what `pull` sets
    `unused`             "none" or "zeros": the gradient of a parameter that nobody had a gradient for
    `wire_dtype`         torch.float16 or torch.bfloat16: how all gradients travel; by default as they are
    `request_bytes`      the bytes of a request at most, alike in all workers: 64 MiB, or half of what the server takes
    `ttl_seconds`        how long after its last change the server deletes a buffer: longer than any pause
    `per_contributor`    the number of pushes that an epoch takes of each worker, by default any
    `nonfinite`, others  the other rules of the buffers: docs/buffers.md. None is the server's default
    ===================  ===============================================================================================

    Threads must not share it. Raises `InvalidInput` for a model that cannot be accumulated. Raises `Conflict` for
    buffers with other rules or of another run, and for a model unlike that of the run's first worker.

    >>> import torch
    >>> from gradserve_client.torch import GradientAccumulator
    >>> model = torch.nn.Linear(2, 1)
    >>> gradients = GradientAccumulator(model, server, run="linear")
    >>> for batch in torch.ones(3, 2), torch.zeros(1, 2):
    ...     model(batch).mean().backward()
    ...     print(gradients.push(weight=len(batch)).weight)
    3.0
    4.0
    >>> gradients.pull().count
    2
    >>> model.weight.grad
    tensor([[0.7500, 0.7500]])
    """

    def __init__(
        self,
        model: torch.nn.Module,
        server: Client,
        *,
        run: str,
        prefix: str | None = None,
        worker: str | None = None,
        keep: int = 1,
        timeout: float = 600.0,
        start: Literal["same", "any"] = "same",
        reduce: Reduce = "mean",
        unused: Literal["none", "zeros"] = "none",
        wire_dtype: torch.dtype | None = None,
        request_bytes: int | None = None,
        nonfinite: str | None = None,
        **rules: Unpack[BufferRules],
    ) -> None:
        check_choice("start", start, ("same", "any"))
        check_choice("reduce", reduce, ("mean", "sum"))
        check_choice("unused", unused, ("none", "zeros"))
        check_choice("wire_dtype", wire_dtype, (None, *HALF_DTYPES))
        rules_json(rules)  # a name or a value that is wrong fails before any request
        if worker is not None:
            as_contributor(worker, "worker")
        self._prefix = checked_prefix(run, prefix)
        self._server, self._timeout = server, timeout
        self._reduce, self._unused, self._worker = reduce, unused, worker
        request_bytes = fitting(server, request_bytes)
        self._model = Model(model, self._prefix, wire_dtype, request_bytes)
        ttl_seconds = rules.get("ttl_seconds")
        given: dict[str, Any] = {"keep": keep, "nonfinite": nonfinite, "per_contributor": MOST_PUSHES, **rules}
        self._sums = Sums(server, self._model.parts, given, request_bytes)
        register = f"{self._prefix}::start"
        places = self._sums.found_places(self._prefix, register) if len(server.urls) > 1 else {}
        server.place(places)
        first = FirstWorker(server, register, run, self._model, request_bytes, ttl_seconds)
        first.check_form()
        self._sums.open(places)
        epoch = self._sums.epoch()
        if start == "same" and epoch == 0:
            first.check_weights()
        self._pushes = Pushes(self._sums, worker, epoch)
        self._new_broadcast = partial(Broadcast, server, model, self._prefix, request_bytes, ttl_seconds)
        self._broadcast: Broadcast | None = None

    def __repr__(self) -> str:
        worker = "" if self._worker is None else f"{self._worker!r}, "
        return f"{type(self).__name__}({worker}prefix={self._prefix!r}, epoch={self.epoch}, server={self._server!r})"

    @property
    def prefix(self) -> str:
        """What the names of all buffers begin with."""
        return self._prefix

    @property
    def epoch(self) -> int:
        """The epoch of the next push and pull."""
        return self._pushes.epoch

    @overload
    def push(self, *, weight: float = 1.0, scale: float = 1.0, wait: Literal[True] = True) -> Pushed: ...

    @overload
    def push(self, *, weight: float = 1.0, scale: float = 1.0, wait: bool) -> Pushed | None: ...

    def push(self, *, weight: float = 1.0, scale: float = 1.0, wait: bool = True) -> Pushed | None:
        """Add `weight` times the gradients to the sums, and set them to None.

        `weight` is the number of samples if the loss is their mean. A parameter whose gradient is None adds nothing. If
        every gradient is None, the weight must be 0: a worker without more data still counts for the quorum. With
        weight 0 no number is sent, and nothing of the gradients counts, not even NaN.

        `scale` is what the loss was multiplied by, as with `scaler.get_scale()`: it must be the same for all pushes.

        wait=False hands the gradients to a thread, and returns None at once, so that the next forward pass runs
        meanwhile. The next call of this accumulator waits for the thread first, and raises its error. If the same push
        may succeed later, the call after that sends it again.

        After another error the gradients are unchanged, and the push can be repeated. Raises `StaleEpoch` if the epoch
        has closed without this worker, and `DuplicateContributor` after `per_contributor` pushes: the worker can `pull`
        then. Raises `KeyReused`, and sets the gradients to None, if a worker of this name has made this push with
        another gradient or weight. That push counts, and the next call makes the next push.
        """
        self._pushes.wait()
        self._model.check()
        if not 0 < scale < math.inf:
            raise mistaken("scale", f"is {scale}, but must be finite and above 0")
        gradients = self._model.gradients()
        if not gradients and weight:
            raise InvalidInput(
                "No parameter has a gradient: call push after backward, once; without data, push(weight=0) counts for"
                " the quorum"
            )
        numbers, used = self._model.numbers(gradients, weight)
        push = partial(self._pushes.add, numbers, used, weight=weight, scale=scale)
        if wait:
            try:
                pushed = push()
            except KeyReused:
                self._model.clear({})
                raise
            self._model.clear(gradients)
            return pushed
        self._model.clear(gradients)
        self._pushes.start(push)
        return None

    def pull(self) -> Pulled:
        """Set the gradients to the weighted mean of the epoch, and begin the next epoch.

        With a quorum or a deadline, this waits up to `timeout` seconds until the epoch closes. Without, it closes the
        epoch. The result says who was in it, and what closed it. Each gradient gets the dtype, the device and the
        strides that its parameter wants. Sparse gradients stay sparse, with the rows that are not zero. Infinity and
        NaN reach every worker unchanged.

        If all weights are 0, nobody had a gradient: all gradients are None, and the result's `weight` is 0.

        After an error no gradient has changed, and the pull can be repeated. Raises `EpochOpen` if pushes are missing;
        its `missing` says whose, of the expected `contributors`. Raises `EpochGone` if this worker is more than `keep`
        epochs behind. Raises `Conflict`, in every worker, if pushes had different scales: then the gradients are None,
        and the next epoch begins.
        """
        self._pushes.wait()
        self._model.check()
        try:
            summed = self._sums.pull(self.epoch, self._reduce, self._timeout)
        except EpochGone as error:
            raise explained(
                error,
                "This worker is too far behind to catch up: take the weights of another, with broadcast_parameters",
            ) from None
        if not summed.has_one_scale:
            summed.values.clear()
        self._model.set(summed, zeros=self._unused == "zeros")
        pulled = Pulled.of(self.epoch, summed.receipts)
        self._pushes.begin(self.epoch + 1)
        if not summed.has_one_scale:
            raise Conflict(
                f"The pushes of epoch {pulled.epoch} had gradients of different scales, so they have no mean: update"
                " the scaler of every worker after the same pulls"
            )
        return pulled

    def set_rules(self, **rules: Unpack[BufferRules]) -> None:
        """Change these of the buffers' rules, in a request for as many buffers as one push sends in a request.

        None takes a rule away. If the running epoch fulfils a new rule already, it closes at once. One worker calls
        this for all. Workers that join or restart later give the new rules, because their buffers must be equal. Raises
        `InvalidInput` for rules that say whether epochs close by themselves: every worker relies on that.
        """
        self._pushes.wait()
        self._sums.set_rules(rules)

    def broadcast_parameters(self, *, send: bool) -> None:
        """Send this worker's parameters and buffers to all others, or set them to those of the worker that sends.

        The others take the newest that were sent in their epoch or later, and continue in that epoch. They wait up to
        `timeout` seconds. So a worker that joins late calls this once, and then another worker, between its steps. The
        states of optimizers are not sent. Raises `EpochOpen` if nobody sends.
        """
        self._pushes.wait()
        self._broadcast = self._broadcast or self._new_broadcast()
        if send:
            self._broadcast.send(self.epoch)
        elif (epoch := self._broadcast.receive(self.epoch, self._timeout)) != self.epoch:
            self._pushes.begin(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this worker, and its buffers' servers, to save beside the states of the model."""
        self._pushes.wait()
        state = {"epoch": self.epoch, "pushes": self._pushes.count}
        return {**state, "shards": dict(self._sums.places)} if self._sums.places else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` of this `worker`.

        Raises `InvalidInput` if the client lacks a server of it, and if the worker has no name: the server would not
        recognize its pushes.
        """
        self._pushes.wait()
        if self._worker is None:
            raise InvalidInput(
                "This worker has no name, so the server would count its repeated pushes again: give each worker its own"
                " name, as with worker=f'rank{rank}'"
            )
        if (places := state.get("shards", self._sums.places)) != self._sums.places:
            self._sums.open(places)
        self._pushes.begin(state["epoch"], state["pushes"])
