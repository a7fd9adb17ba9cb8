"""The gradients of a PyTorch model, summed on a server."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, overload

from gradserve_client._runs.accumulator import Accumulator
from gradserve_client._runs.losses import Loss
from gradserve_client._runs.outcomes import Pulled, Pushed
from gradserve_client._torch import torch
from gradserve_client._torch.model import Model
from gradserve_client._torch.optimizer import Source
from gradserve_client._torch.parameters import HALF_DTYPES
from gradserve_client._torch.state import State
from gradserve_client._wire.arguments import check_choice
from gradserve_client._wire.tensors import Array
from gradserve_client.errors import InvalidInput, KeyReused

__all__ = ["GradientAccumulator", "Pulled", "Pushed"]


class GradientAccumulator(Accumulator[torch.nn.Module, torch.dtype]):
    """Sums the gradients of a model's parameters in buffers on a server: over micro-batches, workers, or both.

    `push`, after `loss.backward()`, sends the gradients. `pull`, before `optimizer.step()`, sets the gradients to their
    weighted mean. Without a `quorum`, a pull closes the step, which suits a single worker. With a `quorum` (workers
    times micro-batches), the `quorum`th push closes the step, and every worker pulls the same bits.

    Workers that give the same `run` sum together. Each may join at any time, and again after a restart: from step 1 on
    with `load_state_dict` or `broadcast_parameters(send=False)`, so that it has the run's weights. `__init__` explains
    the arguments, and `from_env` takes some from the variables that torchrun sets.

    Threads must not share it. Raises `InvalidInput` for a model that cannot be accumulated. Raises `Conflict` for
    buffers with other rules or of another run, and for a model unlike that of the run's first worker: in its names,
    shapes and dtypes, and in step 0 in its numbers, also in frozen parameters and persistent buffers.

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

    _model: Model

    def _check_wire(self, dtype: torch.dtype | None) -> None:
        check_choice("wire_dtype", dtype, (None, *HALF_DTYPES, "int8"))

    def _adapted(self, model: torch.nn.Module, wire: Any, pulled: Any, limit: int) -> Model:
        self._new_state = partial(State, model, f"{self.prefix}::state.", limit)
        return Model(model, self.prefix, wire, torch.bfloat16 if pulled == "bfloat16" else pulled, limit)

    def _as_state(self, residual: Array) -> torch.Tensor:
        return torch.tensor(residual)  # which torch.load reads with weights_only

    def _kept_source(self, model: torch.nn.Module, optimizer: Any, limit: int) -> Source:
        return Source(model, optimizer, f"{self.prefix}::kept.", limit)

    @overload
    def push(
        self, *, weight: float = 1.0, scale: float = 1.0, loss: Loss = None, wait: Literal[True] = True
    ) -> Pushed: ...

    @overload
    def push(self, *, weight: float = 1.0, scale: float = 1.0, loss: Loss = None, wait: bool) -> Pushed | None: ...

    def push(self, *, weight: float = 1.0, scale: float = 1.0, loss: Loss = None, wait: bool = True) -> Pushed | None:
        """Add `weight` times the gradients to the sums, and set them to None.

        `weight` is the number of samples if the loss is their mean. A parameter whose gradient is None adds nothing. If
        every gradient is None, the weight must be 0: a worker without more data still counts for the quorum. With
        weight 0 no number is sent, and nothing of the gradients counts, not even NaN.

        `scale` is what the loss was multiplied by, as with `scaler.get_scale()`: it must be the same for all pushes.

        `loss` is the mean loss of the samples, as a number or a tensor of one, without `scale`. It is required with
        `loss=True`, unless the weight is 0. It counts once, with the gradients, and the rule `nonfinite` is for both.

        wait=False hands the gradients to a thread, and returns None at once, so that the next forward pass runs
        meanwhile. The next call of this accumulator waits for the thread first, and raises its error. If the same push
        may succeed later, the call after that sends it again. Without a next call, Python exits with status 120.

        After another error the gradients are unchanged, and the push can be repeated. Raises `Conflict` if the worker
        came to the run after step 0 and has not got the run's weights. Raises `StaleStep` if the step has closed
        without this worker, and `DuplicateContributor` after `per_contributor` pushes: the worker can `pull` then.
        Raises `KeyReused`, and sets the gradients to None, if a worker of this name has made this push with another
        gradient or weight. That push counts, and the next call makes the next push.
        """
        self._pushes.wait()
        self._model.check()
        gradients = self._model.gradients()
        if not gradients and weight:
            raise InvalidInput(
                "No parameter has a gradient: call push after backward, once; without data, push(weight=0) counts for"
                f" the quorum{self._model.elsewhere()}"
            )
        try:
            pushed = self._push(gradients, weight, scale, loss, wait=wait)
        except KeyReused:
            self._model.clear({})
            raise
        self._model.clear(gradients)
        return pushed

    def pull(self) -> Pulled:
        """Set the gradients to the weighted mean of the step, and begin the next step.

        With a quorum or a deadline, this waits up to `timeout` seconds until the step closes. Without, it closes the
        step. The result says who was in it, what closed it, and the mean `loss` with `loss=True`. Each gradient gets
        the dtype, the device and the strides that its parameter wants. Sparse gradients keep their sparse dimensions,
        without what is zero. Infinity and NaN reach every worker unchanged.

        If all weights are 0, nobody had a gradient: all gradients are None, and the result's `weight` is 0. If other
        weights sum to 0, there is no mean: this raises `NothingToAverage`, in every worker. Then the gradients are
        None, and the next step begins. `reduce="sum"` sets the sums.

        After an error no gradient has changed, and the pull can be repeated. Raises `StepOpen` if pushes are missing;
        its `missing` says whose, of the expected `contributors`. Raises `StepGone` if this worker is more than `keep`
        steps behind. Raises `Conflict`, in every worker, if pushes had different scales: then the gradients are None,
        and the next step begins.
        """
        self._pushes.wait()
        self._model.check()
        pulled, _ = self._pull(partial(self._model.set, zeros=self._unused == "zeros"))
        return pulled

    def broadcast_parameters(self, *, send: bool) -> None:
        """Send this worker's parameters and buffers to all others, or set them to those of the worker that sends.

        All workers make the same calls in a step: the second call waits for the second broadcast. The others take the
        newest of their step or later, all tensors or none, and continue in that step. They wait up to `timeout`
        seconds. So a worker that joins late calls this once, and then another worker, between its steps. The states of
        optimizers are not sent.

        Raises `StepOpen` if nobody sends, and `InvalidInput` for a tensor that cannot be set. Raises `Conflict` if
        this worker's parameters are not the run's: it came after step 0, or with start="any" to a step that has
        begun with others.
        """
        self._broadcast_state(self._new_state(), send=send)
