"""The handwritten digits as PyTorch tensors, a small network for them, and processes that start with PyTorch loaded."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext
from typing import Any

import numpy as np
import torch
from gradserve_client import Client
from torch.nn import functional


class Digits:
    """Images of 64 pixels from 0 to 1, and the digit on each. Some images are held out from training."""

    def __init__(self, arrays: Any) -> None:
        self.images, self.labels = torch.from_numpy(arrays.images), torch.from_numpy(arrays.labels)
        self.held_out_images = torch.from_numpy(arrays.held_out_images)
        self.held_out_labels = torch.from_numpy(arrays.held_out_labels)

    def share(self, step: int, batch: int, worker: int, workers: int) -> Any:
        """Return the rows of one worker in the step's batch, which every process draws alike."""
        rows = np.random.default_rng(step).permutation(len(self.images))[:batch]
        return torch.from_numpy(np.array_split(rows, workers)[worker])

    def loss(self, model: Any, rows: Any) -> Any:
        """Return the mean loss of these rows."""
        return functional.cross_entropy(model(self.images[rows]), self.labels[rows])

    def evaluate(self, model: Any) -> tuple[float, float]:
        """Return the mean loss of the held-out digits, and the share of them that are recognized."""
        with torch.no_grad():
            logits = model(self.held_out_images)
        correct = (logits.argmax(dim=1) == self.held_out_labels).double()
        return functional.cross_entropy(logits, self.held_out_labels).item(), correct.mean().item()


def network() -> Any:
    """Return a network of two layers, with the same weights in every process."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


def parameter_bytes(model: Any) -> bytes:
    """Return the bits of all parameters."""
    return b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())


def processes() -> ForkServerContext:
    """Return a context whose processes start in milliseconds: PyTorch is imported once for all of them.

    Optimizers import torch._dynamo, which takes longer than the rest of PyTorch.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gradserve_client.torch", "torch._dynamo"])
    return context


def delete_buffers(url: str, prefix: str) -> None:
    """Delete the buffers of this example on the server."""
    with Client(url) as server:
        for buffer in server.buffers.list(prefix):
            server.buffers[buffer.name].delete()
