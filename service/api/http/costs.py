"""What tensors cost: time to decode a body, which decides where that happens, and memory, which is reserved first."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from service.api.http.call import Call
from service.api.http.offload import INLINE_TEXT_BYTES
from service.codecs import json as json_codec
from service.dtypes import DTYPES, DType

R = TypeVar("R")

LIST_BYTES = 256
"""A list in a JSON text takes as long to decode as this many bytes of numbers."""

MEMBER_BYTES = 1 << 11
"""A member of an object takes as long to decode as this many bytes of numbers: it may be a tensor of its own."""

HEADER_FACTOR = 16
"""A byte of a safetensors header takes as long to decode as this many bytes of a JSON text."""

TINY_BYTES = 1 << 12
"""A body up to this size is decoded in the event loop: nothing in 4 KiB can take long."""


class Form(NamedTuple):
    """The form of tensors in an answer."""

    encoding: json_codec.Encoding | None
    """How JSON writes them; None if they are bytes."""
    is_coded: bool = False
    """Whether the answer is compressed."""
    dtype: str | None = None
    """Their dtype, if it is not their own."""
    is_mean: bool = False

    def extra_bytes(self, shape: Sequence[int], dtype: DType) -> int:
        """Return how much memory the answer takes for such a tensor, beside the tensor itself."""
        target = dtype if self.dtype is None else DTYPES[self.dtype]
        size = math.prod(shape) * target.itemsize
        text = 0 if self.encoding is None else json_codec.encoded_bytes(shape, target, self.encoding)
        copied = size if self.is_mean or target != dtype else 0
        return copied + text + (text or size) * self.is_coded


def json_cost(text: memoryview) -> int:
    """Return the cost of decoding a JSON text, in bytes of numbers."""
    size = len(text)
    if size > INLINE_TEXT_BYTES:
        return size
    raw = bytes(text)
    return size + LIST_BYTES * raw.count(b"[") + MEMBER_BYTES * raw.count(b":")


def safetensors_cost(body: memoryview) -> int:
    """Return the cost of decoding a safetensors file, in bytes of JSON text: its header's, for tensors are views."""
    return HEADER_FACTOR * len(_header(body))


def _header(body: memoryview) -> memoryview:
    return body[8 : 8 + int.from_bytes(body[:8], "little")]


def decode_json(
    call: Call, body: memoryview, text: memoryview, decoder: Callable[..., R], *arguments: Any
) -> Coroutine[Any, Any, R]:
    """Call the `decoder` of a body whose JSON is `text`: in the event loop if that is quick, else in the pool.

    The pool reserves memory first. Raises `Busy` and what the decoder raises.
    """
    inline = len(body) <= TINY_BYTES or json_cost(text) <= INLINE_TEXT_BYTES
    return _decode(call, inline, text, decoder, arguments)


def decode_safetensors(
    call: Call, body: memoryview, decoder: Callable[..., R], *arguments: Any
) -> Coroutine[Any, Any, R]:
    """Do the same for a safetensors file."""
    inline = len(body) <= TINY_BYTES or safetensors_cost(body) <= INLINE_TEXT_BYTES
    return _decode(call, inline, _header(body), decoder, arguments)


def _decode(
    call: Call, inline: bool, text: memoryview, decoder: Callable[..., R], arguments: tuple[Any, ...]
) -> Coroutine[Any, Any, R]:
    work = decoder if inline else partial(_reserve_and_decode, call, text, decoder)
    return call.offload(inline, work, *arguments, phase="decode")


def _reserve_and_decode(call: Call, text: memoryview, decoder: Callable[..., R], *arguments: Any) -> R:
    call.reserve(json_codec.parsed_bytes(text))
    return decoder(*arguments)
