"""Forward models with a loss: which tensors are trained, and what they get."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn
from torch.nn import functional as F

from service.dtypes import Array
from service.errors import InvalidGraph, ShapeMismatch
from service.graphs.forward import training_of
from service.graphs.graph import Graph
from service.graphs.model import read
from service.graphs.nodes import SEED
from service.graphs.plan import Plan
from service.graphs.training import Program
from service.graphs.weights import parameters_of
from tests.graphs.gradients.question import assert_close
from tests.kernels.calls import peak_bytes

RANDOM = np.random.default_rng(3)
TYPES = {"float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE, "int64": TensorProto.INT64}

OPSETS = [("", 17), ("com.microsoft", 1)]

Nodes = Sequence[tuple[Any, ...]]
"""For each node its operator, its inputs and outputs as texts, and its attributes, if it has any."""


def model(
    nodes: Nodes, weights: Mapping[str, Any], shapes: Mapping[str, Any] = {"y": [None, 3]}, dtype: str = "float64"
) -> bytes:
    """A model with the input x and the outputs of these shapes. Its weights are initializers."""
    protos = [
        helper.make_node(op, ["" if one == "_" else one for one in reads.split()], makes.split(), **dict(*attributes))
        for op, reads, makes, *attributes in nodes
    ]
    kind = TYPES[dtype]
    outputs = [helper.make_tensor_value_info(name, kind, shape) for name, shape in shapes.items()]
    tensors = [numpy_helper.from_array(np.asarray(one), name) for name, one in weights.items()]
    graph = helper.make_graph(protos, "g", [helper.make_tensor_value_info("x", kind, None)], outputs, tensors)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid(*one) for one in OPSETS])
    content: bytes = proto.SerializeToString()
    return content


def numbers(*shape: int) -> Array:
    return RANDOM.normal(size=shape)


LINEAR = [("Gemm", "x w b", "y")]
WEIGHTS = {"w": numbers(4, 3), "b": numbers(3)}
X = numbers(5, 4)
LABELS = np.array([0, 2, 1, -100, 2])
TARGET = (numbers(5, 3) > 0).astype(np.float64)


def program(content: bytes, loss: str = "MSELoss", pattern: str | None = None) -> Program:
    return training_of(read(content), loss, pattern)


def run(trained: Program, given: Mapping[str, Array], seed: int = 0) -> dict[str, Array]:
    """Return the loss, the gradient of each parameter, and the new statistics, by name."""
    assert trained.loss is not None
    names = {"loss": trained.loss.name, **trained.gradients, **trained.statistics}
    plan = Plan(trained.steps, trained.constants, [*names.values()])
    results = plan.run({**trained.initial, SEED: np.array(seed), **given})
    return {name: results[tensor] for name, tensor in names.items()}


LOSSES: dict[str, Callable[..., Any]] = {
    "SoftmaxCrossEntropyLoss": F.cross_entropy,
    "NegativeLogLikelihoodLoss": F.nll_loss,
    "MSELoss": F.mse_loss,
    "L1Loss": F.l1_loss,
    "BCEWithLogitsLoss": F.binary_cross_entropy_with_logits,
}


@pytest.mark.parametrize("loss", LOSSES)
def test_each_loss_is_that_of_pytorch(loss: str) -> None:
    name, other = ("labels", LABELS) if "Likelihood" in loss or "Softmax" in loss else ("target", TARGET)
    got = run(program(model(LINEAR, WEIGHTS), loss), {"x": X, name: other})
    w, b = (torch.tensor(one, requires_grad=True) for one in WEIGHTS.values())
    expected = LOSSES[loss](torch.tensor(X) @ w + b, torch.tensor(other))
    expected.backward()
    assert_close(got["loss"], expected.detach().numpy(), 1e-12)
    assert_close(got["w"], w.grad.numpy(), 1e-12)
    assert_close(got["b"], b.grad.numpy(), 1e-12)


def test_the_inputs_and_outputs_are_those_of_the_model_and_the_loss() -> None:
    trained = program(model(LINEAR, WEIGHTS), "SoftmaxCrossEntropyLoss")
    assert [(one.name, one.dtype.name, one.shape) for one in trained.inputs] == [
        ("x", "float64", None),
        ("labels", "int64", (None,)),
    ]
    assert [one.name for one in trained.outputs] == ["y"]
    assert [one.name for one in trained.parameters] == ["w", "b"]


@pytest.mark.parametrize(("loss", "shape"), [("MSELoss", (None, None)), ("SoftmaxCrossEntropyLoss", (None,))])
def test_a_target_has_any_batch_if_an_input_has(loss: str, shape: tuple[None, ...]) -> None:
    trained = program(model(LINEAR, WEIGHTS, {"y": [4, 3]}), loss)
    assert trained.inputs[-1].shape == shape


def test_an_output_may_be_the_loss() -> None:
    nodes = [*LINEAR, ("ReduceMean", "y", "total", {"keepdims": 0})]
    trained = program(model(nodes, WEIGHTS, {"y": None, "total": []}), "total")
    assert [one.name for one in trained.outputs] == ["y"]
    assert [one.name for one in trained.inputs] == ["x"]
    np.testing.assert_allclose(run(trained, {"x": X})["b"], np.full(3, 1 / 3))


def test_a_loss_of_several_numbers_is_refused() -> None:
    with pytest.raises(InvalidGraph, match=re.escape("the output 'y' has shape [None, 3], but a loss must be one")):
        program(model(LINEAR, WEIGHTS), "y")
    trained = program(model(LINEAR, WEIGHTS, {"y": None}), "y")
    with pytest.raises(ShapeMismatch, match=re.escape("the loss has shape [5, 3], but must be one number")):
        run(trained, {"x": X})


def test_a_target_that_would_broadcast_is_refused() -> None:
    trained = program(model(LINEAR, WEIGHTS))
    with pytest.raises(ShapeMismatch, match=re.escape("target has shape [5, 1], but must have that of the output, [5")):
        run(trained, {"x": X, "target": numbers(5, 1)})


@pytest.mark.parametrize(
    ("loss", "problem"),
    [
        ("mse", "loss is 'mse', but must be one of SoftmaxCrossEntropyLoss, .*, or an output of the model: 'y'"),
        ("MSELoss", "the model has a tensor target, the name of one that MSELoss adds"),
    ],
)
def test_a_loss_that_does_not_fit_is_refused(loss: str, problem: str) -> None:
    nodes = [*LINEAR, ("Identity", "y", "target")]
    shapes = {"y": [None, 3], **({"target": None} if loss == "MSELoss" else {})}
    with pytest.raises(InvalidGraph, match=problem):
        program(model(nodes, WEIGHTS, shapes), loss)


def test_a_name_inside_the_model_is_not_taken_for_the_labels() -> None:
    content = model([("Identity", "w", "labels"), ("Gemm", "x labels b", "y")], WEIGHTS)
    with pytest.raises(InvalidGraph, match="the model has a tensor labels, the name of one that SoftmaxCross"):
        program(content, "SoftmaxCrossEntropyLoss")


def test_the_places_of_top_k_have_no_gradient() -> None:
    nodes = [("MatMul", "x w", "h"), ("TopK", "h k", "v i"), ("Cast", "i", "f", {"to": 11}), ("Mul", "f s", "y")]
    trained = program(model(nodes, {"w": WEIGHTS["w"], "k": np.array([2]), "s": numbers(2)}))
    assert [*trained.gradients] == ["s"]
    assert run(trained, {"x": X, "target": numbers(5, 2)})["s"].any()


def test_gradients_of_many_readers_are_added_at_once() -> None:
    shape, nodes = (64, 400), list[Any]()
    for k in range(64):
        nodes.append(("Slice", f"h from{k} to{k} axis", f"h{k}"))
    total = ("Sum", " ".join(f"h{k}" for k in range(64)), "y")
    places = {f"from{k}": np.array([k]) for k in range(64)} | {f"to{k}": np.array([k + 1]) for k in range(64)}
    content = model([("Mul", "x w", "h"), *nodes, total], {"w": np.ones(shape), "axis": np.array([0]), **places})
    trained, given = program(content), {"x": np.ones(shape), "target": np.zeros((1, 400))}
    run(trained, given)
    assert peak_bytes(lambda: run(trained, given)) < 10 * given["x"].nbytes


def test_an_output_of_integers_has_no_loss() -> None:
    with pytest.raises(InvalidGraph, match="the first output, 'k', is int64: a loss needs a float"):
        program(model([*LINEAR, ("ArgMax", "y", "k")], WEIGHTS, {"k": None}, "int64"))


LAYERS = [
    ("Gemm", "x fc1.w fc1.b", "h"),
    ("Mul", "h scale", "s"),
    ("Pow", "s two", "p"),
    ("Gemm", "p fc2.w fc2.b", "y"),
]
LAYERS_WEIGHTS = {
    "fc1.w": numbers(4, 6),
    "fc1.b": numbers(6),
    "scale": np.array(2.0),
    "two": np.array([2.0]),
    "fc2.w": numbers(6, 3),
    "fc2.b": numbers(3),
    "shape": np.array([4]),
}


@pytest.mark.parametrize(
    ("pattern", "names"),
    {
        "*": "fc1.w fc1.b fc2.w fc2.b",
        "fc2.*": "fc2.w fc2.b",
        "*.b, fc1.w": "fc1.w fc1.b fc2.b",
        "!fc1.*": "fc2.w fc2.b",
        "*,!*.b": "fc1.w fc2.w",
        "*,scale": "fc1.w fc1.b scale fc2.w fc2.b",
        "fc1.*,x": "x fc1.w fc1.b",
    }.items(),
)
def test_patterns_choose_among_the_weights(pattern: str, names: str) -> None:
    trained = program(model(LAYERS, LAYERS_WEIGHTS), pattern=pattern)
    assert [one.name for one in trained.parameters] == names.split() == [*trained.gradients]


@pytest.mark.parametrize(
    ("node", "names"),
    {
        "Mul x val_1": "v",
        "Mul x scale": "scale v",
        "PRelu x val_1": "val_1 v",
        "Add x mask": "v",
        "Clip x val_1 scale": "v",
        "Pow x scale": "v",
        "ScatterElements zeros k x": "v",
    }.items(),
)
def test_constants_in_the_form_of_weights_stay_constant(node: str, names: str) -> None:
    weights = {
        "val_1": np.array([0.5]),
        "scale": np.array([2.0]),
        "mask": np.triu(np.full((3, 3), -np.inf), 1),
        "zeros": np.zeros((3, 3)),
        "k": np.zeros((3, 3), np.int64),
        "unread": np.ones(3),
        "v": np.ones(3),
    }
    op, reads = node.split(" ", 1)
    trained = parameters_of(read(model([(op, reads, "h"), ("Add", "h v", "y")], weights)))
    assert [*trained] == names.split()


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    problem = "train= has 'fc3.*', which is no weight and no input: the weights are 'fc1.w, fc1.b, fc2.w, fc2.b'"
    with pytest.raises(InvalidGraph, match=re.escape(problem)):
        program(model(LAYERS, LAYERS_WEIGHTS), pattern="fc1.*,fc3.*")


def test_weights_that_do_not_reach_the_loss_are_no_parameters() -> None:
    content = model([*LINEAR, ("Add", "x c", "z")], {**WEIGHTS, "c": numbers(4)}, {"y": [None, 3], "z": None})
    assert [one.name for one in program(content).parameters] == ["w", "b"]
    with pytest.raises(InvalidGraph, match="the loss does not depend on 'c', which train= chooses"):
        program(content, pattern="w,c")


def test_nodes_without_a_rule_are_listed() -> None:
    nodes = [("Mul", "x v", "m"), ("TanhGrad", "m x", "d", {"domain": "com.microsoft"}), ("Add", "d b", "y")]
    content = model(nodes, {"v": numbers(3, 3), "b": numbers(1)}, {"y": [1]})
    with pytest.raises(
        InvalidGraph, match="on the way to the loss, these nodes have no gradient: 'TanhGrad'. train= can"
    ):
        program(content)
    assert [one.name for one in program(content, pattern="b").parameters] == ["b"]


def expected_gradients(function: Callable[..., Any], *weights: Array) -> list[Array]:
    tensors = [torch.tensor(one, requires_grad=True) for one in weights]
    function(*tensors).backward()
    return [one.grad.numpy() for one in tensors]


def test_a_weight_that_two_nodes_share_gets_the_sum_of_its_gradients() -> None:
    nodes = [("MatMul", "x w", "h"), ("Tanh", "h", "t"), ("Transpose", "w", "v"), ("MatMul", "t v", "y")]
    target = numbers(5, 4)
    got = run(program(model(nodes, {"w": WEIGHTS["w"]}, {"y": None})), {"x": X, "target": target})
    (expected,) = expected_gradients(
        lambda w: F.mse_loss(torch.tanh(torch.tensor(X) @ w) @ w.T, torch.tensor(target)), WEIGHTS["w"]
    )
    assert_close(got["w"], expected, 1e-10)


def test_weights_may_come_through_identities_and_casts() -> None:
    nodes = [("Identity", "w", "v"), ("Cast", "v", "u", {"to": TensorProto.DOUBLE}), ("MatMul", "x u", "y")]
    weight = WEIGHTS["w"].astype(np.float32)
    got = run(program(model(nodes, {"w": weight})), {"x": X, "target": numbers(5, 3)})
    assert got["w"].dtype == np.float32
    assert got["w"].any()


def test_a_model_without_weights_has_inputs_to_train() -> None:
    content = model([("Mul", "x x", "y")], {})
    with pytest.raises(InvalidGraph, match="the model has no weights: name the inputs that are parameters with train="):
        program(content)
    trained = program(content, pattern="x")
    assert [one.name for one in trained.inputs] == ["target"]
    x, target = numbers(2, 3), numbers(2, 3)
    assert_close(run(trained, {"x": x, "target": target})["x"], 4 * x * (x * x - target) / 6, 1e-12)


def test_inference_has_the_parameters_and_statistics_of_training() -> None:
    weights = {"s": numbers(3), "b": numbers(3), "mean": numbers(3), "var": numbers(3) ** 2, "two": np.array([2.0])}
    content = model([("BatchNormalization", "x s b mean var", "h"), ("Pow", "h two", "y")], weights)
    trained, still = (Graph.read(content, loss=loss).signature() for loss in ("MSELoss", None))
    assert [*trained["parameters"]] == [*still["parameters"]] == ["s", "b"]
    assert [*trained["statistics"]] == [*still["statistics"]] == ["mean", "var"]
    assert [*Graph.read(content, train="b").signature()["parameters"]] == ["b"]
    assert [one.name for one in Graph.read(content).operator("g").outputs] == ["y"]


def test_the_inference_form_has_the_same_weights_in_memory() -> None:
    weights = {"w": numbers(1000, 1000), "b": numbers(1000)}
    content = model([("Gemm", "x w b", "y")], weights, {"y": [None, 1000]})
    assert Graph.read(content, loss="MSELoss").nbytes < 1.1 * len(content)


@pytest.mark.parametrize("trains", [False, True])
def test_the_inference_form_has_no_dropout_and_reads_the_statistics(trains: bool) -> None:
    """Also of a model that was exported for training, whose new statistics are outputs."""
    weights = {"s": numbers(3), "b": numbers(3), "mean": numbers(3), "var": numbers(3) ** 2}
    weights |= {"half": np.array(0.5), "on": np.array(trains)}
    more, mode = ("", {}) if not trains else (" m v", {"training_mode": 1})
    nodes = [("BatchNormalization", "x s b mean var", f"h{more}", mode), ("Dropout", "h half on", "y kept")]
    graph = Graph.read(model(nodes, weights, dict.fromkeys(["y", *more.split()])), loss="MSELoss")
    x, target = numbers(4, 3), numbers(4, 3)
    given = {"x": x, "target": target} | {f"statistics.{name}": numbers(3) ** 2 + 1 for name in ("mean", "var")}
    mean, var = (given[f"statistics.{name}"] for name in ("mean", "var"))
    expected = (x - mean) / np.sqrt(var + 1e-5) * weights["s"] + weights["b"]
    got = graph.inference("g")(given, {})
    assert_close(got["y"], expected, 1e-10)
    assert_close(got["loss"], np.array(((expected - target) ** 2).mean()), 1e-10)
    assert got.keys() == {"loss", "y", *more.split()}
    assert not trains or (got["m"].tolist(), got["v"].tolist()) == (mean.tolist(), var.tolist())
    trained = graph.operator("g")(given, {"seed": 1}, ["loss", "statistics"])
    assert not np.allclose(trained["loss"], got["loss"])
    assert not np.allclose(trained["statistics.mean"], mean)


def test_constants_are_the_weights_of_a_model_without_initializers() -> None:
    constants = [("Constant", "", name, {"value": numpy_helper.from_array(one)}) for name, one in WEIGHTS.items()]
    assert [one.name for one in program(model([*constants, *LINEAR], {})).parameters] == ["w", "b"]


@pytest.mark.parametrize("attributes", [{}, {"momentum": 0.75}])
def test_an_inference_export_trains_its_batch_normalization(attributes: dict[str, Any]) -> None:
    weights = {"s": numbers(3), "b": numbers(3), "mean": numbers(3), "var": numbers(3) ** 2}
    x, target = numbers(4, 3, 2), numbers(4, 3, 2)
    trained = program(model([("BatchNormalization", "x s b mean var", "y", attributes)], weights))
    assert [one.name for one in trained.parameters] == ["s", "b"]
    got = run(trained, {"x": x, "target": target})
    expected = expected_gradients(
        lambda s, b: F.mse_loss(F.batch_norm(torch.tensor(x), None, None, s, b, training=True), torch.tensor(target)),
        weights["s"],
        weights["b"],
    )
    assert_close(got["s"], expected[0], 1e-10)
    assert_close(got["b"], expected[1], 1e-10)
    momentum = attributes.get("momentum", 0.9)
    np.testing.assert_allclose(got["mean"], momentum * weights["mean"] + (1 - momentum) * x.mean((0, 2)))
    np.testing.assert_allclose(got["var"], momentum * weights["var"] + (1 - momentum) * x.var((0, 2)))


def test_a_frozen_batch_normalization_keeps_its_statistics() -> None:
    nodes = [("BatchNormalization", "x s b mean var", "h"), ("MatMul", "h w", "y")]
    weights = {"s": numbers(3), "b": numbers(3), "mean": numbers(3), "var": numbers(3) ** 2, "w": numbers(3, 3)}
    trained = program(model(nodes, weights), pattern="w")
    assert [*trained.gradients] == ["w"]
    got = run(trained, {"x": numbers(2, 3), "target": numbers(2, 3)})
    assert got["mean"].tolist() == weights["mean"].tolist()
    assert got["var"].tolist() == weights["var"].tolist()


@pytest.mark.parametrize(("pattern", "trains"), [("*", True), ("v", False)])
def test_a_batch_normalization_without_weights_trains_behind_others(pattern: str, trains: bool) -> None:
    ones = [("Constant", "", name, {"value": numpy_helper.from_array(np.ones(3))}) for name in ("s", "b")]
    nodes = [*ones, ("MatMul", "x w", "h"), ("BatchNormalization", "h s b mean var", "n"), ("Mul", "n v", "y")]
    weights = {"w": WEIGHTS["w"], "v": numbers(3), "mean": np.zeros(3), "var": np.ones(3)}
    got = run(program(model(nodes, weights), pattern=pattern), {"x": X, "target": numbers(5, 3)})
    assert got["mean"].any() == trains


@pytest.mark.parametrize("inputs", ["h", "h ratio", "h ratio off"])
def test_dropout_drops_by_the_seed(inputs: str) -> None:
    weights = {"w": numbers(4, 300), "ratio": np.array(0.5), "off": np.array(False)}
    content = model([("MatMul", "x w", "h"), ("Dropout", inputs, "y")], weights, {"y": [None, 300]})
    trained, given = program(content), {"x": X, "target": np.zeros((5, 300))}
    first, again, other = (run(trained, given, seed) for seed in (1, 1, 2))
    assert first["w"].tobytes() == again["w"].tobytes() != other["w"].tobytes()
    difference = np.zeros_like(weights["w"])
    difference[2, 7] = 0.5  # the loss is a square of w, so a large step has no error but of rounding
    ends = [run(trained, {**given, "w": weights["w"] + one}, 1)["loss"] for one in (difference, -difference)]
    np.testing.assert_allclose(ends[0] - ends[1], first["w"][2, 7], rtol=1e-6)


def exported(module: nn.Module, *inputs: Array, opset: int = 17) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            tuple(map(torch.tensor, inputs)),
            file,
            opset_version=opset,
            dynamo=False,
            training=torch.onnx.TrainingMode.PRESERVE,
            do_constant_folding=False,
            input_names=[f"x{k}" for k in range(len(inputs))],
        )
    return file.getvalue()


class Attention(nn.Module):  # type: ignore[misc]
    """A block of a transformer, without Dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.norm, self.other = nn.LayerNorm(8), nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("mask", torch.triu(torch.full((6, 6), -1e9, dtype=torch.float64), 1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 6, 4).transpose(1, 2).chunk(3, 1)
        scores = (q @ k.transpose(-1, -2) / 2 + self.mask).softmax(-1)
        x = x + (scores @ v).transpose(1, 2).reshape(x.shape)
        x = x + self.down(F.gelu(self.up(self.other(x))))
        return (x @ self.embedding.weight.T).transpose(1, 2)


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.LeakyReLU(0.25),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 3),
    )


MODULES: dict[str, tuple[Callable[[], nn.Module], Array, Array]] = {
    "attention": (Attention, RANDOM.integers(0, 11, (3, 6)), RANDOM.integers(0, 11, (3, 6))),
    "convolutions": (convolutional, numbers(5, 1, 8, 8), RANDOM.integers(0, 3, 5)),
}


@pytest.mark.parametrize("opset", [13, 17, 20])
@pytest.mark.parametrize("name", MODULES)
def test_exported_models_have_the_gradients_of_pytorch(name: str, opset: int) -> None:
    make, x, labels = MODULES[name]
    torch.manual_seed(0)
    module = make().double()
    got = run(
        program(exported(module, x, opset=opset), "SoftmaxCrossEntropyLoss", "!mask" if name == "attention" else "*"),
        {"x0": x, "labels": labels},
    )
    loss = F.cross_entropy(module(torch.tensor(x)), torch.tensor(labels))
    loss.backward()
    assert_close(got["loss"], loss.detach().numpy(), 1e-10)
    for parameter, tensor in module.named_parameters():
        assert tensor.grad is not None
        assert_close(got[parameter], tensor.grad.numpy(), 1e-10)
