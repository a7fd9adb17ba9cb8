"""Damaged models: each is refused with an error that says why, or it runs, in bounded memory and time.

`make fuzz` tries 100 times as many.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from service.dtypes import DTYPES, Array
from service.engine.engine import Engine
from service.errors import Busy, GradserveError
from service.graphs.forward import LOSSES as LOSS_NODES
from service.graphs.graph import Graph
from service.graphs.model import GraphLimits
from service.kernels import _op
from service.limits import Limits
from tests.graphs.hostile import FLOATS, INTEGERS, damaged, sound
from tests.graphs.test_training import OWN
from tests.kernels.calls import peak_bytes

MANY = int(os.environ.get("GRADSERVE_FUZZ", "1"))
COUNT = 40 * MANY
"""Damaged models of each kind of test."""

LIMITS = GraphLimits(max_nodes=500, max_bytes=1 << 22)
MEMORY_BYTES = 1 << 25
"""What a run may claim."""
SCRATCH_BYTES = 1 << 24
"""What it may take without a claim."""
READ_BYTES = 1 << 24
"""What reading and planning may take."""
WORK = 1 << 24
"""Multiplications and additions of a node, at most."""
SECONDS = 20.0
"""Processor time of one model, at most, with memory traced."""
LOSSES = [*[None] * 20, *LOSS_NODES, *"yhal"]
"""Most models run as they are, some with a loss, which is perhaps one of their outputs."""

SOUND = sound()
TRAINING = {name: OWN[name][0].read_bytes() for name in ("unet", "dlrm")}


class Reserve:
    """What a run may allocate."""

    claimed = 0

    def __call__(self, size: int) -> None:
        assert size >= 0
        self.claimed += size
        if self.claimed > MEMORY_BYTES:
            raise Busy("the run takes too much memory", limit=MEMORY_BYTES)


@pytest.fixture(scope="module")
def engine() -> Any:
    engine = Engine(threads=1, limits=Limits(1 << 22), reuse_bytes=0)
    yield engine
    engine.pool.close()


@pytest.fixture(autouse=True)
def little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_op, "MAX_MULTIPLY_ADDS", WORK)


@pytest.mark.parametrize("name", SOUND)
def test_sound_models_run(engine: Engine, name: str) -> None:
    assert attempt(engine, SOUND[name], random.Random(0), hostile=False) == "an answer"


@pytest.mark.parametrize("name", [*SOUND, *TRAINING])
def test_damaged_models(engine: Engine, name: str) -> None:
    outcomes = {one_of(engine, name, seed)[0] for seed in range(COUNT)}
    assert len(outcomes) > 5, outcomes


def one_of(engine: Engine, name: str, seed: int) -> tuple[str, str]:
    """Try a damaged model. Return what becomes of it, and how it came about."""
    content, story = damaged({**SOUND, **TRAINING}[name], seed)
    try:
        return attempt(engine, content, random.Random(seed)), story
    except BaseException as error:
        error.add_note(f"The model {name} with the seed {seed}: {story}")
        raise


def attempt(engine: Engine, content: bytes, rng: random.Random, *, hostile: bool = True) -> str:
    """Read a model and run it. Return "an answer", or the error's class and message."""
    found: list[Any] = []

    def read() -> None:
        loss = rng.choice(LOSSES) if hostile else None
        graph = Graph.read(content, LIMITS, loss=loss)
        found[:] = [graph, graph.operator("graph"), graph.signature()]

    def run() -> None:
        outputs = engine.run(found[1], given, {}, reserve=reserve)
        assert all(isinstance(output, np.ndarray) and output.dtype in DTYPES.values() for output in outputs.values())

    reserve, start = Reserve(), time.process_time()
    try:
        assert peak_bytes(read) <= READ_BYTES + 20 * len(content)
        graph, _, signature = found
        given = tensors_of(graph, signature, rng, hostile=hostile and rng.random() < 0.3)
        taken = peak_bytes(lambda: _caught(run, found))
        assert taken <= reserve.claimed + SCRATCH_BYTES, f"took {taken} bytes, and claimed {reserve.claimed}"
        if found[-1] is not signature:
            raise found[-1]
    except GradserveError as error:
        return _refusal(error)
    finally:
        assert time.process_time() - start < SECONDS
    return "an answer"


def _refusal(error: GradserveError) -> str:
    assert 400 <= error.status < 500 or isinstance(error, Busy), repr(error)
    assert error.detail
    return f"{type(error).__name__}: {error.detail}"


def _caught(run: Any, found: list[Any]) -> None:
    """Run, and keep an error that is ours, so that the peak is known, too."""
    try:
        run()
    except GradserveError as error:
        found.append(error.with_traceback(None))


def tensors_of(graph: Graph, signature: Mapping[str, Any], rng: random.Random, *, hostile: bool) -> dict[str, Array]:
    """Return tensors for the inputs that have no default, as the signature says; sometimes hostile numbers."""
    lengths: dict[int, int] = {}
    numbers = np.random.default_rng(rng.randrange(1 << 30))
    named = {
        **signature["inputs"],
        **{
            f"parameters.{key}": one
            for key, one in signature["parameters"].items()
            if f"parameters.{key}" not in graph.initial
        },
    }
    tensors = {}
    for name, one in named.items():
        dtype = DTYPES[one["dtype"]]
        shape = one["shape"] if one["shape"] is not None else [2]
        shape = [lengths.setdefault(rng.choice([0, 0, 0, 1]), 2) if k is None else k for k in shape]
        if hostile and rng.random() < 0.1:
            shape = [rng.choice([0, 1, 2, 7, 1000]) for _ in shape]
        if int(np.prod(shape, dtype=object)) * dtype.itemsize > 1 << 22 or len(shape) > 32:
            shape = [1] * min(len(shape), 32)
        if dtype.kind in "iu":
            array = numbers.integers(0 if hostile else 1, 2, shape).astype(dtype)
            if hostile and rng.random() < 0.3:
                limits = np.iinfo(dtype)
                array.reshape(-1)[: rng.choice([1, 100])] = min(max(rng.choice(INTEGERS), limits.min), limits.max)
        else:
            array = numbers.normal(size=shape).astype(dtype)
            if hostile and rng.random() < 0.2 and dtype.kind in "fV":
                with np.errstate(all="ignore"):
                    array.reshape(-1)[:1] = np.array(rng.choice(FLOATS)).astype(dtype)
        tensors[name] = array
    return tensors
