"""The engine: checks tensors against an operator's inputs, and runs its kernel in the thread pool."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from threadpoolctl import threadpool_limits

from service.dtypes import Array, DType
from service.engine.arena import Arena
from service.engine.pool import Pool
from service.errors import MissingTensor, UnknownTensor, cut, shown
from service.kernels import Operator, Workspace, check_dtypes, check_work, workspace
from service.limits import Limits

MAX_MEMBER_CHARACTERS = 100
"""Characters of a tensor's name in a group."""

Reserve: TypeAlias = Callable[[int], None]
"""A function that reserves bytes, or raises."""


class Engine:
    """A pool of `threads`, the `limits` of every tensor, and up to `reuse_bytes` of free memory for new tensors."""

    def __init__(self, *, threads: int, limits: Limits, reuse_bytes: int) -> None:
        self.limits = limits
        # BLAS must not start threads beside the pool's: its results would also depend on their number, bit for bit.
        threadpool_limits(1, user_api="blas")
        pool = self.pool = Pool(threads)
        self._arena = Arena(reuse_bytes)
        empty = self.empty = self._arena.allocate
        """Makes an uninitialised array, in memory of past tensors if some is free."""
        self._workspace = Workspace(pool.executor, threads, self._allocate, empty, empty, give_way=pool.give_way)
        self._alone = Workspace(allocate=self._allocate, spare=empty, scratch=empty)

    def buffer(self, size: int) -> memoryview:
        """Return `size` uninitialised bytes, in memory of past tensors if some is free."""
        return self._arena.allocate((size,), np.dtype(np.uint8)).data

    def run(
        self,
        operator: Operator,
        tensors: Mapping[str, Array],
        attributes: Mapping[str, Any],
        wanted: Sequence[str] | None = None,
        *,
        alone: bool = False,
        reserve: Reserve | None = None,
    ) -> dict[str, Array]:
        """Return the operator's outputs, name -> array: all, or those `wanted`. `alone` uses the calling thread only.

        `reserve` gets the bytes of each output and intermediate result before there is memory for it. Raises
        `UnknownTensor`, `MissingTensor`, `DtypeMismatch`, `TensorTooLarge`, what `reserve` raises, and the kernel's own
        errors.
        """
        self._check(operator, tensors, attributes)
        space = self._alone if alone else self._workspace
        with workspace(space if reserve is None else self._reserving(reserve)):
            return operator(tensors, attributes, wanted)

    def in_pieces(
        self, operator: Operator, tensors: Mapping[str, Array], attributes: Mapping[str, Any], reserve: Reserve
    ) -> Any:
        """Return the only output of a `sparse` operator in pieces, never whole in memory. Raises like `run`."""
        self._check(operator, tensors, attributes)
        with workspace(self._reserving(reserve)):
            return operator.in_pieces(tensors, attributes)

    def _reserving(self, reserve: Reserve) -> Workspace:
        """Return the pool's workspace, whose memory is reserved first."""

        def allocate(shape: tuple[int, ...], dtype: DType) -> Array:
            self.limits.check(None, shape, dtype, label="The output")
            return spare(shape, dtype)

        def spare(shape: tuple[int, ...], dtype: DType) -> Array:
            reserve(math.prod(shape) * dtype.itemsize)
            return self._arena.allocate(shape, dtype)

        return replace(self._workspace, allocate=allocate, spare=spare, claim=reserve)

    def _check(self, operator: Operator, tensors: Mapping[str, Array], attributes: Mapping[str, Any]) -> None:
        """Raise what `run` raises unless the tensors fit the operator and the limits."""
        check_names(operator, tensors)
        known = operator.inputs_by_name
        if operator.has_groups:
            given = [(name, known.get(name) or known[name.partition(".")[0]], tensors[name].dtype) for name in tensors]
        else:
            given = [(name, one, tensors[name].dtype) for name, one in known.items() if name in tensors]
        check_dtypes(given)
        for name, tensor in tensors.items():
            if tensor.nbytes > self.limits.max_tensor_bytes or tensor.ndim > self.limits.max_dimensions:
                self.limits.check(name, tensor.shape, tensor.dtype)
        if operator.multiply_adds is not None:
            check_work(operator.name, operator.work(tensors, attributes))

    def _allocate(self, shape: tuple[int, ...], dtype: DType) -> Array:
        self.limits.check(None, shape, dtype, label="The output")
        return self._arena.allocate(shape, dtype)


def check_known(operator: Operator, names: Iterable[str]) -> None:
    """Raise `UnknownTensor` unless each of `names` is an input of `operator`, or a tensor in a group of inputs."""
    for name in names:
        if name in operator.groups or name not in operator.inputs_by_name:
            _check_member(operator, name)


def check_names(operator: Operator, names: Collection[str]) -> None:
    """Raise `UnknownTensor` or `MissingTensor` unless `names` are inputs of `operator` and hold each required one."""
    check_known(operator, names)
    for name in operator.needed_names:
        if name in names:
            continue
        group = operator.inputs_by_name[name].group
        if not group or not any(one.startswith(f"{name}.") for one in names):
            like = f", as {name}.NAME" * group
            raise MissingTensor(f"{operator.name} needs the input {name!r}{like}", tensor=name)


def _check_member(operator: Operator, name: str) -> None:
    """Raise `UnknownTensor` unless this is the name of a tensor in a group."""
    group, _, member = name.partition(".")
    tensor = operator.inputs_by_name.get(group)
    if tensor is None or not tensor.group:
        raise unknown_input(operator, name)
    if tensor.members is not None and member not in tensor.members:
        raise UnknownTensor(
            f"{shown(name)} is no tensor of the group {group}, which has {cut(', '.join(tensor.members), 1000)}",
            tensor=name,
        )
    if not 1 <= len(member) <= MAX_MEMBER_CHARACTERS or not member.isprintable():
        raise UnknownTensor(
            f"{shown(name)} is no tensor of the group {group}: after the dot, it needs a name of 1 to"
            f" {MAX_MEMBER_CHARACTERS} printable characters",
            tensor=name,
        )


def unknown_input(operator: Operator, name: str) -> UnknownTensor:
    """Return the error of a name that no input has."""
    inputs = ", ".join(tensor.name + ".NAME" * tensor.group for tensor in operator.inputs)
    return UnknownTensor(f"{operator.name} has no input {shown(name)}; its inputs are {inputs}", tensor=name)
