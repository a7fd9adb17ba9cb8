"""The gradients that a pull sets: as each parameter wants them, all or none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gradserve_client import Client
from gradserve_client.torch import GradientAccumulator

from tests.clients.torch.training import exchange, one


def exchanged(server: Client, run: str, model: Any, gradient: Any) -> Any:
    """Return what the parameter gets back for this gradient."""
    model.x.grad = gradient
    exchange(model, server, run)
    return model.x.grad


def images(*shape: int) -> Any:
    return torch.randn(shape).to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "data",
    [images(2, 3, 4, 5), torch.randn(4, 6).T, torch.randn(3, 1).expand(3, 1), torch.randn(2, 3, 4).permute(2, 0, 1)],
    ids=["channels_last", "transposed", "thin", "permuted"],
)
def test_a_gradient_has_the_strides_that_autograd_gives_it(server: Client, run: str, data: Any) -> None:
    model = one(data)
    (model.x * torch.arange(model.x.numel()).reshape(model.x.shape)).sum().backward()
    wanted = model.x.grad
    found = exchanged(server, run, model, wanted)
    assert torch.equal(found, wanted)
    assert found.stride() == wanted.stride()


def test_a_trained_image_model_keeps_channels_last(server: Client, run: str) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    gradients = GradientAccumulator(model, server, run=run)
    model(images(2, 3, 8, 8)).square().mean().backward()
    gradients.push()
    gradients.pull()
    assert model[0].weight.grad.is_contiguous(memory_format=torch.channels_last)
    torch.optim.SGD(model.parameters(), lr=0.1, foreach=True).step()


@pytest.mark.parametrize("kept", [torch.float32, torch.float64, None], ids=str)
def test_a_parameter_whose_gradient_has_another_dtype(server: Client, run: str, kept: Any) -> None:
    model = one(torch.ones(3, dtype=torch.bfloat16))
    model.x.grad_dtype = kept
    dtype = kept or torch.float64
    gradient = torch.tensor([1.0, 1 + 2**-20, 3.0], dtype=dtype)
    found = exchanged(server, run, model, gradient)
    assert found.dtype == dtype
    assert torch.equal(found, gradient)


def test_a_pull_sets_all_gradients_or_none(server: Client, run: str) -> None:
    """Here the second parameter refuses its gradient."""
    model = torch.nn.ParameterList([torch.ones(2), torch.ones(2)])
    gradients = GradientAccumulator(model, server, run=run)
    model[0].grad, model[1].grad = torch.ones(2), torch.ones(2)
    gradients.push()
    model[1].data = torch.ones(3)
    with pytest.raises(ValueError, match="reshape"):
        gradients.pull()
    assert [parameter.grad for parameter in model] == [None, None]
    model[1].data = torch.ones(2)
    gradients.pull()
    assert [parameter.grad.tolist() for parameter in model] == [[1, 1], [1, 1]]
