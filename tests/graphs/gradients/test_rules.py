"""The rule of each operator, against PyTorch's autograd and finite differences."""

from __future__ import annotations

import numpy as np
import pytest

from service.dtypes import BFLOAT16, FLOAT16
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
