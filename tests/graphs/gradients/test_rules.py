"""The rule of each operator, against PyTorch's autograd and finite differences."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from service.dtypes import BFLOAT16, FLOAT16, Array, DType
from service.graphs.gradients import Tape, differentiate
from service.graphs.gradients.elementwise import DERIVATIVES
from service.graphs.nodes import step_of
from service.graphs.plan import Node, Plan
from service.kernels import Workspace, workspace
from tests.graphs.gradients.layers import LAYERS
from tests.graphs.gradients.question import Question, assert_close, tolerance
from tests.graphs.gradients.questions import QUESTIONS
from tests.graphs.gradients.recurrent import RECURRENT

ALL = QUESTIONS | LAYERS | RECURRENT
each_question = pytest.mark.parametrize("question", ALL.values(), ids=ALL)


@each_question
def test_the_gradients_are_those_of_pytorch(question: Question) -> None:
    got, expected = question.by_rule(np.dtype(np.float64)), question.by_torch()
    for name in question.trained:
        assert got[name].dtype == np.float64
        assert_close(got[name], expected[name], 1e-10)


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_the_gradients_are_finite_differences(question: Question) -> None:
    got, expected = question.by_rule(np.dtype(np.float64)), question.by_differences()
    for name in question.trained:
        assert_close(got[name], expected[name], 1e-7)


@each_question
def test_narrower_floats_have_the_same_gradients(question: Question) -> None:
    expected = question.by_rule(np.dtype(np.float64))
    for dtype in (np.dtype(np.float32), FLOAT16, BFLOAT16):
        got = question.by_rule(dtype)
        for name in question.trained:
            assert got[name].dtype == dtype
            assert_close(got[name], expected[name], tolerance(dtype))


ELEMENTWISE = {*DERIVATIVES, *"Add Sum Mean Max Min LeakyRelu Relu Sigmoid Tanh Swish Identity CastLike".split()}
ALONE = {name: one for name, one in QUESTIONS.items() if one.op in ELEMENTWISE}


@pytest.mark.parametrize("question", ALONE.values(), ids=ALONE)
def test_the_gradient_of_a_scalar_is_that_of_a_list_of_one_number(question: Question) -> None:
    lists = tuple(None if one is None else one.reshape(-1)[:1] for one in question.inputs)
    scalars = tuple(None if one is None else one.reshape(()) for one in lists)
    for dtype in (np.dtype(np.float64), np.dtype(np.float32), FLOAT16, BFLOAT16):
        got, expected = (replace(question, inputs=given).by_rule(dtype) for given in (scalars, lists))
        for name in question.trained:
            assert (got[name].shape, got[name].dtype) == ((), dtype)
            assert got[name].tobytes() == expected[name].tobytes()


BLOCK_BYTES = 1 << 20
"""What the blocks of the node itself take, however large the tensor is."""


@pytest.mark.parametrize("op", [op for op, functions in DERIVATIVES.items() if len(functions) == 1])
def test_a_gradient_claims_the_memory_that_it_takes(op: str) -> None:
    shape, claimed = (700, 700), list[int]()
    nodes = [Node(op, "", 21, ("x",), ("y",), {}), Node("ReduceSum", "", 21, ("y",), ("loss",), {"keepdims": 0})]
    tape = Tape(map(step_of, nodes))
    names = differentiate(tape, nodes, "loss", ["x"])
    plan = Plan(tape.steps, {}, [*names.values()])
    x = np.random.default_rng(0).uniform(0.1, 0.9, shape).astype(np.float32)

    def allocate(shape: tuple[int, ...], dtype: DType) -> Array:
        array = np.empty(shape, dtype)
        claimed.append(array.nbytes)
        return array

    plan.run({"x": x})
    tracemalloc.start()
    try:
        with workspace(Workspace(allocate=allocate, spare=allocate, scratch=allocate, claim=claimed.append)):
            plan.run({"x": x})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < sum(claimed) + BLOCK_BYTES
