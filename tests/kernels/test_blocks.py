"""Work in blocks, by many threads, in little memory."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import numpy as np
import pytest

from service.dtypes import Array
from service.errors import TensorTooLarge
from service.kernels import Workspace, workspace
from service.kernels._blocks import helpers, share_out
from service.kernels.accumulate import in_place_accumulator, in_place_accumulator_v2
from tests.cases import case
from tests.kernels.calls import CALLS, ELEMENTWISE, FLOAT_DTYPES, SOFTMAX, Call, peak_bytes
from tests.kernels.equality import assert_close, assert_same_bits
from tests.kernels.threads import PATIENCE, threads

MIB = 1 << 20

# Several blocks in every dtype. The sum runs over more than a block: along one axis, or along the first with many sums
# at once, or, for the first generation, over all dimensions.
SHAPES = [(400_000,), (5000, 100), (3, 3000, 70), (2, 200_000), (70_000, 5), (200, 2000)]

every_call = pytest.mark.parametrize("make", CALLS.values(), ids=CALLS)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES[::2], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_do_not_depend_on_the_threads(dtype: Any, shape: tuple[int, ...]) -> None:
    for name, make in CALLS.items():
        call = make(shape, dtype)
        expected = call.run()
        for count in (1, 2, 3, 5):
            with case(name, f"{count} threads"), threads(count):
                assert_same_bits(call.run(), expected)


@pytest.mark.parametrize("operator", ["SoftmaxGrad", "LogSoftmaxGrad", "SoftmaxGrad_13", "LogSoftmaxGrad_13"])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES[:3], ids=str)
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((400_000,), 0), ((5000, 100), 0), ((3, 3000, 70), 1), ((2, 2, 200_000), 2), ((5, 40_000, 2), 1)],
)
def test_softmax_over_more_than_a_block(operator: str, dtype: Any, shape: tuple[int, ...], axis: int) -> None:
    dY, Y = np.random.default_rng(0).uniform(-1, 1, (2, *shape)).astype(dtype)
    call = Call(operator, [dY, Y], {"axis": axis})
    result = call.run()
    for count in (1, 2, 3, 5):
        with threads(count):
            assert_same_bits(call.run(), result)
    over = (axis,) if operator.endswith("_13") else tuple(range(axis, len(shape)))
    dY, Y = dY.astype(np.float64), Y.astype(np.float64)
    if operator.startswith("Log"):
        expected = dY - np.exp(Y) * dY.sum(over, keepdims=True)
    else:
        expected = Y * (dY - (dY * Y).sum(over, keepdims=True))
    # Partial sums of n numbers of either sign are about n ** 0.5, and n of their roundings add up to about n ** 0.5.
    count = math.prod(shape[place] for place in over)
    eps = np.finfo(np.float64 if dtype == np.float64 else np.float32).eps
    assert_close(result, expected.astype(dtype), rtol=np.finfo(dtype).eps * 10, atol=2 * count * eps)


@pytest.mark.parametrize("make", ELEMENTWISE.values(), ids=ELEMENTWISE)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_blocks_join_without_a_seam(make: Callable[..., Call], dtype: Any) -> None:
    call = make((300_001,), dtype)
    parts = [slice(start, start + 50_021) for start in range(0, 300_001, 50_021)]
    inputs = [[array[part] if array.size > 2 else array for array in call.inputs] for part in parts]
    pieces = [Call(call.operator, each, call.attributes).run() for each in inputs]
    assert_same_bits(call.run(), np.concatenate(pieces))


@pytest.mark.parametrize(
    ("shape", "gradient_shape"),
    [
        ((3, 3000, 70), (70,)),
        ((3, 3000, 70), (3000, 1)),
        ((3, 3000, 70), (3, 1, 1)),
        ((1, 1, 400_000), ()),
        ((400_000, 1), (1,)),
        ((2, 200_000), (2, 1)),
    ],
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_gradient_broadcasts_over_many_blocks(
    shape: tuple[int, ...], gradient_shape: tuple[int, ...], overwrite: bool
) -> None:
    random = np.random.default_rng(0)
    buffer, gradient = random.normal(size=shape), np.asarray(random.normal(size=gradient_shape))
    expected = np.broadcast_to(gradient, shape) if overwrite else buffer + gradient
    for count in (1, 2, 5):
        with threads(count):
            assert_same_bits(in_place_accumulator_v2(buffer, gradient, np.array(overwrite))[1], expected)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("items", [0, 1, 2, 7, 1000])
def test_each_item_is_worked_on_once(items: int, count: int) -> None:
    calls: Counter[int] = Counter()
    lock = threading.Lock()

    def work(number: int) -> None:
        with lock:
            calls[number] += 1

    with threads(count):
        share_out(work, items)
    assert calls == Counter(range(items))


def test_idle_threads_join_in() -> None:
    """Every item waits for the two others, so three threads must be at work."""
    together = threading.Barrier(3)
    met: list[int] = []

    def work(number: int) -> None:
        together.wait(PATIENCE)
        met.append(number)

    with threads(3):
        share_out(work, 3)
    assert sorted(met) == [0, 1, 2]


def test_a_busy_pool_cannot_deadlock() -> None:
    release = threading.Event()
    done: list[int] = []
    with ThreadPoolExecutor(2) as pool:
        busy = [pool.submit(release.wait, PATIENCE) for _ in range(2)]
        try:
            with workspace(Workspace(pool, 2)):
                share_out(done.append, 50)
            assert done == list(range(50))
            assert not any(future.done() for future in busy)
        finally:
            release.set()


def test_callers_in_the_pool_itself_cannot_deadlock() -> None:
    """As the engine calls: every thread of the pool shares out work to the same pool."""

    def call(seed: int) -> Array:
        with workspace(Workspace(pool, 2)):
            return in_place_accumulator(np.full(400_000, seed, np.float32), np.ones((), np.float32))

    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(call, seed) for seed in range(20)]
        for seed, result in enumerate(results):
            assert_same_bits(result.result(PATIENCE), np.full(400_000, seed + 1, np.float32))


def test_a_failure_in_a_helper_reaches_the_caller() -> None:
    together, caller = threading.Barrier(2), threading.current_thread()

    def work(number: int) -> None:
        together.wait(PATIENCE)
        if threading.current_thread() is not caller:
            raise ValueError("from the helper")

    with threads(2), pytest.raises(ValueError, match="^from the helper$"):
        share_out(work, 2)


def test_a_failing_caller_waits_for_its_helpers() -> None:
    """They still write to its arrays."""
    together, failed, caller = threading.Barrier(2), threading.Event(), threading.current_thread()
    finished: list[int] = []

    def work(number: int) -> None:
        together.wait(PATIENCE)
        if threading.current_thread() is caller:
            failed.set()
            raise ValueError("from the caller")
        failed.wait(PATIENCE)
        threading.Event().wait(0.05)
        finished.append(number)

    with threads(2), pytest.raises(ValueError, match="^from the caller$"):
        share_out(work, 2)
    assert len(finished) == 1


class Remembering(ThreadPoolExecutor):
    """A pool that knows what it was asked for."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.asked: list[Future[Any]] = []

    def submit(self, *call: Any, **named: Any) -> Future[Any]:
        self.asked.append(super().submit(*call, **named))
        return self.asked[-1]


def test_there_are_never_more_helpers_than_threads() -> None:
    release = threading.Event()

    def hold() -> None:
        release.wait(PATIENCE)

    with Remembering(5) as pool, workspace(Workspace(pool, 3)):
        with helpers() as ask:
            for _ in range(10):
                ask(hold)
            release.set()
        assert len(pool.asked) == 2


def test_a_helper_that_has_ended_makes_room_for_another() -> None:
    done: list[int] = []
    with Remembering(5) as pool, workspace(Workspace(pool, 2)):
        with helpers() as ask:
            for number in range(3):
                ask(partial(done.append, number))
                wait(pool.asked, PATIENCE)
        assert done == [0, 1, 2]


def test_alone_there_are_no_helpers() -> None:
    done: list[int] = []
    for space in (Workspace(), Workspace(threads=5)):
        with workspace(space), helpers() as ask:
            ask(partial(done.append, 0))
    with threads(1), helpers() as ask:
        ask(partial(done.append, 0))
    assert not done


def test_outputs_come_from_the_workspace() -> None:
    memory = np.full(3, 7, np.float32)
    asked: list[Any] = []

    def allocate(shape: tuple[int, ...], dtype: Any) -> Array:
        asked.append((shape, dtype))
        return memory

    call = CALLS["ReluGrad"]((3,), np.float32)
    expected = call.run()
    with workspace(Workspace(allocate=allocate)):
        assert call.run() is memory
    assert asked == [((3,), np.float32)]
    assert_same_bits(memory, expected)
    assert call.run() is not memory


@every_call
def test_an_output_that_no_memory_holds(make: Callable[..., Call]) -> None:
    def allocate(shape: tuple[int, ...], dtype: Any) -> Array:
        raise MemoryError

    with (
        workspace(Workspace(allocate=allocate)),
        pytest.raises(TensorTooLarge, match=r"shape \[3, 4\] and dtype float32"),
    ):
        make((3, 4), np.float32).run()


@every_call
@pytest.mark.parametrize("count", [1, 2])
def test_infinities_raise_no_floating_point_errors(make: Callable[..., Call], count: int) -> None:
    """Of both signs, in different blocks; whatever the caller asked of NumPy."""
    call = make((400_000,), np.float32)
    gradient = call.inputs[call.floats()[0]]
    gradient[:5], gradient[-5:] = np.inf, -np.inf
    with np.errstate(all="raise"), threads(count):
        result = call.run()
    with np.errstate(all="ignore"):
        assert_same_bits(result, call.run())


def peak_of(call: Call, out: Array) -> int:
    """How much is allocated at most during the call, by two threads that have not worked before."""

    def run() -> None:
        with workspace(Workspace(pool, 2)):
            call.run(out=out)

    with ThreadPoolExecutor(2) as pool:
        return peak_bytes(lambda: pool.submit(run).result())


@pytest.mark.parametrize("make", [*ELEMENTWISE.values(), *SOFTMAX.values()], ids=[*ELEMENTWISE, *SOFTMAX])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1 << 21,), "float32"), ((1024, 2048), "float32"), ((1 << 20, 2), "float32"), ((1024, 2048), "float16")],
)
def test_kernels_take_little_memory(make: Callable[..., Call], shape: tuple[int, ...], dtype: str) -> None:
    call = make(shape, dtype)
    assert peak_of(call, np.empty(shape, dtype)) < 4 * MIB


@pytest.mark.parametrize(
    ("shape", "of_gradient"),
    [((1, 1 << 21), ()), ((2, 1 << 20), (2, 1)), ((3, 1, 1 << 19), (1 << 19,)), ((1, 1 << 20, 2), (1 << 20, 1))],
)
def test_adding_a_gradient_that_broadcasts_takes_little_memory(
    shape: tuple[int, ...], of_gradient: tuple[int, ...]
) -> None:
    """However long the rows are."""
    chance = np.random.default_rng(0)
    buffer, gradient = chance.random(shape).astype(np.float16), chance.random(of_gradient).astype(np.float16)
    call, out = Call("InPlaceAccumulator", [buffer, np.asarray(gradient)], {}), np.empty_like(buffer)
    assert peak_of(call, out) < 4 * MIB
    assert_same_bits(out, (buffer.astype(np.float32) + gradient).astype(np.float16))


def test_few_gathered_rows_take_little_memory() -> None:
    indices = np.arange(0, 20_000, 20)
    call = Call("GatherGrad", [np.array([20_000, 100]), indices, np.ones((1000, 100), np.float32)], {})
    assert peak_of(call, np.empty((20_000, 100), np.float32)) < 4 * MIB


def test_converting_a_gradient_takes_little_memory() -> None:
    buffer, gradient = np.ones((1 << 21,), np.float32), np.ones((1 << 21,), np.float64)
    call = Call("InPlaceAccumulator", [buffer, gradient], {})
    assert peak_of(call, np.empty_like(buffer)) < 4 * MIB
