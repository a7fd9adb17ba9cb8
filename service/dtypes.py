"""The dtypes of the service, their names in each format, and the groups that operators accept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

DType = np.dtype[Any]
Array = np.ndarray[Any, DType]

BOOL = np.dtype(np.bool_)
INT8 = np.dtype(np.int8)
INT32 = np.dtype(np.int32)
INT64 = np.dtype(np.int64)
FLOAT16 = np.dtype(np.float16)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)

_FORMATS = (
    (FLOAT16, "float16", "F16", "FP16"),
    (BFLOAT16, "bfloat16", "BF16", "BF16"),
    (FLOAT32, "float32", "F32", "FP32"),
    (FLOAT64, "float64", "F64", "FP64"),
    (INT32, "int32", "I32", "INT32"),
    (INT64, "int64", "I64", "INT64"),
    (BOOL, "bool", "BOOL", "BOOL"),
)
"""Each dtype with its names in JSON, in safetensors, and in the Open Inference Protocol."""

DTYPES: dict[str, DType] = {name: dtype for dtype, name, _, _ in _FORMATS}
"""The dtype of each JSON name, which is NumPy's name, too. All are little-endian, as the wire is."""

NAMES: dict[DType, str] = {dtype: name for name, dtype in DTYPES.items()}
"""The JSON name of each dtype. A look-up here is a hundred times faster than NumPy's `dtype.name`."""

SAFETENSORS: dict[DType, str] = {dtype: name for dtype, _, name, _ in _FORMATS}
"""The name of each dtype in a safetensors file."""

OPEN_INFERENCE: dict[DType, str] = {dtype: name for dtype, _, _, name in _FORMATS}
"""The datatype of each dtype in the Open Inference Protocol."""

WIRE: dict[str, DType] = {**DTYPES, "int8": INT8}
"""The dtypes of requests and answers by their JSON names: codes of gradients are int8, which no operator takes."""

WIRE_NAMES: dict[DType, str] = {dtype: name for name, dtype in WIRE.items()}


@dataclass(frozen=True)
class Kind:
    """The dtypes that an operator accepts for a tensor, by name, and the `default` of a JSON list without a dtype."""

    name: str
    dtypes: tuple[str, ...]
    default: str


FLOATS = Kind("float", ("float16", "bfloat16", "float32", "float64"), "float32")
INTEGERS = Kind("integer", ("int32", "int64"), "int64")
CODES = Kind("code", ("int8",), "int8")
SCALES = Kind("scale", ("float32",), "float32")
FLAG = Kind("flag", ("bool",), "bool")
NUMBERS = Kind("number", (*FLOATS.dtypes, *INTEGERS.dtypes), "float32")
ELEMENTS = Kind("element", tuple(DTYPES), "float32")
ANY = Kind("any", tuple(DTYPES), "bool")


def cast(numbers: Array, dtype: DType) -> Array:
    """Return the numbers as `dtype`, rounded once, to the nearest. Overflow gives infinity and NumPy's warning.

    ml_dtypes converts float64 to bfloat16 by way of float32, and so rounds twice. Here the first rounding, to float32,
    is to odd, after which the second rounding is right.

    >>> float(cast(np.array(1.00390625000001), BFLOAT16))
    1.0078125
    """
    if numbers.dtype != FLOAT64 or dtype != BFLOAT16:
        return numbers.astype(dtype)
    single = np.atleast_1d(numbers.astype(FLOAT32))
    restored, bits = single.astype(FLOAT64), single.view(np.uint32)
    inexact = restored != numbers
    bits -= np.abs(restored) > np.abs(numbers)  # towards zero
    bits |= inexact
    return single.astype(dtype).reshape(numbers.shape)


def compute_dtype(dtype: DType) -> DType:
    """Return the dtype for arithmetic on `dtype`: float32 for the 16-bit floats, else `dtype` itself.

    >>> compute_dtype(BFLOAT16)
    dtype('float32')
    """
    return FLOAT32 if dtype.itemsize == 2 else dtype
