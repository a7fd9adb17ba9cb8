"""What the accumulators of all frameworks have alike: a worker's place in a run, its pushes and its pulls."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar, Unpack

from gradserve_client._runs.losses import Loss, loss_of
from gradserve_client._runs.model import State
from gradserve_client._runs.outcomes import Pulled, Pushed
from gradserve_client._runs.place import D, M, Place
from gradserve_client._runs.summed import Summed
from gradserve_client._wire.tensors import Array
from gradserve_client.errors import Conflict, InvalidInput, NothingToAverage, StepGone, StepOpen, explained, mistaken
from gradserve_client.models import BufferRules
from gradserve_client.rows import Gradient, Sent

T = TypeVar("T")


class Accumulator(Place[M, D]):
    """Sums the gradients of a model in buffers on a server: pushes, pulls, and what a worker saves."""

    def _push(
        self, gradients: Mapping[str, Any], weight: float, scale: float, loss: Loss, *, wait: bool
    ) -> Pushed | None:
        """Add `weight` times the gradients to the sums, and `weight` times the loss."""
        if not 0 < scale < math.inf:
            raise mistaken("scale", f"is {scale}, but must be finite and above 0")
        self._joining.check(self.step)
        if self._resuming is not None:
            if self._resuming.is_over(self.step):
                return Pushed.late(self.step)
            if not self._pushes.count:
                self._resuming.keep(self.step)
        own = loss_of(loss, weight, is_wanted=self._loss is not None)
        numbers, used = self._model.numbers(gradients, weight)
        if self._loss is not None:
            numbers[self._loss] = own
        sent, cut = self._encoded(numbers, weight / scale)
        push = partial(self._send, sent, cut, used, weight=weight, scale=scale)
        if wait and self._resuming is not None:
            return self._resuming.pushed(self.step, push)
        if wait:
            return push()
        self._pushes.start(push)
        return None

    def _encoded(self, numbers: Mapping[str, Gradient], factor: float) -> tuple[Mapping[str, Sent], dict[str, Array]]:
        """Return the numbers as they travel, and what that cuts off."""
        return (numbers, {}) if self._feedback is None or not factor else self._feedback.encoded(numbers, factor)

    def _send(self, sent: Mapping[str, Sent], cut: Mapping[str, Array], used: set[str], **more: float) -> Pushed:
        pushed = self._pushes.add(sent, used, **more)
        if self._feedback is not None:
            self._feedback.keep(cut)
        return pushed

    def _pull(self, use: Callable[[Summed], T]) -> tuple[Pulled, T]:
        """Return the step and what `use` makes of its sums or means, and begin the next step."""
        self._pushes.wait()
        try:
            summed = self._sums.pull(self.step, self._reduce, self._timeout)
        except StepGone as error:
            if self._resuming is not None and self._resuming.goes_on(self._pushes, self._joining, later=True):
                return self._pull(use)
            raise explained(
                error,
                "This worker is too far behind to catch up: take the weights of another, with broadcast_parameters",
            ) from None
        except StepOpen as error:
            if self._pushes.doubt is None:
                raise
            raise explained(error, self._pushes.doubt) from None
        if summed.weights_cancel or not summed.has_one_scale:
            summed.values.clear()
        used = use(summed)
        pulled = Pulled.of(self.step, summed.receipts, summed.loss)
        if self._resuming is not None:
            self._resuming.contributors = [*(pulled.contributors or ())]
        self._pushes.begin(self.step + 1)
        if summed.weights_cancel:
            raise NothingToAverage(
                f"The weights of step {pulled.step} sum to 0, so the gradients of its {pulled.count} pushes have no"
                " mean: use weights above 0, or reduce='sum'"
            )
        if not summed.has_one_scale:
            raise Conflict(
                f"The pushes of step {pulled.step} had gradients of different scales, so they have no mean: update"
                " the scaler of every worker after the same pulls"
            )
        return pulled, used

    def set_rules(self, **rules: Unpack[BufferRules]) -> None:
        """Change these of the rules of all buffers, those of a server at one moment.

        None takes a rule away. If the running step fulfils a new rule already, it closes at once. One worker calls
        this for all. Workers that join or restart later follow, whatever rules they give, and warn in the log. Raises
        `InvalidInput` for rules that say whether steps close by themselves: every worker relies on that.
        """
        self._pushes.wait()
        self._sums.set_rules(rules)

    def catch_up(self) -> int:
        """Go on in the step that the run is in, without the gradients of those before, and return it.

        A worker that only pushes calls this after `StaleStep`, when another has pulled. What it has pushed in the
        running step still counts. With a quorum or a deadline, a worker that leaves means out needs the run's weights
        before its next push, as a worker that comes after step 0.
        """
        self._pushes.wait()
        step, _ = self._sums.position()
        if step > self.step:
            self._pushes.begin(step)
            if self._sums.closes_itself:
                self._joining.lags()
        return self.step

    def _broadcast_state(self, state: State, *, send: bool) -> None:
        """Send this state to all others, or set it to that of the worker that sends."""
        self._pushes.wait()
        calls = self._calls[1] if self._calls[0] == self.step else 0
        if send:
            self._check_sending()
            self._sent.write((self.step, calls), state.parts, state.numbers())
        else:
            (step, _), numbers = self._sent.wait((self.step, calls), self._timeout)
            state.set(numbers)
            self._joining.shares()
            if step != self.step:
                self._pushes.begin(step)
                calls = 0
        self._calls = self.step, calls + 1

    def _check_sending(self) -> None:
        """Raise `Conflict` if this worker's parameters may differ from those that the step has begun with."""
        self._joining.check(self.step)
        if self._joining.is_new and (
            self._sums.has_begun(self.step) or (self._sent.newest() or (-1, 0))[0] >= self.step
        ):
            raise self._joining.begun(self.step)
        self._joining.shares()

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this worker, and its buffers' servers, to save beside the states of the model."""
        self._pushes.wait()
        state: dict[str, Any] = {"run": self._sums.life, "step": self.step, "pushes": self._pushes.count}
        if self._feedback is not None:
            state["residuals"] = {name: self._as_state(one) for name, one in self._feedback.state().items()}
        return {**state, "shards": dict(self._sums.places)} if self._sums.places else state

    def _as_state(self, residual: Array) -> Any:
        """Return an array as a program saves it."""
        return residual.copy()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` of this `worker`.

        Raises `InvalidInput` if the client lacks a server of it, and if the worker has no name: the server would not
        recognize its pushes. Raises `Conflict` for a state of another run.
        """
        self._pushes.wait()
        if self._worker is None:
            raise InvalidInput(
                "This worker has no name, so the server would count its repeated pushes again: give each worker its own"
                " name, as with worker=f'rank{rank}'"
            )
        places = state.get("shards", self._sums.places)
        self._server.place(places)
        if state.get("run", self._sums.life) != self._sums.life:
            self._server.place(self._sums.places)
            raise Conflict(
                "This is the state of another run, or of one that was deleted since: load it into an accumulator of"
                " its run; to begin a new run with a checkpoint's weights, leave out load_state_dict()"
            )
        if places != self._sums.places:
            self._open(places)
        if self._feedback is not None:
            self._feedback.load(state.get("residuals", {}))
        self._pushes.begin(state["step" if "step" in state else "epoch"], state["pushes"], again=True)
        self._joining.loads()
