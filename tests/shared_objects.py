"""Objects of shared memory, and requests whose tensors lie there."""

from __future__ import annotations

import itertools
import os
from typing import Any

import httpx
import numpy as np

from service.dtypes import Array
from service.host.shared_memory import OBJECTS

SHARED = "/v2/systemsharedmemory"
RELU = "/v2/models/ReluGrad/infer"
_numbers = itertools.count()


def new_key() -> str:
    return f"/gradserve-test-{os.getpid()}-{next(_numbers)}"


class Object:
    """An object of shared memory with some bytes."""

    def __init__(self, data: bytes = b"") -> None:
        self.key = new_key()
        self.path = OBJECTS / self.key[1:]
        self.path.write_bytes(data)

    def array(self, offset: int = 0, dtype: Any = np.float32) -> Array:
        return np.frombuffer(self.path.read_bytes()[offset:], dtype)


def register(http: httpx.Client, name: str, key: str, byte_size: int, offset: int = 0) -> httpx.Response:
    return http.post(f"{SHARED}/region/{name}/register", json={"key": key, "byte_size": byte_size, "offset": offset})


def region(name: str, size: int, offset: int = 0) -> dict[str, Any]:
    """Return the parameters of a tensor in this region."""
    return {"shared_memory_region": name, "shared_memory_byte_size": size, "shared_memory_offset": offset}


def shared(name: str, elements: int, offset: int = 0, *, into: str = "r", datatype: str = "FP32") -> dict[str, Any]:
    size = elements * 4
    return {"name": name, "shape": [elements], "datatype": datatype, "parameters": region(into, size, offset)}


def relu(elements: int, **more: Any) -> dict[str, Any]:
    """Return a request whose tensors lie one behind the other in the region r."""
    size = 4 * elements
    output = {"name": "dX", "parameters": region("r", size, 2 * size)}
    return {"inputs": [shared("dY", elements), shared("X", elements, size)], "outputs": [output], **more}


def numbers(elements: int) -> Array:
    """Return dY and X for this number of elements, one behind the other."""
    return np.random.default_rng(0).standard_normal(2 * elements, np.float32)


def expected(both: Array) -> Array:
    dY, X = both.reshape(2, -1)
    return np.where(X > 0, dY, np.float32(0))
