"""Parts of shared memory: where an input of an inference request is, and where an output of its answer goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from service.codecs._bytes import bytes_of, view
from service.dtypes import Array, DType
from service.errors import InvalidTensor, shown

MAX_BYTES = (1 << 63) - 1
"""The largest offset or size: the system counts the bytes of a file in 64 bits, signed."""

_REGION, _OFFSET, _SIZE = "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"

PARAMETERS = frozenset({_REGION, _OFFSET, _SIZE})
"""The parameters of a tensor in shared memory."""


class Part(NamedTuple):
    """The `size` bytes from `offset` on, in the registered region of this name."""

    region: str
    offset: int
    size: int


class SharedInput(NamedTuple):
    """An input whose bytes are in shared memory."""

    part: Part
    dtype: DType
    shape: list[int]

    def tensor(self, name: str, data: memoryview) -> Array:
        """Return the tensor as a read-only view of `data`, its bytes. Raises `InvalidTensor` for a wrong boolean."""
        return view(name, name, data, self.dtype, self.shape)


def part_of(name: str, parameters: Mapping[str, Any]) -> Part | None:
    """Return the part that the parameters of the tensor `name` tell, None without a region. Raises `InvalidTensor`."""
    region = parameters.get(_REGION)
    if region is None:
        return None
    if not isinstance(region, str):
        raise InvalidTensor(f"{name}.{_REGION} is {shown(region)}, but must be the name of a region", tensor=name)
    offset = parameters.get(_OFFSET)
    size = _bytes_in(name, _SIZE, parameters.get(_SIZE))
    return Part(region, 0 if offset is None else _bytes_in(name, _OFFSET, offset), size)


def _bytes_in(name: str, parameter: str, number: Any) -> int:
    if type(number) is not int or not 0 <= number <= MAX_BYTES:
        raise InvalidTensor(f"{name}.{parameter} is {shown(number)}, but must be a number of bytes", tensor=name)
    return number


def bytes_for(name: str, output: Array, part: Part) -> memoryview:
    """Return the bytes of the output `name`. Raises `InvalidTensor` if the part has no room for all of them."""
    if output.nbytes > part.size:
        raise InvalidTensor(f"{name} takes {output.nbytes} bytes, but its {_SIZE} is {part.size}", tensor=name)
    return bytes_of(output)
