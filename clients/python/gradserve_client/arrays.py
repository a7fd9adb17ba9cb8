"""The gradients of NumPy and JAX arrays, summed on a server."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from gradserve_client._arrays.leaves import HALF_DTYPES
from gradserve_client._arrays.model import Model
from gradserve_client._arrays.state import Source, State
from gradserve_client._runs.accumulator import Accumulator
from gradserve_client._runs.losses import Loss
from gradserve_client._runs.outcomes import Pulled, Pushed
from gradserve_client._wire.arguments import check_choice
from gradserve_client.errors import InvalidInput

__all__ = ["GradientAccumulator", "Pulled", "Pushed"]


class GradientAccumulator(Accumulator[Any, npt.DTypeLike]):
    """Sums the gradients of a tree of arrays in buffers on a server: over micro-batches, workers, or both.

    The tree is an array, or a nest of dicts, lists and tuples of NumPy arrays. If the program uses JAX, it is any
    pytree of NumPy or JAX arrays. None in the place of an array has no buffer. Each other array has one, named after
    its path: `params.Dense_0.kernel`. float64 is summed in float64, and half precision in float32. Complex numbers
    are pairs.

    `push` sends a tree of gradients. `pull` returns the tree of their weighted mean. Without a `quorum`, a pull closes
    the step, which suits a single worker. With a `quorum` (workers times micro-batches), the `quorum`th push closes
    the step, and every worker pulls the same bits.

    Workers that give the same `run` sum together. Each may join at any time, and again after a restart: from step 1 on
    with `load_state_dict` or `broadcast_parameters(tree, send=False)`, so that it has the run's weights. `__init__`
    explains the arguments. `wire_dtype` may be the name of a dtype.

    Threads must not share it. Raises `InvalidInput` for a tree that cannot be accumulated. Raises `Conflict` for
    buffers with other rules or of another run, and for a tree unlike that of the run's first worker: in its names,
    shapes and dtypes, and in step 0 in its numbers.

    >>> import numpy as np
    >>> from gradserve_client.arrays import GradientAccumulator
    >>> model = {"coef": np.zeros((1, 2)), "intercept": np.zeros(1)}
    >>> gradients = GradientAccumulator(model, server, run="logistic")
    >>> for size, coef in (3, [[1.0, 2.0]]), (1, [[5.0, 2.0]]):
    ...     print(gradients.push({"coef": coef, "intercept": None}, weight=size).weight)
    3.0
    4.0
    >>> gradients.pull()
    {'coef': array([[2., 2.]]), 'intercept': None}
    >>> gradients.pulled.count
    2
    """

    _model: Model

    pulled: Pulled | None = None
    """The step of the last pull: who was in it, what closed it, and the mean loss."""

    def _check_wire(self, dtype: npt.DTypeLike | None) -> None:
        if dtype is not None:
            check_choice("wire_dtype", _dtype_name(dtype), (*HALF_DTYPES, "int8"))

    def _adapted(self, model: Any, wire: Any, pulled: Any, limit: int) -> Model:
        self._new_state = partial(State, prefix=f"{self.prefix}::state.", limit=limit)
        return Model(model, self.prefix, _dtype_name(wire), _dtype_name(pulled), limit)

    def _kept_source(self, model: Any, optimizer: Any, limit: int) -> Source:
        return Source(optimizer, f"{self.prefix}::kept.", limit)

    @overload
    def push(
        self, gradients: Any, *, weight: float = 1.0, scale: float = 1.0, loss: Loss = None, wait: Literal[True] = True
    ) -> Pushed: ...

    @overload
    def push(
        self, gradients: Any, *, weight: float = 1.0, scale: float = 1.0, loss: Loss = None, wait: bool
    ) -> Pushed | None: ...

    def push(
        self, gradients: Any, *, weight: float = 1.0, scale: float = 1.0, loss: Loss = None, wait: bool = True
    ) -> Pushed | None:
        """Add `weight` times the gradients to the sums.

        `gradients` has the keys of the tree. Each array has the shape of its own, and a dtype that its sum does not
        round. `Rows` are a sparse gradient. None, for an array or for a nest of them, adds nothing. If every gradient
        is None, the weight must be 0: push(None, weight=0) is of a worker without more data, which still counts for
        the quorum. With weight 0 no number is sent, and nothing of the gradients counts, not even NaN.

        `weight` is the number of samples if the loss is their mean. `scale` is what the loss was multiplied by: it must
        be the same for all pushes.

        `loss` is the mean loss of the samples, as a number or a tensor of one, without `scale`. It is required with
        `loss=True`, unless the weight is 0. It counts once, with the gradients, and the rule `nonfinite` is for both.

        wait=False copies the gradients for a thread, and returns None at once, so that they travel during the next
        computation. The next call of this accumulator waits for the thread first, and raises its error. If the same
        push may succeed later, the call after that sends it again. Without a next call, Python exits with status 120.

        After another error the push can be repeated. Raises `Conflict` if the worker came to the run after step 0 and
        has not got the run's weights. Raises `StaleStep` if the step has closed without this worker, and
        `DuplicateContributor` after `per_contributor` pushes: the worker can `pull` then. Raises `KeyReused` if a
        worker of this name has made this push with another gradient or weight. That push counts, and the next call
        makes the next push. Raises `InvalidInput` for a tree of other keys, shapes or dtypes.
        """
        self._pushes.wait()
        found = self._model.gradients(gradients, copied=not wait)
        if not found and weight:
            raise InvalidInput(
                "No array has a gradient, but the push has a weight; without data, push(None, weight=0) counts for the"
                " quorum"
            )
        return self._push(found, weight, scale, loss, wait=wait)

    def pull(self) -> Any:
        """Return the tree of the weighted mean of the step, and begin the next step.

        With a quorum or a deadline, this waits up to `timeout` seconds until the step closes. Without, it closes the
        step. `pulled` says who was in it, what closed it, and the mean `loss` with `loss=True`. Each gradient has the
        shape and the dtype of its array. It is a JAX array, on the same devices, if that was one. Infinity and NaN
        reach every worker unchanged.

        An array that nobody had a gradient for is None, or zeros with unused="zeros". If all weights are 0, every
        array is None, and the weight of `pulled` is 0. If other weights sum to 0, there is no mean: this raises
        `NothingToAverage`, in every worker, and the next step begins. `reduce="sum"` returns the sums.

        After an error the pull can be repeated. Raises `StepOpen` if pushes are missing; its `missing` says whose, of
        the expected `contributors`. Raises `StepGone` if this worker is more than `keep` steps behind. Raises
        `Conflict`, in every worker, if pushes had different scales: then the next step begins.
        """
        self.pulled, found = self._pull(partial(self._model.tree, zeros=self._unused == "zeros"))
        return found

    def broadcast_parameters(self, tree: Any, *, send: bool) -> Any:
        """Send this worker's tree to all others, and return it, or return that of the worker that sends.

        The tree may have more than the accumulator's, such as batch statistics and the state of an optimizer. It has
        the same paths, shapes and dtypes in all workers and in all calls. Integers up to 2**53 are sent, too.

        All workers make the same calls in a step: the second call waits for the second broadcast. The others get the
        newest of their step or later, and continue in that step. They wait up to `timeout` seconds. So a worker that
        joins late calls this once, and then another worker, between its steps.

        Raises `StepOpen` if nobody sends, and `InvalidInput` for an array that cannot be sent. Raises `Conflict` if
        this worker's arrays are not the run's: it came after step 0, or with start="any" to a step that has begun
        with others.
        """
        state = self._new_state(tree)
        self._broadcast_state(state, send=send)
        return state.nest


def _dtype_name(dtype: Any) -> str | None:
    return dtype if dtype is None or isinstance(dtype, str) else np.dtype(dtype).name
