"""Arrays of any kind to safetensors bytes and back, without copies where none are needed.

The format is that of the safetensors library: eight bytes with the header's length, little-endian; the header, JSON
that gives each tensor's dtype, shape and place; the bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import ml_dtypes
import numpy as np
import numpy.typing as npt

from gradserve_client.errors import InvalidInput

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


@runtime_checkable
class SupportsDLPack(Protocol):
    """An array of any library that speaks DLPack, in the memory of the CPU."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """The array as a capsule."""

    def __dlpack_device__(self) -> Any:
        """Where it is."""


TensorLike: TypeAlias = npt.ArrayLike | SupportsDLPack
"""What the client takes for a tensor: NumPy arrays, what has `__array__` or DLPack, nested lists and numbers."""

MEDIA_TYPE = "application/vnd.safetensors"

DTYPES: dict[str, np.dtype[Any]] = {
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "BOOL": np.dtype(np.bool_),
}
"""The dtypes of the service, by their names in a safetensors file."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def as_array(value: Any, name: str, default: str = "float32") -> Array:
    """`value` as a row-major, little-endian array; a view of it if it is one already.

    `default` is the dtype of nested lists and numbers. Raises `InvalidInput`, which says `name`.
    """
    try:
        array = _array(value, default)
    except (TypeError, ValueError, RuntimeError, BufferError, ArithmeticError) as error:
        raise InvalidInput(f"{name} cannot be read as an array: {error}", code="invalid_tensor") from error
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        raise InvalidInput(f"{name} has masked elements, which have no value to send", code="invalid_tensor")
    dtype = array.dtype if array.dtype.isnative else array.dtype.newbyteorder("=")
    if dtype not in _NAMES:
        known = ", ".join(dtype.name for dtype in DTYPES.values())
        raise InvalidInput(f"{name} is {array.dtype}, but must be one of {known}", code="dtype_mismatch")
    return np.asarray(array, dtype.newbyteorder("<"), order="C")


def _array(value: Any, default: str) -> Array:
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "detach") and any(kind.__module__ == "torch" for kind in type(value).__mro__):
        return _of_torch(value)
    if hasattr(value, "__array__"):
        return np.asarray(value)
    if isinstance(value, SupportsDLPack):
        return np.from_dlpack(value)
    return _of_numbers(value, np.dtype(default))


def _of_numbers(value: Any, dtype: np.dtype[Any]) -> Array:
    """Nested lists and numbers. NumPy alone would make NaN of None, 1 of 1.5 and infinity of what is too large."""
    if isinstance(value, list | tuple) and any(np.ma.is_masked(one) for one in value):
        raise ValueError("it has masked elements, which have no value to send")
    found = np.asarray(value)
    if found.size and not np.can_cast(found.dtype, dtype, "same_kind"):
        raise ValueError(f"it holds {'None or others' if found.dtype == object else found.dtype}, not {dtype}")
    with np.errstate(over="raise"):
        return np.asarray(value, dtype)


def _of_torch(tensor: Any) -> Array:
    import torch  # it is there, since the tensor is

    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.dtype == torch.bfloat16:  # which NumPy knows by ml_dtypes only
        return np.asarray(tensor.contiguous().view(torch.int16).numpy(force=True)).view(DTYPES["BF16"])
    return np.asarray(tensor.numpy(force=True))


def encode(tensors: Mapping[str, Array]) -> list[bytes | memoryview]:
    """The pieces of a file: its header, and a view of each array's bytes.

    The arrays must be as `as_array` gives them. Those of large elements come first: then all lie at multiples of their
    elements' size.
    """
    header, end = {}, 0
    ordered = sorted(tensors.items(), key=lambda pair: -pair[1].itemsize)
    for name, array in ordered:
        start, end = end, end + array.nbytes
        header[name] = {"dtype": _NAMES[array.dtype], "shape": array.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *(array.reshape(-1).view(np.uint8).data for _, array in ordered)]


def decode(body: bytearray) -> tuple[dict[str, Array], dict[str, str]]:
    """The tensors in a file, which are writable views of `body`, and its metadata. Raises `ValueError`."""
    length = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + length])
    if not isinstance(header, dict):
        raise ValueError("the header is no JSON object")
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        dtype, (start, stop) = DTYPES[entry["dtype"]], entry["data_offsets"]
        count = math.prod(entry["shape"])
        if not 0 <= start <= stop <= len(body) - 8 - length or stop - start != count * dtype.itemsize:
            raise ValueError(f"{name} has bytes {start} to {stop} for {count} elements of {dtype}")
        array = np.frombuffer(body, dtype, count, 8 + length + start) if count else np.empty(0, dtype)
        tensors[name] = (array if array.flags.aligned else array.copy()).reshape(entry["shape"])
    return tensors, metadata
