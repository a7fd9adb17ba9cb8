"""PadAndUnflatten: bits, negative and equal indices, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from service.errors import GradserveError, IndexOutOfRange, InvalidTensor, ShapeMismatch
from service.kernels.padding import pad_and_unflatten
from tests.golden.values import special
from tests.kernels.equality import assert_same_bits


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_numbers_keep_their_bits(dtype: str) -> None:
    values = special(dtype)[:, None]
    count = len(values)
    output = pad_and_unflatten(values, np.arange(count)[::-1] - 2 * count, np.array([2, count]))
    expected = np.concatenate([values[::-1], np.zeros_like(values)])
    assert_same_bits(output, expected.reshape(2, count, 1))


def test_the_last_of_equal_indices_counts() -> None:
    """Also in different blocks."""
    values = np.arange(400_000, dtype=np.float32)
    output = pad_and_unflatten(values, np.zeros(400_000, np.int32), np.array([1, 3], np.int32))
    np.testing.assert_array_equal(output, [[399_999, 0, 0]])


def test_empty_tensors() -> None:
    rows: Any = np.ones((0, 2))
    assert pad_and_unflatten(rows, np.zeros(0, np.int64), np.array([0, 5])).shape == (0, 5, 2)
    assert pad_and_unflatten(rows.T, np.array([0, 4]), np.array([1, 5])).shape == (1, 5, 0)
    assert not pad_and_unflatten(np.ones(0), np.zeros(0, np.int64), np.array([2, 2])).any()


WRONG: list[tuple[dict[str, Any], type[GradserveError], str]] = [
    ({"input": np.array(1.0)}, ShapeMismatch, "input has shape"),
    ({"indices": [0]}, ShapeMismatch, r"indices has shape \[1\], but must have \[2\]"),
    ({"indices": [0, 6]}, IndexOutOfRange, r"indices\[1\] is 6"),
    ({"indices": [-7, 0]}, IndexOutOfRange, r"indices\[0\] is -7"),
    ({"unflatten_dims": [6]}, ShapeMismatch, r"unflatten_dims has shape \[1\]"),
    ({"unflatten_dims": [2, -3]}, InvalidTensor, r"unflatten_dims\[1\] is -3"),
    ({"unflatten_dims": [0, 3]}, IndexOutOfRange, "the dimension that it indexes is empty"),
]


@pytest.mark.parametrize(("given", "error", "message"), WRONG)
def test_bad_input_is_refused(given: dict[str, Any], error: type[GradserveError], message: str) -> None:
    inputs = {"input": [1.0, 2.0], "indices": [0, 1], "unflatten_dims": [2, 3], **given}
    with pytest.raises(error, match=message):
        pad_and_unflatten(*map(np.array, inputs.values()))
