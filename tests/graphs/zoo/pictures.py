"""Networks that give images or signals."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.graphs.zoo.example import Net, example, floats, ones_and_zeros


@example("BCEWithLogitsLoss", opset=18, x=floats(2, 8, 8), target=ones_and_zeros(1, 8, 8))
def unet() -> nn.Module:
    """Down and up again, with GroupNorms that begin equal."""

    def block(before: int, after: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(2, after), nn.SiLU())

    def formula(net: Net, x: Tensor) -> Tensor:
        high = net.high(x)
        low = net.low(F.max_pool2d(high, 2))
        return net.last(net.both(torch.cat([net.up(low), high], 1)))

    parts = {"high": block(2, 4), "low": block(4, 8), "both": block(8, 4)}
    return Net(formula, **parts, up=nn.ConvTranspose2d(8, 4, 2, 2), last=nn.Conv2d(4, 1, 1))


@example("MSELoss", opset=19, x=floats(2, 6, 6), target=floats(2, 6, 6))
def two_gn() -> nn.Module:
    parts = [nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4)]
    return nn.Sequential(*parts, nn.Conv2d(4, 2, 1))


@example("L1Loss", opset=20, old=13, x=floats(1, 4, 4), target=floats(1, 8, 8))
def pixel_shuffle() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.PReLU(), nn.Conv2d(6, 4, 3, padding=1), nn.PixelShuffle(2))


@example("MSELoss", opset=21, x=floats(2, 6, 6), target=floats(2, 6, 6))
def style() -> nn.Module:
    """InstanceNorms with reflected borders, and an image made larger by its neighbours."""
    down = [nn.ReflectionPad2d(1), nn.Conv2d(2, 4, 3, stride=2), nn.InstanceNorm2d(4, affine=True), nn.ReLU()]
    up = [nn.Upsample(scale_factor=2, mode="nearest"), nn.ReplicationPad2d(1), nn.Conv2d(4, 2, 3)]
    return nn.Sequential(*down, *up, nn.InstanceNorm2d(2, affine=True), nn.Tanh())


@example("MSELoss", opset=22, x=floats(3, 8, 8), target=floats(2, 8, 8))
def pyramid() -> nn.Module:
    def formula(net: Net, x: Tensor) -> Tensor:
        fine = torch.relu(net.fine(x))
        coarse = torch.relu(net.coarse(fine))
        up = F.interpolate(net.side(coarse), scale_factor=2, mode="bilinear", align_corners=False)
        both = net.last(up + fine)
        return F.interpolate(both, size=(8, 8), mode="bilinear", align_corners=True)

    parts = {"fine": nn.Conv2d(3, 4, 3, stride=2, padding=1), "coarse": nn.Conv2d(4, 6, 3, stride=2, padding=1)}
    return Net(formula, **parts, side=nn.Conv2d(6, 4, 1), last=nn.Conv2d(4, 2, 3, padding=1))


@example(opset=23, x=floats(2, 6, 6), y=ones_and_zeros(6, 6))
def dice() -> nn.Module:
    """Segmentation by the share of the areas that overlaps."""

    def formula(net: Net, x: Tensor, y: Tensor) -> Tensor:
        found = torch.sigmoid(net.last(torch.relu(net.first(x)))).squeeze(1)
        overlap = (found * y).sum((1, 2))
        return (1 - (2 * overlap + 1) / (found.sum((1, 2)) + y.sum((1, 2)) + 1)).mean()

    return Net(formula, first=nn.Conv2d(2, 4, 3, padding=1, dilation=1), last=nn.Conv2d(4, 1, 3, padding=2, dilation=2))


@example("MSELoss", opset=24, x=floats(2, 12), target=floats(1, 12))
def wavenet() -> nn.Module:
    """Causal convolutions with gates and normalized weights."""

    def formula(net: Net, x: Tensor) -> Tensor:
        x, skipped = net.first(x), 0.0
        for k, layer in enumerate(net.layers):
            both = layer(F.pad(x, (2**k, 0)))
            found = torch.tanh(both[:, :4]) * torch.sigmoid(both[:, 4:])
            skipped = skipped + net.skips[k](found)
            x = x + found
        return net.last(torch.relu(skipped))

    normed = nn.utils.parametrizations.weight_norm
    layers = nn.ModuleList(normed(nn.Conv1d(4, 8, 2, dilation=2**k)) for k in range(3))
    skips = nn.ModuleList(nn.Conv1d(4, 3, 1) for _ in range(3))
    return Net(formula, first=nn.Conv1d(2, 4, 1), layers=layers, skips=skips, last=nn.Conv1d(3, 1, 1))


@example("MSELoss", opset=25, x=floats(2, 10), target=floats(2, 10))
def signal_autoencoder() -> nn.Module:
    down = [
        nn.Conv1d(2, 4, 4, stride=2, padding=1),
        nn.BatchNorm1d(4),
        nn.LeakyReLU(0.2),
        nn.AvgPool1d(2, ceil_mode=True),
    ]
    up = [nn.Upsample(size=5, mode="linear"), nn.ConvTranspose1d(4, 2, 4, stride=2, padding=1)]
    return nn.Sequential(*down, *up)
