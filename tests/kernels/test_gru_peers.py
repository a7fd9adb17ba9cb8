"""GRUTraining and GRUGrad against others: the tables of ONNX Runtime's own tests, and torch.nn.GRU.

What ONNX Runtime's kernels answer, `test_golden.py` has.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from service.kernels import OPERATORS
from tests.golden import store
from tests.golden.store import Case
from tests.kernels.equality import assert_close

FORWARD = ("X", "W", "R", "B", "SL", "H0")
TORCH = [pytest.param(case, id=case.name) for case in store.read("GRU", folder=store.TORCH)]

BACKWARD_COMPUTE = {
    "dX": [-2.49756e-4, -5.01315e-4, -1.99651e-4, -3.99207e-4, -8.53292e-5, -1.70508e-4, -2.75774e-5, -5.51547e-5],
    "dW": [
        *(-0.015847, -0.0271209, -1.11526e-5, -2.73875e-5, *[0] * 8),
        *(6.51075e-6, 1.92345e-5, 8.03933e-10, 2.4027e-9, 0, 0),
    ],
    "dR": [
        *(-9.28927e-6, -8.78505e-9, 0, -1.11518e-8, -1.13678e-11, *[0] * 13),
        *(1.47958e-9, 1.50824e-12, 0, 4.52003e-14, 4.60759e-17, 0, 0, 0, 0),
    ],
    "dB": [
        *(-0.00563696, -8.11746e-6, 0, 0, 0, 0, 6.36189e-6, 7.99385e-10, 0),
        *(-0.00563696, -8.11746e-6, 0, 0, 0, 0, 6.36189e-6, 7.99385e-10, 0),
    ],
}
"""What GRUTest.BackwardCompute of ONNX Runtime expects."""


def peer(operator: str, name: str) -> Case:
    (found,) = (case for case in store.read(operator) if case.name == f"peer {name}")
    return found


def test_forward_compute() -> None:
    """GRUTest.ForwardCompute expects the states and gates that BackwardCompute is given."""
    forward, expected = peer("GRUTraining", "ForwardCompute"), peer("GRUGrad", "BackwardCompute").inputs
    got = OPERATORS["GRUTraining"](forward.inputs, forward.attributes)
    # Of states near 0 that z near 1 leaves: two roundings of a number just below 1.
    eps = float(np.finfo(np.float32).eps)
    assert_close(got["HAll"], expected["HAll"], atol=eps)
    assert_close(got["HFinal"], expected["HAll"][-1], atol=eps)
    assert_close(got["ZRH"], expected["ZRH"], atol=5e-7 + eps)  # 6 digits


def test_backward_compute() -> None:
    case = peer("GRUGrad", "BackwardCompute")
    results = OPERATORS["GRUGrad"](case.inputs, case.attributes)
    assert set(BACKWARD_COMPUTE) == set(case.outputs)
    for name, numbers in BACKWARD_COMPUTE.items():
        expected = np.array(numbers, np.float32).reshape(results[name].shape)
        assert_close(results[name], expected, rtol=6e-6)  # 6 digits, and a few roundings; zeros are zeros


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("case", TORCH)
def test_torch(case: Case, dtype: Any) -> None:
    inputs = {name: array if name == "SL" else array.astype(dtype) for name, array in case.inputs.items()}
    results = OPERATORS["GRUTraining"]({name: inputs[name] for name in FORWARD if name in inputs}, case.attributes)
    results |= OPERATORS["GRUGrad"]({**inputs, "HAll": results["HAll"], "ZRH": results["ZRH"]}, case.attributes)
    # dW, the longest sum, is of 476 products: the square root of that is how many roundings are left over, and each
    # factor, which has come through up to 28 steps, brings some with it. 14 are, in float64.
    allowed = 64 * float(np.finfo(dtype).eps)
    for name, expected in case.outputs.items():
        assert results[name].dtype == dtype
        assert_close(case.sampled(results[name]).astype(np.float64), expected, rtol=allowed, atol=allowed)
