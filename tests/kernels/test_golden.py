"""The kernels against the answers of ONNX Runtime's and of PyTorch, stored in tests/golden."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service import errors
from service.dtypes import Array
from service.kernels import OPERATORS, accumulate, activations, broadcast, gather, gru, softmax
from tests.golden import store
from tests.golden.store import Case
from tests.kernels.equality import assert_close, assert_same_bits

FOLDERS = (store.FOLDER, store.TORCH)
CASES = [case for folder in FOLDERS for name in store.operators(folder) for case in store.read(name, folder=folder)]
ANSWERED = [pytest.param(case, id=f"{case.operator}-{case.name}, {case.source}") for case in CASES if not case.error]
REFUSED = [pytest.param(case, id=f"{case.operator}-{case.name}") for case in CASES if case.error]

REASONS = {
    r"axis -?\d+ is not in valid range": errors.AxisOutOfRange,
    r"indices element out of data bounds": errors.IndexOutOfRange,
    r"Broadcast is not possible": errors.ShapeMismatch,
    r"Attempting to broadcast an axis by a dimension other than 1": errors.ShapeMismatch,
    r"OrtValue shape verification failed": errors.ShapeMismatch,
    r"shape.Size\(\) must be >= 0": errors.InvalidTensor,
}
FLOAT16_ULP = 2.0**-10


def tolerance(case: Case, name: str) -> Mapping[str, Any] | None:
    """How far the two may be apart in the output `name`; None: not by a bit."""
    dtype = case.inputs["dY"].dtype.name if "dY" in case.inputs else ""
    if case.source.startswith("torch"):
        # An activation's gradient is a sum of two products. PyTorch rounds each, and they may cancel.
        eps = float(np.finfo(dtype).eps)
        return {"rtol": 4 * eps, "atol": 16 * eps * np.abs(case.inputs["dY"])}
    if "Softmax" in case.operator:
        # The order of the sum is not the same, nor is the exponential, and the difference may cancel.
        return {
            "float16": {"rtol": FLOAT16_ULP, "atol": 1e-6},
            "float32": {"rtol": 1e-6, "atol": 1e-6},
            "float64": {"rtol": 1e-14, "atol": 1e-15},
        }[dtype]
    if case.operator == "GRUTraining":
        # ONNX Runtime's gates are rational approximations, off by up to 5e-7, which a state collects from step to step.
        return {"rtol": 0.0, "atol": 4e-6}
    if case.operator == "GRUGrad":
        # The sums run in another order. Those over all steps and sequences may cancel: their error is that of the
        # largest, and grows with the root of how many numbers they are of, 1024 at most, which is 4e-6 in float32.
        largest = np.abs(case.outputs[name]).max() if name in ("dW", "dR", "dB") else 0.0
        return {"rtol": 4e-6, "atol": 4e-6 * max(1.0, largest)}
    if case.operator == "QuickGeluGrad":
        # ONNX Runtime's logistic is exactly 0 or 1 from about ±17 on, which alone makes 1.7e-6 of dY. Rounding 1 - s,
        # which is then multiplied by up to 17, makes the rest.
        atol = 2.5e-6 * np.abs(case.inputs["dY"].astype(np.float64))
        if dtype == "float16":
            return {"rtol": FLOAT16_ULP, "atol": atol + np.finfo(np.float16).smallest_subnormal}
        return {"rtol": 1e-6, "atol": atol}
    if case.operator == "SigmoidGrad" and dtype == "float64":
        # ONNX Runtime has no kernel for it and multiplies in another order: dY * (Y * (1 - Y)).
        return {"rtol": 4 * np.finfo(np.float64).eps, "atol": 2 * np.finfo(np.float64).smallest_subnormal}
    return None


def run(case: Case) -> dict[str, Array]:
    return OPERATORS[case.operator](case.inputs, case.attributes)


@pytest.mark.parametrize("case", ANSWERED)
def test_same_answer(case: Case) -> None:
    results = run(case)
    assert case.outputs
    for name, expected in case.outputs.items():
        got, allowed = case.sampled(results[name]), tolerance(case, name)
        if allowed is None:
            assert_same_bits(got, expected)
        else:
            assert_close(got, expected, **allowed)


@pytest.mark.parametrize("case", REFUSED)
def test_refused_as_there(case: Case) -> None:
    (error,) = {error for reason, error in REASONS.items() if re.search(reason, case.error)}
    with pytest.raises(error):
        run(case)


def test_every_operator_has_golden_answers() -> None:
    modules = {module.__name__ for module in (accumulate, activations, broadcast, gather, gru, softmax)}
    answered = {case.operator for case in CASES}
    assert answered == {op.name for op in OPERATORS.values() if op.kernel.__module__ in modules}


@pytest.mark.parametrize(("folder", "source"), [(store.FOLDER, "onnxruntime"), (store.TORCH, "torch")])
def test_every_file_says_who_answered(folder: Path, source: str) -> None:
    for file in folder.glob("*.npz"):
        assert re.fullmatch(rf"{source} \d+\.\d+\.\d+", str(np.load(file)["source"])), file


def test_golden_names_are_the_operators() -> None:
    for case in CASES:
        declared = OPERATORS[case.operator]
        assert set(case.inputs) <= {tensor.name for tensor in declared.inputs}
        assert set(case.attributes) <= {attribute.name for attribute in declared.attributes}
        assert set(case.outputs) <= {tensor.name for tensor in declared.outputs}
