from __future__ import annotations

import numpy as np
import pytest

from service.errors import InvalidTensor
from service.kernels.scale import scale
from tests.kernels.calls import FLOAT_DTYPES
from tests.kernels.equality import assert_same_bits

X = np.array([[1.0, -2.0], [3.5, -0.0]], np.float32)


def test_scale_has_any_shape_with_one_element_and_any_dtype() -> None:
    for dtype in ("int32", "int64", *FLOAT_DTYPES):
        for shape in ((), (1,), (1, 1)):
            assert_same_bits(scale(X, np.full(shape, -2, dtype)), X * np.float32(-2))


def test_the_inverse_is_taken_in_the_dtype_of_the_input() -> None:
    for dtype in ("float32", "float64"):
        three = np.array(3, dtype)
        assert_same_bits(scale(np.array([7.0], dtype), np.array(3), scale_down=1), np.array([7], dtype) * (1 / three))


def test_a_scale_of_0_has_no_inverse() -> None:
    assert_same_bits(scale(X, np.array(0.0)), X * np.float32(0))
    for zero in (np.array(0), np.array(-0.0), np.array(1e-60)):
        with pytest.raises(InvalidTensor, match=f"^scale is {zero.item()}, which is 0 as float32, but must not be 0"):
            scale(X, zero, scale_down=1)


@pytest.mark.parametrize("shape", [(0,), (2,), (1, 3)])
def test_scale_has_one_element(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidTensor, match="^scale has shape .*, but must have one element$") as caught:
        scale(X, np.ones(shape, np.float32))
    assert caught.value.context == {"tensor": "scale"}


def test_numbers_beyond_the_dtype_of_the_input_become_infinite() -> None:
    assert_same_bits(scale(X[:1], np.array(1e300)), np.array([[np.inf, -np.inf]], np.float32))
    assert_same_bits(scale(X, np.array(-np.inf), scale_down=1), X * np.float32(-0.0))


def test_the_adjoint_is_the_same_scale() -> None:
    left, right = np.random.default_rng(0).normal(size=(2, 5, 7))
    for down in (0, 1):
        there = np.vdot(left, scale(right, np.array(3.0), scale_down=down))
        assert there == pytest.approx(np.vdot(scale(left, np.array(3.0), scale_down=down), right), rel=1e-14)
