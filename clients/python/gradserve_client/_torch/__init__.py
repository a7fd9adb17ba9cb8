"""PyTorch, or an error that says how to install it."""

from __future__ import annotations

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "gradserve_client.torch needs PyTorch: pip install 'gradserve-client[torch]'", name="torch"
    ) from error

__all__ = ["torch"]
