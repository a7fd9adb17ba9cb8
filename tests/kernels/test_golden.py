"""The kernels against the answers of ONNX Runtime's and of PyTorch, stored in tests/golden."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from service.dtypes import FLOAT64, Array, cast
from service.kernels import OPERATORS
from tests import cases
from tests.golden import questions, store
from tests.golden.store import Case
from tests.kernels.equality import assert_close, assert_same_bits

FOLDERS = (store.FOLDER, store.TORCH)
FILES = [(name, folder) for folder in FOLDERS for name in store.operators(folder)]


@cache
def everything() -> list[Case]:
    """The cases of all files. They are not read before a test needs them: each process of pytest would read them."""
    return [case for folder in FOLDERS for name in store.operators(folder) for case in store.read(name, folder=folder)]


def run(case: Case) -> dict[str, Array]:
    return OPERATORS[case.operator](case.inputs, case.attributes)


def rounded(case: Case, expected: Array, got: Array) -> Array:
    """An answer of PyTorch in float64, in the dtype of our answer, unless an input is float64, too."""
    if case.source.startswith("torch") and not any(array.dtype == FLOAT64 for array in case.inputs.values()):
        return cast(expected, got.dtype)
    return expected


@pytest.mark.parametrize(("name", "folder"), FILES, ids=lambda one: getattr(one, "name", one))
def test_same_answers(name: str, folder: Path) -> None:
    answered = [case for case in store.read(name, folder=folder) if not case.error]
    assert answered
    for case in answered:
        with cases.case(case.name, case.source):
            assert_same_answer(case)


def assert_same_answer(case: Case) -> None:
    results = run(case)
    assert case.outputs
    for name, expected in case.outputs.items():
        got, allowed = case.sampled(results[name]), questions.tolerance(OPERATORS[case.operator], case, name)
        if allowed is None:
            assert_same_bits(got, rounded(case, expected, got))
        else:
            assert_close(got, rounded(case, expected, got), **allowed)


def test_refused_as_there() -> None:
    refused = [case for case in everything() if case.error]
    assert refused
    for case in refused:
        with cases.case(case.operator, case.name):
            reasons, told = questions.reasons(OPERATORS[case.operator]), f"{case.name}: {case.error}"
            (error,) = {error for reason, error in reasons.items() if re.search(reason, told)}
            with pytest.raises(error):
                run(case)


def test_every_operator_has_golden_answers() -> None:
    served = {op.name for op in OPERATORS.values() if op.kernel.__module__.startswith("service.kernels.")}
    assert {case.operator for case in everything()} == served


@pytest.mark.parametrize(("folder", "source"), [(store.FOLDER, "onnxruntime"), (store.TORCH, "torch")])
def test_every_file_says_who_answered(folder: Path, source: str) -> None:
    for file in folder.glob("*.npz"):
        assert re.fullmatch(rf"{source} \d+\.\d+\.\d+", str(np.load(file)["source"])), file


def test_golden_names_are_the_operators() -> None:
    for case in everything():
        declared = OPERATORS[case.operator]
        assert {_base(name) for name in case.inputs} <= {tensor.name for tensor in declared.inputs}
        assert set(case.attributes) <= {attribute.name for attribute in declared.attributes}
        assert {_base(name) for name in case.outputs} <= {tensor.name for tensor in declared.outputs}


def test_attributes_are_kept_as_onnx_has_them() -> None:
    given = {"alpha": 0.1, "pads": [1, 1], "reduction": "mean"}
    assert store.kept(given) == given | {"alpha": 0.10000000149011612}


def _base(name: str) -> str:
    return name.partition(".")[0]
