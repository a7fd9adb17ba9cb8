"""The gradients of a PyTorch model, summed on a server."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradserve_client._names import buffer_name, checked_prefix
from gradserve_client._parameters import named_parameters, set_gradients, trained
from gradserve_client._placement import balanced
from gradserve_client._tensors import Array
from gradserve_client._torch import torch
from gradserve_client.client import Client
from gradserve_client.errors import Conflict, EpochGone, GradserveError, InvalidInput, KeyReused, StaleEpoch


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """The state of the epoch after a push."""

    epoch: int
    count: int
    """The number of pushes in the epoch, with this push."""
    weight: float
    """The sum of the pushes' weights."""
    closed: bool
    """Whether this push completed the quorum."""
    replayed: bool
    """Whether the server had counted this push before, and did not count it again."""


class GradientAccumulator:
    """Sums the gradients of a model's parameters in buffers on a server: over micro-batches, workers, or both.

    `push`, after `loss.backward()`, sends the gradients. `pull`, before `optimizer.step()`, sets the gradients to their
    weighted mean. Without a `quorum`, a pull closes the epoch, which suits a single worker. With a `quorum` (workers
    times micro-batches), the `quorum`th push closes the epoch, and every worker pulls the same bits.

    Each parameter that requires a gradient has a buffer named `prefix` + its name. Existing buffers are used in their
    running epoch, others are created, balanced by bytes if the client has several servers. The last `keep` closed
    epochs can be pulled.

    A repeated push counts once. After a restart too, if the `worker` has a name: the epoch and the place in it then
    identify each push. Save `state_dict()` with each checkpoint.

    Threads must not share it. Raises `InvalidInput` for a model without trainable parameters, and `Conflict` for
    buffers that differ.

    >>> import torch
    >>> from gradserve_client.torch import GradientAccumulator
    >>> model = torch.nn.Linear(2, 1)
    >>> gradients = GradientAccumulator(model, server, prefix="linear.")
    >>> for batch in torch.ones(3, 2), torch.zeros(1, 2):
    ...     model(batch).mean().backward()
    ...     print(gradients.push(weight=len(batch)).weight)
    3.0
    4.0
    >>> gradients.pull()
    >>> model.weight.grad
    tensor([[0.7500, 0.7500]])
    """

    def __init__(
        self,
        model: torch.nn.Module,
        server: Client,
        *,
        prefix: str,
        quorum: int | None = None,
        worker: str | None = None,
        keep: int = 1,
        timeout: float = 600.0,
    ) -> None:
        self._model, self._server, self._prefix = model, server, checked_prefix(prefix)
        self._quorum, self._keep, self._timeout = quorum, keep, timeout
        self._worker = worker or uuid.uuid4().hex
        self._trained = {buffer_name(prefix, one.name): one for one in trained(model)}
        if not self._trained:
            raise InvalidInput("The model has no parameter that requires a gradient")
        self._open(self._found_places() if len(server.urls) > 1 else {})
        self._epoch = self._running_epoch()
        self._pushes = 0

    @property
    def epoch(self) -> int:
        """The epoch of the next push and pull."""
        return self._epoch

    def push(self, *, weight: float = 1.0) -> Pushed:
        """Add `weight` times the gradients to the sums, in one request a server, and set them to None.

        `weight` is the number of samples if the loss is their mean. A parameter whose gradient is None adds nothing. If
        every gradient is None, the weight must be 0: a worker without more data still counts for the quorum.

        After an error the gradients are unchanged, and the push can be repeated. Raises `StaleEpoch` if the epoch has
        closed without this worker, which can `pull` then. Raises `KeyReused`, and sets the gradients to None, if a
        worker of this name has made this push with another gradient or weight. That push counts, and the next call
        makes the next push.
        """
        self._check_model()
        gradients = {name: one.parameter.grad for name, one in self._trained.items() if one.parameter.grad is not None}
        if not gradients and weight:
            raise InvalidInput(
                "No parameter has a gradient: call push after backward, once; without data, push(weight=0) counts for"
                " the quorum"
            )
        numbers: dict[str, Array] = dict.fromkeys(self._trained, np.zeros((), np.float32))  # broadcasts to every shape
        numbers |= {name: self._trained[name].numbers(gradient) for name, gradient in gradients.items()}
        try:
            receipts = self._server.buffers.accumulate(
                numbers,
                weight=weight,
                epoch=self._epoch,
                idempotency_key=f"{self._identity}-{self._epoch}-{self._pushes}",
            )
        except StaleEpoch as error:
            hint = "; if it has closed, pull() fetches its mean" if self._quorum is not None else ""
            raise _explained(
                error, f"This worker is at epoch {self._epoch}, and its gradients do not count{hint}"
            ) from None
        except KeyReused as error:
            push = f"push {self._pushes} of epoch {self._epoch}"
            self._pushes += 1
            self._clear()
            raise _explained(
                error,
                f"This worker made {push} before, with another gradient or weight, and that push counts; or another"
                " worker has the same name",
            ) from None
        self._pushes += 1
        for name, gradient in gradients.items():
            self._trained[name].sent(gradient)
        self._clear()
        receipt = next(iter(receipts.values()))
        return Pushed(
            epoch=receipt.epoch,
            count=receipt.count,
            weight=receipt.weight,
            closed=receipt.closed,
            replayed=receipt.replayed,
        )

    def pull(self) -> None:
        """Set the gradients to the weighted mean of the epoch, and begin the next epoch.

        With a quorum, this waits up to `timeout` seconds until the epoch closes. Without one, it closes the epoch. Each
        gradient gets the dtype, the device and the strides that its parameter wants, and zeros if no worker pushed it.
        Sparse gradients stay sparse, with the rows that are not zero. Infinity and NaN reach every worker unchanged.

        After an error no gradient has changed, and the pull can be repeated. Raises `EpochOpen` if pushes are missing,
        `EpochGone` if this worker is more than `keep` epochs behind, and `Conflict` if all weights are 0.
        """
        self._check_model()
        try:
            means = self._closed() if self._quorum is not None else self._taken()
        except EpochGone as error:
            raise _explained(
                error, "This worker is too far behind to catch up: load the weights of another worker"
            ) from None
        set_gradients(
            {
                name: (one, one.gradient(means[name]))
                for name, one in self._trained.items()
                if one.parameter.requires_grad
            }
        )
        self._epoch += 1
        self._pushes = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this worker, and its buffers' servers, to save beside the states of the model."""
        state = {"epoch": self._epoch, "pushes": self._pushes}
        return {**state, "shards": dict(self._places)} if self._places else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` of this `worker`. Raises `InvalidInput` if the client lacks a server of it."""
        if (places := state.get("shards", self._places)) != self._places:
            self._open(places)
        self._epoch, self._pushes = state["epoch"], state["pushes"]

    def _found_places(self) -> dict[str, str]:
        """Return the servers of the buffers: where they exist, else balanced by bytes."""
        found = self._server.places(self._prefix)
        new = balanced({name: one.parameter.nbytes for name, one in self._trained.items()}, self._server.urls)
        return {name: found.get(name, url) for name, url in new.items()}

    def _open(self, places: Mapping[str, str]) -> None:
        """Create the buffers that do not exist, on the servers of these URLs by name if there are several servers."""
        self._server.place(places)
        self._places = places
        created = [
            self._server.buffers[name].create(one.shape, dtype=one.sum_dtype, quorum=self._quorum, keep=self._keep)
            for name, one in self._trained.items()
        ]
        # The server may still remember the keys of earlier buffers with the same names.
        identity = repr((self._prefix, self._worker, [info.created_at for info in created]))
        self._identity = hashlib.sha256(identity.encode()).hexdigest()[:32]

    def _check_model(self) -> None:
        """Raise `InvalidInput` if the model trains parameters that it did not have when this accumulator was made."""
        current = named_parameters(self._model)
        before = {one.name: one.parameter for one in self._trained.values()}
        for name, parameter in current.items():
            if parameter.requires_grad and name not in before:
                raise self._changed(f"{name!r} requires a gradient now, but did not")
            if parameter.requires_grad and parameter is not before[name]:
                raise self._changed(f"{name!r} is another parameter than")
        for name in before.keys() - current.keys():
            raise self._changed(f"{name!r} is not in the model any more, but was")

    def _changed(self, change: str) -> InvalidInput:
        return InvalidInput(f"{change} when this accumulator was made; make a new one, with another prefix")

    def _running_epoch(self) -> int:
        """Return the epoch of all buffers, the earlier one if a worker was killed when some servers had its push."""
        names = dict.fromkeys(self._trained, 0.0)
        receipts = self._server.buffers.accumulate(names, do_update=False)
        epochs = dict(sorted((receipt.epoch, name) for name, receipt in receipts.items()))
        states = {(self._places.get(name), receipt.epoch) for name, receipt in receipts.items()}
        if len(states) > len(dict(states)) or max(epochs) - min(epochs) > 1:
            (first_epoch, first), *_, (second_epoch, second) = epochs.items()
            raise Conflict(
                f"The buffers do not belong to the same model: {first!r} is in epoch {first_epoch}, {second!r} in"
                f" {second_epoch}; use another prefix, or delete the buffers"
            )
        return min(epochs)

    def _closed(self) -> Mapping[str, Array]:
        """Return the means of the epoch, once it has closed."""
        names = list(self._trained)
        return self._server.buffers.value(names, epoch=self._epoch, reduce="mean", timeout=self._timeout)

    def _taken(self) -> Mapping[str, Array]:
        """Close the epoch, and return its means."""
        try:
            taken = self._server.buffers.take(
                list(self._trained),
                min_count=1,
                epoch=self._epoch,
                reduce="mean",
                idempotency_key=f"{self._identity}-{self._epoch}-take",
            )
        except StaleEpoch as error:
            raise _explained(
                error, f"Another client closed epoch {self._epoch}: without a quorum, only one worker may pull"
            ) from None
        return {name: receipt.value for name, receipt in taken.items()}

    def _clear(self) -> None:
        for one in self._trained.values():
            one.parameter.grad = None


def _explained(error: GradserveError, sentence: str) -> GradserveError:
    error.detail = f"{error.detail}. {sentence}"
    error.args = (error.detail,)
    return error
