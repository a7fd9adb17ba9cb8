"""Recurrent networks, and others over sequences without attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.graphs.zoo.example import Net, below, example, floats, weight

WORDS: dict[str, Any] = {"words": below(9, 5), "labels": below(3, 5)}


@example("SoftmaxCrossEntropyLoss", opset=18, **WORDS)
def lstm_tagger() -> nn.Module:
    """Both directions. The classes are dimension 1."""
    lstm = nn.LSTM(4, 3, batch_first=True, bidirectional=True)

    def formula(net: Net, words: Tensor) -> Tensor:
        return net.head(net.lstm(net.embed(words))[0]).transpose(1, 2)

    return Net(formula, embed=nn.Embedding(9, 4), lstm=lstm, head=nn.Linear(6, 3))


@example("SoftmaxCrossEntropyLoss", opset=19, old=13, words=below(9, 5), labels=below(3))
def gru_classifier() -> nn.Module:
    gru = nn.GRU(4, 5, num_layers=2, batch_first=True)

    def formula(net: Net, words: Tensor) -> Tensor:
        return net.head(net.gru(net.embed(words))[1][-1])

    return Net(formula, embed=nn.Embedding(9, 4), gru=gru, head=nn.Linear(5, 3))


@example("MSELoss", opset=20, x=floats(6, 2), target=floats(1))
def forecast() -> nn.Module:
    """The last state of a plain recurrent network."""
    return Net(lambda net, x: net.head(net.rnn(x)[0][:, -1]), rnn=nn.RNN(2, 5, batch_first=True), head=nn.Linear(5, 1))


@example(opset=21, source=below(8, 5), target_words=below(7, 4))
def seq2seq_lstm() -> nn.Module:
    """The state of an encoder begins the decoder, which gets the right words."""

    def formula(net: Net, source: Tensor, words: Tensor) -> Tensor:
        _, state = net.encoder(net.embed_source(source))
        found, _ = net.decoder(net.embed_target(words[:, :-1]), state)
        return F.cross_entropy(net.head(found).flatten(0, 1), words[:, 1:].flatten())

    recurrent = {"encoder": nn.LSTM(4, 5, batch_first=True), "decoder": nn.LSTM(4, 5, batch_first=True)}
    embeds = {"embed_source": nn.Embedding(8, 4), "embed_target": nn.Embedding(7, 4)}
    return Net(formula, **embeds, **recurrent, head=nn.Linear(5, 7))


@example(opset=22, source=below(8, 5), target_words=below(7, 4))
def seq2seq_gru() -> nn.Module:
    """A decoder that looks at all states of the encoder."""

    def formula(net: Net, source: Tensor, words: Tensor) -> Tensor:
        states, last = net.encoder(net.embed_source(source))
        found, _ = net.decoder(net.embed_target(words[:, :-1]), last)
        shares = torch.softmax(torch.bmm(found, net.keys(states).transpose(1, 2)), -1)
        both = torch.cat([found, torch.bmm(shares, states)], -1)
        return F.cross_entropy(net.head(both).transpose(1, 2), words[:, 1:])

    recurrent = {"encoder": nn.GRU(4, 5, batch_first=True), "decoder": nn.GRU(4, 5, batch_first=True)}
    embeds = {"embed_source": nn.Embedding(8, 4), "embed_target": nn.Embedding(7, 4)}
    return Net(formula, **embeds, **recurrent, keys=nn.Linear(5, 5), head=nn.Linear(10, 7))


@example("SoftmaxCrossEntropyLoss", opset=23, words=below(9, 4), labels=below(3))
def lstm_cell() -> nn.Module:
    """A cell that Python calls for each word."""

    def formula(net: Net, words: Tensor) -> Tensor:
        x = net.embed(words)
        state = (net.start.expand(x.shape[0], 5), torch.zeros_like(net.start).expand(x.shape[0], 5))
        for k in range(4):
            state = net.cell(x[:, k], state)
        return net.head(state[0])

    return Net(formula, embed=nn.Embedding(9, 4), cell=nn.LSTMCell(4, 5), start=weight(1, 5), head=nn.Linear(5, 3))


@example("SoftmaxCrossEntropyLoss", opset=24, **WORDS)
def linear_attention() -> nn.Module:
    """Attention without a softmax: sums over what came before."""

    def formula(net: Net, words: Tensor) -> Tensor:
        x = net.embed(words)
        q, k, v = F.elu(net.q(x)) + 1, F.elu(net.k(x)) + 1, net.v(x)
        sums = torch.cumsum(k.unsqueeze(-1) * v.unsqueeze(-2), 1)
        norm = (q * torch.cumsum(k, 1)).sum(-1, keepdim=True)
        return net.head(torch.einsum("bti,btio->bto", q, sums) / norm).transpose(1, 2)

    heads = {name: nn.Linear(4, 3) for name in "qkv"}
    return Net(formula, embed=nn.Embedding(9, 4), **heads, head=nn.Linear(3, 3))


@example("SoftmaxCrossEntropyLoss", opset=25, words=below(9, 6), labels=below(3))
def text_cnn() -> nn.Module:
    """Convolutions of three widths, and the most of each."""

    def formula(net: Net, words: Tensor) -> Tensor:
        x = net.embed(words).transpose(1, 2)
        return net.head(torch.cat([torch.relu(conv(x)).amax(-1) for conv in net.convs], 1))

    convs = nn.ModuleList(nn.Conv1d(4, 3, width) for width in (2, 3, 4))
    return Net(formula, embed=nn.Embedding(9, 4), convs=convs, head=nn.Linear(9, 3))


@example("SoftmaxCrossEntropyLoss", opset=18, words=below(9, 5), lengths=below(5), labels=below(3))
def masked_mean() -> nn.Module:
    """A mean over as many words as a text has."""

    def formula(net: Net, words: Tensor, lengths: Tensor) -> Tensor:
        mask = (torch.arange(words.shape[1]) <= lengths.unsqueeze(1)).unsqueeze(-1)
        x = torch.tanh(net.gru(net.embed(words))[0]).masked_fill(~mask, 0.0)
        return net.head(x.sum(1) / mask.sum(1))

    return Net(formula, embed=nn.Embedding(9, 4), gru=nn.GRU(4, 4, batch_first=True), head=nn.Linear(4, 3))


@example(opset=19, x=floats(4, 3), y=floats(4))
def state_space() -> nn.Module:
    """A selective state space, step by step."""

    def formula(net: Net, x: Tensor, y: Tensor) -> Tensor:
        state, found = 0.0, []
        for k in range(4):
            step = F.softplus(net.step(x[:, k]))
            kept = torch.exp(-step.unsqueeze(-1) * torch.exp(net.decay))
            state = kept * state + (step * x[:, k]).unsqueeze(-1) * net.enters(x[:, k]).unsqueeze(1)
            found.append((state * net.leaves(x[:, k]).unsqueeze(1)).sum(-1) + net.skip * x[:, k])
        return F.smooth_l1_loss(net.head(torch.stack(found, 1)).squeeze(-1), y, beta=0.5)

    maps = {"step": nn.Linear(3, 3), "enters": nn.Linear(3, 2), "leaves": nn.Linear(3, 2), "head": nn.Linear(3, 1)}
    return Net(formula, **maps, decay=weight(3, 2), skip=weight(3))


@example("SoftmaxCrossEntropyLoss", opset=20, words=below(9, 4), labels=below(9, 4))
def tied_small() -> nn.Module:
    """The next word by the same table that embeds."""

    def formula(net: Net, words: Tensor) -> Tensor:
        return F.linear(torch.tanh(net.layer(net.embed(words))), net.embed.weight).transpose(1, 2)

    return Net(formula, embed=nn.Embedding(9, 4), layer=nn.Linear(4, 4))
