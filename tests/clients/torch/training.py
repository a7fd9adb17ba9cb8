"""What the tests train: small models, PyTorch's own gradients of them, and a transport that fails on demand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import httpx
import torch
from gradserve_client import Client
from gradserve_client.torch import GradientAccumulator
from torch.nn import functional


def net(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))


def shard(model: Any) -> Any:
    """Make each parameter of a `net` a DTensor, divided along its first axis. Return the mesh."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    for layer in (model[0], model[2]):
        for name, parameter in [*layer.named_parameters()]:
            part = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            setattr(layer, name, torch.nn.Parameter(part))
    return mesh


def one(data: Any) -> Any:
    """Return a model with one parameter, `x`."""
    model = torch.nn.Module()
    model.x = data if isinstance(data, torch.nn.Parameter) else torch.nn.Parameter(data)
    return model


def batch(size: int, seed: int) -> tuple[Any, Any]:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(size, 5, generator=random), torch.randint(3, (size,), generator=random)


def backward(model: Any, size: int, seed: int) -> None:
    samples, labels = batch(size, seed)
    functional.cross_entropy(model(samples), labels).backward()


def own(model: Any, batches: list[tuple[int, int]]) -> list[Any]:
    """Return PyTorch's own weighted mean of the gradients over batches of these sizes and seeds."""
    model = copy.deepcopy(model)
    model.zero_grad()
    for size, seed in batches:
        samples, labels = batch(size, seed)
        (functional.cross_entropy(model(samples), labels) * size / sum(size for size, _ in batches)).backward()
    return grads(model)


def grads(model: Any) -> list[Any]:
    return [parameter.grad for parameter in model.parameters()]


def fill_with(model: Any, value: float) -> None:
    """Set every number of the gradients."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


def assert_close(found: list[Any], expected: list[Any], atol: float = 1e-6) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=atol)


def same(found: Any, expected: Any) -> bool:
    """Return whether tensors have the same bits, one by one."""
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def exchange(model: Any, server: Client, run: str, **options: Any) -> GradientAccumulator:
    """Push the gradients of a single worker, and pull them."""
    gradients = GradientAccumulator(model, server, run=run, **options)
    gradients.push()
    gradients.pull()
    return gradients


class Watched(httpx.HTTPTransport):
    """Notes the paths and the bytes of requests, and the bytes of answers."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int]] = []
        self.answered: list[int] = []
        self.refuses: Callable[[httpx.Request], bool] = lambda request: False
        """Does not connect for these requests."""
        self.left = 1 << 30
        """Requests until none connects any more."""
        self.losing = False
        """Whether the answers are lost."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if self.left == 0 or self.refuses(request):
            raise httpx.ConnectError("no route")
        self.left -= 1
        self.sent.append((request.url.path, int(request.headers.get("content-length", "0"))))
        response = super().handle_request(request)
        self.answered.append(int(response.headers.get("content-length", "0")))
        if self.losing:
            response.read()
            raise httpx.ReadError("the answer is lost")
        return response
