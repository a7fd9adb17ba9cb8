"""A named accumulation buffer of a server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal, Unpack, overload

import numpy.typing as npt

from gradserve_client._http.runner import Runner
from gradserve_client._wire import answers
from gradserve_client._wire.answers import JSON
from gradserve_client._wire.arguments import answered, as_dtype, as_key, as_query
from gradserve_client._wire.specs import Reduce, add_query, matching, on, rules_json, spec_json
from gradserve_client._wire.tensors import MEDIA_TYPE, Array, TensorLike, encode
from gradserve_client.models import BufferInfo, BufferName, BufferRules, Receipt, Statistics, Taken
from gradserve_client.rows import Rows, tensors_of


class Buffer(BufferName):
    """A buffer: a sum with a name, a count and a weight. Operators take it as an input."""

    def __init__(self, runner: Runner, name: str) -> None:
        super().__init__(name)
        self._runner = runner

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r} at {self._runner.place_of(self.name)})"

    def create(
        self,
        shape: Sequence[int] | int,
        *,
        dtype: npt.DTypeLike = "float32",
        keep: int = 1,
        nonfinite: str = "allow",
        life: str | None = None,
        exist_ok: bool = True,
        idempotency_key: str | None = None,
        **rules: Unpack[BufferRules],
    ) -> BufferInfo:
        """Create the buffer with zeros. An equal buffer may exist already, unless `exist_ok` is False.

        `dtype` is float16, bfloat16, float32 or float64. The server keeps the last `keep` closed steps. With
        nonfinite="reject", it refuses gradients that would make the sum infinite or NaN. It refuses gradients whose
        2-norm, without the weight, is above `max_norm`. It deletes the buffer `ttl_seconds` after the last change.

        A step closes with its `quorum`th gradient, with the weight `quorum_weight`, or `deadline_seconds` after its
        first gradient; if `min_count` gradients are not in then, with the gradient that brings them. Each step expects
        the `contributors`, and takes `per_contributor` gradients of each contributor, also of others.

        Raises `Conflict` if a different buffer of this name exists, `PreconditionFailed` if any exists and `exist_ok`
        is False, `TooManyBuffers`, and `InvalidInput`, also for rules that contradict each other.

        >>> server.buffers["emb.weight"].create((30000, 256), quorum=8).bytes
        30720000
        """
        spec = spec_json(shape, dtype=dtype, keep=keep, nonfinite=nonfinite, life=life, **rules)
        headers = {"Content-Type": JSON, **({} if exist_ok else {"If-None-Match": "*"})}
        return self._runner.run(
            on(
                self.name,
                "PUT",
                "",
                answers.info,
                headers=headers,
                body=[json.dumps(spec).encode()],
                key=as_key(idempotency_key),
            )
        )

    def set_rules(
        self, *, if_match: str | None = None, idempotency_key: str | None = None, **rules: Unpack[BufferRules]
    ) -> BufferInfo:
        """Change these of the rules that `create` has, and return the metadata. None takes a rule away.

        If the running step fulfils a new rule already, the step closes at once. A deadline counts from the step's
        first gradient, or from this call if the buffer had no deadline. `if_match` is the `etag` that the buffer must
        have.

        Raises `NotFound`, `InvalidInput` and `PreconditionFailed`.

        >>> server.buffers["w1"].set_rules(quorum=None, deadline_seconds=30).deadline_seconds
        30.0
        """
        body, headers = [json.dumps(rules_json(rules)).encode()], {"Content-Type": JSON, **matching(if_match)}
        return self._runner.run(
            on(self.name, "PATCH", "", answers.info, headers=headers, body=body, key=as_key(idempotency_key))
        )

    @overload
    def info(self) -> BufferInfo: ...

    @overload
    def info(self, *, step: int, timeout: float = 0.0) -> Receipt: ...

    def info(self, *, step: int | None = None, timeout: float = 0.0) -> BufferInfo | Receipt:
        """Return the buffer's metadata, or the receipt of a closed `step`.

        The call waits up to `timeout` seconds until the step has closed. Raises `NotFound`, `StepOpen` after the
        `timeout`, and `StepGone` if the server no longer keeps the step.

        >>> server.buffers["w1"].info().shape
        (1, 2)
        >>> server.buffers["w1"].accumulate([[1, 2]], contributor="rank0").closed
        False
        >>> server.buffers["w1"].set_rules(quorum=1).count
        0
        >>> closed = server.buffers["w1"].info(step=0)
        >>> closed.closed_by, closed.contributors
        ('quorum', {'rank0': 1})
        """
        if step is None:
            return self._runner.run(on(self.name, "GET", "", answers.info))
        query = as_query({"step": step})
        return self._runner.run(on(self.name, "GET", "", answers.receipt, query=query, wait=timeout))

    def accumulate(
        self,
        gradient: TensorLike | Rows,
        *,
        weight: float = 1.0,
        step: int | None = None,
        overwrite: bool = False,
        do_update: bool = True,
        contributor: str | None = None,
        return_value: bool = False,
        if_match: str | None = None,
        idempotency_key: str | None = None,
    ) -> Receipt:
        """Add `weight` times the gradient to the sum, exactly once. The sum is on the server's disk afterwards.

        The server broadcasts the gradient to the buffer's shape and converts it to the buffer's dtype. `Rows` are a
        sparse gradient. The array must not change during the call. With `step`, the server refuses the gradient
        unless the buffer is in that step. The step lists the `contributor`. `overwrite` replaces the sum.
        `do_update=False` changes nothing. `return_value` puts the sum into the receipt's `value`. `if_match` is the
        `etag` that the buffer must have.

        Each call gets a new key, so that all its attempts count once. With your own `idempotency_key`, all calls with
        the same arguments count once together, as long as the server remembers the key (a day).

        Raises `NotFound`, `InvalidInput`, `StaleStep`, `DuplicateContributor`, `PreconditionFailed` and `StoreFull`.

        >>> server.buffers["w1"].accumulate([[1, 2]], weight=32).count
        1
        """
        query = add_query(weight, step, overwrite, do_update, contributor)
        accept = MEDIA_TYPE if return_value else JSON
        return self._runner.run(
            on(
                self.name,
                "POST",
                "/accumulate",
                answers.receipt_with_value if return_value else answers.receipt,
                query={**query, "return": "value"} if return_value else query,
                headers={"Content-Type": MEDIA_TYPE, "Accept": accept, **matching(if_match)},
                body=encode(tensors_of(gradient, "gradient")),
                key=as_key(idempotency_key),
            )
        )

    def value(
        self,
        *,
        step: int | None = None,
        reduce: Reduce = "sum",
        dtype: npt.DTypeLike | None = None,
        wire_dtype: Literal["int8"] | None = None,
        timeout: float = 0.0,
    ) -> Array:
        """Return the running sum, or the sum of `step`, after up to `timeout` seconds until the step has closed.

        reduce="mean" divides the sum by the sum of the weights. `dtype` is that of the result, by default the buffer's.
        With wire_dtype="int8" the value travels in 8 bits a number, about a quarter of float32. It is float32 then, and
        each number is off by up to 1/254 of the largest of its 256 neighbours.

        Raises `NotFound`, `StepOpen` after the `timeout`, `StepGone` if the server no longer keeps the step, and
        `NothingToAverage` for the mean of weights that sum to zero.

        >>> server.buffers["w1"].value()
        array([[0., 0.]], dtype=float32)
        """
        query = as_query({"step": step, "reduce": reduce, **answered(dtype, wire_dtype)})
        accept = {"Accept": MEDIA_TYPE}
        return self._runner.run(
            on(self.name, "GET", "/value", answers.value, query=query, headers=accept, wait=timeout)
        )

    def statistics(self, *, step: int | None = None, heat_map: int | None = None) -> Statistics:
        """Return what is in the sum, or in that of a closed `step`, with a histogram and past steps.

        With `heat_map`, also the means of at most this many rows and columns of cells, 256 at most. Raises `NotFound`,
        `StepOpen` and `StepGone`.

        >>> server.buffers["w1"].statistics().norm
        0.0
        """
        query = as_query({"step": step, "heat_map": heat_map})
        return self._runner.run(on(self.name, "GET", "/statistics", answers.statistics, query=query))

    def take(
        self,
        *,
        min_count: int = 0,
        step: int | None = None,
        timeout: float = 0.0,
        reduce: Reduce = "sum",
        dtype: npt.DTypeLike | None = None,
        if_match: str | None = None,
        idempotency_key: str | None = None,
    ) -> Taken:
        """Close the step, and return its receipt with its value: read and zero at once.

        The call waits up to `timeout` seconds for `min_count` gradients, and then raises `StepOpen`. It raises
        `StaleStep` if the buffer is not in `step`. If several clients take from a buffer, let it `keep` more steps
        than there are clients: a retry after a lost answer reads the closed step, or raises `StepGone`.

        >>> server.buffers["w1"].accumulate([[1, 2]], weight=2).closed
        False
        >>> server.buffers["w1"].take(min_count=1, reduce="mean").value
        array([[1., 2.]], dtype=float32)
        """
        return self._runner.run(
            on(
                self.name,
                "POST",
                "/take",
                answers.taken,
                query=as_query({"min_count": min_count, "step": step, "reduce": reduce, "dtype": as_dtype(dtype)}),
                headers={"Accept": MEDIA_TYPE, **matching(if_match)},
                key=as_key(idempotency_key),
                wait=timeout,
            )
        )

    def zero(self, *, if_match: str | None = None, idempotency_key: str | None = None) -> Receipt:
        """Discard the sum, and begin the next step.

        >>> server.buffers["w1"].zero().step
        1
        """
        headers, key = matching(if_match), as_key(idempotency_key)
        return self._runner.run(on(self.name, "POST", "/zero", answers.receipt, headers=headers, key=key))

    def delete(self, *, if_match: str | None = None, idempotency_key: str | None = None) -> None:
        """Delete the buffer, its value and its closed steps. Raises `NotFound`.

        >>> server.buffers["w1"].delete()
        """
        headers, key = matching(if_match), as_key(idempotency_key)
        return self._runner.run(on(self.name, "DELETE", "", answers.deleted, headers=headers, key=key))
