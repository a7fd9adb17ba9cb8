"""Transformers of PyTorch's own parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.graphs.zoo.example import Net, below, example, fixed, floats, ones_and_zeros, weight

NEXT: dict[str, Any] = {"words": below(11, 6), "labels": below(11, 6)}


def heads(x: Tensor, count: int) -> Tensor:
    """Change [batch, length, count x width] to [batch, count, length, width]."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    """Change [batch, count, length, width] to [batch, length, count x width]."""
    return x.transpose(1, 2).flatten(2)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the halves of each head by the angles of its place."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


@example("SoftmaxCrossEntropyLoss", opset=23, **NEXT)
def gpt_rope() -> nn.Module:
    """Places by rotation, RMSNorm, and a head that is the embedding."""

    def formula(net: Net, words: Tensor) -> Tensor:
        x = net.embed.weight[words]
        y = net.norm1(x)
        q, k = (turned(heads(one(y), 2), net.cos.table, net.sin.table) for one in (net.q, net.k))
        x = x + net.out(joined(F.scaled_dot_product_attention(q, k, heads(net.v(y), 2), is_causal=True)))
        y = net.norm2(x)
        x = x + net.down(F.silu(net.gate(y)) * net.up(y))
        return F.linear(net.norm3(x), net.embed.weight).transpose(1, 2)

    angles = torch.outer(torch.arange(6.0), 10.0 ** -torch.arange(0, 1, 0.5)).repeat(1, 2)
    tables = {"cos": fixed(angles.cos()), "sin": fixed(angles.sin())}
    maps = {name: nn.Linear(8, 8, bias=False) for name in ("q", "k", "v", "out")}
    block = {
        "gate": nn.Linear(8, 12, bias=False),
        "up": nn.Linear(8, 12, bias=False),
        "down": nn.Linear(12, 8, bias=False),
    }
    norms = {f"norm{k}": nn.RMSNorm(8, eps=1e-6) for k in (1, 2, 3)}
    return Net(formula, embed=nn.Embedding(11, 8), **tables, **maps, **block, **norms)


@example("SoftmaxCrossEntropyLoss", opset=18, **NEXT)
def gpt_chunk() -> nn.Module:
    """One map of queries, keys and values, learned places, and a mask by hand."""

    def formula(net: Net, words: Tensor) -> Tensor:
        x = net.embed(words) + net.places(torch.arange(6))
        q, k, v = (heads(one, 2) for one in net.qkv(net.norm1(x)).chunk(3, dim=-1))
        scores = q @ k.transpose(-2, -1) / 2.0
        later = torch.ones(6, 6, dtype=torch.bool).triu(1)
        x = x + net.out(joined(torch.softmax(scores.masked_fill(later, float("-inf")), -1) @ v))
        return net.head(x + net.mlp(net.norm2(x))).transpose(1, 2)

    embeds = {"embed": nn.Embedding(11, 8), "places": nn.Embedding(6, 8)}
    mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU("tanh"), nn.Linear(16, 8))
    maps = {"qkv": nn.Linear(8, 24), "out": nn.Linear(8, 8), "head": nn.Linear(8, 11, bias=False)}
    return Net(formula, **embeds, norm1=nn.LayerNorm(8), norm2=nn.LayerNorm(8), mlp=mlp, **maps)


@example("SoftmaxCrossEntropyLoss", opset=19, words=below(11, 5), padded=ones_and_zeros(5), labels=below(3))
def encoder() -> nn.Module:
    """PyTorch's layer, with places that are padding."""

    def formula(net: Net, words: Tensor, padded: Tensor) -> Tensor:
        ignored = torch.cat([torch.zeros_like(padded[:, :1]), padded[:, 1:]], 1) > 0
        return net.head(net.layer(net.embed(words), src_key_padding_mask=ignored)[:, 0])

    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    return Net(formula, embed=nn.Embedding(11, 8), layer=layer, head=nn.Linear(8, 3))


@example("SoftmaxCrossEntropyLoss", opset=20, **NEXT, memory=floats(4, 8))
def decoder() -> nn.Module:
    """PyTorch's layer, which looks back and at a memory."""

    def formula(net: Net, words: Tensor, memory: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(6, dtype=memory.dtype)
        return net.head(net.layer(net.embed(words), memory, tgt_mask=mask)).transpose(1, 2)

    layer = nn.TransformerDecoderLayer(8, 2, 12, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
    return Net(formula, embed=nn.Embedding(11, 8), layer=layer, head=nn.Linear(8, 11))


@example("SoftmaxCrossEntropyLoss", opset=21, x=floats(3, 8, 8), labels=below(3))
def vision_transformer() -> nn.Module:
    def formula(net: Net, x: Tensor) -> Tensor:
        x = net.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([net.first.expand(x.shape[0], -1, -1), x], 1) + net.places
        return net.head(net.norm(net.layer(x))[:, 0])

    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
    parts = {"patches": nn.Conv2d(3, 8, 4, 4), "layer": layer, "norm": nn.LayerNorm(8), "head": nn.Linear(8, 3)}
    return Net(formula, first=weight(1, 1, 8), places=weight(1, 5, 8), **parts)


@example(opset=22, x=floats(4, 8), time=floats(4), y=floats(4, 8))
def diffusion() -> nn.Module:
    """A layer that a time scales, shifts and gates."""

    def formula(net: Net, x: Tensor, time: Tensor, y: Tensor) -> Tensor:
        shift, scale, gate = net.makes(F.silu(net.time(time))).unsqueeze(1).chunk(3, dim=-1)
        x = x + gate * net.mlp(F.layer_norm(x, (8,)) * (1 + scale) + shift)
        return F.mse_loss(x, y)

    mlp = nn.Sequential(nn.Linear(8, 12), nn.GELU("tanh"), nn.Linear(12, 8))
    return Net(formula, time=nn.Linear(4, 6), makes=nn.Linear(6, 24), mlp=mlp)


@example("SoftmaxCrossEntropyLoss", opset=24, x=floats(6, 5), labels=below(3))
def perceiver() -> nn.Module:
    """A few learned queries look at a long input."""

    def formula(net: Net, x: Tensor) -> Tensor:
        latent = net.latent.expand(x.shape[0], -1, -1)
        found, _ = net.cross(latent, x, x, need_weights=False)
        found = found + net.own(found, found, found, need_weights=True)[0]
        return net.head(found.mean(1))

    cross = nn.MultiheadAttention(8, 2, kdim=5, vdim=5, batch_first=True)
    own = nn.MultiheadAttention(8, 4, batch_first=True)
    return Net(formula, latent=weight(1, 3, 8), cross=cross, own=own, head=nn.Linear(8, 3))


@example(opset=25, words=below(11, 5), chosen=ones_and_zeros(5))
def masked_words() -> nn.Module:
    """Words that are hidden are guessed. All others have the label -100."""

    def formula(net: Net, words: Tensor, chosen: Tensor) -> Tensor:
        labels = torch.where(chosen > 0, words, -100)
        x = net.layer(net.embed(torch.where(chosen > 0, 10, words)) + net.places)
        found = F.linear(net.norm(F.gelu(net.map(x))), net.embed.weight, net.bias)
        return F.cross_entropy(found.reshape(-1, 11), labels.reshape(-1))

    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    parts = {"layer": layer, "map": nn.Linear(8, 8), "norm": nn.LayerNorm(8), "bias": weight(11)}
    return Net(formula, embed=nn.Embedding(11, 8), places=weight(5, 8), **parts)


@example("SoftmaxCrossEntropyLoss", opset=18, x=floats(4, 4, 6), labels=below(3))
def windows() -> nn.Module:
    """Attention inside of shifted windows, with a bias for each place in them."""

    def formula(net: Net, x: Tensor) -> Tensor:
        parts = torch.roll(x, (-1, -1), (1, 2)).view(-1, 2, 2, 2, 2, 6).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, 6)
        q, k, v = net.qkv(net.norm(parts)).reshape(-1, 4, 3, 2, 3).permute(2, 0, 3, 1, 4)
        shares = torch.softmax(q @ k.transpose(-2, -1) * 3**-0.5 + net.bias, -1)
        parts = net.out(joined(shares @ v))
        back = parts.view(-1, 2, 2, 2, 2, 6).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, 4, 6)
        return net.head((x + torch.roll(back, (1, 1), (1, 2))).mean((1, 2)))

    maps = {"norm": nn.LayerNorm(6), "qkv": nn.Linear(6, 18), "out": nn.Linear(6, 6), "head": nn.Linear(6, 3)}
    return Net(formula, bias=weight(2, 4, 4), **maps)


@example("SoftmaxCrossEntropyLoss", opset=19, **NEXT)
def grouped_queries() -> nn.Module:
    """Four heads of queries for two of keys, normalized, with biases by distance."""

    def formula(net: Net, words: Tensor) -> Tensor:
        x = net.embed(words)
        q, k = net.norm_q(heads(net.q(x), 4)), net.norm_k(heads(net.k(x), 2)).repeat_interleave(2, dim=1)
        v = heads(net.v(x), 2).repeat_interleave(2, dim=1)
        distance = torch.arange(6)[None, :] - torch.arange(6)[:, None]
        bias = (distance * net.slopes[:, None, None]).masked_fill(distance > 0, -1e9)
        return net.head(joined(torch.softmax(q @ k.mT + bias, -1) @ v)).transpose(1, 2)

    maps = {"q": nn.Linear(8, 16), "k": nn.Linear(8, 8), "v": nn.Linear(8, 8), "head": nn.Linear(16, 11)}
    norms = {"norm_q": nn.RMSNorm(4), "norm_k": nn.RMSNorm(4)}
    return Net(formula, embed=nn.Embedding(11, 8), slopes=weight(4), **maps, **norms)
