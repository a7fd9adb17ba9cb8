"""The dtypes of the service, each in one row, and the groups of them that operators ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

DType = np.dtype[Any]
Array = np.ndarray[Any, DType]

BOOL = np.dtype(np.bool_)
INT32 = np.dtype(np.int32)
INT64 = np.dtype(np.int64)
FLOAT16 = np.dtype(np.float16)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)

DTYPES: dict[str, DType] = {
    "float16": FLOAT16,
    "bfloat16": BFLOAT16,
    "float32": FLOAT32,
    "float64": FLOAT64,
    "int32": INT32,
    "int64": INT64,
    "bool": BOOL,
}
"""The JSON name of each dtype, which is NumPy's, and the dtype: little-endian, as the wire is."""

NAMES: dict[DType, str] = {dtype: name for name, dtype in DTYPES.items()}
"""The way back, a hundred times faster than NumPy's `dtype.name`."""

SAFETENSORS: dict[DType, str] = {
    FLOAT16: "F16",
    BFLOAT16: "BF16",
    FLOAT32: "F32",
    FLOAT64: "F64",
    INT32: "I32",
    INT64: "I64",
    BOOL: "BOOL",
}
"""The name of each dtype in a safetensors file."""

OPEN_INFERENCE: dict[DType, str] = {
    FLOAT16: "FP16",
    BFLOAT16: "BF16",
    FLOAT32: "FP32",
    FLOAT64: "FP64",
    INT32: "INT32",
    INT64: "INT64",
    BOOL: "BOOL",
}
"""The datatype of each dtype in the Open Inference Protocol."""


@dataclass(frozen=True)
class Kind:
    """What an operator takes in one place: the names of the dtypes, and the one that a bare JSON list has there."""

    name: str
    dtypes: tuple[str, ...]
    default: str


FLOATS = Kind("float", ("float16", "bfloat16", "float32", "float64"), "float32")
INTEGERS = Kind("integer", ("int32", "int64"), "int64")
FLAG = Kind("flag", ("bool",), "bool")
ANY = Kind("any", tuple(DTYPES), "bool")


def cast(numbers: np.ndarray[Any, DType], dtype: DType) -> np.ndarray[Any, DType]:
    """The numbers as `dtype`, rounded once, to the nearest. What is out of its range is infinite, with NumPy's warning.

    ml_dtypes makes bfloat16 of float64 by way of float32, and rounds twice. Here float32 is rounded to odd on the way,
    after which the second rounding is right.

    >>> float(cast(np.array(1.00390625000001), BFLOAT16))
    1.0078125
    """
    if numbers.dtype != FLOAT64 or dtype != BFLOAT16:
        return numbers.astype(dtype)
    single = np.atleast_1d(numbers.astype(FLOAT32))
    back, bits = single.astype(FLOAT64), single.view(np.uint32)
    inexact = back != numbers
    bits -= np.abs(back) > np.abs(numbers)  # towards zero
    bits |= inexact
    return single.astype(dtype).reshape(numbers.shape)


def compute_dtype(dtype: DType) -> DType:
    """The dtype that arithmetic on `dtype` runs in: float32 for the 16-bit floats, else `dtype` itself.

    >>> compute_dtype(BFLOAT16)
    dtype('float32')
    """
    return FLOAT32 if dtype.itemsize == 2 else dtype
