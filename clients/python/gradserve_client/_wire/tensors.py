"""Arrays of any kind to safetensors bytes and back, without needless copies.

The format is that of the safetensors library. It begins with eight bytes, the header's length in little-endian order.
The header is JSON with each tensor's dtype, shape and offsets. The tensors' bytes follow.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import ml_dtypes
import numpy as np
import numpy.typing as npt

from gradserve_client.errors import InvalidInput

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


@runtime_checkable
class SupportsDLPack(Protocol):
    """An array in the memory of the CPU, of any library that implements DLPack."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the array as a capsule."""

    def __dlpack_device__(self) -> Any:
        """Return the device of the array."""


TensorLike: TypeAlias = npt.ArrayLike | SupportsDLPack
"""A tensor for the client: a NumPy array, an object with `__array__` or DLPack, nested lists or a number."""

MEDIA_TYPE = "application/vnd.safetensors"
"""The media type of a safetensors body."""

DTYPES: dict[str, np.dtype[Any]] = {
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "BOOL": np.dtype(np.bool_),
}
"""The service's dtypes by their names in a safetensors file."""

FLOATS = tuple(dtype for name, dtype in DTYPES.items() if "F" in name)
"""The dtypes that gradients have."""

_WIRE = {**DTYPES, "I8": np.dtype(np.int8)}
"""With that of codes, which no operator takes."""

_NAMES = {dtype: name for name, dtype in _WIRE.items()}


def as_array(
    value: Any, name: str, default: str = "float32", dtypes: Collection[np.dtype[Any]] = tuple(DTYPES.values())
) -> Array:
    """Return `value` as a row-major, little-endian array, a view if `value` has that form already.

    `default` is the dtype of nested lists and numbers. Raises `InvalidInput` with `name` in its text, also unless the
    array has one of these `dtypes`.
    """
    try:
        array = _array(value, default)
    except (TypeError, ValueError, RuntimeError, BufferError, ArithmeticError) as error:
        raise InvalidInput(f"{name} cannot be read as an array: {error}", code="invalid_tensor") from error
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        raise InvalidInput(f"{name} has masked elements, which cannot be sent", code="invalid_tensor")
    dtype = array.dtype if array.dtype.isnative else array.dtype.newbyteorder("=")
    if dtype not in dtypes:
        known = ", ".join(dtype.name for dtype in dtypes)
        raise InvalidInput(f"{name} is {array.dtype}, but must be one of {known}", code="dtype_mismatch")
    return np.asarray(array, dtype.newbyteorder("<"), order="C")


def _array(value: Any, default: str) -> Array:
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "detach") and any(kind.__module__ == "torch" for kind in type(value).__mro__):
        return _from_torch(value)
    if (fault := _fault(value)) is not None:
        raise ValueError(fault)
    if hasattr(value, "__array__"):
        return np.asarray(value)
    if isinstance(value, SupportsDLPack):
        return np.from_dlpack(value)
    return _from_numbers(value, np.dtype(default))


def _fault(value: Any) -> str | None:
    """Return why an object is no tensor, and what to give in its place. None: it may be one."""
    if value is None:
        return "it is None: leave it out"
    if isinstance(value, Mapping):
        return "it is a dict, but tensors do not nest: give each a name of its own, such as 'layer.weight'"
    if hasattr(value, "todense"):
        return f"it is a sparse {type(value).__name__}: give it as Rows(indices, rows), or its todense()"
    return None


def _from_numbers(value: Any, dtype: np.dtype[Any]) -> Array:
    """Convert nested lists and numbers, but neither None to NaN, nor 1.5 to 1, nor large numbers to infinity."""
    if isinstance(value, list | tuple) and any(np.ma.is_masked(item) for item in value):
        raise ValueError("it has masked elements, which cannot be sent")
    natural = np.asarray(value)
    if natural.size and not np.can_cast(natural.dtype, dtype, "same_kind"):
        raise ValueError(f"it holds {'None or objects' if natural.dtype == object else natural.dtype}, not {dtype}")
    with np.errstate(over="raise"):
        return np.asarray(value, dtype)


def _from_torch(tensor: Any) -> Array:
    import torch  # already imported, because the tensor exists

    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.dtype == torch.bfloat16:  # NumPy knows it only through ml_dtypes
        return np.asarray(tensor.contiguous().view(torch.int16).numpy(force=True)).view(DTYPES["BF16"])
    return np.asarray(tensor.numpy(force=True))


def encode(tensors: Mapping[str, Array]) -> list[bytes | memoryview]:
    """Return the pieces of a file: its header, and a view of each array's bytes.

    The arrays must come from `as_array`. Arrays of larger elements come first, so that each is aligned to its elements.
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
    """Return the tensors of a file, as writable views of `body`, and its metadata. Raises `ValueError`."""
    length = int.from_bytes(body[:8], "little")
    if body[8:9] != b"{":
        raise ValueError("it does not begin with a header in JSON")
    header = json.loads(body[8 : 8 + length])
    if not isinstance(header, dict):
        raise ValueError("the header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        dtype, (start, stop) = _WIRE[entry["dtype"]], entry["data_offsets"]
        count = math.prod(entry["shape"])
        if not 0 <= start <= stop <= len(body) - 8 - length or stop - start != count * dtype.itemsize:
            raise ValueError(f"{name} has bytes {start} to {stop} for {count} elements of {dtype}")
        array = np.frombuffer(body, dtype, count, 8 + length + start) if count else np.empty(0, dtype)
        tensors[name] = (array if array.flags.aligned else array.copy()).reshape(entry["shape"])
    return tensors, metadata
