"""The sums of a model's gradients on a server: pushes and pulls of all buffers, in requests below a size."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from gradserve_client._adding import added
from gradserve_client._http.placement import balanced
from gradserve_client._http.policy import Call
from gradserve_client._runs.losses import KEPT_LOSSES
from gradserve_client._runs.parts import Group, Part, rounds
from gradserve_client._runs.rules import canonical
from gradserve_client._runs.summed import Read, Summed
from gradserve_client._wire import answers, bulk
from gradserve_client._wire.specs import Reduce
from gradserve_client._wire.tensors import Array
from gradserve_client.client import Client
from gradserve_client.errors import Conflict, InvalidInput, NothingToAverage, StaleStep, explained
from gradserve_client.models import BufferRules, Receipt
from gradserve_client.rows import Sent

T = TypeVar("T")

_TALLIED = 3
"""Numbers at the end of a tally: 1, the scale of the gradients, and its square."""


class Sums:
    """The buffers of a model, `parts` by their names, their tallies, and that of the losses if `loss` names one.

    Of the buffers' `rules`, None is omitted.
    """

    def __init__(
        self,
        server: Client,
        parts: Mapping[str, Part],
        rules: Mapping[str, Any],
        request_bytes: int,
        loss: str | None = None,
    ) -> None:
        self._server, self._gradients, self._request_bytes, self._loss = server, [*parts], request_bytes, loss
        self._parts = dict(parts) if loss is None else {**parts, loss: Part((), "float64", None)}
        self._rules = {name: rule for name, rule in rules.items() if rule is not None}
        self.places: Mapping[str, str] = {}
        """The URLs of the buffers' servers, if the client has several servers."""
        self.life = ""
        """The life of the run: the buffers are of no earlier run of its name."""

    @property
    def closes_itself(self) -> bool:
        """Whether steps close by themselves: by their quorum or a deadline."""
        return _closes_itself(self._rules)

    def found_places(self, prefix: str) -> dict[str, str]:
        """Return the servers of the buffers: where they exist, else balanced by bytes."""
        found = self._server.places(prefix)
        new = balanced({name: part.nbytes for name, part in self._parts.items()}, self._server.urls)
        return {name: found.get(name, url) for name, url in new.items()}

    def open(self, places: Mapping[str, str]) -> None:
        """Create the buffers that do not exist, on the servers of these URLs by name if there are several servers."""
        self._rounds = rounds(self._parts, places, self._request_bytes)
        groups = [group for one in self._rounds for group in one.groups]
        if places:
            self.places = {**places, **{group.tally: places[group.names[0]] for group in groups}}
        self._server.place(self.places)
        self._create()

    def buffers(self, places: Mapping[str, str]) -> dict[str, str]:
        """Return a buffer of each server by the server's URL."""
        found: dict[str, str] = {}
        for name in self._parts:
            found.setdefault(places.get(name, self._server.url), name)
        return found

    def _create(self) -> None:
        rules = {**self._rules, "life": self.life}
        tally = {name: rule for name, rule in rules.items() if name != "max_norm"}
        own = {self._loss: {**tally, "keep": KEPT_LOSSES}}
        for one in self._rounds:
            specs: dict[str, Any] = {}
            for group in one.groups:
                for name in group.names:
                    shape, dtype = self._parts[name].shape, self._parts[name].dtype
                    specs[name] = {"shape": shape, "dtype": dtype, **own.get(name, rules)}
                specs[group.tally] = {"shape": len(group.names) + _TALLIED, "dtype": "float64", **tally}
            self._server.buffers.create_many(specs)

    def set_rules(self, rules: BufferRules) -> None:
        """Change rules of all buffers. Raises `InvalidInput` if steps would begin or cease to close by themselves."""
        new = {name: rule for name, rule in {**self._rules, **rules}.items() if rule is not None}
        if _closes_itself(new) != self.closes_itself:
            raise InvalidInput(
                "The new rules would change whether steps close by themselves: take another run for that",
                code="invalid_parameter",
            )
        of_all: Any = {name: rule for name, rule in rules.items() if name != "max_norm"}
        if of_all:
            self._server.buffers.set_rules([name for one in self._rounds for name in one.names], **of_all)
        if "max_norm" in rules:  # not of the tallies and the losses, whose numbers are no gradients
            self._server.buffers.set_rules(self._gradients, max_norm=rules["max_norm"])
        self._rules = new

    def rules(self) -> dict[str, Any]:
        """Return the rules of the buffers as they are."""
        return canonical(vars(self._server.buffers[next(iter(self._parts))].info()))

    def follow(self, rules: Mapping[str, Any]) -> list[str]:
        """Take these rules in place of those given. Return what differs."""
        given = canonical(self._rules)
        self._rules |= rules
        self._rules = {name: rule for name, rule in self._rules.items() if rule is not None}
        return [f"{name} is {rule}, not {given[name]}" for name, rule in rules.items() if rule != given[name]]

    def identity(self, worker: str) -> str:
        """Return what the keys of a worker's changes begin with.

        The server may still remember the keys of earlier buffers with the same names.
        """
        return hashlib.sha256(f"{self.life} {worker}".encode()).hexdigest()[:32]

    def position(self) -> tuple[int, int]:
        """Return the earliest step of the buffers, and its count: the greatest of a buffer.

        Rounds may be a step apart, if it closes while they are read, and so may servers. Raises `Conflict` if the
        buffers do not belong to the same model.
        """
        steps: dict[int, Receipt] = {}
        units: set[tuple[object, ...]] = set()
        for number, one in enumerate(self._rounds):
            found = self._server.buffers.accumulate(dict.fromkeys(one.names, 0.0), do_update=False)
            units |= {(number, self.places.get(name), found[name].step) for name in one.names}
            for receipt in found.values():
                steps[receipt.step] = max(steps.get(receipt.step, receipt), receipt, key=lambda one: one.count)
        if len({unit[:-1] for unit in units}) < len(units) or max(steps) - min(steps) > 1:
            first, *_, second = [steps[step] for step in sorted(steps)]
            raise Conflict(
                f"The buffers do not belong to the same model: {first.name!r} is in step {first.step},"
                f" {second.name!r} in {second.step}; use another run, or delete the buffers"
            )
        return min(steps), steps[min(steps)].count

    def has_begun(self, step: int) -> bool:
        """Return whether the step has pushes, or follows one that has closed. After `zero` it follows none."""
        closed = self._server.buffers[next(iter(self._parts))].info().closed_steps
        return self.position() != (step, 0) or step - 1 in closed

    def add(
        self,
        numbers: Mapping[str, Sent],
        used: set[str],
        *,
        weight: float,
        scale: float,
        step: int,
        contributor: str | None,
        key: str,
    ) -> list[Receipt]:
        """Add `weight` times the numbers, all or none, and return a receipt of each group.

        The `used` buffers have a gradient. Several servers add at the same time, once each of them has all numbers.
        """
        groups = [group for one in self._rounds for group in one.groups]
        tallies = {group.tally: _tally(group, used, scale, weight) for group in groups}
        add = bulk.accumulate(
            {**numbers, **tallies},
            weight=weight,
            step=step,
            contributor=contributor,
            life=self.life,
            idempotency_key=key,
        )
        is_one_request = len(groups) == 1 and "max_norm" not in self._rules  # which is for the whole push
        receipts = added(self._server.buffers._runner, add, None if is_one_request else self._request_bytes)
        return [receipts[tally] for tally in tallies]

    def pull(self, step: int, reduce: Reduce, timeout: float) -> Summed:
        """Return the sums or means of the step: once it has closed, or close it if it does not close by itself.

        Workers that close the same step get the same.
        """
        return self._closed(step, reduce, timeout) if self.closes_itself else self._taken(step, reduce)

    def _closed(self, step: int, reduce: Reduce, timeout: float) -> Summed:
        end = time.monotonic() + timeout

        def fetch(names: Sequence[str], dtype: str | None, reduce: Reduce) -> Call[Any]:
            rest = max(end - time.monotonic(), 0.0)
            more: Any = {"timeout": rest, "life": self.life, **_travels(dtype)}
            return bulk.value(names, None, step=step, reduce=reduce, **more)

        return self._summed(fetch, reduce)

    def _taken(self, step: int, reduce: Reduce) -> Summed:
        """Close the step of all buffers with one request to each server: a take, unless several reads are needed."""
        key = f"{self.identity('')}-{step}-take"

        def fetch(names: Sequence[str], dtype: str | None, reduce: Reduce) -> Call[Any]:
            more: Any = {"min_count": 1, "step": step, "timeout": 0.0, "life": self.life}
            more |= {"idempotency_key": f"{key}-{reduce}", **_travels(dtype)}
            return bulk.take(names, None, reduce=reduce, **more)

        reads = [names for one in self._rounds for names in one.reads(self._parts).values()]
        try:
            if len(reads) == 1:
                return self._summed(fetch, reduce)
            names = [name for some in reads for name in some]
            more: Any = {"min_count": 1, "step": step, "timeout": 0.0, "idempotency_key": key, "life": self.life}
            self._run(bulk.close_step(names, None, **more))
        except StaleStep as error:
            raise explained(
                error, f"Another client closed step {step}: without a quorum, only one worker may pull"
            ) from None
        return self._closed(step, reduce, 0.0)

    def _summed(self, fetch: Callable[..., Call[Any]], reduce: Reduce) -> Summed:
        summed = Summed()
        for one in self._rounds:
            found: dict[str, Read] = {}
            tallies = {group.tally for group in one.groups}
            for dtype, names in one.reads(self._parts).items():
                found |= self._found(partial(fetch, names, dtype), dtype, reduce, tallies)
            if self._loss in found:
                summed.loss = _mean(found.pop(self._loss), reduce)
            summed.enter(one, found, reduce)
        return summed

    def _found(
        self, fetch: Callable[[Reduce], Call[Any]], dtype: str | None, reduce: Reduce, tallies: set[str]
    ) -> dict[str, Read]:
        try:
            return self._finite(self._read(fetch(reduce)), dtype, reduce)
        except NothingToAverage:
            return _means(self._finite(self._read(fetch("sum")), dtype, "sum"), tallies)

    def _finite(self, found: dict[str, Read], dtype: str | None, reduce: Reduce) -> dict[str, Read]:
        """Return what was read of a closed step. What half precision made infinite, or 8 bits NaN, is read again."""
        lost = np.isnan if dtype == "int8" else np.isinf  # of a block with an infinity, codes have nothing
        infinite = [name for name, (value, _) in found.items() if value is not None and lost(value).any()]
        if dtype is None or not infinite:
            return found
        step = found[infinite[0]][1]["step"]
        return found | self._read(bulk.value(infinite, None, step=step, reduce=reduce, dtype=None, timeout=0.0))

    def _read(self, call: Call[Any]) -> dict[str, Read]:
        return self._run(replace(call, read=answers.values_with_receipts))

    def _run(self, call: Call[T]) -> T:
        return self._server.buffers._runner.run(call)


def _travels(dtype: str | None) -> dict[str, str | None]:
    """Return the arguments of values that are answered in this dtype."""
    return {"dtype": None, "wire_dtype": dtype} if dtype == "int8" else {"dtype": dtype}


def _closes_itself(rules: Mapping[str, Any]) -> bool:
    return not rules.keys().isdisjoint({"quorum", "quorum_weight", "deadline_seconds"})


def _tally(group: Group, used: set[str], scale: float, weight: float) -> Array:
    """Return what a push adds to the tally of a group, `weight` times.

    No sign of a weight may cancel what another push adds. A push of weight 0 adds nothing.
    """
    if not weight:
        return np.zeros(())
    return np.copysign(np.array([*(name in used for name in group.names), 1, scale, scale * scale], np.float64), weight)


def _mean(read: Read, reduce: Reduce) -> float | None:
    """Return the mean loss. Weights that sum to 0 have none."""
    value, receipt = read
    if value is None or not receipt["weight"]:
        return None
    return float(value) if reduce == "mean" else float(value) / float(receipt["weight"])


def _means(found: Mapping[str, Read], tallies: set[str]) -> dict[str, Read]:
    """Return the means of these sums. If the weights sum to 0, a tally stays a sum, and other means are None."""
    means = {}
    for name, (value, receipt) in found.items():
        weight = receipt["weight"]
        assert value is not None
        if weight:
            np.divide(value, weight, out=value)
        means[name] = (value if weight or name in tallies else None, receipt)
    return means
