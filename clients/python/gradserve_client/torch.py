"""The gradients of a PyTorch model, summed on a server."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradserve_client._placement import balanced
from gradserve_client._tensors import Array
from gradserve_client.client import Client
from gradserve_client.errors import Conflict, EpochGone, GradserveError, InvalidInput, KeyReused, StaleEpoch
from gradserve_client.models import BufferSpec

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "gradserve_client.torch needs PyTorch: pip install 'gradserve-client[torch]'", name="torch"
    ) from error

_BUFFER_DTYPES = {
    torch.float16: "float32",  # in a sum of half precision, small gradients would vanish
    torch.bfloat16: "float32",
    torch.float32: "float32",
    torch.float64: "float64",
}


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
        self._model, self._server, self._prefix = model, server, prefix
        self._quorum, self._keep, self._timeout = quorum, keep, timeout
        self._worker = worker or uuid.uuid4().hex
        self._parameters = self._trainable()
        if not self._parameters:
            raise InvalidInput("The model has no parameter that requires a gradient")
        self._sparse = {
            prefix + name
            for name, parameter in model.named_parameters()
            if any(parameter is weight for weight in _sparse_weights(model))
        }
        """The buffers of sparse gradients: at first as the modules say, then as the last gradients were."""
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
        gradients = {name: param.grad for name, param in self._parameters.items() if param.grad is not None}
        if not gradients and weight:
            raise InvalidInput(
                "No parameter has a gradient: call push after backward, once; without data, push(weight=0) counts for"
                " the quorum"
            )
        nothing = np.zeros((), np.float32)  # broadcasts to every shape
        try:
            receipts = self._server.buffers.accumulate(
                {name: gradients.get(name, nothing) for name in self._parameters},
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
            (self._sparse.discard if gradient.layout == torch.strided else self._sparse.add)(name)
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
        gradient gets its parameter's dtype and device, and zeros if no worker pushed it. Sparse gradients stay sparse,
        with the rows that are not zero. Infinity and NaN reach every worker unchanged.

        After an error, the pull can be repeated. Raises `EpochOpen` if pushes are missing, `EpochGone` if this worker
        is more than `keep` epochs behind, and `Conflict` if all weights are 0.
        """
        self._check_model()
        try:
            means = self._closed() if self._quorum is not None else self._taken()
        except EpochGone as error:
            raise _explained(
                error, "This worker is too far behind to catch up: load the weights of another worker"
            ) from None
        for name, parameter in self._parameters.items():
            if parameter.requires_grad:
                mean = torch.from_numpy(means[name]).to(parameter.device, parameter.dtype)
                parameter.grad = mean.to_sparse(1) if name in self._sparse else mean
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
        new = balanced({name: one.nbytes for name, one in self._parameters.items()}, self._server.urls)
        return {name: found.get(name, url) for name, url in new.items()}

    def _open(self, places: Mapping[str, str]) -> None:
        """Create the buffers that do not exist, on the servers of these URLs by name if there are several servers."""
        self._server.place(places)
        self._places = places
        specs: dict[str, BufferSpec] = {
            name: {"shape": one.shape, "dtype": _buffer_dtype(name, one), "quorum": self._quorum, "keep": self._keep}
            for name, one in self._parameters.items()
        }
        created = self._server.buffers.create_many(specs)
        # The server may still remember the keys of earlier buffers with the same names.
        identity = repr((self._prefix, self._worker, [created[name].created_at for name in self._parameters]))
        self._identity = hashlib.sha256(identity.encode()).hexdigest()[:32]

    def _trainable(self) -> dict[str, Any]:
        """Return the parameters that require a gradient, by the names of their buffers. Shared parameters come once."""
        return {name: parameter for name, parameter in self._named() if parameter.requires_grad}

    def _check_model(self) -> None:
        """Raise `InvalidInput` if the model trains parameters that it did not have when this accumulator was made."""
        current = dict(self._named())
        for name, parameter in current.items():
            if parameter.requires_grad and name not in self._parameters:
                raise self._changed(f"{name!r} requires a gradient now, but did not")
            if parameter.requires_grad and parameter is not self._parameters[name]:
                raise self._changed(f"{name!r} is another parameter than")
        for name in self._parameters.keys() - current.keys():
            raise self._changed(f"{name!r} is not in the model any more, but was")

    def _named(self) -> Iterator[tuple[str, Any]]:
        return ((self._prefix + name, parameter) for name, parameter in self._model.named_parameters())

    def _changed(self, change: str) -> InvalidInput:
        return InvalidInput(f"{change} when this accumulator was made; make a new one, with another prefix")

    def _running_epoch(self) -> int:
        """Return the epoch of all buffers, the earlier one if a worker was killed when some servers had its push."""
        names = dict.fromkeys(self._parameters, 0.0)
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
        names = list(self._parameters)
        return self._server.buffers.value(names, epoch=self._epoch, reduce="mean", timeout=self._timeout)

    def _taken(self) -> Mapping[str, Array]:
        """Close the epoch, and return its means."""
        try:
            taken = self._server.buffers.take(
                list(self._parameters),
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
        for parameter in self._parameters.values():
            parameter.grad = None


def _sparse_weights(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return [module.weight for module in model.modules() if isinstance(module, kinds) and module.sparse]


def _buffer_dtype(name: str, parameter: torch.nn.Parameter) -> str:
    dtype = _BUFFER_DTYPES.get(parameter.dtype)
    if dtype is None:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _BUFFER_DTYPES)
        raise InvalidInput(f"{name!r} is {parameter.dtype}, but must be one of {known}", code="dtype_mismatch")
    return dtype


def _explained(error: GradserveError, sentence: str) -> GradserveError:
    error.detail = f"{error.detail}. {sentence}"
    error.args = (error.detail,)
    return error
