"""The ONNX project's own cases of single nodes, those that are served. `make fuzz` runs them, as they take seconds.

Only a run that names this file makes the cases: every other run imports it, to look for doctests.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from functools import cache
from typing import Any

import numpy as np
import pytest
from onnx.backend.test.case.node import collect_testcases

from service.dtypes import NAMES
from service.errors import InvalidGraph
from service.graphs.graph import Graph

OTHER = {
    "test_averagepool_3d_dilations_large_count_include_pad_is_1_ceil_mode_is_True": "as ONNX Runtime",
    "test_bernoulli": "random",
    "test_convtranspose_output_shape": "refused, as an output beyond the whole one has no gradient in PyTorch",
    "test_resize_downsample_scales_cubic_align_corners": "as ONNX Runtime",
    "test_resize_downsample_scales_linear_align_corners": "as ONNX Runtime",
    "test_training_dropout_": "random",
    "test_training_dropout": "random",
}
"""Cases, or what their names begin with, whose outputs are others here, and why."""

LEAST: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-5}
"""The tolerance of the ONNX project."""

NARROW: dict[str, Any] = {"rtol": 1e-2, "atol": 4e-3}
"""That of attention in 16 bits, which the ONNX project computes in 16 bits."""


@cache
def served() -> dict[str, Any]:
    """Return the cases whose model is served, by name, with the graph."""
    found = {}
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        cases = collect_testcases(None)
    for case in cases:
        if case.model is None or any(case.name == one or case.name.startswith(f"{one}_") for one in OTHER):
            continue
        with contextlib.suppress(InvalidGraph):
            found[case.name] = case, Graph.read(case.model.SerializeToString())
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", served())


def test_a_case_has_its_outputs(name: str) -> None:
    case, graph = served()[name]
    for given, expected in case.data_sets:
        arrays = [np.asarray(one) for one in given]
        if any(one.dtype not in NAMES for one in arrays):
            continue  # numbers as texts
        names = [one.name for one in case.model.graph.input]
        got = graph.operator("case")(dict(zip(names, arrays, strict=True)), {})
        for output, right in zip(case.model.graph.output, expected, strict=True):
            ours = got[output.name]
            assert (ours.dtype, ours.shape) == (right.dtype, right.shape)
            wide = np.float64 if NAMES[ours.dtype] in ("float16", "bfloat16") else ours.dtype
            tolerance = NARROW if "attention" in name and wide != ours.dtype else LEAST
            np.testing.assert_allclose(ours.astype(wide), np.asarray(right).astype(wide), equal_nan=True, **tolerance)


def test_many_cases_are_served() -> None:
    assert len(served()) > 700
