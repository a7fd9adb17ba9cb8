"""A worker's place in a run of an accumulator: it opens the buffers, joins the run, and leaves it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
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
from gradserve_client._runs.losses import loss_name
from gradserve_client._runs.member import Member
from gradserve_client._runs.model import Model
from gradserve_client._runs.names import checked_prefix, first_new_run, new_run
from gradserve_client._runs.pushes import Pushes
from gradserve_client._runs.resuming import SPARE_STEPS, Resuming, every
from gradserve_client._runs.rules import FOLLOWS
from gradserve_client._runs.start import Start, fitting, form_of
from gradserve_client._runs.sums import Sums
from gradserve_client._wire.arguments import check_choice
from gradserve_client._wire.specs import Reduce, rules_json
from gradserve_client.client import Client
from gradserve_client.errors import Conflict, GradserveError, explained
from gradserve_client.models import BufferRules

MOST_PUSHES = 10**9
"""Pushes of a worker in a step, by default: the most that the server allows, so micro-batches need no limit."""

BEHIND = "run %s is in step %s, and this worker has its weights only once it loads its state_dict(); else %s"
"""What a worker says that comes to a run without `optimizer=`: a loop up to a last step may end at once."""

M = TypeVar("M")
"""The model as the framework has it."""

D = TypeVar("D")
"""A dtype as the framework has it."""


class Place(Generic[M, D]):
    """The place of a worker. A subclass says how a framework holds the gradients."""

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
        self.prefix = checked_prefix(run, prefix)
        """What the names of all buffers begin with."""
        self._server, self._timeout = server, timeout
        self._reduce, self._unused, self._worker = reduce, unused, worker
        request_bytes = fitting(server, request_bytes)
        pulled: Any = pull_dtype or ("bfloat16" if is_coded else wire_dtype)
        self._model = self._adapted(model, narrow, pulled, request_bytes)
        self._feedback = Feedback(self._model.parts) if is_coded else None
        source = None if optimizer is None else self._kept_source(model, optimizer, request_bytes)
        if source is not None:
            state_every = every(state_every, self._model.parts, source, rules)
            given["keep"] = max(keep, state_every + SPARE_STEPS)
        self._loss = loss_name(self.prefix, self._model.parts, loss)
        self._sums = Sums(server, self._model.parts, given, request_bytes, self._loss)
        places = self._sums.found_places(self.prefix) if len(server.urls) > 1 else {}
        server.place(places)
        self._first = first = Start(run, self._model, given)
        form = form_of(self._model, request_bytes, has_loss=loss)
        self._member = Member(server, run, self.prefix, worker, form, first.own)
        first.first = self._member.join(self._sums.buffers(places)).start
        self._sums.life = self._member.life
        self._open(places)
        step, count = self._sums.position()
        if start == "same" and step == 0:
            first.check(has_pushes=count > 0)
        self._joining = Joining(first, run, step, cares=start == "any", has_begun=self._member.has_begun)
        self._pushes = Pushes(self._sums, self._member, worker, step, new_run(run))
        life, urls, ttl = self._member.life, self._member.urls, rules.get("ttl_seconds")
        kept = partial(Kept, server, life=life, urls=urls, request_bytes=request_bytes, ttl=ttl)
        self._sent = kept(f"{self.prefix}::state")
        self._resuming: Resuming | None = None
        if source is not None:
            state, contributors = kept(f"{self.prefix}::kept"), rules.get("contributors") or ()
            self._resuming = Resuming(state, source, self._sums, self._member, state_every or 0, worker, contributors)
            if step and not self._resuming.goes_on(self._pushes, self._joining):
                raise Conflict(
                    f"{first_new_run(run)}, or load this worker's state_dict() without optimizer=. The run"
                    f" {self._member.run!r} is in step {step}, and its state is not on the server"
                )
        elif step and start == "same":
            logger.warning(BEHIND, self._member.run, step, new_run(run))
        self._calls = self.step, 0
        """The calls of `broadcast_parameters` in a step."""

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
                logger.warning(FOLLOWS, self.prefix, ", ".join(differing))
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
        return f"{type(self).__name__}({worker}prefix={self.prefix!r}, step={self.step}, server={self._server!r})"

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
    def step(self) -> int:
        """The step of the next push and pull."""
        return self._pushes.step
