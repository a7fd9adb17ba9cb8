"""LSTMTraining and LSTMGrad against torch.nn.LSTM. What ONNX Runtime's kernels answer, `test_golden.py` has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from service.kernels import OPERATORS
from tests.golden import store
from tests.golden.store import Case
from tests.kernels.equality import assert_close

TORCH = [pytest.param(case, id=case.name) for case in store.read("LSTM", folder=store.TORCH)]


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("case", TORCH)
def test_torch(case: Case, dtype: Any) -> None:
    inputs = {name: array if name == "SL" else array.astype(dtype) for name, array in case.inputs.items()}
    forward, backward = OPERATORS["LSTMTraining"], OPERATORS["LSTMGrad"]
    results = forward({name: inputs[name] for name in forward.inputs_by_name if name in inputs}, case.attributes)
    given = {**inputs, **results}
    results |= backward({name: given[name] for name in backward.inputs_by_name if name in given}, case.attributes)
    # dW, the longest sum, is of 476 products: the square root of that is how many roundings are left over, and each
    # factor, which has come through up to 28 steps, brings some with it.
    allowed = 64 * float(np.finfo(dtype).eps)
    for name, expected in case.outputs.items():
        assert results[name].dtype == dtype
        assert_close(case.sampled(results[name]).astype(np.float64), expected, rtol=allowed, atol=allowed)
