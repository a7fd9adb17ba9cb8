"""Networks of images: classifiers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.graphs.zoo.example import Net, below, example, floats, weight

CLASSES: dict[str, Any] = {"x": floats(3, 8, 8), "labels": below(3)}


def conv(before: int, after: int, size: int = 3, **options: Any) -> nn.Module:
    """A convolution with a BatchNorm, which keeps the sides."""
    return nn.Sequential(
        nn.Conv2d(before, after, size, padding=size // 2, bias=False, **options), nn.BatchNorm2d(after)
    )


@example("SoftmaxCrossEntropyLoss", opset=18, old=13, x=floats(1, 8, 8), labels=below(3))
def cnn() -> nn.Module:
    parts = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*parts, nn.Linear(24, 3))


@example("SoftmaxCrossEntropyLoss", opset=19, **CLASSES)
def resnet() -> nn.Module:
    def formula(net: Net, x: Tensor) -> Tensor:
        x = torch.relu(net.stem(x))
        x = torch.relu(net.b(torch.relu(net.a(x))) + x)
        x = torch.relu(net.d(torch.relu(net.c(x))) + net.down(x))
        return net.head(F.adaptive_avg_pool2d(x, 1).flatten(1))

    blocks = {"a": conv(4, 4), "b": conv(4, 4), "c": conv(4, 6, stride=2), "d": conv(6, 6)}
    return Net(formula, stem=conv(3, 4), **blocks, down=conv(4, 6, 1, stride=2), head=nn.Linear(6, 3))


class Excited(nn.Module):  # type: ignore[misc]  # PyTorch is not checked
    """Channels times a share that follows from all of them."""

    def __init__(self, channels: int, activation: nn.Module) -> None:
        super().__init__()
        self.down, self.up, self.activation = nn.Conv2d(channels, 2, 1), nn.Conv2d(2, channels, 1), activation

    def forward(self, x: Tensor) -> Tensor:
        return x * self.activation(self.up(torch.relu(self.down(x.mean((2, 3), keepdim=True)))))


@example("SoftmaxCrossEntropyLoss", opset=20, **CLASSES)
def mobilenet_v3() -> nn.Module:
    def formula(net: Net, x: Tensor) -> Tensor:
        x = net.stem(x)
        return net.head((x + net.block(x)).mean((2, 3)))

    depth = [conv(4, 8, 1), nn.Hardswish(), conv(8, 8, 3, groups=8), nn.Hardswish()]
    block = nn.Sequential(*depth, Excited(8, nn.Hardsigmoid()), conv(8, 4, 1))
    head = nn.Sequential(nn.Linear(4, 6), nn.Hardswish(), nn.Dropout(0.0), nn.Linear(6, 3))
    return Net(formula, stem=nn.Sequential(conv(3, 4, stride=2), nn.Hardswish()), block=block, head=head)


@example("SoftmaxCrossEntropyLoss", opset=21, **CLASSES)
def efficientnet() -> nn.Module:
    block = nn.Sequential(
        conv(4, 8, 1), nn.SiLU(), conv(8, 8, 5, groups=8, stride=2), nn.SiLU(), Excited(8, nn.Sigmoid())
    )
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3)]
    return nn.Sequential(conv(3, 4), nn.SiLU(), block, conv(8, 5, 1), nn.SiLU(), *pool)


@example("SoftmaxCrossEntropyLoss", opset=22, **CLASSES)
def convnext() -> nn.Module:
    def formula(net: Net, x: Tensor) -> Tensor:
        x = net.stem(x)
        y = net.norm(net.depth(x).permute(0, 2, 3, 1))
        x = x + (net.scale * net.down(F.gelu(net.up(y)))).permute(0, 3, 1, 2)
        return net.head(net.last(x.mean((-2, -1))))

    parts = {"depth": nn.Conv2d(4, 4, 7, padding=3, groups=4), "norm": nn.LayerNorm(4, eps=1e-6)}
    block = {**parts, "up": nn.Linear(4, 8), "down": nn.Linear(8, 4), "scale": weight(4)}
    return Net(formula, stem=nn.Conv2d(3, 4, 2, 2), **block, last=nn.LayerNorm(4), head=nn.Linear(4, 3))


@example("SoftmaxCrossEntropyLoss", opset=23, **CLASSES)
def densenet() -> nn.Module:
    def formula(net: Net, x: Tensor) -> Tensor:
        for layer in net.layers:
            x = torch.cat([x, layer(x)], 1)
        return net.head(F.avg_pool2d(x, 2).amax((2, 3)))

    layers = [nn.Sequential(nn.BatchNorm2d(n), nn.ReLU(), nn.Conv2d(n, 2, 3, padding=1)) for n in (3, 5, 7)]
    return Net(formula, layers=nn.ModuleList(layers), head=nn.Linear(9, 3))


@example("SoftmaxCrossEntropyLoss", opset=24, **CLASSES)
def shufflenet() -> nn.Module:
    """Channels of groups change places, and one half passes by."""

    def formula(net: Net, x: Tensor) -> Tensor:
        x = net.stem(x)
        passing, worked = x.chunk(2, dim=1)
        x = torch.cat([passing, torch.relu(net.block(worked))], 1)
        batch, channels, height, width = x.shape
        x = x.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(batch, channels, height, width)
        return net.head(torch.relu(net.grouped(x)).mean((2, 3)))

    parts = {"stem": conv(3, 8, stride=2), "block": conv(4, 4), "grouped": nn.Conv2d(8, 8, 3, groups=2)}
    return Net(formula, **parts, head=nn.Linear(8, 3))


@example("SoftmaxCrossEntropyLoss", opset=25, **CLASSES)
def inception() -> nn.Module:
    """Four branches, pools of three kinds among them."""

    def formula(net: Net, x: Tensor) -> Tensor:
        most = F.max_pool2d(x, 3, stride=1, padding=1)
        mean = F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)
        x = torch.cat([net.small(x), net.large(x), net.most(most), net.mean(mean)], 1)
        x = F.adaptive_avg_pool2d(F.max_pool2d(torch.relu(x), 2, ceil_mode=True), 2)
        return net.head(F.adaptive_max_pool2d(x, 1).flatten(1) + x.flatten(2).sum(-1))

    branches = {"small": nn.Conv2d(3, 2, 1), "large": nn.Conv2d(3, 2, 5, padding=2), "most": nn.Conv2d(3, 2, 1)}
    return Net(formula, **branches, mean=nn.Conv2d(3, 2, 1), head=nn.Linear(8, 3))


@example("SoftmaxCrossEntropyLoss", opset=18, **CLASSES)
def alexnet() -> nn.Module:
    """LocalResponseNorm behind convolutions."""
    features = [
        nn.Conv2d(3, 6, 3),
        nn.ReLU(),
        nn.LocalResponseNorm(5, alpha=1.0),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(6, 4, 2),
    ]
    return nn.Sequential(*features, nn.ReLU(), nn.Flatten(), nn.Dropout(0.0), nn.Linear(4, 3))


@example("SoftmaxCrossEntropyLoss", opset=19, **CLASSES)
def power_pools() -> nn.Module:
    pools = [nn.Conv2d(3, 4, 3, padding=1), nn.Sigmoid(), nn.LPPool2d(2, 2), nn.Conv2d(4, 4, 1), nn.Softplus()]
    return nn.Sequential(*pools, nn.LPPool2d(3, 2, 1), nn.Flatten(), nn.Linear(36, 3))


@example("SoftmaxCrossEntropyLoss", opset=20, x=floats(1, 4, 6, 6), labels=below(3))
def video() -> nn.Module:
    first = [nn.Conv3d(1, 3, 3, padding=1), nn.BatchNorm3d(3), nn.ReLU(), nn.MaxPool3d(2)]
    return nn.Sequential(*first, nn.Conv3d(3, 4, (1, 3, 3)), nn.AvgPool3d((2, 1, 1)), nn.Flatten(), nn.Linear(4, 3))


@example("SoftmaxCrossEntropyLoss", opset=20, old=20, x=floats(1, 7, 7), labels=below(3))
def spatial_transformer() -> nn.Module:
    """An affine change of the image, which the image itself says, and a classifier."""

    def formula(net: Net, x: Tensor) -> Tensor:
        theta = net.move(x.flatten(1)).view(-1, 2, 3) + net.start
        x = F.grid_sample(x, F.affine_grid(theta, [x.shape[0], 1, 5, 5], align_corners=False), align_corners=False)
        return net.head(x.flatten(1))

    return Net(formula, move=nn.Linear(49, 6), start=weight(2, 3), head=nn.Linear(25, 3))


@example("SoftmaxCrossEntropyLoss", opset=22, **CLASSES)
def patches() -> nn.Module:
    """Patches by unfold, and a linear layer for each."""

    def formula(net: Net, x: Tensor) -> Tensor:
        found = F.unfold(x, 4, stride=2, padding=1).transpose(1, 2)
        return net.head(torch.relu(net.each(found)).mean(1))

    return Net(formula, each=nn.Linear(48, 6), head=nn.Linear(6, 3))


@example("SoftmaxCrossEntropyLoss", opset=23, **CLASSES)
def mixer() -> nn.Module:
    """Layers over patches and over channels in turn."""

    def formula(net: Net, x: Tensor) -> Tensor:
        x = net.patches(x).flatten(2).transpose(1, 2)
        x = x + net.tokens(net.norm1(x).transpose(1, 2)).transpose(1, 2)
        x = x + net.channels(net.norm2(x))
        return net.head(net.norm3(x).mean(1))

    norms = {f"norm{k}": nn.LayerNorm(6) for k in (1, 2, 3)}
    tokens = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 4))
    channels = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
    return Net(formula, patches=nn.Conv2d(3, 6, 4, 4), tokens=tokens, channels=channels, head=nn.Linear(6, 3), **norms)
