"""Networks of tables and of graphs: embeddings, gathers and scatters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.graphs.zoo.example import Input, Net, below, example, floats, ones_and_zeros, weight

EDGES = Input(lambda nodes, random: torch.randint(nodes, (2, 3 * nodes), generator=random), {1: "edges"})
NODES: dict[str, Any] = {"x": floats(4), "edges": EDGES}


@example("BCEWithLogitsLoss", opset=18, dense=floats(3), sparse=below(7, 2, 3), target=ones_and_zeros(1))
def dlrm_sums() -> nn.Module:
    """Sums of embeddings, and the products of all pairs."""

    def formula(net: Net, dense: Tensor, sparse: Tensor) -> Tensor:
        bags = [table(sparse[:, k]).sum(1) for k, table in enumerate(net.tables)]
        all = torch.stack([torch.relu(net.dense(dense)), *bags], 1)
        pairs = torch.bmm(all, all.transpose(1, 2))
        i, j = torch.tril_indices(3, 3, offset=-1)
        return net.head(torch.cat([all[:, 0], pairs[:, i, j]], 1))

    tables = nn.ModuleList(nn.Embedding(7, 4) for _ in range(2))
    return Net(formula, dense=nn.Linear(3, 4), tables=tables, head=nn.Linear(7, 1))


def bag(mode: str) -> nn.Module:
    return Net(lambda net, words: net.head(net.bag(words)), bag=nn.EmbeddingBag(7, 4, mode=mode), head=nn.Linear(4, 3))


@example("SoftmaxCrossEntropyLoss", opset=19, words=below(7, 3), labels=below(3))
def bag_of_sums() -> nn.Module:
    return bag("sum")


@example("SoftmaxCrossEntropyLoss", opset=20, words=below(7, 3), labels=below(3))
def bag_of_means() -> nn.Module:
    return bag("mean")


@example("SoftmaxCrossEntropyLoss", opset=21, words=below(7, 3), labels=below(3))
def bag_of_maxima() -> nn.Module:
    return bag("max")


@example("MSELoss", opset=22, user=below(6), item=below(5), target=floats())
def factors() -> nn.Module:
    """Ratings as products of users and items, with a bias of each."""

    def formula(net: Net, user: Tensor, item: Tensor) -> Tensor:
        return (net.users(user) * net.items(item)).sum(-1) + (net.user(user) + net.item(item)).squeeze(-1)

    tables = {"users": nn.Embedding(6, 4), "items": nn.Embedding(5, 4)}
    return Net(formula, **tables, user=nn.Embedding(6, 1), item=nn.Embedding(5, 1))


@example("BCEWithLogitsLoss", opset=23, fields=below(12, 4), target=ones_and_zeros())
def factorization_machine() -> nn.Module:
    def formula(net: Net, fields: Tensor) -> Tensor:
        x = net.embed(fields)
        pairs = (x.sum(1) ** 2 - (x**2).sum(1)).sum(-1) / 2
        return net.linear(fields).sum((1, 2)) + pairs + net.deep(x.flatten(1)).squeeze(-1)

    deep = nn.Sequential(nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 1))
    return Net(formula, embed=nn.Embedding(12, 3), linear=nn.Embedding(12, 1), deep=deep)


@example(opset=24, word=below(9), near=below(9), far=below(9, 3))
def word_vectors() -> nn.Module:
    """A word, one near it, and three that are drawn."""

    def formula(net: Net, word: Tensor, near: Tensor, far: Tensor) -> Tensor:
        x = net.inside(word)
        right = F.logsigmoid((x * net.outside(near)).sum(-1))
        wrong = F.logsigmoid(-torch.bmm(net.outside(far), x.unsqueeze(-1)).squeeze(-1)).sum(-1)
        return -(right + wrong).mean()

    return Net(formula, inside=nn.Embedding(9, 4), outside=nn.Embedding(9, 4))


@example("MSELoss", opset=25, **NODES, target=floats(2))
def gnn_index_add() -> nn.Module:
    """Messages along edges, divided by how many come."""

    def formula(net: Net, x: Tensor, edges: Tensor) -> Tensor:
        messages = torch.relu(net.message(torch.cat([x[edges[0]], x[edges[1]]], -1)))
        sums = torch.zeros(x.shape[0], 5, dtype=x.dtype).index_add(0, edges[1], messages)
        count = torch.zeros(x.shape[0], dtype=x.dtype).index_add(0, edges[1], torch.ones_like(messages[:, 0]))
        return net.update(torch.cat([x, sums / count.clamp(min=1).unsqueeze(-1)], -1))

    return Net(formula, message=nn.Linear(8, 5), update=nn.Linear(9, 2))


@example("MSELoss", opset=18, **NODES, target=floats(2))
def gnn_scatter() -> nn.Module:
    """The largest message of each node, and the sum of all."""

    def formula(net: Net, x: Tensor, edges: Tensor) -> Tensor:
        messages = net.message(x)[edges[0]]
        to = edges[1].unsqueeze(-1).expand(-1, 5)
        none = torch.zeros(x.shape[0], 5, dtype=x.dtype)
        most = none.scatter_reduce(0, to, messages, "amax", include_self=True)
        return net.update(torch.cat([x, most, none.scatter_add(0, to, messages)], -1))

    return Net(formula, message=nn.Linear(4, 5), update=nn.Linear(14, 2))


@example("SoftmaxCrossEntropyLoss", opset=19, x=floats(5, 4), near=ones_and_zeros(5, 5), labels=below(3))
def graph_attention() -> nn.Module:
    """A softmax over the neighbours that a matrix has."""

    def formula(net: Net, x: Tensor, near: Tensor) -> Tensor:
        h = net.map(x)
        scores = F.leaky_relu(h @ net.into + (h @ net.back).transpose(1, 2), 0.2)
        joined = near + torch.eye(5, dtype=near.dtype) > 0
        shares = torch.softmax(torch.where(joined, scores, torch.full_like(scores, -1e9)), -1)
        return net.head(F.elu(shares @ h).mean(1))

    return Net(formula, map=nn.Linear(4, 6), into=weight(6, 1), back=weight(6, 1), head=nn.Linear(6, 3))


@example("MSELoss", opset=20, x=floats(2), bins=below(4), target=floats())
def one_hot() -> nn.Module:
    """A category as ones and zeros, and a table by hand."""

    def formula(net: Net, x: Tensor, bins: Tensor) -> Tensor:
        hot = F.one_hot(bins, 4).to(x.dtype)
        return (net.layer(torch.cat([x, hot], -1)) + net.table[bins]).squeeze(-1)

    return Net(formula, layer=nn.Linear(6, 1), table=weight(4, 1))


@example("MSELoss", opset=21, x=floats(3, 4), target=floats(3))
def triangles() -> nn.Module:
    """A triangular matrix from a table, by index_put, and norms."""

    def formula(net: Net, x: Tensor) -> Tensor:
        i, j = torch.tril_indices(4, 4)
        lower = torch.zeros(4, 4, dtype=x.dtype).index_put((i, j), net.entries)
        return torch.linalg.vector_norm(F.normalize(x, dim=-1) @ lower.T + net.shift, dim=-1)

    return Net(formula, entries=weight(10), shift=weight(4))
