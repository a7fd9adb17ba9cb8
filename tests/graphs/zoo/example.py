"""A model of the zoo: its module, its inputs and its loss."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Make = Callable[[int, torch.Generator], Tensor]
"""Makes an input for a batch of this many samples."""

LABELS = {"SoftmaxCrossEntropyLoss": "labels", "NegativeLogLikelihoodLoss": "labels"}
"""What the server's losses call their own input. All others call it target."""


@dataclass(frozen=True)
class Input:
    """An input, and the names of its dimensions that are open, by their axes."""

    make: Make
    axes: Mapping[int, str] = field(default_factory=lambda: {0: "batch"})


def floats(*shape: int) -> Input:
    """Normal numbers [batch, *shape]."""
    return Input(lambda batch, random: torch.randn(batch, *shape, generator=random))


def ones_and_zeros(*shape: int) -> Input:
    """Float32 [batch, *shape] of ones and zeros."""
    return Input(lambda batch, random: torch.randint(2, (batch, *shape), generator=random).float())


def below(end: int, *shape: int, start: int = 0) -> Input:
    """Int64 [batch, *shape] from `start` up to `end`, which is left out."""
    return Input(lambda batch, random: torch.randint(start, end, (batch, *shape), generator=random))


class Net(nn.Module):  # type: ignore[misc]  # PyTorch is not checked
    """A module of these parts. `formula` gets the module and its inputs."""

    def __init__(self, formula: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.formula = formula

    def forward(self, *given: Tensor) -> Any:
        return self.formula(self, *given)


def weight(*shape: int) -> nn.Parameter:
    """A parameter of small normal numbers."""
    return nn.Parameter(0.3 * torch.randn(shape))


def fixed(value: Tensor) -> nn.Module:
    """A module whose buffer `table` is no parameter."""
    module = nn.Module()
    module.register_buffer("table", value)
    return module


@dataclass(frozen=True)
class Example:
    """A model of the zoo. `loss` is an output of the module, the only one, or a loss of the server."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Mapping[str, Input]
    loss: str
    opset: int
    """The opset of the default exporter."""
    old: int
    """The opset of the old exporter."""
    train: Mapping[str, str]
    """By exporter, the patterns of the parameters: if there are tables, frozen ones or some without a dimension."""

    def net(self) -> nn.Module:
        """Return the module in float32, with the same weights each time."""
        torch.manual_seed(zlib.crc32(self.name.encode()))
        return self.make().train()

    def tensors(self, batch: int) -> dict[str, Tensor]:
        """Return inputs of `batch` samples, and with them the labels or the target of a loss of the server."""
        random = torch.Generator().manual_seed(batch)
        return {name: one.make(batch, random) for name, one in self.inputs.items()}

    @property
    def target(self) -> str | None:
        """The input that the loss of the server adds, None if the module computes the loss."""
        return None if self.loss == "loss" else LABELS.get(self.loss, "target")

    @property
    def given(self) -> dict[str, Input]:
        """The inputs of the module."""
        return {name: one for name, one in self.inputs.items() if name != self.target}


ZOO: dict[str, Example] = {}
"""The models by their names. The modules of models fill it."""


def example(
    loss: str = "loss", *, opset: int = 18, old: int = 17, train: str | Mapping[str, str] = {}, **inputs: Input
) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Add the module that the function makes to the zoo, under the function's name."""

    def add(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        name = make.__name__
        assert name not in ZOO
        trains = dict.fromkeys(("default", "old", "optimized"), train) if isinstance(train, str) else train
        ZOO[name] = Example(name, make, inputs, loss, opset, old, trains)
        return make

    return add
