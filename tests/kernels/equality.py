"""What it means here that two results are the same."""

from __future__ import annotations

from typing import Any

import numpy as np

from service.dtypes import Array


def bits(array: Array) -> Array:
    """The bits of each element, as an unsigned integer."""
    return np.ascontiguousarray(array).reshape(array.shape).view(f"u{array.dtype.itemsize}")


def is_nan(array: Array) -> Array:
    """True where an element is NaN, for every dtype: no integer or bool is."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        return np.asarray(array != array)


def assert_like(got: Array, expected: Array) -> None:
    """Shape and dtype are the same, and so are the places of NaN."""
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_array_equal(is_nan(got), is_nan(expected))


def assert_same_bits(got: Array, expected: Array) -> None:
    """Also every other element, down to the sign of a zero. What kind of NaN a NaN is does not count."""
    if got.dtype == expected.dtype and np.array_equal(bits(got), bits(expected)):
        return  # as most results are
    assert_like(got, expected)
    numbers = ~is_nan(expected)
    np.testing.assert_array_equal(bits(got)[numbers], bits(expected)[numbers])


def assert_close(got: Array, expected: Array, *, rtol: float = 0.0, atol: Any = 0.0) -> None:
    """Also every other element within the tolerances; `atol` may be an array. Infinities are the same."""
    assert_like(got, expected)
    with np.errstate(invalid="ignore", over="ignore"):
        wide, exact = got.astype(np.float64), expected.astype(np.float64)
        error, allowed = np.abs(wide - exact), atol + rtol * np.abs(exact)
    infinite = np.isinf(wide) | np.isinf(exact)
    wrong = ~is_nan(wide) & (wide != exact) & (infinite | ~(error <= allowed))
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size} wrong: {got[wrong][:5]}, expected {expected[wrong][:5]}"
