"""Gradients of a PyTorch model, accumulated on a server."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradserve_client._tensors import Array
from gradserve_client.client import Client
from gradserve_client.errors import Conflict, EpochGone, GradserveError, InvalidInput, KeyReused, StaleEpoch

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "gradserve_client.torch needs PyTorch: pip install 'gradserve-client[torch]'", name="torch"
    ) from error

_BUFFER_DTYPES = {
    torch.float16: "float32",  # many small gradients would vanish in a sum of half precision
    torch.bfloat16: "float32",
    torch.float32: "float32",
    torch.float64: "float64",
}


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """What a push left of the epoch."""

    epoch: int
    count: int
    """The pushes in the epoch, this one included."""
    weight: float
    """The sum of their weights."""
    closed: bool
    """Whether this push completed the quorum."""
    replayed: bool
    """Whether it had been counted before, and was not counted again."""


class GradientAccumulator:
    """The gradients of a model's parameters, summed in buffers on a server: over micro-batches, workers, or both.

    `push`, after `loss.backward()`, hands the gradients over, and `pull` brings their weighted mean back, before
    `optimizer.step()`. Without a `quorum` a pull closes the epoch: that is for one worker. With it, the push that is
    the `quorum`th of the epoch does (workers times micro-batches), and every worker pulls the same bits.

    Each parameter that requires a gradient has a buffer named `prefix` + its name. The buffers are created, or, if they
    are there, taken up in the epoch that runs. The last `keep` closed epochs can be pulled.

    A push that is made again counts once. For that to be so after a restart too, name the `worker`: its pushes are then
    known by their epoch and their place in it. Save `state_dict()` with each checkpoint.

    Not for several threads. Raises `InvalidInput` for a model with nothing to train, and `Conflict` for buffers that
    differ.

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
        self._quorum, self._timeout = quorum, timeout
        self._parameters = self._trainable()
        if not self._parameters:
            raise InvalidInput("The model has no parameter that requires a gradient")
        self._sparse = {
            prefix + name
            for name, parameter in model.named_parameters()
            if any(parameter is weight for weight in _sparse_weights(model))
        }
        """Those whose gradients are sparse: as their modules say, and then as the last gradient was."""
        created = [
            server.buffers[name].create(parameter.shape, dtype=_buffer_dtype(name, parameter), quorum=quorum, keep=keep)
            for name, parameter in self._parameters.items()
        ]
        # Buffers of the same names may have been there before, and their keys may still be remembered.
        identity = repr((prefix, worker or uuid.uuid4().hex, [one.created_at for one in created]))
        self._identity = hashlib.sha256(identity.encode()).hexdigest()[:32]
        self._epoch = self._running_epoch()
        self._pushes = 0

    @property
    def epoch(self) -> int:
        """The epoch that is pushed to, and pulled next."""
        return self._epoch

    def push(self, *, weight: float = 1.0) -> Pushed:
        """Add `weight` times the gradients to the sums, in one request, and set them to None as `zero_grad()` does.

        `weight` is the number of samples if the loss is their mean. A parameter whose gradient is None adds nothing;
        if all are, the weight must be 0: a worker that has run out of data counts for the quorum so.

        If it raises, the gradients are still there, and it can be called again. Raises `StaleEpoch` if the epoch has
        closed without this worker: it may `pull`. Only after `KeyReused` they are gone: a worker of this name has made
        this push before, with another gradient or weight. That one is counted, and the next push is the next.
        """
        self._check_model()
        gradients = {name: one.grad for name, one in self._parameters.items() if one.grad is not None}
        if not gradients and weight:
            raise InvalidInput(
                "No parameter has a gradient: push comes after backward, and sets them to None; with nothing to add,"
                " push(weight=0) counts for the quorum"
            )
        nothing = np.zeros((), np.float32)  # which broadcasts
        try:
            receipts = self._server.buffers.accumulate(
                {name: gradients.get(name, nothing) for name in self._parameters},
                weight=weight,
                epoch=self._epoch,
                idempotency_key=f"{self._identity}-{self._epoch}-{self._pushes}",
            )
        except StaleEpoch as error:
            kept = "; if that has closed, pull() brings its mean as long as it is kept"
            raise _explained(
                error,
                f"This worker is at epoch {self._epoch}, and its gradients do not count"
                + (kept if self._quorum is not None else ""),
            ) from None
        except KeyReused as error:
            place = f"push {self._pushes} of epoch {self._epoch}"
            self._pushes += 1
            self._clear()
            raise _explained(
                error,
                f"This worker made {place} before, with another gradient or weight, which is counted; or another"
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
        """Set the gradients to the weighted mean of the epoch, and go on to the next one.

        With a quorum this waits up to `timeout` seconds for the epoch to close, and without one it closes it. Each
        gradient has its parameter's dtype and device; where nobody had one it is zero. Sparse ones are sparse again,
        with the rows that are not zero. Infinity and NaN come back as they were pushed, to every worker.

        If it raises, it can be called again. Raises `EpochOpen` if pushes are missing, `EpochGone` if this worker is
        more than `keep` epochs behind, and `Conflict` if all weights are 0.
        """
        self._check_model()
        try:
            means = self._closed() if self._quorum is not None else self._taken()
        except EpochGone as error:
            raise _explained(
                error, "This worker is too far behind to catch up: let it begin with the weights of another one"
            ) from None
        for name, parameter in self._parameters.items():
            if parameter.requires_grad:
                mean = torch.from_numpy(means[name]).to(parameter.device, parameter.dtype)
                parameter.grad = mean.to_sparse(1) if name in self._sparse else mean
        self._epoch += 1
        self._pushes = 0

    def state_dict(self) -> dict[str, Any]:
        """Where this worker is: for a checkpoint, with the state of the model and of the optimizer."""
        return {"epoch": self._epoch, "pushes": self._pushes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was, in this process or in another one of the same `worker`."""
        self._epoch, self._pushes = state["epoch"], state["pushes"]

    def _trainable(self) -> dict[str, Any]:
        """The parameters that require a gradient, by the names of their buffers; shared ones once."""
        return {self._prefix + name: one for name, one in self._model.named_parameters() if one.requires_grad}

    def _check_model(self) -> None:
        """Raise `InvalidInput` unless what is trained is what was when this accumulator was made, or less."""
        there = {self._prefix + name: one for name, one in self._model.named_parameters()}
        for name, one in there.items():
            if one.requires_grad and name not in self._parameters:
                raise self._another(f"{name!r} requires a gradient now, but did not")
            if one.requires_grad and one is not self._parameters[name]:
                raise self._another(f"{name!r} is another parameter than")
        for name in self._parameters.keys() - there.keys():
            raise self._another(f"{name!r} is not in the model any more, but was")

    def _another(self, what: str) -> InvalidInput:
        return InvalidInput(f"{what} when this accumulator was made; make another one, with another prefix")

    def _running_epoch(self) -> int:
        """The epoch of all buffers, at one moment."""
        names = dict.fromkeys(self._parameters, 0.0)
        receipts = self._server.buffers.accumulate(names, do_update=False)
        epochs = {receipt.epoch: name for name, receipt in receipts.items()}
        if len(epochs) > 1:
            one, other, *_ = epochs.items()
            raise Conflict(
                f"The buffers are not those of one model: {one[1]!r} is in epoch {one[0]}, {other[1]!r} in {other[0]};"
                " take another prefix, or delete them"
            )
        return epochs.popitem()[0]

    def _closed(self) -> Mapping[str, Array]:
        """The means of the epoch, once it has closed."""
        names = list(self._parameters)
        return self._server.buffers.value(names, epoch=self._epoch, reduce="mean", timeout=self._timeout)

    def _taken(self) -> Mapping[str, Array]:
        """The means of the epoch, which closes by this."""
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
                error, f"Epoch {self._epoch} was closed by somebody else: without a quorum one worker pulls"
            ) from None
        return {name: one.value for name, one in taken.items()}

    def _clear(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None


def _sparse_weights(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return [module.weight for module in model.modules() if isinstance(module, kinds) and module.sparse]


def _buffer_dtype(name: str, parameter: torch.nn.Parameter) -> str:
    dtype = _BUFFER_DTYPES.get(parameter.dtype)
    if dtype is None:
        known = ", ".join(str(one).removeprefix("torch.") for one in _BUFFER_DTYPES)
        raise InvalidInput(f"{name!r} is {parameter.dtype}, but must be one of {known}", code="dtype_mismatch")
    return dtype


def _explained(error: GradserveError, sentence: str) -> GradserveError:
    error.detail = f"{error.detail}. {sentence}"
    error.args = (error.detail,)
    return error
