"""The functions of single nodes, against the reference evaluator of the ONNX project."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator

from service.dtypes import BFLOAT16, FLOAT16, Array
from service.errors import DtypeMismatch, GradserveError, InvalidGraph
from service.graphs.nodes import NODES, maker, step_of
from service.graphs.nodes.activations import FORMULAS
from service.graphs.nodes.elementwise import FOLDS, TESTS, UFUNCS
from service.graphs.plan import Node

RANDOM = np.random.default_rng(0)
FLOATS = RANDOM.normal(size=(3, 4)).astype(np.float32)


def node(op: str, inputs: int = 1, outputs: int = 1, opset: int = 21, domain: str = "", **attributes: Any) -> Node:
    names = tuple(f"x{k}" for k in range(inputs)), tuple(f"y{k}" for k in range(outputs))
    return Node(op, domain, opset, names[0], names[1], attributes)


def run(op: str, *given: Any, **options: Any) -> Any:
    return step_of(node(op, len(given), **options)).function(*given)


def reference(op: str, *given: Any, outputs: int = 1, opset: int = 21, **attributes: Any) -> Any:
    names = [f"x{k}" if array is not None else "" for k, array in enumerate(given)]
    proto = onnx.helper.make_node(op, names, [f"y{k}" for k in range(outputs)], **attributes)
    inputs = [onnx.ValueInfoProto(name=name) for name in names if name]
    graph = onnx.helper.make_graph([proto], "g", inputs, [onnx.ValueInfoProto(name=name) for name in proto.output])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    results: Any = ReferenceEvaluator(model).run(None, {k: v for k, v in zip(names, given, strict=True) if k})
    return results[0] if outputs == 1 else results


def tensors(op: str) -> list[Array]:
    if op.startswith("Bitwise"):
        return [RANDOM.integers(-9, 9, (3, 4)), RANDOM.integers(-9, 9, 4)]
    if op in ("And", "Or", "Xor", "Not"):
        return [FLOATS > 0, FLOATS[0] > 0.5]
    base = FLOATS + 2 if op == "Acosh" else np.tanh(FLOATS) if op in ("Asin", "Acos", "Atanh") else FLOATS
    return [base, FLOATS[0]]


TWO_INPUTS = {"Add", "Sub", "Mul", "PRelu", *FOLDS, *TESTS} - {"Not", "IsNaN"} | {
    op for op in UFUNCS if re.match("Bitwise(And|Or|Xor)", op)
}


@pytest.mark.parametrize("op", [op for op in (*UFUNCS, *TESTS, *FOLDS, *FORMULAS) if op != "Swish"])
def test_elementwise_operators_agree_with_the_reference(op: str) -> None:
    given = tensors(op)[: 2 if op in TWO_INPUTS else 1]
    with np.errstate(all="ignore"):
        got, expected = run(op, *given), reference(op, *given)
    assert got.dtype == expected.dtype
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [np.dtype(np.float64), np.dtype(np.float32), FLOAT16, BFLOAT16])
@pytest.mark.parametrize("op", [*UFUNCS, *TESTS, *FOLDS, *FORMULAS, "Div", "Pow", "Mod"])
def test_a_scalar_is_computed_as_a_list_of_one_number(op: str, dtype: Any) -> None:
    given = [one.reshape(-1)[:1] for one in tensors(op)][: 2 if op in {*TWO_INPUTS, "Div", "Pow", "Mod"} else 1]
    given = [one.astype(dtype) if one.dtype.kind == "f" else one for one in given]
    with np.errstate(all="ignore"):
        got, expected = run(op, *(one.reshape(()) for one in given)), run(op, *given)
    assert isinstance(got, np.ndarray)
    assert (got.shape, got.dtype) == ((), expected.dtype)
    assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16])
def test_narrow_floats_are_rounded_once(dtype: Any) -> None:
    given = FLOATS.astype(dtype)
    expected = run("Gelu", given.astype(np.float32)).astype(dtype)
    assert run("Gelu", given).tobytes() == expected.tobytes()


def test_inputs_of_two_dtypes_are_refused() -> None:
    with pytest.raises(DtypeMismatch, match="the inputs are float32, float64, but must share a dtype"):
        run("Add", FLOATS, FLOATS.astype(np.float64))


def test_integers_divide_towards_zero() -> None:
    assert run("Div", np.array([7, -7, 6, -6]), np.array([2, 2, -3, -3])).tolist() == [3, -3, -2, 2]


@pytest.mark.parametrize("exponent", [2.0, 0.5, [2.0, 3.0, 0.0, 1.0]])
def test_powers(exponent: Any) -> None:
    given = np.abs(FLOATS), np.array(exponent, np.float32)
    np.testing.assert_allclose(run("Pow", *given), reference("Pow", *given), rtol=1e-6)


def test_dropout_has_the_same_bits_for_the_same_seed() -> None:
    given = np.ones((50, 50), np.float32), np.array(0.25, np.float32), np.array(True)
    step = step_of(node("Dropout", 3, 2))
    assert step.inputs[-1] == "~seed"
    (first, mask), (again, _), (other, _) = (step.function(*given, np.int64(seed)) for seed in (1, 1, 2))
    assert first.tobytes() == again.tobytes() != other.tobytes()
    assert (first[mask] == np.float32(1 / 0.75)).all()
    assert not first[~mask].any()
    assert 0.7 < mask.mean() < 0.8


def test_a_kernel_refuses_attributes_that_its_operator_has_not() -> None:
    with pytest.raises(InvalidGraph, match="SoftmaxGrad_13: SoftmaxGrad_13 has no attribute 'axes'"):
        step_of(node("SoftmaxGrad_13", 2, domain="com.microsoft", axes=1))
    with pytest.raises(InvalidGraph, match="axis is 'last', but must be int"):
        step_of(node("SoftmaxGrad_13", 2, domain="com.microsoft", axis="last"))


def test_an_operator_has_one_maker() -> None:
    assert ("", "Add") in NODES
    with pytest.raises(TypeError, match="two makers"):
        maker("Add")(lambda node: lambda *_: None)


def ints(*numbers: int) -> Array:
    return np.array(numbers, np.int64)


CUBE = RANDOM.normal(size=(2, 3, 4)).astype(np.float32)
IMAGE = RANDOM.normal(size=(1, 8, 4, 6)).astype(np.float32)
PLACES = (RANDOM.integers(-120, 120, (1, 2, 9, 2)) / 64).astype(np.float32)

QUESTIONS: list[tuple[str, list[Any], dict[str, Any]]] = [
    ("Reshape", [CUBE, ints(0, -1)], {}),
    ("Reshape", [np.zeros((0, 3), np.float32), ints(3, 0)], {"allowzero": 1}),
    ("Flatten", [CUBE], {"axis": -1}),
    ("Flatten", [CUBE], {"axis": 0}),
    ("Squeeze", [CUBE[:, :1].copy(), ints(-2)], {}),
    ("Squeeze", [CUBE[:1, :1]], {}),
    ("Unsqueeze", [CUBE, ints(0, -1)], {}),
    ("Transpose", [CUBE], {"perm": [2, 0, 1]}),
    ("Transpose", [CUBE], {}),
    ("Concat", [CUBE, CUBE[:, :1]], {"axis": 1}),
    ("Split", [CUBE, ints(1, 3)], {"axis": 2, "outputs": 2}),
    ("Split", [CUBE], {"axis": 1, "outputs": 2, "num_outputs": 2}),
    ("Slice", [CUBE, ints(1, -1), ints(10**9, -(10**9)), ints(1, -1), ints(1, -2)], {}),
    ("Slice", [CUBE, ints(0, 1), ints(-1, 3)], {}),
    ("Expand", [CUBE[:, :1], ints(2, 1, 3, 1)], {}),
    ("Tile", [CUBE, ints(2, 1, 3)], {}),
    ("Pad", [CUBE, ints(1, 1, 0, 0, 2, 1), np.array(7.0, np.float32)], {}),
    ("Pad", [CUBE, ints(2, 1), None, ints(-1)], {"mode": "edge"}),
    ("Pad", [CUBE, ints(1, 2), None, ints(1)], {"mode": "reflect"}),
    ("Pad", [CUBE, ints(1, 5), None, ints(2)], {"mode": "wrap"}),
    ("Shape", [CUBE], {"start": -2}),
    ("Size", [CUBE], {}),
    ("Range", [np.array(1.0, np.float32), np.array(-4.0, np.float32), np.array(-1.5, np.float32)], {}),
    ("Range", [np.array(-5), np.array(7), np.array(3)], {}),
    ("Trilu", [CUBE, np.array(99)], {"upper": 0}),
    ("Trilu", [CUBE, np.array(-99)], {"upper": 0}),
    (
        "Resize",
        [IMAGE.astype(np.float64), None, np.array([1, 1, 0.5, 0.5], np.float32)],
        {"mode": "linear", "antialias": 1},
    ),
    (
        "Resize",
        [IMAGE.astype(np.float64), None, np.array([1, 1, 0.5, 0.5], np.float32)],
        {"mode": "cubic", "antialias": 1},
    ),
    ("DepthToSpace", [IMAGE], {"blocksize": 2, "mode": "DCR"}),
    ("DepthToSpace", [IMAGE], {"blocksize": 2, "mode": "CRD"}),
    ("SpaceToDepth", [IMAGE], {"blocksize": 2}),
    ("Trilu", [CUBE, np.array(-1)], {"upper": 0}),
    ("Trilu", [CUBE, np.array(1)], {}),
    ("Gather", [CUBE, np.array([[0, -1], [2, 1]])], {"axis": 1}),
    ("GatherElements", [CUBE, np.array([[[1, 0, 0, -1]] * 3])], {"axis": 0}),
    ("GatherND", [CUBE, np.array([[1, 0], [0, 2]])], {}),
    ("GatherND", [CUBE, np.array([[1], [0]])], {"batch_dims": 1}),
    ("ScatterElements", [FLOATS, np.array([[0, 0], [1, 1]]), FLOATS[:2, :2]], {"axis": 1, "reduction": "add"}),
    ("ScatterElements", [FLOATS, np.array([[0, 2], [1, 0]]), FLOATS[:2, :2]], {"axis": 1}),
    ("ScatterND", [CUBE, np.array([[1], [0]]), CUBE], {}),
    ("ScatterND", [CUBE, np.array([[1], [1]]), CUBE], {"reduction": "max"}),
    ("OneHot", [np.array([[1, -1], [0, 9]]), np.array(3), np.array([2.0, 5.0], np.float32)], {"axis": 1}),
    ("ArgMax", [CUBE], {"axis": 1, "keepdims": 0}),
    ("ArgMin", [np.array([[1, 0, 0]])], {"axis": -1, "select_last_index": 1}),
    ("TopK", [CUBE, ints(2)], {"outputs": 2}),
    ("TopK", [CUBE, ints(2)], {"outputs": 2, "largest": 0, "axis": 1}),
    ("CumSum", [CUBE, np.array(-1)], {"exclusive": 1, "reverse": 1}),
    ("CumSum", [CUBE, np.array(0)], {}),
    ("CumProd", [CUBE, np.array(-1)], {"exclusive": 1, "reverse": 1, "opset": 26}),
    ("CumProd", [np.array([[1, -2], [0, 3]]), np.array(0)], {"opset": 26}),
    ("BitCast", [FLOATS], {"to": TensorProto.INT32, "opset": 26}),
    ("BitCast", [ints(1, -1, 1 << 62)], {"to": TensorProto.DOUBLE, "opset": 26}),
    ("TensorScatter", [CUBE, CUBE[:, :2], ints(1, 0)], {"opset": 24}),
    ("TensorScatter", [CUBE, CUBE[..., :3]], {"axis": -1, "opset": 24}),
    ("TensorScatter", [CUBE, CUBE[:, :2], ints(2, 7)], {"mode": "circular", "opset": 24}),
    ("Swish", [FLOATS], {"alpha": 1.75, "opset": 24}),
    ("RotaryEmbedding", [IMAGE, FLOATS[:, :3], 2 * FLOATS[:, :3], ints(0, 2, 1, 1)[None]], {"opset": 23}),
    (
        "RotaryEmbedding",
        [CUBE, FLOATS[:, :1], FLOATS[:, 1:2], np.array([[0, 1, 2], [2, 2, 0]])],
        {"num_heads": 1, "rotary_embedding_dim": 2, "interleaved": 1, "opset": 23},
    ),
    *(
        ("GridSample", [IMAGE[:, :1], PLACES], {"mode": mode, "padding_mode": padding, "align_corners": corners})
        for mode in ("nearest", "linear", "cubic")
        for padding in ("zeros", "reflection", *(["border"] if mode != "cubic" else []))
        for corners in (0, 1)
    ),
    ("GridSample", [IMAGE[:, None], np.concatenate([PLACES, PLACES[..., :1] / 2], -1)[:, None]], {"mode": "cubic"}),
    ("GridSample", [CUBE[:1], PLACES[0, :1, :, :1]], {}),
    ("LpPool", [IMAGE], {"kernel_shape": [2, 3], "pads": [1, 0, 0, 1], "strides": [1, 2], "p": 3}),
    ("LpPool", [IMAGE], {"kernel_shape": [2, 2], "dilations": [1, 3]}),
    ("NonZero", [np.array([[1, 0], [2, 3]])], {}),
    ("MatMul", [CUBE, CUBE.transpose(0, 2, 1)], {}),
    ("Gemm", [FLOATS, FLOATS, FLOATS[:, 0]], {"transB": 1, "alpha": 0.5, "beta": 2.0}),
    ("Einsum", [CUBE, FLOATS], {"equation": "bij, ik -> bk"}),
    ("Einsum", [CUBE, FLOATS, FLOATS[0]], {"equation": "...ij,kj,j->...ik"}),
    ("Einsum", [FLOATS[:, :3]], {"equation": "ii"}),
    ("Einsum", [FLOATS, FLOATS], {"equation": "i...,j...->..."}),
    ("Clip", [FLOATS, np.array(-0.5, np.float32), None], {}),
    ("Where", [FLOATS > 0, FLOATS, FLOATS[0]], {}),
    ("Cast", [FLOATS * 10], {"to": 7}),
    ("CastLike", [ints(1, 0), np.array(True)], {}),
    ("Mod", [ints(7, -7), ints(3, 3)], {}),
    ("Mod", [FLOATS, FLOATS[0]], {"fmod": 1}),
    ("IsInf", [np.array([np.inf, -np.inf, 1], np.float32)], {"detect_positive": 0}),
    ("ConstantOfShape", [ints(2, 3)], {}),
    ("EyeLike", [FLOATS], {}),
    ("EyeLike", [FLOATS], {"k": 2, "dtype": 7}),
    ("EyeLike", [FLOATS], {"k": -1, "dtype": 9}),
    ("EyeLike", [FLOATS], {"k": 9}),
    *(
        (f"Reduce{kind}", [np.abs(CUBE), ints(0, -1)], {"keepdims": 0})
        for kind in ("Sum", "Mean", "Max", "Min", "Prod")
    ),
    *((f"Reduce{kind}", [np.abs(CUBE), ints(1)], {}) for kind in ("L1", "L2", "LogSum", "LogSumExp", "SumSquare")),
    ("ReduceMean", [CUBE], {}),
    ("ReduceMax", [np.empty((2, 0, 4), np.float32), ints(1)], {}),
    ("ReduceMax", [np.empty((2, 0), bool), ints(1)], {}),
    ("ReduceMin", [np.empty((2, 0), np.int32), ints(1)], {"keepdims": 0}),
    ("ReduceLogSumExp", [np.empty((2, 0), np.float32), ints(1)], {}),
    ("ReduceProd", [np.empty((2, 0), np.float32), ints(1)], {}),
    ("ReduceMax", [CUBE], {"noop_with_empty_axes": 1}),
    ("ReduceMean", [CUBE], {"axes": [1], "opset": 13}),
]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: str(question[0]))
def test_operators_agree_with_the_reference(question: tuple[str, list[Any], dict[str, Any]]) -> None:
    op, given, options = question
    with np.errstate(all="ignore"):
        got, expected = run(op, *given, **options), reference(op, *given, **options)
    for ours, theirs in zip(*([got], [expected]) if options.get("outputs", 1) == 1 else (got, expected), strict=True):
        assert isinstance(ours, np.ndarray)
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=1e-6)
        assert ours.flags.c_contiguous


def test_the_indices_of_gather_elements_may_be_fewer_than_the_data() -> None:
    assert run("GatherElements", CUBE, np.array([[[1, 0]]]), axis=0).tolist() == [[[CUBE[1, 0, 0], CUBE[0, 0, 1]]]]


def test_padding_below_zero_removes() -> None:
    got = run("Pad", CUBE, ints(1, -1, 0, 0, 1, -2))
    assert got.shape == (3, 3, 2)
    assert not got[0].any()
    np.testing.assert_array_equal(got[1:, :2], CUBE[:, 1:, :2])


ONES = np.ones((2, 3))


@pytest.mark.parametrize(
    ("op", "given", "problem"),
    [
        ("MatMul", [ONES, ONES.T.astype(np.float32)], "the inputs are float64, float32, but must share a dtype"),
        ("Gemm", [ONES, np.ones((1, 3, 2))], r"A has shape [2, 3] and B [1, 3, 2], but both must have two dimensions"),
        (
            "Gemm",
            [ONES, ONES.T, np.ones((2, 1, 1))],
            "C has shape [2, 1, 1], but must broadcast to that of A @ B, [2, 2]",
        ),
        ("ScatterND", [ONES, ints(0, 1)[:, None], ONES[:1]], "updates has shape [1, 3], but must have [2, 3]"),
        (
            "ScatterElements",
            [ONES, ints(0, 1, 0)[None], ONES[:1, :1]],
            "updates has shape [1, 1], but must have [1, 3]",
        ),
        ("GatherElements", [ONES, ONES], "indices is float64, but must be of integers"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(op: str, given: list[Array], problem: str) -> None:
    with pytest.raises(GradserveError, match=re.escape(problem)):
        run(op, *given)


def test_attention_to_nothing_is_zero() -> None:
    given = [np.ones((1, 1, 2, 3))] * 3
    seen = np.array([[False, False], [True, False]])
    assert run("Attention", *given, seen, opset=23).tolist() == [[[[0.0] * 3, [1.0] * 3]]]


def test_a_cache_that_gives_its_places_is_attended_to_as_far_as_it_is_filled() -> None:
    """The first sample has two keys, and so no key for the first of its three queries."""
    Q, K, V = RANDOM.normal(size=(2, 4, 3, 2)), RANDOM.normal(size=(2, 2, 5, 2)), RANDOM.normal(size=(2, 2, 5, 3))
    given: list[Any] = [Q, K, V, RANDOM.normal(size=(3, 4)), None, None, ints(2, 4)]
    options: dict[str, Any] = {"is_causal": 1, "opset": 24}
    made = node("Attention", 7, **options)
    step = step_of(replace(made, inputs=("x0", "x1", "x2", "x3", "", "", "x6")))
    got = step.function(*given)
    np.testing.assert_allclose(got, reference("Attention", *given, **options), rtol=1e-6, atol=1e-7)
    assert not got[0, :, 0].any()


HUGE = np.array([[[[np.inf, -np.inf], [np.nan, 0]], [[1e300, 1], [-1e300, 1]]]])


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_samples_of_no_place_are_zero_and_those_of_far_places_are_finite(mode: str, padding: str) -> None:
    with np.errstate(all="ignore"):
        got = run("GridSample", np.ones((1, 1, 2, 2)), HUGE, mode=mode, padding_mode=padding)
    assert got[0, 0, 0, 1] == 0
    assert np.isfinite(got[0, 0, 1]).all()


def test_bits_that_become_a_bool_are_a_bool() -> None:
    got = run("BitCast", np.array([0, 1, 2, 255], np.uint8), to=TensorProto.BOOL)
    assert got.view(np.uint8).tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("op", "given", "options", "problem"),
    [
        ("BitCast", [FLOATS], {"to": TensorProto.INT64}, "the input is float32, but must have the 64 bits of int64"),
        ("TensorScatter", [CUBE, CUBE, ints(0)], {}, "write_indices has shape [1], but must have [2]"),
        ("TensorScatter", [CUBE, CUBE], {"axis": 0}, "must fit into [2, 3, 4] along axis 0, not 0"),
        ("TensorScatter", [CUBE, CUBE[:, :1, :2]], {}, "updates has shape [2, 1, 2], but must have [2, 1, 4]"),
        ("TensorScatter", [CUBE, CUBE[:, :2], ints(0, 2)], {}, "from 0 to 3, but must be from 0 to 2"),
        ("TensorScatter", [CUBE, CUBE[:, :2], ints(-1, 0)], {}, "from -1 to 1, but must be from 0 to 2"),
        ("RotaryEmbedding", [IMAGE, CUBE, CUBE], {}, "the angles have shapes [2, 3, 4], [2, 3, 4], but must have"),
        ("RotaryEmbedding", [IMAGE, CUBE, CUBE], {"rotary_embedding_dim": 3}, "3 numbers of a head are rotated"),
        ("RotaryEmbedding", [CUBE, CUBE, CUBE], {"num_heads": 3}, "has shape [2, 3, 4], which are not 3 heads"),
        ("GridSample", [IMAGE, PLACES[..., :1]], {}, "but they must have [N, C, in...] and [N, out..., axes]"),
        ("GridSample", [IMAGE[:, :0], PLACES], {}, "X has shape [1, 0, 4, 6]"),
        ("GridSample", [IMAGE.astype(np.int32), PLACES], {}, "X is int32, but must be one of float16"),
        ("GridSample", [np.ones((1, 1, *[1] * 4)), np.ones((1, *[1] * 4, 4))], {}, "with 1 to 3 axes"),
        ("GridSample", [FLOATS, PLACES], {}, "X has shape [3, 4]"),
        ("LRN", [FLOATS], {"size": 3}, "X has shape [3, 4], but must have 3 dimensions or more"),
        ("LpPool", [IMAGE], {"kernel_shape": [5, 1]}, "a window takes 5"),
        ("LpPool", [FLOATS], {"kernel_shape": [1]}, "must have 3 dimensions or more"),
        ("Attention", [IMAGE] * 3 + [None, None, None, ints(1, 2)], {}, "nonpad_kv_seqlen has shape [2]"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(op: str, given: list[Any], options: Any, problem: str) -> None:
    made = node(op, len(given), **options)
    names = tuple("" if one is None else name for one, name in zip(given, made.inputs, strict=True))
    with pytest.raises(GradserveError, match=re.escape(problem)):
        step_of(replace(made, inputs=names)).function(*given)


@pytest.mark.parametrize(
    ("op", "options", "problem"),
    [
        ("GridSample", {"mode": "area"}, "mode is 'area', but must be one of nearest, linear, cubic"),
        (
            "GridSample",
            {"padding_mode": "wrap"},
            "padding_mode is 'wrap', but must be one of zeros, border, reflection",
        ),
        ("LRN", {"size": 0}, "size is 0, but must be an integer in"),
        ("LRN", {"size": 1 << 62}, "size is 4611686018427387904, but must be"),
        ("LpPool", {"p": 0}, "p is 0, but must be an integer of at least 1"),
        ("BitCast", {"to": TensorProto.INT4}, "the type INT4 is none of float32, uint8"),
    ],
)
def test_attributes_that_are_not_served_are_refused(op: str, options: Any, problem: str) -> None:
    with pytest.raises(InvalidGraph, match=problem):
        step_of(node(op, **options))


def test_attention_with_a_cache_is_refused() -> None:
    with pytest.raises(InvalidGraph, match="Attention: it has a cache of keys and values"):
        step_of(node("Attention", 6, opset=23))
