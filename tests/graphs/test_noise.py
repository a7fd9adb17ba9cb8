"""The operators that give random numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from service.dtypes import Array
from service.errors import InvalidGraph
from service.graphs.nodes import SEED, step_of
from service.graphs.plan import Node, Plan


def run(op: str, seed: int, like: Array | None = None, output: str = "y", opset: int = 21, **attributes: Any) -> Any:
    node = Node(op, "", opset, () if like is None else ("x",), (output,), attributes)
    tensors: Any = {"x": like, SEED: seed}
    return Plan([step_of(node)], {}, [output]).run(tensors)[output]


def test_the_numbers_depend_on_the_seed_and_the_node() -> None:
    like = np.zeros((200, 300), np.float32)
    numbers = run("RandomNormalLike", 1, like, mean=2.0, scale=3.0)
    assert numbers.dtype == np.float32
    assert numbers.mean() == pytest.approx(2, abs=0.05)
    assert numbers.std() == pytest.approx(3, abs=0.05)
    assert numbers.tobytes() == run("RandomNormalLike", 1, like, mean=2.0, scale=3.0).tobytes()
    assert (numbers != run("RandomNormalLike", 2, like, mean=2.0, scale=3.0)).mean() > 0.99
    assert (numbers != run("RandomNormalLike", 1, like, "z", mean=2.0, scale=3.0)).mean() > 0.99


def test_the_shape_and_the_dtype_may_be_attributes() -> None:
    numbers = run("RandomUniform", 1, shape=[2, 500], low=-1.0, high=3.0, dtype=11)
    assert (numbers.dtype, numbers.shape) == (np.float64, (2, 500))
    assert numbers.min() >= -1
    assert 2.9 < numbers.max() < 3
    assert run("RandomNormal", 1, shape=[3]).dtype == np.float32
    assert run("RandomUniformLike", 1, np.zeros(3), dtype=10).dtype == np.float16
    with pytest.raises(InvalidGraph, match="dtype is int64, but must be a float"):
        run("RandomNormal", 1, shape=[3], dtype=7)
