"""Hashes of what the models of all workers must have alike, also where nothing is trained."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from gradserve_client._torch import torch
from gradserve_client._torch.names import plain_names
from gradserve_client._torch.parameters import fault_of, is_distributed


def kept_buffers(model: torch.nn.Module) -> dict[str, Any]:
    """Return the buffers by their names, without those that no checkpoint keeps, which may be caches."""
    passing = {
        f"{path}.{name}".removeprefix(".")
        for path, module in model.named_modules()
        for name in getattr(module, "_non_persistent_buffers_set", ())
    }
    buffers = {name: one for name, one in model.named_buffers() if name not in passing}
    plain = plain_names([*buffers, *(name for name, _ in model.named_parameters())])
    return {plain[name]: one for name, one in buffers.items()}


def described(tensors: Mapping[str, Any]) -> list[tuple[str, object, str]]:
    """Return names, shapes and dtypes. A lazy tensor has no shape yet."""
    lazy = torch.nn.parameter.UninitializedTensorMixin
    return [
        (name, None if isinstance(one, lazy) else tuple(one.shape), str(one.dtype))
        for name, one in sorted(tensors.items())
    ]


def hashed(tensors: Mapping[str, Any]) -> str:
    """Return a hash of all numbers that PyTorch shows. All ranks of a DTensor call this."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode(errors="surrogatepass"))
        if fault_of(tensor) is None and not tensor.is_quantized:
            digest.update(_bytes(tensor.detach()))
    return digest.hexdigest()


def _bytes(tensor: Any) -> memoryview:
    if is_distributed(tensor):
        tensor = tensor.full_tensor()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    whole = tensor.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    found: memoryview = whole.view(torch.uint8).numpy().data
    return found
