"""Memory and work that a stranger's data asks for: counted before there is memory for it."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
import pytest

from service.dtypes import Array, DType
from service.errors import Busy, TensorTooLarge
from service.graphs.gradients import Tape, differentiate
from service.graphs.graph import Graph
from service.graphs.nodes import step_of
from service.graphs.plan import Node, Plan
from service.kernels import Workspace, workspace
from tests.graphs.test_nodes import ints, node
from tests.graphs.test_training import OWN, step

RANDOM = np.random.default_rng(3)
MOST = 1 << 20
LONG = 1 << 40


@contextmanager
def memory(most: int) -> Iterator[list[int]]:
    """Refuse more memory than `most`. Yield the sizes that were claimed."""
    claims: list[int] = []

    def claim(size: int) -> None:
        claims.append(size)
        if sum(claims) > most:
            raise Busy("too much")

    def allocate(shape: tuple[int, ...], dtype: DType) -> Array:
        claim(int(np.prod(shape, dtype=object)) * dtype.itemsize)
        return np.empty(shape, dtype)

    with workspace(Workspace(allocate=allocate, spare=allocate, scratch=np.empty, claim=claim)):
        yield claims


ONE, ROW = np.ones(1, np.float32), np.ones((1, 1 << 14), np.float32)
EMPTY = np.empty((LONG, 0), np.float32)
NO_PLACES = np.empty((LONG, 0), np.int64)

LARGE: list[tuple[str, list[Any], dict[str, Any]]] = [
    ("Expand", [ONE, ints(LONG)], {}),
    ("Tile", [ONE, ints(LONG)], {}),
    ("ConstantOfShape", [ints(1 << 20, 1 << 20)], {}),
    ("Range", [np.array(0), np.array(LONG), np.array(1)], {}),
    ("Range", [np.array(0.0), np.array(1.0), np.array(1e-12)], {}),
    ("Pad", [ONE, ints(LONG, 0)], {}),
    ("Pad", [ONE, ints(0, LONG)], {"mode": "edge"}),
    ("OneHot", [ints(0), np.array(LONG), ints(0, 1)], {}),
    ("OneHot", [np.empty(0, np.int64), np.array(LONG), ints(0, 1)], {}),
    ("Add", [ROW, ROW.T], {}),
    ("Equal", [ROW, ROW.T], {}),
    ("PRelu", [ROW, ROW.T], {}),
    ("Sum", [ROW, ROW.T], {}),
    ("Where", [ROW > 0, ROW.T, ROW], {}),
    ("MatMul", [ROW.T, ROW], {}),
    ("Gemm", [ROW.T, ROW], {}),
    ("Einsum", [ROW, ROW], {"equation": "ai,bj->ij"}),
    ("Einsum", [ROW] * 20, {"equation": ",".join("a" + one for one in "bcdefghijklmnopqrstu") + "->a"}),
    ("Einsum", [ROW] * 6, {"equation": "ab,ac,ad,ae,af,ag->bcdefg"}),
    ("Gather", [ROW, np.zeros(1 << 10, np.int64)], {}),
    ("GatherND", [ROW, np.zeros((1 << 10, 1), np.int64)], {}),
    ("GatherND", [EMPTY, NO_PLACES[..., None]], {"batch_dims": 1}),
    ("GatherElements", [EMPTY, NO_PLACES], {"axis": 1}),
    ("ScatterElements", [EMPTY, NO_PLACES, EMPTY], {"axis": 1}),
    ("Concat", [ROW] * 100, {"axis": 0}),
    ("Trilu", [EMPTY], {}),
    ("ReduceMax", [EMPTY, ints(1)], {}),
    ("ReduceSum", [EMPTY, ints(1)], {}),
    ("ReduceLogSumExp", [EMPTY, ints(1)], {}),
    ("TopK", [EMPTY, ints(1)], {"axis": 0, "outputs": 2}),
    ("NonZero", [np.ones((1, 1, 1, 1 << 15))], {}),
    ("CumSum", [np.ones(1 << 17, np.float16), np.array(0)], {}),
    ("CumProd", [np.ones(1 << 17, np.float16), np.array(0)], {}),
    ("TensorScatter", [EMPTY[..., None], EMPTY[..., None]], {}),
    ("RotaryEmbedding", [ROW.reshape(1, 1, 1, -1), ROW[:, ::2], ROW[:, ::2], np.zeros((1, 99), int)], {}),
    ("BitCast", [np.ones(1 << 21, np.uint8)], {"to": 9}),
    ("GridSample", [np.ones((1, 1, 1, 1)), np.ones((1, 1, 1 << 14, 2))], {"mode": "cubic"}),
    ("GridSample", [np.ones((1, 1 << 18, 1, 1), np.float32), np.ones((1, 1, 1, 2))], {}),
    ("LRN", [ROW.reshape(1, 1, -1).repeat(8, 1)], {"size": 3}),
    ("LpPool", [ROW.reshape(1, 1, -1).repeat(8, 1)], {"kernel_shape": [2]}),
    ("Cast", [np.ones(1 << 18, bool)], {"to": 11}),
]


@pytest.mark.parametrize("question", LARGE, ids=lambda question: str(question[0]))
def test_large_results_are_refused_before_there_is_memory_for_them(
    question: tuple[str, list[Any], dict[str, Any]],
) -> None:
    op, given, options = question
    made = step_of(node(op, len(given), **options))
    plan = Plan([made], {}, made.outputs)
    tracemalloc.start()
    try:
        with memory(MOST), pytest.raises((Busy, TensorTooLarge)):
            plan.run(dict(zip(made.inputs, given, strict=True)))
        assert tracemalloc.get_traced_memory()[1] < 2 * MOST
    finally:
        tracemalloc.stop()


def test_long_sums_of_products_are_refused() -> None:
    tensors = [np.ones((1 << 13, 1 << 13), np.int8)] * 3
    made = step_of(node("Einsum", 3, equation="ij,jk,kl->"))
    with pytest.raises(TensorTooLarge, match="Einsum would take"):
        Plan([made], {}, made.outputs).run(dict(zip(made.inputs, tensors, strict=True)))


def test_a_product_of_matrices_that_takes_too_long_is_refused() -> None:
    tall = np.ones((1 << 25, 1), np.int8)
    made = step_of(node("MatMul", 2))
    with pytest.raises(TensorTooLarge, match="MatMul would take"):
        Plan([made], {}, made.outputs).run({"x0": tall, "x1": tall.T})


@pytest.mark.parametrize("name", ["unet", "resnet"])
def test_a_run_claims_what_it_holds_at_its_peak(name: str) -> None:
    graph, given, _ = step(*OWN[name])
    operator = graph.operator(name)
    operator(given, {})
    peaks = []
    tracemalloc.start()
    try:
        for _ in range(3):  # threads of other tests may allocate, too, but seldom three times
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            with memory(1 << 30) as claims:
                outputs = operator(given, {})
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    peak = min(peaks)
    assert sum(claims) > sum(one.nbytes for one in outputs.values())
    assert 0.5 * peak - (1 << 17) < sum(claims) < 1.5 * peak


LENGTH = 1 << 18
"""Numbers of float32 in a megabyte."""

VIEWS: dict[str, list[str]] = {
    "Slice": ["Slice b first last -> v"],
    "Split": ["Split b lengths -> v w"],
    "SplitTraining": ["SplitTraining b lengths -> v w"],
    "Identity": ["Slice b first last -> s", "Identity s -> v"],
    "Reshape": ["Slice b first last -> s", "Reshape s square -> v"],
    "Squeeze": ["Reshape b row -> r", "Slice r first last second -> s", "Squeeze s -> v"],
    "Transpose": ["Reshape b row -> r", "Slice r first last second -> s", "Transpose s -> v"],
    "TopK": ["TopK b last -> w v"],
}
"""Nodes that leave a few numbers of a large tensor b, as v."""

NUMBERS = {"size": ints(LENGTH), "first": ints(0), "last": ints(4), "second": ints(1), "row": ints(1, LENGTH)}
NUMBERS |= {"square": ints(2, 2), "lengths": ints(4, LENGTH - 4)}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_counts_with_all_the_memory_that_it_keeps(name: str) -> None:
    steps = []
    for number in range(20):
        for line in ["ConstantOfShape size -> b", *VIEWS[name]]:
            (op, *given), made = (part.split() for part in line.split("->"))
            domain = "com.microsoft" * (op == "SplitTraining")
            names = [[one if one in NUMBERS else f"{one}{number}" for one in part] for part in (given, made)]
            steps.append(step_of(Node(op, domain, 21, (*names[0],), (*names[1],), {})))
    plan = Plan(steps, NUMBERS, [f"v{number}" for number in range(20)])
    assert_claimed(lambda: plan.run({}))


def test_a_gradient_counts_with_all_the_memory_that_it_keeps() -> None:
    rows = " ".join(
        f"c{k} = Concat<axis = 0>(p{k}, x)  m{k} = Mul(c{k}, y)  l{k} = ReduceSum<keepdims = 0>(m{k})"
        for k in range(20)
    )
    given = ", ".join(f"float[4] p{k}" for k in range(20))
    text = f"""<ir_version: 8, opset_import: ["": 17]> g (float[N] x, float[M] y, {given}) => (float loss)
        {{ {rows} loss = Sum({", ".join(f"l{k}" for k in range(20))}) }}"""
    content = onnx.parser.parse_model(text).SerializeToString()
    operator = Graph.read(content, loss="loss", train=",".join(f"p{k}" for k in range(20))).operator("g")
    tensors = {f"parameters.p{k}": np.ones(4, np.float32) for k in range(20)}
    x, y = np.ones(LENGTH, np.float32), np.ones(LENGTH + 4, np.float32)
    assert_claimed(lambda: operator({**tensors, "x": x, "y": y}, {}))


WIDE, PLACES = RANDOM.normal(size=(2, 8, 1 << 15)), RANDOM.uniform(-1.2, 1.2, (2, 8, 1 << 12, 2))
ANGLES = RANDOM.normal(size=(2, 1 << 12, 32))
LAYERS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "CumProd": ([WIDE, np.array(2)], {}),
    "TensorScatter": ([WIDE, WIDE[..., : 1 << 14], ints(9, 0)], {"axis": 2}),
    "RotaryEmbedding": ([WIDE.reshape(2, 2, 1 << 12, 32), ANGLES[..., :16], ANGLES[..., 16:]], {}),
    "GridSample": ([WIDE[..., : 1 << 12].reshape(2, 8, 64, 64), PLACES], {}),
    "GridSample of an image": ([WIDE[..., : 1 << 12].reshape(2, 8, 64, 64), PLACES], {"mode": "cubic"}),
    "GridSample of channels": ([WIDE.reshape(2, 1 << 12, 8, 8), PLACES[:, :4, :16]], {"mode": "nearest"}),
    "LRN": ([WIDE], {"size": 5}),
    "LpPool": ([WIDE], {"kernel_shape": [3], "p": 3}),
}


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_and_its_gradients_claim_what_they_take(name: str, dtype: Any) -> None:
    given, options = LAYERS[name]
    made = node(name.split()[0], len(given), opset=26, **options)
    tensors = {
        k: one.astype(dtype) if one.dtype.kind == "f" else one for k, one in zip(made.inputs, given, strict=True)
    }
    nodes = [made, Node("ReduceSum", "", 21, made.outputs, ("loss",), {"keepdims": 0})]
    tape = Tape(map(step_of, nodes))
    found = differentiate(tape, nodes, "loss", [name for name, one in tensors.items() if one.dtype == dtype])
    plan = Plan(tape.steps, {}, ["loss", *found.values()])
    assert_claimed(lambda: plan.run(tensors))


def assert_claimed(run: Callable[[], Any]) -> None:
    """Check that a run claims what it takes, but for what a step may take before it is counted."""
    run()
    tracemalloc.start()
    try:
        with memory(1 << 30) as claims:
            run()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < sum(claims) + 4 * MOST


def test_many_small_tensors_are_counted() -> None:
    """A workspace need not count a claim of a few kilobytes."""
    steps = [step_of(Node("ConstantOfShape", "", 21, ("size",), (f"v{k}",), {})) for k in range(400)]
    plan = Plan(steps, {"size": ints(1 << 13)}, [f"v{k}" for k in range(400)])
    with memory(1 << 30) as claims:
        plan.run({})
    assert sum(size for size in claims if size > 1 << 16) > 390 << 15
