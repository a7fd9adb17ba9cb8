"""Modules whose loss is the point."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.graphs.zoo.example import Net, below, example, floats, ones_and_zeros


@example(opset=18, images=floats(5), texts=floats(4))
def clip() -> nn.Module:
    """Pairs of a batch, with a temperature that is one number."""

    def formula(net: Net, images: Tensor, texts: Tensor) -> Tensor:
        a, b = F.normalize(net.images(images), dim=-1), F.normalize(net.texts(texts), dim=-1)
        scores = torch.exp(net.scale) * a @ b.T
        same = torch.arange(images.shape[0])
        return (F.cross_entropy(scores, same) + F.cross_entropy(scores.T, same)) / 2

    parts = {"images": nn.Linear(5, 6), "texts": nn.Linear(4, 6)}
    return Net(formula, **parts, scale=nn.Parameter(torch.tensor(1.5)))


@example(opset=19, x=floats(6), noise=floats(2))
def vae() -> nn.Module:
    """The noise is an input."""

    def formula(net: Net, x: Tensor, noise: Tensor) -> Tensor:
        mean, logarithm = net.encoder(x).chunk(2, dim=-1)
        again = net.decoder(mean + noise * torch.exp(logarithm / 2))
        distance = -(1 + logarithm - mean**2 - logarithm.exp()).sum(-1).mean() / 2
        return F.mse_loss(again, x) + 0.1 * distance

    return Net(formula, encoder=nn.Linear(6, 4), decoder=nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 6)))


@example(opset=20, x=floats(4), y=floats(1))
def quantiles() -> nn.Module:
    def formula(net: Net, x: Tensor, y: Tensor) -> Tensor:
        shares, error = torch.tensor([0.1, 0.5, 0.9], dtype=x.dtype), y - net.layer(x)
        return torch.maximum(shares * error, (shares - 1) * error).mean()

    return Net(formula, layer=nn.Linear(4, 3))


@example(opset=21, old=13, x=floats(4), y=ones_and_zeros(3))
def focal() -> nn.Module:
    """Labels that are easy count less."""

    def formula(net: Net, x: Tensor, y: Tensor) -> Tensor:
        found = net.layer(x)
        each = F.binary_cross_entropy_with_logits(found, y, reduction="none")
        share = torch.sigmoid(found)
        return ((1 - share * y - (1 - share) * (1 - y)) ** 2 * (0.25 * y + 0.75 * (1 - y)) * each).mean()

    return Net(formula, layer=nn.Linear(4, 3))


@example(opset=22, first=floats(4), second=floats(4), third=floats(4))
def triplets() -> nn.Module:
    def formula(net: Net, *three: Tensor) -> Tensor:
        a, b, c = (F.normalize(net.layer(one), dim=-1) for one in three)
        return F.relu((a - b).norm(dim=-1) - (a - c).norm(dim=-1) + 0.5).mean() - F.cosine_similarity(a, b).mean()

    return Net(formula, layer=nn.Linear(4, 3))


@example(opset=23, state=floats(4), action=below(3, 1), before=floats(1), gain=floats(), returned=floats())
def ppo() -> nn.Module:
    """The logarithm of an action's chance, a ratio that is clipped, a value and an entropy."""

    def formula(net: Net, state: Tensor, action: Tensor, before: Tensor, gain: Tensor, returned: Tensor) -> Tensor:
        h = torch.tanh(net.body(state))
        chances = F.log_softmax(net.policy(h), -1)
        ratio = torch.exp(chances.gather(-1, action).squeeze(-1) - before.squeeze(-1) / 10 + 1)
        clipped = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
        value = (net.value(h).squeeze(-1) - returned) ** 2
        entropy = -(chances.exp() * chances).sum(-1)
        return (0.5 * value - clipped - 0.01 * entropy).mean()

    return Net(formula, body=nn.Linear(4, 6), policy=nn.Linear(6, 3), value=nn.Linear(6, 1))


@example(opset=24, x=floats(4), teacher=floats(3), label=below(3))
def distillation() -> nn.Module:
    """The distance to a teacher's chances, and smoothed labels."""

    def formula(net: Net, x: Tensor, teacher: Tensor, label: Tensor) -> Tensor:
        found = net.layer(x)
        far = F.kl_div(F.log_softmax(found / 2, -1), F.softmax(teacher / 2, -1), reduction="batchmean")
        return 4 * far + F.cross_entropy(found, label, label_smoothing=0.1)

    return Net(formula, layer=nn.Linear(4, 3))


@example(opset=25, x=floats(4), y=floats(2))
def gaussian() -> nn.Module:
    """A mean and a variance, by PyTorch's own loss."""

    def formula(net: Net, x: Tensor, y: Tensor) -> Tensor:
        return F.gaussian_nll_loss(net.mean(x), y, F.softplus(net.variance(x)), eps=1e-4)

    return Net(formula, mean=nn.Linear(4, 2), variance=nn.Linear(4, 2))


@example("BCEWithLogitsLoss", opset=18, x=floats(4), target=ones_and_zeros(5))
def many_labels() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Softmax(-1), nn.Linear(6, 5))


@example("NegativeLogLikelihoodLoss", opset=19, x=floats(4), labels=below(3))
def likelihood() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Hardtanh(), nn.Linear(6, 3), nn.LogSoftmax(-1))


@example(opset=20, x=floats(4), y=floats(1))
def robust() -> nn.Module:
    """Huber's loss, an L1 of the weights, and one of the norms."""

    def formula(net: Net, x: Tensor, y: Tensor) -> Tensor:
        error = F.huber_loss(net.last(F.relu6(net.first(x))), y, delta=0.7)
        return error + 0.01 * net.first.weight.abs().sum() + 0.01 * torch.linalg.matrix_norm(net.last.weight)

    return Net(formula, first=nn.Linear(4, 5), last=nn.Linear(5, 1))


@example(opset=21, x=floats(4), place=below(3), weights=ones_and_zeros(3))
def ordered() -> nn.Module:
    """Hinges, a weight for each class, and the logarithm of a sum."""

    def formula(net: Net, x: Tensor, place: Tensor, weights: Tensor) -> Tensor:
        found = net.layer(x)
        right = found.gather(1, place.unsqueeze(1))
        hinge = (F.relu(1 + found - right) * (weights + 0.5)).sum(1)
        by_class = F.cross_entropy(found, place, weight=torch.tensor([1.0, 2.0, 0.5], dtype=x.dtype))
        return hinge.mean() + by_class + torch.logsumexp(found, 0).mean()

    return Net(formula, layer=nn.Linear(4, 3))
