"""Operators on tensors without dimensions: the same bits as for one number in a list."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.dtypes import FLOATS, INTEGERS, Array
from service.errors import Invalid
from service.kernels import OPERATORS, Tensor
from tests.kernels.calls import FLOAT_DTYPES
from tests.kernels.equality import assert_same_bits

SINGLE = [name for name, one in OPERATORS.items() if not any(tensor.group for tensor in one.inputs)]

SERVED = {
    *("AdamOptimizer", "DivGrad", "DropoutGrad", "FakeQuant", "FakeQuantGrad", "FastGeluGrad", "GeluGrad"),
    *("InPlaceAccumulator", "InPlaceAccumulatorV2", "LeakyReluGrad", "QuickGelu", "QuickGeluGrad", "ReluGrad"),
    *("ResizeGrad", "SGDOptimizer", "Scale", "SigmoidGrad", "TanhGrad", "ZeroGradient"),
}
"""The operators that work element by element. Others have axes, and refuse a tensor without any."""


def numbers(operator: str, values: list[float], dtype: Any, shape: tuple[int, ...]) -> list[Array | None]:
    """Tensors of one number each. Optional ones are left out."""

    def tensor(declared: Tensor, value: float) -> Array | None:
        kind = declared.kind.name
        of_kind = (
            dtype if kind in (FLOATS.name, "number", "element", "any") else np.int64 if kind == INTEGERS.name else bool
        )
        return None if declared.optional else np.full(shape, value if of_kind == dtype else 1, of_kind)

    return [tensor(*pair) for pair in zip(OPERATORS[operator].inputs, values, strict=False)]


@pytest.mark.parametrize("operator", SINGLE)
@settings(max_examples=25, database=None, derandomize=True)
@given(values=st.lists(st.floats(0.0625, 4, width=16), min_size=12, max_size=12), dtype=st.sampled_from(FLOAT_DTYPES))
def test_a_scalar_is_computed_as_a_list_of_one_number(operator: str, values: list[float], dtype: Any) -> None:
    kernel = OPERATORS[operator].kernel
    try:
        scalars = kernel(*numbers(operator, values, dtype, ()))
    except (Invalid, TypeError):
        assert operator not in SERVED
        return
    lists = kernel(*numbers(operator, values, dtype, (1,)))
    for got, expected in zip(*(one if isinstance(one, tuple) else (one,) for one in (scalars, lists)), strict=True):
        assert got.shape in ((), expected.shape)
        assert_same_bits(got.reshape(expected.shape), expected)
