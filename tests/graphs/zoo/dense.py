"""Networks of dense layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.graphs.zoo.example import Net, below, example, fixed, floats, weight


@example("SoftmaxCrossEntropyLoss", opset=18, old=13, x=floats(5), labels=below(3))
def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))


@example("SoftmaxCrossEntropyLoss", opset=19, x=floats(5), labels=below(3))
def batch_norm_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.0), nn.Linear(8, 3))


@example("MSELoss", opset=20, x=floats(4), target=floats(2))
def two_ln() -> nn.Module:
    parts = [nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 2)]
    return nn.Sequential(*parts)


@example("MSELoss", opset=21, old=20, x=floats(6), target=floats(6))
def autoencoder() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.GELU(), nn.Linear(4, 2), nn.Linear(2, 4), nn.GELU(), nn.Linear(4, 6))


@example("MSELoss", opset=22, x=floats(3, 6), target=floats(3, 6))
def swiglu() -> nn.Module:
    def formula(net: Net, x: Tensor) -> Tensor:
        gate, up = net.both(x).chunk(2, dim=-1)
        return x + net.down(F.silu(gate) * up)

    return Net(formula, both=nn.Linear(6, 16), down=nn.Linear(8, 6, bias=False))


@example("MSELoss", opset=23, old=13, x=floats(6), target=floats(2))
def glu_split() -> nn.Module:
    def formula(net: Net, x: Tensor) -> Tensor:
        a, b, c = torch.split(net.first(x), [4, 4, 2], dim=1)
        return F.glu(net.second(a * torch.sigmoid(b)), dim=-1) + c

    return Net(formula, first=nn.Linear(6, 10), second=nn.Linear(4, 4))


@example("SoftmaxCrossEntropyLoss", opset=18, train={"old": "!centres.*"}, x=floats(4), labels=below(3))
def kan() -> nn.Module:
    """Two layers of splines: sums of bumps around fixed centres."""

    def layer(x: Tensor, centres: Tensor, spline: Tensor, base: nn.Linear) -> Tensor:
        bumps = torch.exp(-((torch.tanh(x).unsqueeze(-1) - centres) ** 2) * 8)
        return torch.einsum("bik,iko->bo", bumps, spline) + base(F.silu(x))

    def formula(net: Net, x: Tensor) -> Tensor:
        centres = net.centres.table
        return layer(layer(x, centres, net.spline1, net.base1), centres, net.spline2, net.base2)

    parts = {"spline1": weight(4, 5, 6), "base1": nn.Linear(4, 6), "spline2": weight(6, 5, 3), "base2": nn.Linear(6, 3)}
    return Net(formula, centres=fixed(torch.linspace(-1, 1, 5)), **parts)


@example("MSELoss", opset=19, x=floats(2), target=floats(1))
def siren() -> nn.Module:
    def formula(net: Net, x: Tensor) -> Tensor:
        return net.last(torch.sin(5 * net.second(torch.sin(5 * net.first(x)))))

    return Net(formula, first=nn.Linear(2, 8), second=nn.Linear(8, 8), last=nn.Linear(8, 1))


@example(opset=20, x=floats(5), y=floats(2))
def mixture_of_experts() -> nn.Module:
    """Each sample goes through the two best of four experts."""

    def formula(net: Net, x: Tensor, y: Tensor) -> Tensor:
        scores = torch.softmax(net.gate(x), -1)
        best, places = torch.topk(scores, 2, dim=-1)
        chosen = torch.zeros_like(scores).scatter(1, places, best / best.sum(-1, keepdim=True))
        experts = torch.stack([expert(x) for expert in net.experts], 1)
        balance = (scores.mean(0) * (chosen > 0).float().mean(0)).sum()
        return F.mse_loss((chosen.unsqueeze(-1) * experts).sum(1), y) + 0.1 * balance

    experts = nn.ModuleList(nn.Sequential(nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 2)) for _ in range(4))
    return Net(formula, gate=nn.Linear(5, 4), experts=experts)


@example(opset=21, x=floats(3), y=floats(1))
def mixture_density() -> nn.Module:
    def formula(net: Net, x: Tensor, y: Tensor) -> Tensor:
        mean, deviation, share = net.heads(torch.tanh(net.first(x))).reshape(-1, 3, 4).unbind(1)
        distance = (y - mean) * torch.exp(-deviation)
        return -torch.logsumexp(F.log_softmax(share, -1) - deviation - distance**2 / 2, -1).mean()

    return Net(formula, first=nn.Linear(3, 8), heads=nn.Linear(8, 12))


@example("SoftmaxCrossEntropyLoss", opset=22, train="!base.*,!head.*", x=floats(6), labels=below(3))
def lora() -> nn.Module:
    """Two small matrices beside frozen layers."""

    def formula(net: Net, x: Tensor) -> Tensor:
        return net.head(torch.relu(net.base(x) + 2.0 * (x @ net.down.T @ net.up.T)))

    base, head = nn.Linear(6, 8).requires_grad_(False), nn.Linear(8, 3).requires_grad_(False)
    return Net(formula, base=base, head=head, down=weight(2, 6), up=weight(8, 2))


@example("MSELoss", opset=23, x=floats(5), target=floats(2))
def weight_norm() -> nn.Module:
    normed = nn.utils.parametrizations.weight_norm
    return nn.Sequential(normed(nn.Linear(5, 7)), nn.ELU(), normed(nn.Linear(7, 2)))


@example("MSELoss", opset=18, old=20, x=floats(4), target=floats(2))
def activations() -> nn.Module:
    kinds = [nn.CELU(), nn.Softplus(), nn.Hardswish(), nn.Mish(), nn.LeakyReLU(0.1), nn.SELU(), nn.Softsign()]
    more = [nn.PReLU(5), nn.Hardsigmoid(), nn.SiLU(), nn.LogSigmoid(), nn.Softshrink(0.1), nn.Tanhshrink(), nn.ReLU6()]
    layers = [part for kind in kinds + more for part in (nn.Linear(5, 5), kind)]
    return nn.Sequential(nn.Linear(4, 5), *layers, nn.Linear(5, 2))


@example("MSELoss", opset=19, x=floats(4), target=floats(2))
def highway() -> nn.Module:
    def formula(net: Net, x: Tensor) -> Tensor:
        for gate, layer in zip(net.gates, net.layers, strict=True):
            share = torch.sigmoid(gate(x))
            x = share * torch.relu(layer(x)) + (1 - share) * x
        return net.last(x)

    gates, layers = (nn.ModuleList(nn.Linear(4, 4) for _ in range(2)) for _ in range(2))
    return Net(formula, gates=gates, layers=layers, last=nn.Linear(4, 2))


@example("MSELoss", opset=20, x=floats(5, 3), target=floats(2))
def deep_set() -> nn.Module:
    def formula(net: Net, x: Tensor) -> Tensor:
        each = torch.tanh(net.each(x))
        pooled = torch.cat([each.mean(1), each.amax(1), each.std(1), torch.var(each, 1, unbiased=False)], -1)
        return net.all(pooled)

    return Net(formula, each=nn.Linear(3, 4), all=nn.Linear(16, 2))


@example("MSELoss", opset=21, x=floats(4), target=floats(3))
def hyper_network() -> nn.Module:
    """One layer's weights come from another layer."""

    def formula(net: Net, x: Tensor) -> Tensor:
        made = net.makes(x).view(-1, 3, 4)
        return torch.bmm(made, torch.tanh(net.first(x)).unsqueeze(-1)).squeeze(-1)

    return Net(formula, makes=nn.Linear(4, 12), first=nn.Linear(4, 4))


@example(opset=22, x=floats(4), y=floats(5))
def stick_breaking() -> nn.Module:
    """Shares of a whole: products of what is left."""

    def formula(net: Net, x: Tensor, y: Tensor) -> Tensor:
        part = torch.sigmoid(net.layer(x))
        left = torch.cumprod(1 - part, -1)
        shares = part * torch.cat([torch.ones_like(left[:, :1]), left[:, :-1]], -1)
        return ((shares - torch.softmax(y, -1)) ** 2).sum(-1).mean()

    return Net(formula, layer=nn.Linear(4, 5))


@example(opset=23, x=floats(4), time=below(5), seen=below(2))
def survival() -> nn.Module:
    """The likelihood of discrete times, by the sum of hazards."""

    def formula(net: Net, x: Tensor, time: Tensor, seen: Tensor) -> Tensor:
        hazard = F.softplus(net.layer(x))
        so_far = torch.cumsum(hazard, 1).gather(1, time.unsqueeze(1)).squeeze(1)
        now = torch.log(hazard).gather(1, time.unsqueeze(1)).squeeze(1)
        return (so_far - seen * now).mean()

    return Net(formula, layer=nn.Linear(4, 5))


@example("SoftmaxCrossEntropyLoss", opset=18, x=floats(4), labels=below(3))
def prototypes() -> nn.Module:
    def formula(net: Net, x: Tensor) -> Tensor:
        return -torch.cdist(torch.tanh(net.layer(x)), net.centres)

    return Net(formula, layer=nn.Linear(4, 6), centres=weight(3, 6))
