"""The trained parameters of a PyTorch model: what they send to a server, and the gradients that they get back."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from gradserve_client._torch import torch
from gradserve_client._torch.names import plain_names
from gradserve_client._wire.tensors import Array, as_array
from gradserve_client.errors import InvalidInput
from gradserve_client.rows import Gradient, Rows

_SUM_DTYPES = {
    torch.float16: "float32",  # in a sum of half precision, small gradients would vanish
    torch.bfloat16: "float32",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.complex64: "float32",  # a complex number is a pair
    torch.complex128: "float64",
}


HALF_DTYPES = (torch.float16, torch.bfloat16)
"""The dtypes of half precision."""


class Trained:
    """A parameter that requires a gradient. Raises `InvalidInput` for a parameter that cannot be accumulated."""

    def __init__(self, name: str, parameter: Any, *, is_sparse: bool) -> None:
        self.name, self.parameter = name, parameter
        self._sparse = sparse_form(parameter) or ({"sparse_dim": 1} if is_sparse else None)
        """How the gradient is sparse: at first as the parameter or its module says, then as the last gradient was."""
        self._last_dtype = parameter.dtype
        if (fault := fault_of(parameter)) is not None:
            raise InvalidInput(f"{name!r} {fault}")
        if self.dtype not in _SUM_DTYPES:
            known = ", ".join(map(dtype_name, _SUM_DTYPES))
            raise InvalidInput(f"{name!r} is {self.dtype}, but must be one of {known}", code="dtype_mismatch")
        self._first_dtype, self.sum_dtype = self.dtype, _SUM_DTYPES[self.dtype]
        """The dtype of the sum on the server."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the sum. Complex numbers are pairs."""
        return (*self.parameter.shape, 2) if self.parameter.is_complex() else tuple(self.parameter.shape)

    @property
    def dtype(self) -> Any:
        """The dtype that the gradient must have. A parameter that takes every dtype gets that of its last gradient."""
        return getattr(self.parameter, "grad_dtype", self.parameter.dtype) or self._last_dtype  # since PyTorch 2.10

    def answered(self, wire: Any) -> str | None:
        """Return the dtype of the sum in an answer, if that is half precision, or 8 bits."""
        if wire == "int8":
            return "int8"
        if getattr(self.parameter, "grad_dtype", self.dtype) is None:
            return wire and dtype_name(wire)
        dtype = min((self.dtype, wire or self.dtype), key=lambda dtype: dtype.itemsize)
        return dtype_name(dtype) if dtype in HALF_DTYPES else None

    def check_dtype(self) -> None:
        """Raise `InvalidInput` if the parameter has a dtype now whose sum has another."""
        dtype = getattr(self.parameter, "grad_dtype", None) or self.parameter.dtype
        if _SUM_DTYPES.get(dtype) != self.sum_dtype:
            raise changed(f"{self.name!r} is {dtype_name(dtype)} now, but was {dtype_name(self._first_dtype)}")

    def sent(self, gradient: Any) -> None:
        """Note the form of a gradient that was sent."""
        self._sparse = sparse_form(gradient)
        self._last_dtype = gradient.dtype

    def gradient(self, numbers: Array) -> Any:
        """Return a gradient as the parameter wants it: its dtype, its device, and its place in memory."""
        found = tensor_of(numbers, self.dtype)
        if self._sparse is not None:
            return found.to(self.parameter.device, self.dtype).to_sparse(**self._sparse)
        if is_distributed(self.parameter):
            return distributed(found.to(self.parameter.device, self.dtype), self.parameter)
        return torch.empty_like(self.parameter, dtype=self.dtype, requires_grad=False).copy_(found)


def sparse_form(tensor: Any) -> dict[str, Any] | None:
    """Return the arguments of `to_sparse` that make a whole tensor like this, None for one that is not sparse."""
    if tensor.layout == torch.strided:
        return None
    return {"sparse_dim": tensor.sparse_dim()} if tensor.layout == torch.sparse_coo else {"layout": tensor.layout}


def numbers_of(tensor: Any, name: str, wire: Any = None) -> Array:
    """Return a tensor as an array, complex numbers as pairs. DTensors need all ranks.

    It is not wider than `wire`, unless a finite number would become infinite.
    """
    if is_distributed(tensor):
        tensor = tensor.full_tensor()
    tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if wire is not None and wire.itemsize < tensor.dtype.itemsize:
        half = tensor.to(wire)
        tensor = half if torch.equal(half.isinf(), tensor.isinf()) else tensor
    return as_array(tensor, name)


def gradient_of(tensor: Any, name: str, wire: Any = None) -> Gradient:
    """Return a gradient as `numbers_of` does, or as rows with sorted indices if only its first dimension is sparse."""
    if tensor.layout != torch.sparse_coo or tensor.sparse_dim() != 1:
        return numbers_of(tensor, name, wire)
    tensor = tensor.coalesce()
    return Rows(tensor.indices()[0], numbers_of(tensor.values(), name, wire))


def tensor_of(numbers: Array, dtype: Any) -> Any:
    """Return an array as a tensor, which is complex if `dtype` is."""
    if numbers.dtype.name == "bfloat16":  # PyTorch does not know the dtype of ml_dtypes
        found = torch.from_numpy(numbers.view(np.int16)).view(torch.bfloat16)
    else:
        found = torch.from_numpy(numbers)
    return torch.view_as_complex(found.to(dtype.to_real())) if dtype.is_complex else found


def distributed(tensor: Any, like: Any) -> Any:
    """Return the whole tensor as a DTensor that is divided like another, if that is a DTensor. Ranks send nothing."""
    if not is_distributed(like):
        return tensor
    return _distributed().distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def named_parameters(model: torch.nn.Module) -> dict[str, Any]:
    """Return the parameters by their names without wrappers. Shared parameters come once."""
    parameters = dict(model.named_parameters())
    return {plain: parameters[name] for name, plain in plain_names(parameters).items()}


def trained(model: torch.nn.Module) -> Iterator[Trained]:
    """Yield the parameters that require a gradient. Raises `InvalidInput` for models that cannot be accumulated."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    sparse = {id(module.weight) for module in model.modules() if isinstance(module, kinds) and module.sparse}
    parameters = named_parameters(model)
    if parameters and any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise InvalidInput(
            f"{next(iter(parameters))!r} is sharded by FullyShardedDataParallel, which hides the whole gradient: use"
            " torch.distributed.fsdp.fully_shard (FSDP2)"
        )
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            yield Trained(name, parameter, is_sparse=id(parameter) in sparse)


def set_gradients(gradients: Mapping[str, tuple[Trained, Any]]) -> None:
    """Set the gradients of all parameters, or of none if one cannot be set."""
    before = [(one.parameter, one.parameter.grad) for one, _ in gradients.values()]
    try:
        for one, gradient in gradients.values():
            one.parameter.grad = gradient
    except BaseException:
        for parameter, gradient in before:
            parameter.grad = gradient
        raise


def changed(change: str) -> InvalidInput:
    """Return the error of a model that is not as it was."""
    return InvalidInput(f"{change} when this accumulator was made; make a new one, with another run")


def fault_of(parameter: Any) -> str | None:
    """Return why the gradient of this parameter cannot be accumulated, and what to do."""
    if isinstance(parameter, torch.nn.parameter.UninitializedTensorMixin):
        return "is lazy and has no shape yet: call the model on a sample first"
    if parameter.is_meta:
        return "is on the meta device and has no data: give it data first, as with model.to_empty(device='cpu')"
    if hasattr(parameter, "ds_tensor"):
        return "is partitioned by DeepSpeed: use ZeRO stage 2 or lower, or torch.distributed.fsdp.fully_shard"
    if is_distributed(parameter):
        if "src_data_rank" not in inspect.signature(_distributed().distribute_tensor).parameters:
            return f"is a DTensor, which needs PyTorch 2.7 or later, not {torch.__version__}"
        return None
    if type(parameter).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return (
            f"is a {type(parameter).__name__}, a tensor subclass whose gradient need not be a plain tensor: make it a"
            " torch.nn.Parameter of a plain tensor, or freeze it with requires_grad_(False)"
        )
    return None


def is_distributed(tensor: Any) -> bool:
    return _distributed() is not None and isinstance(tensor, _distributed().DTensor)


def _distributed() -> Any:
    """Return the module of DTensor if the program has imported it: nothing else makes DTensors."""
    return sys.modules.get("torch.distributed.tensor")


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype of PyTorch."""
    return str(dtype).removeprefix("torch.")
