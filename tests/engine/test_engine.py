"""The engine without a server: its checks, the memory of outputs, and cancelled tasks."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from service.engine.arena import MIN_REUSED_BYTES
from service.engine.engine import Engine
from service.errors import Busy, DtypeMismatch, MissingTensor, TensorTooLarge, UnknownTensor
from service.kernels import OPERATORS
from service.limits import Limits
from tests.kernels.calls import peak_bytes

RELU = OPERATORS["ReluGrad"]
GATHER = OPERATORS["GatherGrad"]


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine(threads=2, limits=Limits(4 * MIN_REUSED_BYTES), reuse_bytes=4 * MIN_REUSED_BYTES)
    yield engine
    engine.pool.close()


def ones(*shape: int) -> np.ndarray[Any, Any]:
    return np.ones(shape, np.float32)


def test_tasks_run_in_the_pool(engine: Engine) -> None:
    name, outputs = engine.pool.submit(
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
    engine.pool.close()
    assert len(addresses) == 1


def test_a_task_cancelled_before_its_start_never_runs(engine: Engine) -> None:
    release = threading.Event()
    busy = [engine.pool.submit(lambda: release.wait(30)) for _ in range(2)]
    ran = []
    waiting = engine.pool.submit(lambda: ran.append(1))
    assert waiting.cancel()
    release.set()
    assert all(future.result() for future in busy)
    engine.pool.submit(lambda: None).result()
    assert not ran


def test_a_cancelled_task_is_released_at_once(engine: Engine) -> None:
    release, held = threading.Event(), ones(10)
    gone = weakref.ref(held)
    busy = [engine.pool.submit(lambda: release.wait(30)) for _ in range(2)]
    waiting = engine.pool.submit(partial(engine.run, RELU, {"dY": held, "X": held}, {}))
    del held
    assert gone() is not None
    assert waiting.cancel()
    assert gone() is None
    assert engine.pool.waiting() == 0
    release.set()
    assert all(future.result() for future in busy)


def large_tensors(operator: str, dtype: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return inputs of this operator whose outputs and intermediate results take several megabytes."""
    steps, batch, size = 500, 16, 128
    rows = np.zeros(1 << 18, np.int32)
    tensors: dict[str, dict[str, np.ndarray[Any, Any]]] = {
        "SoftmaxGrad_13": dict.fromkeys(("dY", "Y"), np.ones((1, 1 << 21), dtype)),
        "InPlaceAccumulatorV2": {"gradient_buffer": np.ones(1 << 21, dtype), "gradient": np.ones(1, np.float64)},
        "GatherGrad": {"shape": np.array([1 << 24]), "indices": rows - 1, "grad": np.ones(rows.size, dtype)},
    }
    for scores, loss in (("logits", "SoftmaxCrossEntropy"), ("log_prob", "SoftmaxCrossEntropyGrad")):
        tensors[loss] = dict.fromkeys((scores, "label"), np.ones((2, 1 << 21), dtype))
    tensors["SoftmaxCrossEntropyGrad"]["dY"] = np.ones(1, dtype)
    for recurrent, gates in (("GRUTraining", 3), ("LSTMTraining", 4)):
        weights = {name: np.ones((1, gates * size, size), dtype) for name in ("W", "R")}
        tensors[recurrent] = {"X": np.ones((steps, batch, size), dtype), **weights}
    return tensors[operator]


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(
    "operator",
    [
        "SoftmaxGrad_13",
        "SoftmaxCrossEntropy",
        "SoftmaxCrossEntropyGrad",
        "InPlaceAccumulatorV2",
        "GatherGrad",
        "GRUTraining",
        "GRUGrad",
        "LSTMTraining",
        "LSTMGrad",
    ],
)
def test_the_memory_of_a_kernel_is_reserved(operator: str, dtype: Any) -> None:
    engine = Engine(threads=2, limits=Limits(1 << 30), reuse_bytes=0)
    forward = {"GRUGrad": "GRUTraining", "LSTMGrad": "LSTMTraining"}.get(operator, operator)
    tensors = large_tensors(forward, dtype)
    if forward != operator:
        made = engine.run(OPERATORS[forward], tensors, {})
        made |= {"grad_HAll": made["HAll"], "dHAll": made["HAll"]}
        tensors |= {name: made[name] for name in OPERATORS[operator].inputs_by_name if name in made}
    reserved: list[int] = []
    peak = peak_bytes(lambda: engine.run(OPERATORS[operator], tensors, {}, reserve=reserved.append))
    engine.pool.close()
    assert sum(reserved) > 1 << 20
    assert peak < sum(reserved) + (6 << 20)  # the scratch of two threads, and the kernel's objects


def test_what_a_sparse_kernel_keeps_is_reserved(engine: Engine) -> None:
    tensors, reserved = large_tensors("GatherGrad", np.float16), list[int]()
    peak = peak_bytes(lambda: engine.in_pieces(GATHER, tensors, {}, reserved.append))
    assert peak < sum(reserved) + (2 << 20)


def test_a_refused_reservation_leaves_no_output(engine: Engine) -> None:
    def refuse(size: int) -> None:
        raise Busy(f"{size} bytes")

    with pytest.raises(Busy, match="4194304 bytes"):
        engine.run(
            GATHER, {"shape": np.array([1 << 20]), "indices": np.array([0]), "grad": ones(1)}, {}, reserve=refuse
        )
