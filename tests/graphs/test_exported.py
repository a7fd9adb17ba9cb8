"""The signs that an exporter has changed the parameters of a model, and what the file says of the module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from service.errors import InvalidGraph
from service.graphs.graph import Graph
from tests.graphs.test_model import model, tensor

NUMBERS = np.random.default_rng(5)


def weight(*shape: int) -> Any:
    return NUMBERS.normal(size=shape).astype(np.float32)


Node = tuple[str, str, str, str]
"""An operator, its inputs and its output as texts, and the node's name, or the path of its module behind an @."""


def made(nodes: Sequence[Node], weights: Mapping[str, Any], module: str = "", rules: str = "", by: str = "") -> bytes:
    """Return a model of x, [batch, 4], with the metadata that PyTorch's exporters write."""
    protos = []
    for op, reads, makes, name in nodes:
        at = name.removeprefix("@")
        protos.append(helper.make_node(op, reads.split(), [makes], name="" if name[:1] == "@" else name))
        if name[:1] == "@":
            protos[-1].metadata_props.add(key="pkg.torch.onnx.name_scopes", value=f"['', '{at}', 'call']")
        if rules:
            protos[-1].metadata_props.add(key="pkg.onnxscript.rewriter.rule_name", value=rules)
    tensors = [numpy_helper.from_array(np.asarray(one, np.float32), name) for name, one in weights.items()]
    proto = model(*protos, inputs=[tensor("x", ("batch", 4))], initializer=tensors)
    proto.producer_name = by
    if module:
        lines = [f"p: {line.split()[0]} target='{line.split()[1]}'" for line in module.split(", ")]
        value = "\n# inputs\n" + "\n".join(lines) + "\n\n# outputs\nh: BUFFER_MUTATION target='n.mean'\n"
        proto.graph.metadata_props.add(key="pkg.torch.export.ExportedProgram.graph_signature", value=value)
    content: bytes = proto.SerializeToString()
    return content


def signature(content: bytes, train: str | None = None) -> dict[str, Any]:
    return Graph.read(content, loss="MSELoss", train=train).signature()


def two_norms(first: str, second: str, scale: str = "n.weight") -> list[Node]:
    reads = f"{scale} n.bias"
    return [("LayerNormalization", f"x {reads}", "h", first), ("LayerNormalization", f"h {reads}", "y", second)]


NORM = {"n.weight": weight(4), "n.bias": weight(4)}


@pytest.mark.parametrize(
    ("first", "second", "where"),
    [
        ("@n", "@m", "'n, m'"),
        ("/n/LayerNormalization", "/m/LayerNormalization", "'/n, /m'"),
        ("/a/n/LayerNormalization", "/b/n/LayerNormalization", "'/a/n, /b/n'"),
        ("", "", "'h, y'"),
    ],
)
def test_a_scale_of_two_normalizations_is_a_doubt(first: str, second: str, where: str) -> None:
    got = signature(made(two_norms(first, second), NORM))["doubts"]
    fault = "is read by LayerNormalization in 2 modules, " + where + ": were they equal at the start?"
    assert got == [f"{name} {fault}" for name in ("'n.weight'", "'n.bias'")]


@pytest.mark.parametrize(
    ("first", "second"), [("@n", "@n"), ("/n/LayerNormalization", "/n_1/LayerNormalization"), ("/n/A", "/n/B")]
)
def test_a_module_that_is_called_twice_is_none(first: str, second: str) -> None:
    assert signature(made(two_norms(first, second), NORM))["doubts"] == []


def test_a_bias_of_two_layers_is_a_doubt() -> None:
    nodes = [("Gemm", "x a b", "h", "/one/Gemm"), ("Gemm", "h c b", "y", "/two/Gemm")]
    weights = {"a": weight(4, 4), "b": weight(4), "c": weight(4, 4)}
    (doubt,) = signature(made(nodes, weights))["doubts"]
    assert doubt.startswith("'b' is read by Gemm in 2 modules, '/one, /two'")


def test_a_transposed_copy_is_a_doubt() -> None:
    table = weight(4, 6)
    nodes = [("MatMul", "x a", "h", ""), ("MatMul", "h b", "y", "")]
    assert signature(made(nodes, {"a": table, "b": table.T}))["doubts"] == [
        "'b' is 'a' transposed: were they one weight?"
    ]
    for other in (table.T + 1, np.where(np.arange(24).reshape(6, 4) == 5, 9, table.T)):
        assert signature(made(nodes, {"a": table, "b": other}))["doubts"] == []
    same = {"a": np.eye(4), "b": np.eye(4)}
    assert signature(made(nodes, same))["doubts"] == []


def test_a_tensor_that_the_exporter_has_made_is_a_doubt() -> None:
    nodes = [("MatMul", "x val_3", "h", ""), ("Mul", "h onnx::Mul_7", "y", "")]
    doubts = signature(made(nodes, {"val_3": weight(4, 4), "onnx::Mul_7": np.ones(4)}))["doubts"]
    assert doubts == [
        "'val_3', of shape [4, 4], is made by the exporter: a table, or a weight in another form",
        "'onnx::Mul_7', of shape [4], is made by the exporter: all ones or zeros",
    ]


@pytest.mark.parametrize(
    ("reads", "table"), {"scale val_1": weight(4), "val_1 bias": weight(4), "scale bias": np.ones(4)}.items()
)
def test_tables_of_the_exporter_are_trained_only_by_name(reads: str, table: Any) -> None:
    weights = {"scale": weight(4), "bias": weight(4), "val_1": table, "w": weight(4)}
    nodes = [("LayerNormalization", f"x {reads}", "h", ""), ("Mul", "h w", "k", ""), ("Add", "k w", "y", "")]
    if "val_1" not in reads:
        nodes[1] = ("Mul", "h val_1", "k", "")
    content = made(nodes, weights)
    assert "val_1" not in signature(content)["parameters"]
    assert "val_1" in signature(content, "*, val_1")["parameters"]


MODULE = "PARAMETER t, PARAMETER w, BUFFER sin, BUFFER n.mean"


def test_the_file_says_what_is_a_parameter() -> None:
    nodes = [("Mul", "x sin", "h", ""), ("MatMul", "h w", "k", ""), ("Mul", "k t", "y", "")]
    weights = {"sin": weight(4), "w": weight(4, 4), "t": 0.5}
    content = made(nodes, weights, MODULE)
    assert [*signature(content)["parameters"]] == ["w", "t"]
    assert [*signature(content, "*, sin")["parameters"]] == ["sin", "w", "t"]
    assert [*signature(made(nodes, weights))["parameters"]] == ["sin", "w"]
    assert [*signature(made(nodes, weights, by="pytorch"))["parameters"]] == ["sin", "w", "t"]
    assert signature(content)["doubts"] == []


def test_a_parameter_that_the_optimizer_has_folded_is_a_doubt() -> None:
    nodes = [("Mul", "x sin", "h", ""), ("MatMul", "h w", "y", "")]
    weights = {"sin": weight(4), "w": weight(4, 4)}
    assert signature(made(nodes, weights, MODULE))["doubts"] == []  # a tied parameter is in the file once
    (doubt,) = signature(made(nodes, weights, MODULE, rules="FuseBatchNormIntoGemm"))["doubts"]
    assert doubt == "the file lacks 't' of the module: merged with others, or folded by FuseBatchNormIntoGemm"
    folded = [*nodes[:1], ("MatMul", "h w", "k", ""), ("Mul", "k exp", "y", "")]
    doubts = signature(made(folded, {**weights, "exp": 1.6}, MODULE))["doubts"]
    assert doubts == [
        "the file lacks 't' of the module: merged with others, or folded",
        "'exp', of shape [], is made by the exporter: a table, or a weight in another form",
    ]


def test_a_number_that_the_exporter_has_made_is_a_doubt_if_it_is_trained() -> None:
    nodes = [("Mul", "x val_1", "h", ""), ("PRelu", "h val_2", "y", "")]
    doubts = signature(made(nodes, {"val_1": [0.5], "val_2": [[0.25]]}))["doubts"]
    assert doubts == ["'val_2', of shape [1, 1], is made by the exporter: a table, or a weight in another form"]


def test_a_scale_that_is_a_running_statistic_is_refused() -> None:
    weights = {"w": np.ones(4), "b": np.zeros(4)}
    content = made([("BatchNormalization", "x w b b w", "y", "")], weights)
    problem = "'w, b' is a parameter and a running statistic: an exporter has made one of two that began equal"
    with pytest.raises(InvalidGraph, match=problem):
        signature(content)


def test_a_model_says_twenty_doubts_at_most() -> None:
    names = [f"val_{k}" for k in range(30)]
    nodes = [("Mul", f"{f'h{k - 1}' if k else 'x'} {name}", f"h{k}", "") for k, name in enumerate(names)]
    content = made([*nodes, ("Identity", "h29", "y", "")], {name: weight(4) for name in names})
    assert [one[:6] for one in signature(content)["doubts"]] == ["'val_" + name[4:5] for name in names[:20]] + [
        "and 10"
    ]


def test_long_metadata_is_read() -> None:
    proto = onnx.load_from_string(made(two_norms("@n", "@m"), NORM, "PARAMETER n.weight, PARAMETER n.bias"))
    for node in proto.graph.node:
        node.metadata_props.add(key="pkg.torch.onnx.stack_trace", value="x" * 100_000)
    proto.graph.node[0].metadata_props[0].value = "['', '" + "n" * 5000 + "', 'call']"
    assert len(signature(proto.SerializeToString())["doubts"]) == 2
