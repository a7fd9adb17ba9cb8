"""Reading models: what a file has, and what is refused."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from io import BytesIO
from typing import Any
from zipfile import ZipFile

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save

from service.dtypes import BFLOAT16, FLOAT32
from service.errors import InvalidGraph
from service.graphs.graph import Graph
from service.graphs.model import GraphLimits, Value, read
from service.graphs.protobuf import Budget


def tensor(name: str, shape: Any = ("batch", 3), kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def model(*nodes: onnx.NodeProto, opset: int = 17, **changes: Any) -> onnx.ModelProto:
    parts = {"inputs": [tensor("x")], "outputs": [tensor("y", None)], "initializer": [], **changes}
    graph = helper.make_graph(nodes or [helper.make_node("Relu", ["x"], ["y"])], "g", **parts)
    domains = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=domains, ir_version=8)


def test_a_model_has_its_inputs_nodes_and_outputs() -> None:
    got = read(model(helper.make_node("LeakyRelu", ["x"], ["y"], name="slope", alpha=0.1)).SerializeToString())
    assert got.inputs == (Value("x", FLOAT32, (None, 3)),)
    assert got.outputs == (Value("y", FLOAT32, None),)
    (node,) = got.nodes
    assert (node.label, node.domain, node.version, node.inputs, node.outputs) == (
        "LeakyRelu slope",
        "",
        17,
        ("x",),
        ("y",),
    )
    assert node.attributes == {"alpha": 0.1}


def test_attributes_that_are_left_out_have_their_defaults() -> None:
    (node,) = read(model(helper.make_node("Gemm", ["x", "x"], ["y"], transB=1)).SerializeToString()).nodes
    assert node.attributes == {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 1}


VALUES: list[tuple[int, Any]] = [
    (TensorProto.FLOAT, [1.5, -2.0]),
    (TensorProto.DOUBLE, [1.5, -2.0]),
    (TensorProto.FLOAT16, [1.5, -2.0]),
    (TensorProto.BFLOAT16, [1.5, -2.0]),
    (TensorProto.INT32, [1, -2]),
    (TensorProto.INT64, [1, -(1 << 60)]),
    (TensorProto.UINT8, [1, 255]),
    (TensorProto.INT8, [1, -128]),
    (TensorProto.UINT64, [1, (1 << 64) - 1]),
    (TensorProto.BOOL, [True, False]),
]


@pytest.mark.parametrize(("kind", "numbers"), VALUES)
@pytest.mark.parametrize("raw", [True, False])
def test_initializers_are_read_in_both_forms(kind: int, numbers: Any, raw: bool) -> None:
    array = np.array(numbers, helper.tensor_dtype_to_np_dtype(kind))
    stored = numpy_helper.from_array(array, "w") if raw else helper.make_tensor("w", kind, [2], array)
    got = read(model(initializer=[stored]).SerializeToString()).initializers["w"]
    assert got.dtype == (BFLOAT16 if kind == TensorProto.BFLOAT16 else array.dtype)
    assert got.tolist() == array.tolist()
    assert not got.flags.writeable


def test_constants_are_apart_from_the_initializers() -> None:
    nodes = [
        helper.make_node("Constant", [], ["a"], value_float=0.1),
        helper.make_node("Constant", [], ["b"], value_ints=[1, 2]),
        helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.eye(2, dtype=np.float32))),
        helper.make_node("Add", ["x", "a"], ["y"]),
    ]
    got = read(model(*nodes).SerializeToString())
    assert {name: one.tolist() for name, one in got.constants.items()} == {
        "a": np.float32(0.1),
        "b": [1, 2],
        "c": [[1, 0], [0, 1]],
    }
    assert [node.op for node in got.nodes] == ["Add"]


def test_an_input_with_an_initializer_need_not_come() -> None:
    weights = numpy_helper.from_array(np.ones(3, np.float32), "w")
    add = helper.make_node("Add", ["x", "w"], ["y"])
    got = read(model(add, inputs=[tensor("x"), tensor("w", [3])], initializer=[weights]).SerializeToString())
    assert [one.name for one in got.inputs] == ["x"]


def external() -> onnx.ModelProto:
    stored = numpy_helper.from_array(np.ones(3, np.float32), "w")
    stored.data_location = TensorProto.EXTERNAL
    stored.external_data.add(key="location", value="/etc/passwd")
    return model(initializer=[stored])


def short() -> onnx.ModelProto:
    stored = numpy_helper.from_array(np.ones(3, np.float32), "w")
    stored.dims[0] = 1 << 40
    return model(initializer=[stored])


def node(op: str, *inputs: str, outputs: tuple[str, ...] = ("y",), **attributes: Any) -> onnx.ModelProto:
    return model(helper.make_node(op, inputs or ("x",), outputs, name="n", **attributes))


REFUSED: list[tuple[Callable[[], onnx.ModelProto], str]] = [
    (external, "initializer 'w' has its data in another file"),
    (short, r"'w', float32 of shape \[1099511627776\], has 12 bytes of data, but must have 4398046511104"),
    (lambda: model(opset=12), "opset 12 of ONNX, but must have 13 to 26"),
    (lambda: model(opset=27), "opset 27 of ONNX, but must have 13 to 26"),
    *(
        (lambda kind=kind: model(inputs=[tensor("x", kind=kind)], opset=26), f"the type {name} is none of float32")
        for name, kind in TensorProto.DataType.items()
        if re.match("FLOAT[48]|U?INT[24]|COMPLEX", name)
    ),
    (lambda: model(inputs=[tensor("x", kind=99)]), "the type with the number 99 is none of float32"),
    (
        lambda: model(
            helper.make_node("If", ["x"], ["a"], then_branch=model().graph, else_branch=model().graph),
            helper.make_node("Mystery", ["x"], ["b"], domain="com.microsoft"),
            helper.make_node("Add", ["a", "b"], ["y"]),
        ),
        r"operators that are not served: If, com\.microsoft\.Mystery",
    ),
    (lambda: node("Relu", "z"), "Relu n reads 'z', which no node before it computes"),
    (lambda: node("Relu", outputs=("x",)), "'x', an output of Relu n, stands for two tensors"),
    (lambda: node("Relu", outputs=("~0",)), "begins with a tilde"),
    (lambda: node("Relu", "x", "x"), "Relu n has 2 inputs, but must have 1 to 1"),
    (lambda: node("Relu", outputs=("y", "z")), "Relu n has 2 outputs, but must have 1 to 1"),
    (lambda: node("Add", "x", ""), "Add n has 2 inputs, but must have 2 to 2"),
    (lambda: node("Relu", axis=1), "Relu n has no attribute 'axis' in opset 17"),
    (lambda: node("LeakyRelu", alpha="big"), "the attribute alpha of LeakyRelu n is 'big', but must be FLOAT"),
    (lambda: node("Cast"), "Cast n needs the attribute to"),
    (lambda: node("Concat", axis=helper.make_graph([], "g", [], [])), "is no number, text, tensor"),
    (lambda: model(outputs=[tensor("z")]), "the output 'z' is computed by no node"),
    (lambda: model(outputs=[]), "no outputs"),
    (lambda: model(inputs=[tensor("x", kind=TensorProto.STRING)]), "the type STRING is none of float32, uint8"),
    (
        lambda: model(inputs=[tensor("x", kind=TensorProto.UINT8)]),
        "'x' is uint8, but inputs and outputs must be one of",
    ),
    (lambda: model(inputs=[helper.make_tensor_sequence_value_info("x", 1, None)]), "'x' is an input or output, but no"),
]


@pytest.mark.parametrize(("made", "problem"), REFUSED, ids=[problem for _, problem in REFUSED])
def test_other_models_are_refused(made: Callable[[], onnx.ModelProto], problem: str) -> None:
    with pytest.raises(InvalidGraph, match=problem):
        read(made().SerializeToString())


def test_nodes_and_bytes_are_limited() -> None:
    chain = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Relu", ["a"], ["y"])]
    with pytest.raises(InvalidGraph, match="the model has 2 nodes; the limit is 1"):
        read(model(*chain).SerializeToString(), GraphLimits(max_nodes=1))
    weights = numpy_helper.from_array(np.ones(3, np.float32), "w")
    with pytest.raises(InvalidGraph, match="more than 10 bytes"):
        read(model(initializer=[weights]).SerializeToString(), GraphLimits(max_bytes=10))


@pytest.mark.parametrize(
    "content", [b"", b"\x08", b"no model", b"{}", b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"]
)
def test_other_files_are_refused(content: bytes) -> None:
    with pytest.raises(InvalidGraph, match="the file is no ONNX model, or it is damaged"):
        read(content)


def zipped() -> bytes:
    file = BytesIO()
    with ZipFile(file, "w") as archive:
        archive.writestr("model/data.pkl", b"")
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (zipped(), "a zip, as PyTorch's .pt and Keras's .keras are"),
        (pickle.dumps({"w": [1.0]}, 2), "a pickle, as old .pt files of PyTorch are"),
        (b"\x89HDF\r\n\x1a\n" + bytes(8), "HDF5, as Keras's .h5 are"),
        (b"\x1c\0\0\0TFL3" + bytes(8), "a .tflite of TensorFlow"),
        (save({"w": np.zeros(2)}), "a .safetensors, which has weights alone"),
    ],
)
def test_a_file_of_another_kind_is_named_with_the_export_to_onnx(content: bytes, kind: str) -> None:
    way = "PyTorch makes one with torch.onnx.export(net, args, path, dynamo=True, optimize=False)"
    with pytest.raises(InvalidGraph, match=re.escape(f"the file is {kind}, and no ONNX model: {way}")):
        read(content)


@pytest.mark.parametrize(("shape", "kind"), [([3, 2], "float32"), ([2], "float32"), ([2, 3], "float64")])
def test_an_initializer_that_contradicts_its_input_is_refused(shape: list[int], kind: str) -> None:
    add, value = helper.make_node("Add", ["x", "w"], ["y"]), numpy_helper.from_array(np.zeros(shape, kind), "w")
    content = model(add, inputs=[tensor("x"), tensor("w", (2, 3))], initializer=[value]).SerializeToString()
    fault = f"the initializer 'w' is {kind} of shape {shape}, but the input of that name is float32 of shape [2, 3]"
    with pytest.raises(InvalidGraph, match=re.escape(fault)):
        read(content)


def test_an_initializer_may_be_as_its_input_says() -> None:
    add, value = helper.make_node("Add", ["x", "w"], ["y"]), numpy_helper.from_array(np.zeros((2, 3), "f4"), "w")
    content = model(add, inputs=[tensor("x"), tensor("w", ("n", 3))], initializer=[value]).SerializeToString()
    assert [one.name for one in read(content).inputs] == ["x"]


@pytest.mark.parametrize(("op", "way"), [("Loop", r"nn.Embedding, then \.mean\(1\)"), ("Scan", "unroll a scan")])
def test_control_flow_is_refused_with_a_way(op: str, way: str) -> None:
    with pytest.raises(InvalidGraph, match=rf"operators that are not served: {op}\. {op}: .*{way}"):
        read(model(helper.make_node(op, ["x"], ["y"])).SerializeToString())


def test_the_fields_of_a_file_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Budget, "left", 100)
    with pytest.raises(InvalidGraph, match="fields"):
        read(b"\x08\x00" * 1000)


def test_numbers_without_a_fixed_length_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.graphs.protobuf.MAX_VARINT_BYTES", 4)
    stored = helper.make_tensor("w", TensorProto.INT64, [5], range(5))
    with pytest.raises(
        InvalidGraph, match="5 bytes of numbers without a fixed length; the limit is 4: write it with raw_data"
    ):
        read(model(initializer=[stored]).SerializeToString())


def test_an_initializer_has_few_dimensions() -> None:
    stored = helper.make_tensor("w", TensorProto.FLOAT, [1] * 65, [1.0])
    with pytest.raises(InvalidGraph, match="the initializer 'w' has 65 dimensions; the limit is 64"):
        read(model(initializer=[stored]).SerializeToString())


def with_functions(*functions: onnx.FunctionProto, calls: int = 1, **attributes: Any) -> bytes:
    """Return a model that calls the first function, several times in a row."""
    names = ["x", *(f"a{k}" for k in range(1, calls)), "y"]
    nodes = [
        helper.make_node(functions[0].name, [names[k]], [names[k + 1]], domain="mine", **attributes)
        for k in range(calls)
    ]
    made = model(*nodes)
    made.opset_import.add(domain="mine", version=1)
    made.functions.extend(functions)
    content: bytes = made.SerializeToString()
    return content


def function(name: str, *nodes: onnx.NodeProto, inputs: Any = ("a", "b"), **options: Any) -> onnx.FunctionProto:
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
    return helper.make_function("mine", name, inputs, ["c"], nodes, opsets, **options)


def scaled() -> onnx.FunctionProto:
    constant = helper.make_node("Constant", [], ["factor"])
    constant.attribute.add(name="value_float", ref_attr_name="by", type=onnx.AttributeProto.FLOAT)
    clip = helper.make_node("Clip", ["a", "b"], ["kept"])
    default = helper.make_attribute("by", 3.0)
    return function(
        "Scaled", constant, clip, helper.make_node("Mul", ["kept", "factor"], ["c"]), attribute_protos=[default]
    )


def test_functions_of_a_model_are_put_in_place_of_their_calls() -> None:
    outer = function(
        "Twice",
        helper.make_node("Scaled", ["a"], ["once"], domain="mine", by=2.0),
        helper.make_node("Scaled", ["once"], ["c"], domain="mine"),
    )
    got = read(with_functions(outer, scaled(), calls=2))
    assert [node.op for node in got.nodes] == ["Clip", "Mul"] * 4
    assert [float(one) for one in got.constants.values()] == [2.0, 3.0, 2.0, 3.0]
    assert got.nodes[0].inputs == ("x", "")
    made = Graph.read(with_functions(outer, scaled(), calls=2)).operator("twice")
    assert made({"x": np.ones((1, 3), np.float32)}, {})["y"].tolist() == [[36.0] * 3]


def test_a_function_may_return_its_input() -> None:
    same = helper.make_function("mine", "Same", ["a"], ["a"], [], [helper.make_opsetid("", 17)])
    assert [(node.op, node.inputs, node.outputs) for node in read(with_functions(same)).nodes] == [
        ("Identity", ("x",), ("y",))
    ]


def call(name: str) -> onnx.NodeProto:
    return helper.make_node(name, ["a"], ["c"], domain="mine")


def test_functions_have_an_end() -> None:
    with pytest.raises(InvalidGraph, match="functions call each other more than 16 times"):
        read(with_functions(function("Again", call("Again"))))
    many = [
        function(f"F{k}", *(helper.make_node(f"F{k + 1}", ["a"], [f"o{n}"], domain="mine") for n in range(50)))
        for k in range(9)
    ]
    with pytest.raises(InvalidGraph, match="more than 20000 nodes with those of its functions"):
        read(with_functions(*many, function("F9")))
    with pytest.raises(InvalidGraph, match=r"operators that are not served: mine\.Missing"):
        read(with_functions(function("Calls", call("Missing"))))


def test_only_functions_refer_to_attributes() -> None:
    concat = helper.make_node("Concat", ["x"], ["y"], name="n")
    concat.attribute.add(name="axis", ref_attr_name="by", type=onnx.AttributeProto.INT)
    with pytest.raises(InvalidGraph, match="Concat n refers to an attribute of a function, but is in none"):
        read(model(concat).SerializeToString())
    bare = helper.make_node("Constant", [], [], value_float=1.0)
    with pytest.raises(InvalidGraph, match="Constant must have one attribute"):
        read(model(bare).SerializeToString())
