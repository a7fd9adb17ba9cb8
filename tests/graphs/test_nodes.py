"""The functions of single nodes, against the reference evaluator of the ONNX project."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from service.dtypes import BFLOAT16, FLOAT16, Array
from service.errors import DtypeMismatch, InvalidGraph
from service.graphs.nodes import NODES, maker, step_of
from service.graphs.nodes.elementwise import FOLDS, FORMULAS, TESTS, UFUNCS
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
