"""What the arithmetic of several rules has in common."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import numpy as np

from service.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, Array, DType
from service.kernels import claim

F = TypeVar("F", bound=Callable[..., Any])

TEMPORARIES = 3
"""Tensors that a formula holds at a time, beside what it reads. NumPy writes a result over one that nobody else has."""


def kept(mask: Array, numbers: Array) -> Array:
    """Return the numbers where the mask is true, else 0: in bits, as random branches would take ten times as long."""
    bits = np.dtype(f"i{numbers.itemsize}")
    result: Array = (np.negative(mask.view(np.int8), dtype=bits) & numbers.view(bits)).view(numbers.dtype)
    return result


def unbroadcast(gradient: Array, shape: tuple[int, ...]) -> Array:
    """Return the gradient, summed over the axes along which a tensor of this shape was broadcast."""
    if gradient.shape == shape:
        return gradient
    extra = gradient.ndim - len(shape)
    axes = (*range(extra), *(extra + k for k, n in enumerate(shape) if n == 1 and gradient.shape[extra + k] != 1))
    total: Array
    if axes == (*range(len(axes)),) and gradient.dtype.itemsize > 2:
        # As for a bias. BLAS adds rows faster and closer than NumPy, which adds one at a time.
        count = math.prod(gradient.shape[: len(axes)])
        total = np.ones(count, gradient.dtype) @ gradient.reshape(count, math.prod(shape))
    else:
        total = gradient.sum(axis=axes, dtype=FLOAT64, keepdims=True).astype(gradient.dtype)
    return total.reshape(shape)


def dtype_of(tensor: Array) -> DType:
    """Return the tensor's dtype."""
    return tensor.dtype


def rounded_once(function: F) -> F:
    """Let a function of arrays compute 16-bit floats in float32. The result has the dtype of the first array."""

    @wraps(function)
    def compute(first: Array, *others: Array | None, **attributes: Any) -> Array:
        largest = max(getattr(one, "size", 0) for one in (first, *others))
        claim(TEMPORARIES * largest * max(4, first.itemsize))
        result: Array = function(*map(_wide, (first, *others)), **attributes)
        return result.astype(first.dtype, copy=False)

    return compute  # type: ignore[return-value]


def _wide(array: Any) -> Any:
    narrow = isinstance(array, np.ndarray | np.generic) and array.dtype in (FLOAT16, BFLOAT16)
    return array.astype(FLOAT32) if narrow else array
