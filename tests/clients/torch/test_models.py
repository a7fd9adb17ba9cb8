"""Models of every kind: accumulated right, or refused when the accumulator is made."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

import pytest
import torch
from gradserve_client import Client, InvalidInput
from gradserve_client.torch import GradientAccumulator
from torch.testing._internal.two_tensor import TwoTensor

from tests.clients.torch.training import assert_close, backward, exchange, grads, net, one, own, shard


def names(server: Client, run: str) -> set[str]:
    """Return the parameters that have buffers."""
    found = {info.name.removeprefix(f"{run}.") for info in server.buffers.list(run)}
    return {name for name in found if "::" not in name}


# ----- refused -----


def partitioned() -> Any:
    model = one(torch.ones(1))
    model.x.ds_tensor = torch.ones(1)
    return model


def sharded() -> Any:
    model = one(torch.ones(1))
    model.inner = type("FullyShardedDataParallel", (torch.nn.Module,), {})()
    return model


def twice() -> Any:
    model = torch.nn.Module()
    model.a = torch.nn.Module()
    model.a.x = torch.nn.Parameter(torch.ones(1))
    model.a._orig_mod = torch.nn.Module()
    model.a._orig_mod.x = torch.nn.Parameter(torch.ones(1))
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.nn.LazyLinear(2), "'weight' is lazy.*call the model on a sample first"),
        (lambda: torch.nn.Linear(2, 1, device="meta"), "'weight' is on the meta device.*to_empty"),
        (lambda: one(torch.nn.Parameter(TwoTensor(torch.ones(1), torch.ones(1)))), "'x' is a TwoTensor.*plain tensor"),
        (lambda: one(torch.ones(1, dtype=torch.float8_e5m2)), "'x' is torch.float8_e5m2, but must be one of float16"),
        (partitioned, "'x' is partitioned by DeepSpeed: use ZeRO stage 2"),
        (sharded, "'x' is sharded by FullyShardedDataParallel.*fully_shard"),
        (twice, "'a.x' and 'a._orig_mod.x' are both 'a.x'"),
    ],
    ids=["lazy", "meta", "subclass", "float8", "zero3", "fsdp1", "twice"],
)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_models_that_cannot_be_accumulated(server: Client, run: str, make: Any, words: str) -> None:
    """They are refused before anything is created, with the way out."""
    with pytest.raises(InvalidInput, match=words):
        GradientAccumulator(make(), server, run=run)
    assert not server.buffers.list(run)


@pytest.mark.parametrize(
    ("mistaken", "words"),
    [
        ({"run": ""}, "run is '', but must be a name"),
        ({"run": "a" * 100}, r"prefix 'a+\.' has 101 characters"),
        ({"run": "a", "prefix": "a b."}, "'a b.x' is not a buffer name"),
        ({"run": "a", "prefix": "a" * 101}, "prefix 'a+' has 101 characters"),
    ],
)
def test_names_of_runs_that_no_buffer_can_have(server: Client, mistaken: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        GradientAccumulator(net(), server, **mistaken)


# ----- names -----


@pytest.mark.parametrize("name", ["a b", "läufer/größe", "層", "a:b", "%41", "~", "\n", "a-b_c", "\U0001f600"])
def test_names_that_the_server_does_not_take_are_quoted(server: Client, run: str, name: str) -> None:
    model = torch.nn.ParameterDict({name: torch.ones(1)})
    model[name].grad = torch.ones(1)
    exchange(model, server, run)
    assert model[name].grad.tolist() == [1]
    (quoted,) = names(server, run)
    assert unquote(quoted.replace(":", "%")) == name


def test_long_names_stay_distinct(server: Client, run: str) -> None:
    model = torch.nn.ParameterDict({"é" * 300 + end: torch.full((1,), float(end)) for end in "12"})
    for parameter in model.values():
        parameter.grad = parameter.detach().clone()
    exchange(model, server, run)
    assert [parameter.grad.item() for parameter in model.values()] == [1, 2]
    assert all(len(info.name) <= 200 for info in server.buffers.list(run))


class Wrapped(torch.nn.Module):  # type: ignore[misc]  # PyTorch is not checked
    """Names its model's parameters as DistributedDataParallel does."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, samples: Any) -> Any:
        return self.module(samples)


def inner_compiled() -> Any:
    model = net()
    model[2] = torch.compile(model[2], backend="eager")
    return model


@pytest.mark.parametrize(
    "wrap",
    [
        lambda: torch.nn.DataParallel(net()),
        lambda: Wrapped(torch.compile(net(), backend="eager")),
        lambda: torch.compile(Wrapped(net()), backend="eager"),
        inner_compiled,
    ],
    ids=["DataParallel", "compiled in parallel", "parallel in compiled", "a compiled layer"],
)
def test_a_wrapped_worker_and_a_plain_worker_meet(server: Client, run: str, wrap: Any) -> None:
    plain, wrapped = net(), wrap()
    expected = own(plain, [(4, 1), (2, 2)])
    first = GradientAccumulator(plain, server, run=run, quorum=2)
    second = GradientAccumulator(wrapped, server, run=run, quorum=2)
    backward(plain, 4, 1)
    first.push(weight=4)
    copied = net()
    backward(copied, 2, 2)
    for parameter, source in zip(wrapped.parameters(), copied.parameters(), strict=True):
        parameter.grad = source.grad
    second.push(weight=2)
    for gradients, model in [(first, plain), (second, wrapped)]:
        gradients.pull()
        assert_close(grads(model), expected)
    assert names(server, run) == {name for name, _ in net().named_parameters()}


# ----- kinds of numbers -----


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_parameters(server: Client, run: str, dtype: Any) -> None:
    model = torch.nn.Linear(3, 2, dtype=dtype)
    inputs = torch.randn(4, 3, dtype=dtype)
    model(inputs).abs().square().sum().backward()
    expected = grads(model)
    gradients = GradientAccumulator(model, server, run=run)
    gradients.push(weight=3)
    gradients.pull()
    for found, wanted in zip(grads(model), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    assert server.buffers[f"{run}.weight"].info().shape == (2, 3, 2)


def test_a_conjugated_complex_gradient(server: Client, run: str) -> None:
    model = one(torch.ones(2, dtype=torch.complex64))
    model.x.grad = torch.tensor([1 + 2j, 3 - 4j]).conj()
    exchange(model, server, run)
    assert model.x.grad.tolist() == [1 - 2j, 3 + 4j]


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore")
def test_dtensors_meet_plain_tensors(server: Client, run: str) -> None:
    """As `fully_shard` makes them: the gradient of each rank is a part, and the whole is sent."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    plain, sharded = net(), net()
    mesh = shard(sharded)
    expected = own(plain, [(4, 1), (2, 2)])
    workers = [GradientAccumulator(model, server, run=run, quorum=2) for model in (plain, sharded)]
    backward(plain, 4, 1)
    workers[0].push(weight=4)
    copied = net()
    backward(copied, 2, 2)
    for parameter, source in zip(sharded.parameters(), copied.parameters(), strict=True):
        parameter.grad = distribute_tensor(source.grad, mesh, [Shard(0)])
    workers[1].push(weight=2)
    for worker in workers:
        worker.pull()
    assert_close(grads(plain), expected)
    assert all(isinstance(gradient, DTensor) and gradient.placements == (Shard(0),) for gradient in grads(sharded))
    assert_close([gradient.full_tensor() for gradient in grads(sharded)], expected)
    torch.optim.SGD(sharded.parameters(), lr=0.1).step()


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore")
def test_fully_shard(server: Client, run: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    plain, sharded = net(), net()
    expected = own(plain, [(4, 1), (2, 2)])
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    workers = [GradientAccumulator(model, server, run=run, quorum=2) for model in (plain, sharded)]
    for worker, model, (size, seed) in zip(workers, (plain, sharded), [(4, 1), (2, 2)], strict=True):
        backward(model, size, seed)
        worker.push(weight=size)
    for worker, model in zip(workers, (plain, sharded), strict=True):
        worker.pull()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert_close(grads(plain), expected)
    assert_close([gradient.full_tensor() for gradient in grads(sharded)], expected)
    assert_close([parameter.full_tensor() for parameter in sharded.parameters()], list(plain.parameters()))
