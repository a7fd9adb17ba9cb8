"""What the accumulators of all frameworks have alike: a worker's place in a run, its pushes and its pulls."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar, Unpack

from gradserve_client._http.log import logger
from gradserve_client._runs.environment import with_environment
from gradserve_client._runs.feedback import Feedback
from gradserve_client._runs.given import check_rules, check_server, check_worker
from gradserve_client._runs.joining import Joining
from gradserve_client._runs.kept import Kept, Source
from gradserve_client._runs.losses import Loss, loss_name, loss_of
from gradserve_client._runs.member import Member
from gradserve_client._runs.model import Model, State
from gradserve_client._runs.names import checked_prefix, first_new_run, new_run
from gradserve_client._runs.outcomes import Pulled, Pushed
from gradserve_client._runs.pushes import Pushes
from gradserve_client._runs.resuming import SPARE_STEPS, Resuming, every
from gradserve_client._runs.rules import FOLLOWS
from gradserve_client._runs.start import Start, fitting, form_of
from gradserve_client._runs.summed import Summed
from gradserve_client._runs.sums import Sums
from gradserve_client._wire.arguments import check_choice
from gradserve_client._wire.specs import Reduce, rules_json
from gradserve_client._wire.tensors import Array
from gradserve_client.client import Client
from gradserve_client.errors import (
    Conflict,
    GradserveError,
    InvalidInput,
    NothingToAverage,
    StepGone,
    StepOpen,
    explained,
    mistaken,
)
from gradserve_client.models import BufferRules
from gradserve_client.rows import Gradient, Sent

MOST_PUSHES = 10**9
"""Pushes of a worker in a step, by default: the most that the server allows, so micro-batches need no limit."""

BEHIND = "run %s is in step %s, and this worker has its weights only once it loads its state_dict(); else %s"
"""What a worker says that comes to a run without `optimizer=`: a loop up to a last step may end at once."""

M = TypeVar("M")
"""The model as the framework has it."""

D = TypeVar("D")
"""A dtype as the framework has it."""

T = TypeVar("T")


class Accumulator(Generic[M, D]):
    """Sums the gradients of a model in buffers on a server. A subclass says how a framework holds them."""

    _model: Model

    def __init__(
        self,
        model: M,
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
        wire_dtype: D | Literal["int8"] | None = None,
        pull_dtype: Literal["int8"] | None = None,
        request_bytes: int | None = None,
        nonfinite: str | None = None,
        loss: bool = False,
        optimizer: Any = None,
        state_every: int | None = None,
        **rules: Unpack[BufferRules],
    ) -> None:
        """Begin a run, or join it.

        ===================  ===========================================================================================
        `run`                the name of the run; another run takes another name
        `prefix`             what the names of the buffers begin with, by default the run and a dot
        `worker`             the worker's own name: a push that it repeats after a restart then counts once
        `quorum`             the number of pushes that closes a step
        `keep`               the number of closed steps that can be pulled
        `timeout`            the seconds that `pull` waits
        `start`              "same": weights are compared in step 0, and come from the run later; "any": as you care
        `reduce`             "mean" or "sum": what `pull` sets
        `unused`             "none" or "zeros": the gradient of a parameter that nobody had a gradient for
        `wire_dtype`         float16 or bfloat16: how gradients travel unless that makes one infinite; or "int8", a
                             quarter of float32: what rounding cuts off is added to the worker's next gradients
        `pull_dtype`         "int8": means travel in 8 bits, too, not in the `wire_dtype`, or in bfloat16 beside "int8"
        `request_bytes`      the bytes of a request at most, alike in all workers: 64 MiB, or half of the server's limit
        `loss`               whether each push has a loss, alike in all workers: `pull` gives the mean of the losses
        `optimizer`          what else a worker needs to go on: the server keeps it with the model, and a worker that
                             is started again goes on from there, without a checkpoint of its own
        `state_every`        the steps between two of these states, by default for a tenth of the gradients' bytes
        `ttl_seconds`        how long after its last change the server deletes a buffer: longer than any pause
        `per_contributor`    the number of pushes that a step takes of each worker, by default any
        `nonfinite`, others  the other rules of the buffers: docs/buffers.md. None is the server's default
        ===================  ===========================================================================================
        """
        check_choice("start", start, ("same", "any"))
        check_choice("reduce", reduce, ("mean", "sum"))
        check_choice("unused", unused, ("none", "zeros"))
        is_coded = isinstance(wire_dtype, str) and wire_dtype == "int8"
        narrow: Any = None if is_coded else wire_dtype
        self._check_wire(narrow)
        check_choice("pull_dtype", pull_dtype, (None, "int8"))
        check_server(server)
        given: dict[str, Any] = {"keep": keep, "nonfinite": nonfinite, "per_contributor": MOST_PUSHES, **rules}
        check_rules({**given, **rules_json(rules)})
        check_worker(worker, rules.get("contributors"))
        self._prefix = checked_prefix(run, prefix)
        self._server, self._timeout = server, timeout
        self._reduce, self._unused, self._worker = reduce, unused, worker
        request_bytes = fitting(server, request_bytes)
        pulled: Any = pull_dtype or ("bfloat16" if is_coded else wire_dtype)
        self._model = self._adapted(model, narrow, pulled, request_bytes)
        self._feedback = Feedback(self._model.parts) if is_coded else None
        self._source = None if optimizer is None else self._kept_source(model, optimizer, request_bytes)
        if self._source is not None:
            state_every = every(state_every, self._model.parts, self._source, rules)
            given["keep"] = max(keep, state_every + SPARE_STEPS)
        ttl_seconds = rules.get("ttl_seconds")
        self._loss = loss_name(self._prefix, self._model.parts, loss)
        self._sums = Sums(server, self._model.parts, given, request_bytes, self._loss)
        places = self._sums.found_places(self._prefix) if len(server.urls) > 1 else {}
        server.place(places)
        self._first = first = Start(run, self._model, given)
        form = form_of(self._model, request_bytes, has_loss=loss)
        self._member = Member(server, run, self._prefix, worker, form, first.own)
        first.first = self._member.join(self._sums.buffers(places)).start
        self._sums.life = self._member.life
        self._open(places)
        step, count = self._sums.position()
        if start == "same" and step == 0:
            first.check(has_pushes=count > 0)
        self._joining = Joining(first, run, step, cares=start == "any", has_begun=self._member.has_begun)
        self._pushes = Pushes(self._sums, self._member, worker, step, new_run(run))
        kept = partial(Kept, server, life=self._member.life, urls=self._member.urls, request_bytes=request_bytes)
        self._sent, state = (
            kept(f"{self._prefix}::state", ttl=ttl_seconds),
            kept(f"{self._prefix}::kept", ttl=ttl_seconds),
        )
        self._resuming = self._new_resuming(state, state_every or 0, rules.get("contributors"))
        if step and self._resuming is not None and not self._resuming.goes_on(self._pushes, self._joining):
            raise Conflict(
                f"{first_new_run(run)}, or load this worker's state_dict() without optimizer=. The run"
                f" {self._member.run!r} is in step {step}, and its state is not on the server"
            )
        if step and self._source is None and start == "same":
            logger.warning(BEHIND, self._member.run, step, new_run(run))
        self._calls = self.step, 0
        """The calls of `broadcast_parameters` in a step."""

    def _new_resuming(self, kept: Kept, state_every: int, contributors: Sequence[str] | None) -> Resuming | None:
        if self._source is None:
            return None
        self._source.begin(kept.prefix)
        return Resuming(kept, self._source, self._sums, self._member, state_every, self._worker, contributors or ())

    @classmethod
    def from_env(cls, model: M, server: Client, *, run: str, **given: Any) -> Self:
        """Return the accumulator of a worker that torchrun has started, or that has `RANK` and `WORLD_SIZE` set.

        Each argument of the class may be given. Those that are not follow from the two variables. Worker 1 of 4 gets
        `worker="rank1"`, `quorum=4`, `contributors=["rank0", "rank1", "rank2", "rank3"]`, `deadline_seconds=120` and
        `min_count=2`. So each worker pushes once in a step, which waits two minutes for a worker that is started
        again, and then goes on if at least half of the pushes are in. For 3 pushes of each, give `quorum=12`.

        Raises `InvalidInput` if a variable is missing or wrong.
        """
        return cls(model, server, run=run, **with_environment(given))

    def _open(self, places: Mapping[str, str]) -> None:
        """Open the buffers. If their rules have changed since the first worker gave them, follow these."""
        try:
            self._sums.open(places)
        except Conflict as error:
            if error.code != "buffer_exists":
                raise
            if self._first.has(rules := self._sums.rules()):
                raise explained(error, f"All workers of a run give the same; {new_run(self._member.run)}") from None
            if differing := self._sums.follow(rules):
                logger.warning(FOLLOWS, self._prefix, ", ".join(differing))
            self._sums.open(places)

    @abstractmethod
    def _check_wire(self, dtype: D | None) -> None:
        """Raise `InvalidInput` if gradients cannot travel in this dtype."""

    @abstractmethod
    def _kept_source(self, model: M, optimizer: Any, limit: int) -> Source:
        """Return what the server keeps of the model and its optimizer."""

    @abstractmethod
    def _adapted(self, model: M, wire: Any, pulled: Any, limit: int) -> Any:
        """Return the model in buffers of at most `limit` bytes. Its sums are answered in the dtype `pulled`."""

    def __repr__(self) -> str:
        worker = "" if self._worker is None else f"{self._worker!r}, "
        return f"{type(self).__name__}({worker}prefix={self._prefix!r}, step={self.step}, server={self._server!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        else:
            with suppress(GradserveError):  # the program has another error already
                self._member.finish(error)

    def finish(self) -> None:
        """Say that this worker has done its part, and leave the run: no step waits for it. The last worker ends it.

        A `with` block does this at its end; after an exception the run has failed.
        """
        self._pushes.wait()
        self._member.finish()

    @property
    def prefix(self) -> str:
        """What the names of all buffers begin with."""
        return self._prefix

    @property
    def step(self) -> int:
        """The step of the next push and pull."""
        return self._pushes.step

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
