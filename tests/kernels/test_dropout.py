from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from service.dtypes import Array
from service.errors import InvalidTensor, ShapeMismatch
from service.kernels.dropout import dropout_grad
from tests.kernels.calls import FLOAT_DTYPES
from tests.kernels.equality import assert_same_bits
from tests.kernels.gradcheck import check_gradient

TRUE, FALSE = np.array(True), np.array(False)


def one(value: float, dtype: Any = np.float32) -> Array:
    return np.array(value, dtype)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_kept_elements_are_divided_and_rounded_once(dtype: Any) -> None:
    random = np.random.default_rng(0)
    dy, mask = random.normal(size=(3, 1001)).astype(dtype), random.random((3, 1001)) < 0.7
    compute = np.float32 if dtype.itemsize == 2 else dtype
    kept = compute(1) - compute(np.float32(0.3)) if compute is np.float32 else 1 - float(np.float32(0.3))
    expected = np.where(mask, (dy.astype(compute) / kept).astype(dtype), np.zeros((), dtype))
    assert_same_bits(dropout_grad(dy, mask, one(0.3)), expected)


def test_dropped_elements_are_plus_zero_whatever_dy_is() -> None:
    dy = np.array([1, -1, 0, -0.0, np.inf, -np.inf, np.nan, 3e38], np.float32)
    assert_same_bits(dropout_grad(dy, np.zeros(8, np.bool_)), np.zeros(8, np.float32))


def test_it_is_the_gradient_of_dropout() -> None:
    random = np.random.default_rng(0)
    mask = random.random((3, 4)) < 0.5
    forward, gradient = lambda X: mask * X / 0.75, lambda dY, X: dropout_grad(dY, mask, one(0.25))
    check_gradient(forward, gradient, random.normal(size=(3, 4)))


def test_without_dropout_dy_passes_bit_by_bit() -> None:
    dy, mask = np.array([1.5, -0.0, np.inf, np.nan], np.float32), np.array([True, False, False, False])
    assert_same_bits(dropout_grad(dy, mask, one(0.0)), dy)
    assert_same_bits(dropout_grad(dy, mask, one(0.5), FALSE), dy)
    assert dropout_grad(dy, mask, one(0.5), TRUE).tolist() == [3, 0, 0, 0]
    assert dropout_grad(dy, mask, seed=7).tolist() == dropout_grad(dy, mask, None, TRUE).tolist() == [3, 0, 0, 0]


def test_a_ratio_next_to_1_keeps_its_distance() -> None:
    """Rounded to the dtype of dy, it would be 1."""
    got = dropout_grad(np.ones(1, np.float32), np.ones(1, np.bool_), one(1 - 2.0**-40, np.float64))
    assert got.tolist() == [2.0**40]


@pytest.mark.parametrize("ratio", [-0.1, 1.0, 1.5, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("training", [None, TRUE, FALSE])
def test_a_ratio_outside_its_range_is_refused(ratio: float, training: Array | None) -> None:
    with pytest.raises(InvalidTensor, match=r"ratio is .*, but must be in \[0, 1\)") as caught:
        dropout_grad(np.ones(3), np.ones(3, np.bool_), one(ratio), training)
    assert caught.value.context == {"tensor": "ratio"}


def test_ratio_and_training_mode_have_one_element() -> None:
    dy, mask = np.ones(3), np.ones(3, np.bool_)
    assert dropout_grad(dy, mask, np.array([[0.5]]), np.array([True])).tolist() == [2, 2, 2]
    for count in (0, 2):
        with pytest.raises(InvalidTensor, match=rf"ratio has shape \[{count}\], but must have one element"):
            dropout_grad(dy, mask, np.full(count, 0.5))
        with pytest.raises(InvalidTensor, match=rf"training_mode has shape \[{count}\]"):
            dropout_grad(dy, mask, None, np.ones(count, np.bool_))


@pytest.mark.parametrize("shape", [(), (2,), (1, 3), (3, 1), (4,), (0,)])
def test_a_mask_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeMismatch, match="mask has shape"):
        dropout_grad(np.ones(3), np.ones(shape, np.bool_))


@pytest.mark.parametrize("shape", [(), (0,), (2, 0)])
def test_scalars_and_empty_tensors(shape: tuple[int, ...]) -> None:
    assert_same_bits(dropout_grad(np.ones(shape), np.ones(shape, np.bool_)), np.full(shape, 2.0))
