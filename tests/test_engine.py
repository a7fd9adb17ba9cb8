"""The engine without a server: its checks, the memory of outputs, and cancelled tasks."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from service.arena import MIN_REUSED_BYTES
from service.engine import Engine
from service.errors import DtypeMismatch, MissingTensor, TensorTooLarge, UnknownTensor
from service.kernels import OPERATORS
from service.limits import Limits

RELU = OPERATORS["ReluGrad"]
GATHER = OPERATORS["GatherGrad"]


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine(threads=2, limits=Limits(4 * MIN_REUSED_BYTES), reuse_bytes=4 * MIN_REUSED_BYTES)
    yield engine
    engine.close()


def ones(*shape: int) -> np.ndarray[Any, Any]:
    return np.ones(shape, np.float32)


def test_tasks_run_in_the_pool(engine: Engine) -> None:
    name, outputs = engine.submit(
        lambda: (threading.current_thread().name, engine.run(RELU, {"dY": ones(3), "X": ones(3)}, {}))
    ).result()
    assert name.startswith("gradserve")
    assert outputs["dX"].tolist() == [1.0, 1.0, 1.0]


def test_names_and_dtypes_are_checked(engine: Engine) -> None:
    with pytest.raises(UnknownTensor, match="ReluGrad has no input 'Y'; its inputs are dY, X"):
        engine.run(RELU, {"dY": ones(1), "Y": ones(1)}, {})
    with pytest.raises(MissingTensor, match="ReluGrad needs the input 'X'"):
        engine.run(RELU, {"dY": ones(1)}, {})
    with pytest.raises(DtypeMismatch, match="X is int64, but must be one of float16"):
        engine.run(RELU, {"dY": ones(1), "X": np.ones(1, np.int64)}, {})
    with pytest.raises(DtypeMismatch, match="X is float64 and dY is float32"):
        engine.run(RELU, {"dY": ones(1), "X": np.ones(1)}, {})


def test_inputs_and_outputs_have_a_limit(engine: Engine) -> None:
    over = MIN_REUSED_BYTES + 1
    with pytest.raises(TensorTooLarge, match=f"dY, float32 of shape \\[{over}\\], takes {4 * over} bytes"):
        engine.run(RELU, {"dY": ones(over), "X": ones(over)}, {})
    tensors = {"shape": np.array([over, 1]), "indices": np.array([0]), "grad": ones(1, 1)}
    with pytest.raises(TensorTooLarge, match="The output"):
        engine.run(GATHER, tensors, {})
    assert engine.run(GATHER, {**tensors, "shape": np.array([over - 1, 1])}, {})["output"].shape == (over - 1, 1)


def test_outputs_reuse_the_memory_of_released_outputs() -> None:
    # One thread: a second thread could hold the output for a moment longer.
    engine = Engine(threads=1, limits=Limits(4 * MIN_REUSED_BYTES), reuse_bytes=4 * MIN_REUSED_BYTES)
    tensors = {"dY": ones(MIN_REUSED_BYTES), "X": ones(MIN_REUSED_BYTES)}
    addresses = set()
    for _ in range(5):
        output = engine.run(RELU, tensors, {})["dX"]
        assert output.all()
        addresses.add(output.__array_interface__["data"][0])
        del output
    engine.close()
    assert len(addresses) == 1


def test_a_task_cancelled_before_its_start_never_runs(engine: Engine) -> None:
    release = threading.Event()
    busy = [engine.submit(lambda: release.wait(30)) for _ in range(2)]
    ran = []
    waiting = engine.submit(lambda: ran.append(1))
    assert waiting.cancel()
    release.set()
    assert all(future.result() for future in busy)
    engine.submit(lambda: None).result()
    assert not ran


def test_a_cancelled_task_is_released_at_once(engine: Engine) -> None:
    release, held = threading.Event(), ones(10)
    gone = weakref.ref(held)
    busy = [engine.submit(lambda: release.wait(30)) for _ in range(2)]
    waiting = engine.submit(partial(engine.run, RELU, {"dY": held, "X": held}, {}))
    del held
    assert gone() is not None
    assert waiting.cancel()
    assert gone() is None
    assert engine.waiting == 0
    release.set()
    assert all(future.result() for future in busy)
