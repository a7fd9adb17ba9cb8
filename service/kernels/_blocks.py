"""Where a kernel's memory and threads come from: cache-sized blocks, shared out over a pool.

Called by itself, a kernel runs in the calling thread and allocates with NumPy. Inside `workspace(...)` idle threads of
the pool join in, and outputs come from the caller's allocator. The blocks depend on the shapes alone, so the bits of a
result do not depend on the number of threads.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np

from service.dtypes import FLOAT32, Array, DType, compute_dtype
from service.errors import ShapeMismatch, TensorTooLarge

T = TypeVar("T", bound=Array)

BLOCK_BYTES = 768 * 1024
"""Bytes of one tensor in a block. Smaller blocks stay closer to the core, but threads then hand the interpreter lock
over more often, which costs more; with larger ones, scratch would take more than 2 MB in each thread."""

SCRATCH_BYTES = 1 << 22
"""Bytes of scratch, at most, that a thread keeps in each slot."""

CACHE_LINE = 64
"""Bytes. What starts in the middle of a line is slower: each access of a vector's width touches two."""


@dataclass(frozen=True)
class Workspace:
    """The pool whose idle threads may help, how many threads may work at once, and who allocates outputs and others."""

    pool: Executor | None = None
    threads: int = 1
    allocate: Callable[[tuple[int, ...], DType], Array] = np.empty
    spare: Callable[[tuple[int, ...], DType], Array] = np.empty


_ALONE = Workspace()
_current: ContextVar[Workspace] = ContextVar("workspace", default=_ALONE)
_scratch = threading.local()


class workspace:
    """Kernels called inside use `space`."""

    def __init__(self, space: Workspace) -> None:
        self._space = space

    def __enter__(self) -> None:
        self._token = _current.set(self._space)

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)


def new_output(out: T | None, shape: tuple[int, ...], dtype: DType) -> T:
    """`out` if given and fit to take a result of this shape and dtype, else uninitialised memory from the workspace.

    Raises `ShapeMismatch` unless `out` is a writeable, C-contiguous array of that shape and dtype, and `TensorTooLarge`
    where there is not enough memory.
    """
    if out is None:
        return cast(T, _allocated("an output", _current.get().allocate, shape, dtype))
    if out.shape != shape or out.dtype != dtype or not (out.flags.c_contiguous and out.flags.writeable):
        raise ShapeMismatch(
            f"out must be a writeable C-contiguous {dtype} array of shape {list(shape)},"
            f" but is {out.dtype} of shape {list(out.shape)}",
            tensor="out",
        )
    return out


def spare_memory(shape: tuple[int, ...], dtype: DType) -> Array:
    """Uninitialised memory from the workspace for what is no output. Raises `TensorTooLarge` where there is no more."""
    return _allocated("an intermediate result", _current.get().spare, shape, dtype)


def _allocated(
    what: str, allocate: Callable[[tuple[int, ...], DType], Array], shape: tuple[int, ...], dtype: DType
) -> Array:
    try:
        return allocate(shape, dtype)
    except (MemoryError, ValueError):  # ValueError: NumPy cannot even count the bytes
        raise TensorTooLarge(f"{what} of shape {list(shape)} and dtype {dtype} does not fit in memory") from None


def block_length(dtype: DType) -> int:
    """Elements of one tensor of `dtype` in a block. Few for the 16-bit floats, which are widened in scratch."""
    return BLOCK_BYTES // (16 if dtype.itemsize == 2 else dtype.itemsize)


def share_out(work: Callable[[int], None], count: int) -> None:
    """Call `work(0)` ... `work(count - 1)`, each once, in this thread and in idle threads of the workspace's pool."""
    if count == 1:
        with np.errstate(all="ignore"):
            work(0)
        return
    numbers = itertools.count()  # next() on it is atomic under the interpreter lock

    def drain() -> None:
        for number in numbers:
            if number >= count:
                return
            work(number)

    with helpers() as ask:
        for _ in range(min(_current.get().threads, count) - 1):
            ask(drain)
        drain()


@contextmanager
def helpers() -> Iterator[Callable[[Callable[[], None]], None]]:
    """A function that asks an idle thread of the workspace's pool to call another, where there may be one more thread.

    Leaving waits for the helpers and raises what one of them raised. One that has not started by then is cancelled,
    never waited for: a full pool cannot deadlock. What is called here and by helpers makes no floating-point warnings.
    """
    space = _current.get()
    asked: list[Future[None]] = []
    works: list[Callable[[], None]] = []

    def quietly(number: int) -> None:
        with np.errstate(all="ignore"):
            works[number]()

    def ask(work: Callable[[], None]) -> None:
        if space.pool is not None and sum(not helper.done() for helper in asked) < space.threads - 1:
            works.append(work)
            asked.append(space.pool.submit(quietly, len(works) - 1))

    try:
        with np.errstate(all="ignore"):
            yield ask
    finally:
        running = [helper for helper in asked if not helper.cancel()]
        failures = [helper.exception() for helper in running]  # waits: they still write to our arrays
        works.clear()  # the pool keeps what is cancelled until a thread comes to it
    for failure in failures:
        if failure is not None:
            raise failure


def scratch(slot: int, size: int, dtype: DType) -> Array:
    """This thread's flat scratch array number `slot`, uninitialised, its own until it asks for the slot again.

    One of more than `SCRATCH_BYTES` is not kept. Raises `TensorTooLarge` where there is not enough memory for it.
    """
    if size * dtype.itemsize > SCRATCH_BYTES:
        return spare_memory((size,), dtype)
    slots: dict[tuple[int, DType], Array] = _scratch.__dict__.setdefault("slots", {})
    memory = slots.get((slot, dtype))
    if memory is None or memory.size < size:
        raw = np.empty(size * dtype.itemsize + CACHE_LINE, np.uint8)
        memory = np.ndarray((size,), dtype, raw, -raw.ctypes.data % CACHE_LINE)
        slots[slot, dtype] = memory
    return memory[:size]


def widen(block: Array, slot: int) -> Array:
    """A float32 copy of `block` in scratch."""
    wide = scratch(slot, block.size, FLOAT32).reshape(block.shape)
    wide[...] = block
    return wide


def elementwise(formula: Callable[..., None], inputs: Sequence[T], out: T | None, *, temporaries: int) -> T:
    """`formula(*blocks, out, *temporaries)` on every block of `inputs`, which share shape and dtype.

    `formula` writes its result to `out`, which it may also use on the way, as it may the scratch arrays `temporaries`.
    """
    result, tensors = prepare(inputs, out)
    flats, target = [tensor.reshape(-1) for tensor in tensors], result.reshape(-1)
    dtype, length = compute_dtype(result.dtype), block_length(result.dtype)
    narrow = dtype != result.dtype
    if target.size <= length and not narrow:
        with np.errstate(all="ignore"):
            formula(*flats, target, *(scratch(slot, target.size, dtype) for slot in range(temporaries)))
        return result

    def work(number: int) -> None:
        part = slice(number * length, (number + 1) * length)
        blocks, block_out = [flat[part] for flat in flats], target[part]
        spare = [scratch(slot, block_out.size, dtype) for slot in range(temporaries)]
        if narrow:
            wide_out = scratch(temporaries, block_out.size, dtype)
            formula(*(widen(block, temporaries + 1 + k) for k, block in enumerate(blocks)), wide_out, *spare)
            block_out[...] = wide_out
        else:
            formula(*blocks, block_out, *spare)

    share_out(work, -(-target.size // length))
    return result


def prepare(inputs: Sequence[T], out: T | None) -> tuple[T, list[Array]]:
    """The array for a result like `inputs[0]`, and the inputs row-major and apart from it."""
    result = new_output(out, inputs[0].shape, inputs[0].dtype)
    tensors: list[Array] = list(inputs)
    if out is not None:
        tensors = [array.copy() if np.may_share_memory(array, out) else array for array in tensors]
    return result, [
        array if array.flags.c_contiguous else np.ascontiguousarray(array).reshape(array.shape) for array in tensors
    ]
