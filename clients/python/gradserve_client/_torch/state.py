"""All parameters and buffers of a PyTorch model as numbers, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradserve_client._runs.names import buffer_name
from gradserve_client._runs.parts import Layout, Part
from gradserve_client._torch import torch
from gradserve_client._torch.names import plain_names
from gradserve_client._torch.parameters import distributed, dtype_name, numbers_of, sparse_form, tensor_of
from gradserve_client._wire.tensors import Array
from gradserve_client.errors import InvalidInput
from gradserve_client.rows import Gradient

_SENT = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes that are sent as they are. Integers travel as float64, and complex numbers as pairs."""


class State(Layout):
    """The parameters and buffers of a model, also the frozen ones, in parts of at most `limit` bytes.

    Raises `InvalidInput` if one of them cannot be set.
    """

    def __init__(self, model: torch.nn.Module, prefix: str, limit: int) -> None:
        named = dict(model.named_parameters()) | dict(model.named_buffers())
        for name, tensor in named.items():
            if (fault := _fault(tensor)) is not None:
                raise InvalidInput(f"{name!r} {fault}")
        self._tensors = {buffer_name(prefix, plain): named[name] for name, plain in plain_names(named).items()}
        super().__init__(
            {name: Part(_shape(one), dtype_name(_sent_dtype(one)), None) for name, one in self._tensors.items()}, limit
        )

    def numbers(self) -> dict[str, Gradient]:
        """Return the numbers of all parts. Raises `InvalidInput` for integers beyond 2**53."""
        tensors = self._tensors.items()
        return self.spread({name: numbers_of(_as_sent(one.detach(), name), name) for name, one in tensors})[0]

    def set(self, numbers: Mapping[str, Array]) -> None:
        """Set all tensors, or none."""
        found, rest = {}, dict(numbers)
        for name, tensor in self._tensors.items():
            whole = self.joined(name, rest).reshape(_shape(tensor))
            one = tensor_of(whole, tensor.dtype).to(tensor.device, tensor.dtype)
            form = sparse_form(tensor)
            found[name] = distributed(one, tensor) if form is None else one.to_sparse(**form)
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                tensor.copy_(found[name])


def _fault(tensor: Any) -> str | None:
    """Return why PyTorch cannot write into this tensor."""
    if tensor.layout == torch.sparse_coo:
        return None
    if tensor.layout != torch.strided:
        return f"is {tensor.layout}, which cannot be set: use torch.sparse_coo or a dense tensor"
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() > span:
        return "has elements that share memory, so they cannot be set: register its clone() in its place"
    return None


def _shape(tensor: Any) -> tuple[int, ...]:
    return (*tensor.shape, 2) if tensor.is_complex() else tuple(tensor.shape)


def _sent_dtype(tensor: Any) -> Any:
    dtype = tensor.dtype.to_real()
    return dtype if dtype in _SENT else torch.float64


def _as_sent(tensor: Any, name: str) -> Any:
    if tensor.dtype.to_real() in _SENT:
        return tensor
    wide = tensor.to(torch.float64)
    if not torch.equal(wide.to(tensor.dtype), tensor):
        raise InvalidInput(f"{name!r} has integers beyond 2**53, which float64 cannot hold")
    return wide
