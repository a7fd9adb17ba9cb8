"""A kernel's memory and threads: blocks that fit into the cache, shared out over a pool.

By default a kernel runs in the calling thread and allocates with NumPy. Inside `workspace(...)` idle threads of the
pool join in, and outputs come from the caller's allocator. The blocks depend on the shapes alone, so the bits of a
result do not depend on the number of threads.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from service.dtypes import Array, DType
from service.errors import ShapeMismatch, TensorTooLarge

T = TypeVar("T", bound=Array)

BLOCK_BYTES = 1 << 20
"""Bytes of one tensor in a block.

Smaller blocks fit into a faster cache, but threads hand the interpreter lock over more often, which costs more. A
tensor of one block has no helper: to start a helper and to wait for it takes 0.15 ms, which is the time of the block.
"""

TEMPORARIES_BYTES = 3 << 19
"""Bytes of a block's temporaries together, in each thread. With more, two threads would have over 4 MB of scratch."""

NARROW_BLOCK_LENGTH = 96 << 10
"""Elements of one tensor of a 16-bit float in a block: two threads have up to five such blocks as float32 in 4 MB."""

SCRATCH_BYTES = 1 << 22
"""The most bytes of scratch that a thread keeps in each slot."""

CACHE_LINE_BYTES = 64
"""Bytes of a cache line. An array that starts inside a line is slower: each wide vector of it touches two lines."""


@dataclass(frozen=True)
class Workspace:
    """A pool whose idle threads help, how many threads work at once, and the allocators.

    They allocate outputs, spare memory for intermediate results, and large scratch, which is freed after each block.
    `claim` gets the bytes of what NumPy allocates by itself. All but `scratch` may raise, to end the kernel.
    `give_way` gets `claim`, and waits for the turns of others. Only the thread that has started the work may call it.
    """

    pool: Executor | None = None
    threads: int = 1
    allocate: Callable[[tuple[int, ...], DType], Array] = np.empty
    spare: Callable[[tuple[int, ...], DType], Array] = np.empty
    scratch: Callable[[tuple[int, ...], DType], Array] = np.empty
    claim: Callable[[int], None] = lambda size: None
    give_way: Callable[[Callable[[int], None]], None] = lambda claim: None


_DEFAULT = Workspace()
_current: ContextVar[Workspace] = ContextVar("workspace", default=_DEFAULT)
_scratch = threading.local()


class workspace:
    """A context manager: kernels called inside it use `space`."""

    def __init__(self, space: Workspace) -> None:
        self._space = space

    def __enter__(self) -> None:
        self._token = _current.set(self._space)

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)


def current_workspace() -> Workspace:
    """Return the workspace that kernels called here use."""
    return _current.get()


def new_output(out: T | None, shape: tuple[int, ...], dtype: DType) -> T:
    """Return `out`, or, if that is None, uninitialised memory from the workspace.

    Raises `ShapeMismatch` unless `out` is a writeable, C-contiguous array of this shape and dtype, and `TensorTooLarge`
    if there is not enough memory.
    """
    if out is None:
        return _allocate("an output", _current.get().allocate, shape, dtype)  # type: ignore[return-value]
    if out.shape != shape or out.dtype != dtype or not (out.flags.c_contiguous and out.flags.writeable):
        raise ShapeMismatch(
            f"out must be a writeable C-contiguous {dtype} array of shape {list(shape)},"
            f" but is {out.dtype} of shape {list(out.shape)}",
            tensor="out",
        )
    return out


def spare_memory(shape: tuple[int, ...], dtype: DType) -> Array:
    """Return uninitialised memory for an intermediate result. Raises `TensorTooLarge` if there is not enough."""
    return _allocate("an intermediate result", _current.get().spare, shape, dtype)


def claim(size: int) -> None:
    """Tell the workspace that NumPy is about to allocate `size` bytes by itself. Raises what the workspace raises."""
    _current.get().claim(size)


def row_major(tensor: Array) -> Array:
    """Return the tensor row-major: itself, or a copy, which is claimed."""
    if tensor.flags.c_contiguous:
        return tensor
    claim(tensor.nbytes)
    return tensor.copy(order="C")


def check_wanted() -> None:
    """Raise what the workspace raises if nobody waits for the outputs any more. Kernels of many blocks ask often."""
    _current.get().claim(0)


def _allocate(
    purpose: str, allocate: Callable[[tuple[int, ...], DType], Array], shape: tuple[int, ...], dtype: DType
) -> Array:
    try:
        return allocate(shape, dtype)
    except (MemoryError, ValueError):  # ValueError: NumPy cannot even count the bytes
        raise TensorTooLarge(f"{purpose} of shape {list(shape)} and dtype {dtype} does not fit in memory") from None


def block_length(dtype: DType, temporaries: int = 1) -> int:
    """Return how many elements of one tensor a block has. A formula with more `temporaries` has smaller blocks."""
    if dtype.itemsize == 2:
        return NARROW_BLOCK_LENGTH
    return min(BLOCK_BYTES, TEMPORARIES_BYTES // (temporaries or 1)) // dtype.itemsize


def share_out(function: Callable[[int], None], count: int) -> None:
    """Call `function` with each number below `count`, in this thread and in idle threads of the workspace's pool."""
    if count == 1:
        with np.errstate(all="ignore"):
            function(0)
        return
    numbers = itertools.count()  # the interpreter lock makes next() atomic

    def drain() -> None:
        for number in numbers:
            if number >= count:
                return
            check_wanted()
            function(number)

    with helpers() as start_helper:
        for _ in range(min(_current.get().threads, count) - 1):
            start_helper(drain)
        drain()


@contextmanager
def helpers() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Yield a function that starts a helper: it submits a function to the workspace's pool if one more thread may work.

    Leaving the context waits for running helpers and raises the error of a helper that failed. It cancels helpers that
    have not started, so a full pool cannot deadlock. NumPy makes no floating-point warnings inside or in helpers.
    """
    space = _current.get()
    started: list[Future[None]] = []
    functions: list[Callable[[], None]] = []

    alone = replace(space, pool=None, threads=1)

    def run_quietly(number: int) -> None:
        with workspace(alone), np.errstate(all="ignore"):
            functions[number]()

    def start_helper(function: Callable[[], None]) -> None:
        if space.pool is not None and sum(not helper.done() for helper in started) < space.threads - 1:
            functions.append(function)
            started.append(space.pool.submit(run_quietly, len(functions) - 1))

    try:
        with np.errstate(all="ignore"):
            yield start_helper
    finally:
        running = [helper for helper in started if not helper.cancel()]
        failures = [helper.exception() for helper in running]  # this waits, because helpers still write to our arrays
        functions.clear()  # the pool keeps a cancelled helper, and so its function, until a thread takes it
    for failure in failures:
        if failure is not None:
            raise failure


def cuts(size: int, length: int) -> list[slice]:
    """Return slices of this length, the last one shorter, that cut an axis of `size` elements."""
    return [slice(start, min(start + length, size)) for start in range(0, size, length)]


def scratch(slot: int, size: int, dtype: DType) -> Array:
    """Return this thread's flat, uninitialised scratch array number `slot`. The next call for the slot reuses it.

    The thread does not keep an array of more than `SCRATCH_BYTES`. Raises `TensorTooLarge` if there is not enough
    memory for such an array.
    """
    if size * dtype.itemsize > SCRATCH_BYTES:
        return _allocate("an intermediate result", _current.get().scratch, (size,), dtype)
    slots: dict[tuple[int, DType], Array] = _scratch.__dict__.setdefault("slots", {})
    memory = slots.get((slot, dtype))
    if memory is None or memory.size < size:
        raw = np.empty(size * dtype.itemsize + CACHE_LINE_BYTES, np.uint8)
        memory = np.ndarray((size,), dtype, raw, -raw.ctypes.data % CACHE_LINE_BYTES)
        slots[slot, dtype] = memory
    return memory[:size]
