"""The engine: binds tensors to an operator's inputs, checks them, and runs the kernel in the thread pool."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from threadpoolctl import threadpool_limits

from service.arena import Arena
from service.dtypes import NAMES, Array, DType
from service.errors import DtypeMismatch, MissingTensor, UnknownTensor, shown
from service.kernels import Operator, Workspace, workspace
from service.limits import Limits

R = TypeVar("R")


class Engine:
    """One pool of `threads`, the `limits` of every tensor, and at most `reuse_bytes` of memory kept for new ones."""

    def __init__(self, *, threads: int, limits: Limits, reuse_bytes: int) -> None:
        self.limits = limits
        # BLAS must not start threads of its own beside the pool's, and its bits must not depend on their number.
        threadpool_limits(1, user_api="blas")
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="gradserve")
        self._lock = threading.Lock()
        self.waiting = 0
        """How much was submitted that has neither started nor been cancelled."""
        self._arena = Arena(reuse_bytes)
        self._workspace = Workspace(self._pool, threads, self._allocate, self._arena.allocate)
        self._alone = Workspace(allocate=self._allocate, spare=self._arena.allocate)

    def buffer(self, size: int) -> memoryview:
        """`size` uninitialised bytes, in memory of past tensors where there is some."""
        return self._arena.allocate((size,), np.dtype(np.uint8)).data

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """An uninitialised array, in memory of past tensors where there is some."""
        return self._arena.allocate(shape, dtype)

    def submit(self, work: Callable[[], R]) -> Future[R]:
        """Call `work` in the pool. A future that is cancelled before it starts is dropped."""

        waiting = [work]

        def start() -> R:
            self._count_waiting(-1)
            return waiting.pop()()

        def drop(ended: Future[R]) -> None:
            if ended.cancelled():
                self._count_waiting(-1)
                waiting.clear()  # the pool keeps what is cancelled until a thread comes to it

        self._count_waiting(1)
        future = self._pool.submit(start)
        future.add_done_callback(drop)
        return future

    def _count_waiting(self, change: int) -> None:
        with self._lock:
            self.waiting += change

    def close(self) -> None:
        """Finish what runs, drop what waits, and end the threads."""
        self._pool.shutdown(cancel_futures=True)

    def run(
        self,
        operator: Operator,
        tensors: Mapping[str, Array],
        attributes: Mapping[str, Any],
        wanted: Sequence[str] | None = None,
        *,
        alone: bool = False,
    ) -> dict[str, Array]:
        """The operator's outputs, name -> array, or those `wanted`. Idle threads of the pool join in, unless `alone`.

        Raises `UnknownTensor`, `MissingTensor`, `DtypeMismatch`, `TensorTooLarge`, and what the kernel raises.
        """
        self._check(operator, tensors)
        with workspace(self._alone if alone else self._workspace):
            return operator(tensors, attributes, wanted)

    def in_pieces(self, operator: Operator, tensors: Mapping[str, Array], attributes: Mapping[str, Any]) -> Any:
        """The only output of a `sparse` operator, as a gradient that is never whole. Raises like `run`."""
        self._check(operator, tensors)
        return operator.in_pieces(tensors, attributes)

    def _check(self, operator: Operator, tensors: Mapping[str, Array]) -> None:
        _check_types(operator, tuple([(name, tensor.dtype) for name, tensor in tensors.items()]))
        for name, tensor in tensors.items():
            self.limits.check(name, tensor.shape, tensor.dtype)

    def _allocate(self, shape: tuple[int, ...], dtype: DType) -> Array:
        self.limits.check(None, shape, dtype, what="The output")
        return self._arena.allocate(shape, dtype)


def check_names(operator: Operator, names: Collection[str]) -> None:
    """Raise `UnknownTensor` or `MissingTensor` unless `names` are inputs of `operator`, and hold all that it needs."""
    for name in names:
        if name not in operator.input_names:
            known = ", ".join(tensor.name for tensor in operator.inputs)
            raise UnknownTensor(f"{operator.name} has no input {shown(name)}; its inputs are {known}", tensor=name)
    for name in operator.needed_names:
        if name not in names:
            raise MissingTensor(f"{operator.name} needs the input {name!r}", tensor=name)


@lru_cache(maxsize=1024)
def _check_types(operator: Operator, given: Sequence[tuple[str, DType]]) -> None:
    """Raise `UnknownTensor`, `MissingTensor` or `DtypeMismatch` unless the tensors `given`, by name and dtype, fit."""
    dtypes = dict(given)
    check_names(operator, dtypes)
    bound: dict[str, tuple[str, DType]] = {}
    for expected in operator.inputs:
        if expected.name not in dtypes:
            continue
        name, dtype = expected.name, dtypes[expected.name]
        if NAMES.get(dtype) not in expected.kind.dtypes:
            raise DtypeMismatch(f"{name} is {dtype}, but must be one of {', '.join(expected.kind.dtypes)}", tensor=name)
        if expected.variable is None:
            continue
        first, common = bound.setdefault(expected.variable, (name, dtype))
        if dtype != common:
            raise DtypeMismatch(
                f"{name} is {dtype} and {first} is {common}, but they must share a dtype"
                f" (a JSON list without one is {expected.kind.default})",
                tensor=name,
            )
