"""The arrays of a tree: what they send to a server, and what they get back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from gradserve_client._runs.names import buffer_name
from gradserve_client._wire.tensors import Array, as_array
from gradserve_client.errors import InvalidInput
from gradserve_client.rows import Gradient, Rows

HALF_DTYPES = ("float16", "bfloat16")
"""The dtypes of half precision."""

FLOAT_DTYPES = (*HALF_DTYPES, "float32", "float64")
"""The dtypes that travel as they are. Complex numbers travel as pairs."""


class Leaf:
    """The form of an array in a tree. Raises `InvalidInput` for what is no array."""

    def __init__(self, name: str, array: Any) -> None:
        if not (hasattr(array, "__array__") and isinstance(getattr(array, "dtype", None), np.dtype)):
            raise InvalidInput(f"{name!r} is of type {type(array).__name__}, but must be a NumPy or JAX array")
        self.name = name
        self.dtype: np.dtype[Any] = array.dtype.newbyteorder("=")
        self._own_shape = tuple(array.shape)
        self._make = _maker(array)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the numbers that travel. Complex numbers are pairs."""
        return (*self._own_shape, 2) if self.dtype.kind == "c" else self._own_shape

    @property
    def real_dtype(self) -> np.dtype[Any]:
        """The dtype of the numbers, or of each of a pair."""
        return _real(self.dtype)

    def restored(self, numbers: Array) -> Any:
        """Return these numbers as an array of this form: in JAX if it was there, and on its devices."""
        real = _converted(numbers, self.real_dtype)
        return self._make(real.reshape(-1).view(self.dtype).reshape(self._own_shape))

    def gradient(self, value: Any, wire: str | None) -> Gradient:
        """Return a gradient of this array as numbers, not wider than `wire`, and its rows in order if it is sparse.

        Raises `InvalidInput` for another shape, and for a dtype that the sum would round.
        """
        if isinstance(value, Rows) and self.shape:
            self._check(value.rows, (len(value.indices), *self.shape[1:]))
            rows = self._coalesced(value)
            return Rows(rows.indices, _narrowed(rows.rows, wire))
        if isinstance(value, Mapping) or hasattr(value, "todense"):
            raise InvalidInput(
                f"The gradient of {self.name!r} is of type {type(value).__name__}, but must be an array, or Rows if it"
                " is sparse"
            )
        if hasattr(value, "dtype") and _is_complex(value) != _is_complex(self):
            raise self._mismatch(value.dtype)
        numbers = numbers_of(value, f"The gradient of {self.name!r}", self.real_dtype.name)
        self._check(numbers, self.shape)
        return _narrowed(numbers, wire)

    def _mismatch(self, dtype: Any) -> InvalidInput:
        return InvalidInput(
            f"The gradient of {self.name!r} is {dtype}, but the array is {self.dtype}, and its sum would not keep the"
            " gradient as it is: convert one of them",
            code="dtype_mismatch",
        )

    def _check(self, numbers: Array, shape: tuple[int, ...]) -> None:
        if numbers.shape != shape:
            raise InvalidInput(
                f"The gradient of {self.name!r} has the shape {list(numbers.shape)}, but must have {list(shape)}",
                code="shape_mismatch",
            )
        if numbers.dtype.name not in FLOAT_DTYPES or not np.can_cast(numbers.dtype, sum_dtype(self.real_dtype)):
            raise self._mismatch(numbers.dtype)

    def _coalesced(self, rows: Rows) -> Rows:
        """Return the rows with sorted indices, each once."""
        height = self.shape[0]
        if not ((rows.indices >= -height) & (rows.indices < height)).all():
            raise InvalidInput(f"The gradient of {self.name!r} has indices beyond its {height} rows")
        indices, first, places = np.unique(rows.indices % height, return_index=True, return_inverse=True)
        if len(indices) == len(rows.indices):
            return Rows(indices, rows.rows[first])
        sums = np.zeros((len(indices), *self.shape[1:]), sum_dtype(rows.rows.dtype))
        np.add.at(sums, places, rows.rows.astype(sums.dtype, copy=False))
        return Rows(indices, sums)


def leaves(arrays: Mapping[str, Any], prefix: str) -> dict[str, Leaf]:
    """Return the forms of arrays, in the order of their names, by the names of their buffers."""
    if not arrays:
        raise InvalidInput("The tree has no array")
    return {buffer_name(prefix, name): Leaf(name, array) for name, array in sorted(arrays.items())}


def sum_dtype(dtype: np.dtype[Any]) -> str:
    """Return the dtype of a sum of such gradients. In half precision, small gradients would vanish."""
    return "float32" if dtype.name in HALF_DTYPES else dtype.name


def numbers_of(value: Any, name: str, default: str = "float64") -> Array:
    """Return an array as numbers that can travel. Lists and numbers get the dtype `default`."""
    if not _is_complex(value):
        return as_array(value, name, default)
    whole = np.asarray(value)
    pairs = np.asarray(whole, whole.dtype.newbyteorder("="), order="C").reshape(-1).view(_real(whole.dtype))
    return as_array(pairs.reshape(*whole.shape, 2), name)


def _is_complex(value: Any) -> bool:
    return getattr(getattr(value, "dtype", None), "kind", None) == "c"


def _real(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.zeros((), dtype).real.dtype if dtype.kind == "c" else dtype


def _narrowed(numbers: Array, wire: str | None) -> Array:
    """Return numbers that are not wider than `wire`, unless a finite number would become infinite."""
    if wire is None or numbers.itemsize <= np.dtype(wire).itemsize:
        return numbers
    half = _converted(numbers, np.dtype(wire))
    return half if np.array_equal(np.isinf(half), np.isinf(numbers)) else numbers


def _converted(numbers: Array, dtype: np.dtype[Any]) -> Array:
    with np.errstate(over="ignore"):
        return numbers.astype(dtype, copy=False)


def is_of_jax(array: Any) -> bool:
    """Return whether it is an array of JAX, which nobody can overwrite."""
    return "jax" in sys.modules and isinstance(array, sys.modules["jax"].Array)


def _maker(array: Any) -> Callable[[Array], Any]:
    """Return what makes an array of the same library, on the same devices, of a NumPy array."""
    if not is_of_jax(array):
        return np.asarray
    from jax import device_put  # already imported, because the array exists

    return partial(device_put, device=array.sharding if array.committed else None)
