"""Rates and weight decays by patterns of names: as PyTorch's groups of parameters, in one step for all workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from gradserve_client import InvalidInput, KeyReused
from onnx import TensorProto, helper, numpy_helper

from tests.clients.both import connected
from tests.clients.conftest import delete_all
from tests.serving import serving

SHAPES = {"body.weight": (2, 3), "body.bias": (3,), "head.weight": (3, 1), "head.bias": (1,)}
GROUPS = {"*.bias": {"weight_decay": 0.0}, "head.*": {"lr": 0.1}, "head.b*": {"lr": 0.2}}
RATES = {"body.weight": 0.05, "body.bias": 0.05, "head.weight": 0.1, "head.bias": 0.2}
DTYPES = {"float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE}
SGD = "SGDOptimizerV2"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving() as url:
        yield url


@pytest.fixture
def server(address: str, kind: str) -> Iterator[Any]:
    """A client of a server without buffers, with the graphs `float32` and `float64`, nets of this dtype."""
    with connected(kind, address, timeout=20) as client:
        delete_all(client)
        for dtype in DTYPES:
            client.graphs.put(dtype, net(dtype), loss="MSELoss")
        yield client


def initial(dtype: str) -> dict[str, Any]:
    """Return the parameters before the first step."""
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


def batch(step: int, dtype: str) -> dict[str, Any]:
    """Return a micro-batch that follows from its place."""
    x = np.random.default_rng([step, 1]).standard_normal((4, 2)).astype(dtype)
    return {"x": x, "target": x[:, :1] - 2 * x[:, 1:] + 3}


def net(dtype: str) -> bytes:
    """y = tanh(x body.weight + body.bias) head.weight + head.bias."""
    layers = [("MatMul", "x body.weight", "a"), ("Add", "a body.bias", "b"), ("Tanh", "b", "c")]
    layers += [("MatMul", "c head.weight", "d"), ("Add", "d head.bias", "y")]
    nodes = [helper.make_node(op, given.split(), [output]) for op, given, output in layers]
    x, y = (helper.make_tensor_value_info(name, DTYPES[dtype], ["n", size]) for name, size in (("x", 2), ("y", 1)))
    weights = [numpy_helper.from_array(value, name) for name, value in initial(dtype).items()]
    graph = helper.make_graph(nodes, "net", [x], [y], weights)
    content: bytes = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString()
    return content


def trained(optimizer: Any, dtype: str, of_each: Mapping[str, dict[str, float]], **more: Any) -> dict[str, Any]:
    """Return the parameters after three steps of one of PyTorch's optimizers, with a group for each parameter."""
    named = {name: torch.nn.Parameter(torch.from_numpy(value)) for name, value in initial(dtype).items()}
    steps = optimizer([{"params": [one], **of_each[name]} for name, one in named.items()], lr=0.05, **more)
    for step in range(3):
        x, target = (torch.from_numpy(one) for one in batch(step, dtype).values())
        hidden = torch.tanh(x @ named["body.weight"] + named["body.bias"])
        steps.zero_grad()
        torch.nn.functional.mse_loss(hidden @ named["head.weight"] + named["head.bias"], target).backward()
        steps.step()
    return {name: one.detach().numpy() for name, one in named.items()}


def assert_close(model: Any, expected: Mapping[str, Any], dtype: str) -> None:
    found = model.parameters()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == dtype
        np.testing.assert_allclose(found[name], value, rtol=5e-6 if dtype == "float32" else 1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_adamw_has_the_groups_of_pytorch(server: Any, dtype: str) -> None:
    model = server.graphs[dtype].join("run")
    for step in range(3):
        model.forward_backward(batch(step, dtype))
        assert model.optim_step(lr=0.05, weight_decay=0.3, groups=GROUPS).step == step
        assert {server.buffers[f"run.p.{name}"].info().version for name in SHAPES} == {step + 2}
    groups = {name: {"lr": lr, "weight_decay": 0.0 if "bias" in name else 0.3} for name, lr in RATES.items()}
    assert_close(model, trained(torch.optim.AdamW, dtype, groups), dtype)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sgd_has_groups_and_momentum_of_pytorch(server: Any, dtype: str, momentum: float) -> None:
    model, groups = server.graphs[dtype].join("run"), {name: {"lr": lr} for name, lr in RATES.items()}
    for step in range(3):
        model.forward_backward(batch(step, dtype))
        model.optim_step(SGD, lr=0.05, momentum=momentum, groups={"head.*": {"lr": 0.1}, "head.bias": {"lr": 0.2}})
    assert_close(model, trained(torch.optim.SGD, dtype, groups, momentum=momentum), dtype)


def test_momentum_takes_a_run_over_from_adamw(server: Any) -> None:
    """Its second moment, which SGD has not, has no part in the step."""
    model = server.graphs["float64"].join("run")
    steps: list[dict[str, Any]] = [{"weight_decay": 0.0}, {"optimizer": SGD, "momentum": 0.5}]
    for step, more in enumerate(steps):
        before = model.parameters()
        model.forward_backward(batch(step, "float64"))
        model.optim_step(lr=0.05, **more)
    after, moments = model.parameters(), server.buffers.value(prefix="run.m.")
    for name in SHAPES:
        np.testing.assert_allclose(before[name] - after[name], 0.05 * 2 * moments[f"run.m.{name}"], rtol=1e-9)


def test_workers_take_the_step_once_and_with_the_same_groups(server: Any) -> None:
    models = [server.graphs["float32"].join("run", worker=name, quorum=3) for name in "abc"]
    for model in models:
        model.forward_backward(batch(0, "float32"))
    same = {"head.?e*": {"lr": 0.1}, "body.bias": {"weight_decay": 0.0}, "head.bias": {"weight_decay": 0, "lr": 0.2}}
    done = [model.optim_step(lr=0.05, groups=groups) for model, groups in zip(models, (GROUPS, same), strict=False)]
    assert [(one.step, one.replayed) for one in done] == [(0, False), (0, True)]
    after = models[0].parameters()
    for other in ({}, {**GROUPS, "body.*": {"lr": 0.1}}):
        with pytest.raises(KeyReused, match="All workers of a run give optim_step the same arguments"):
            models[2].optim_step(lr=0.05, groups=other)
    assert all(np.array_equal(after[name], value) for name, value in models[1].parameters().items())


def test_a_buffer_of_others_gets_no_rate(server: Any) -> None:
    model = server.graphs["float32"].join("run")
    model.forward_backward(batch(0, "float32"))
    before = model.parameters()
    server.buffers.set({"run.p.body.a": [1.0]})
    with pytest.raises(InvalidInput, match=r"weights\.body\.a has no gradients\.body\.a"):
        model.optim_step(SGD, lr=0.05, groups=GROUPS | {"*.bias": {"lr": 0.1}})
    server.buffers["run.p.body.a"].delete()
    assert all(np.array_equal(before[name], value) for name, value in model.parameters().items())
    model.optim_step(SGD, lr=0.05, groups={"body.bias": {"lr": 0.0}})
    unmoved = {name for name, value in model.parameters().items() if np.array_equal(before[name], value)}
    assert unmoved == {"body.bias"}


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("AdamWOptimizer", {"groups": {"*.bia": {"lr": 1}}}, r"'\*\.bia', .* no parameter: .* body\.weight, body\.bias, "),
    ("AdamWOptimizer", {"groups": {"*": {"betas": 1}}}, r"\{'betas': 1\} for '\*', .* dict of lr and weight_decay"),
    ("AdamWOptimizer", {"groups": {"*": 0.1}}, r"has 0\.1 for '\*', .* takes a dict"),
    ("AdamWOptimizer", {"groups": {"*": {"lr": np.nan}}}, "lr is nan, but must be a finite number"),
    ("AdamWOptimizer", {"momentum": 0.9}, "only SGDOptimizerV2 takes it"),
    (SGD, {"groups": {"*": {"weight_decay": 1}}}, "SGDOptimizerV2 takes a dict of lr there"),
    (SGD, {"momentum": 1}, r"momentum is 1, but must be in \[0, 1\)"),
    (SGD, {"momentum": 0.9, "weight_decay": 0.1}, "weight_decay is no attribute of SGDOptimizerV2"),
    (SGD, {"momentum": 0.9, "nesterov": True}, "nesterov is missing"),
    ("SGD", {"momentum": 0.9}, "SGD is SGDOptimizerV2, also with momentum="),
    ("AdamOptimizer", {}, "Adam is AdamWOptimizer with weight_decay=0"),
]


@pytest.mark.parametrize(("optimizer", "given", "reason"), WRONG)
def test_what_no_step_can_take_is_refused_before_it(
    server: Any, optimizer: str, given: dict[str, Any], reason: str
) -> None:
    model = server.graphs["float32"].join("run")
    model.start()
    with pytest.raises(InvalidInput, match=reason):
        model.optim_step(optimizer, lr=0.05, **given)
    assert server.buffers["run.loss"].info().step == 0
