"""Questions to PadAndUnflatten, which PyTorch answers: ONNX Runtime has a kernel for it on GPUs only.

The first two are those of ONNX Runtime's own unit tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from service.dtypes import Array
from tests.golden.store import Case
from tests.golden.values import generator


def ask() -> Iterator[Case]:
    """All questions of this module."""
    yield _case("peer-FloatType1D", np.arange(1, 7), [1, 3, 5, 7, 9, 11], [5, 3])
    yield _case("peer-FloatType2D", np.arange(1, 10).reshape(3, 3), [1, 3, 4], [2, 3])
    random = generator("PadAndUnflatten")
    yield _case("3-D", random.normal(size=(7, 2, 3)), random.permutation(20)[:7], [4, 5])
    yield _case("none", np.zeros((0, 2)), [], [2, 2])


def tolerance(case: Case, output: str) -> Mapping[str, Any] | None:
    """No bit may differ."""
    return None


def _case(name: str, given: Array, indices: Sequence[int] | Array, dims: Sequence[int]) -> Case:
    inputs: dict[str, Array] = {"input": given.astype(np.float32), "indices": np.array(indices, np.int64)}
    return Case("PadAndUnflatten", name, {**inputs, "unflatten_dims": np.array(dims)}, ("output",), source="torch")
