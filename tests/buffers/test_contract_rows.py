"""The contract of every store for sparse gradients that are given as indices and rows."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service import errors
from service.buffers.changes import Add, Create
from service.buffers.gradients import Rows
from service.buffers.memory import MemoryStore
from service.buffers.store import Store
from service.dtypes import NAMES, Array
from tests.buffers.calls import LARGE, add, create, do, fails_alone, key, ones, spec, value
from tests.kernels.calls import FLOAT_DTYPES, NARROW_DTYPES, peak_bytes
from tests.kernels.equality import assert_same_bits

ROWS = LARGE // 40


@pytest.fixture
def store(namespace: Store) -> Store:
    return namespace


def rows(indices: Any, numbers: Any, dtype: Any = np.float32) -> Rows:
    return Rows(np.asarray(indices, np.int64), np.asarray(numbers, dtype))


def dense(shape: tuple[int, ...], sparse: Rows) -> Array:
    """Return the gradient as a whole, computed in float64: exact for small integers."""
    whole = np.zeros(shape, np.float64)
    np.add.at(whole, sparse.indices, sparse.rows.astype(np.float64))
    return whole.astype(sparse.rows.dtype)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("given_dtype", [FLOAT_DTYPES[0], NARROW_DTYPES[1]], ids=str)
@pytest.mark.parametrize("shape", [(5, 3), (ROWS, 40)])
def test_rows_add_as_the_whole_gradient(store: Store, dtype: Any, given_dtype: Any, shape: tuple[int, ...]) -> None:
    create(store, "sparse", "dense", shape=shape, dtype=NAMES[dtype])
    random = np.random.default_rng(1)
    calls: list[dict[str, Any]] = [{}, {"weight": -2.0}, {"overwrite": True}, {"overwrite": True, "weight": 0.5}, {}]
    for how in calls:
        indices = random.choice(random.integers(-shape[0], shape[0], 6), 9)
        sparse = Rows(indices, random.integers(-9, 9, (9, shape[1])).astype(given_dtype))
        one, other = add(store, "sparse", sparse, **how), add(store, "dense", dense(shape, sparse), **how)
        assert {**one, "name": "dense"} == other
    assert_same_bits(value(store, "sparse") + 0, value(store, "dense") + 0)  # without negative zeros
    assert value(store, "sparse").any()


@st.composite
def gradients(draw: st.DrawFn) -> tuple[tuple[int, ...], Rows]:
    """Draw a shape and a gradient of small integers, whose sums every dtype holds exactly."""
    shape = tuple(draw(st.lists(st.integers(0, 4), min_size=1, max_size=3)))
    some = st.integers(-shape[0], shape[0] - 1) if shape[0] else st.nothing()
    indices = draw(st.lists(some, max_size=7 if shape[0] else 0))
    size = len(indices) * int(np.prod(shape[1:]))
    numbers = draw(st.lists(st.integers(-4, 4), min_size=size, max_size=size))
    kind, dtype = draw(st.sampled_from(["int32", "int64"])), draw(st.sampled_from(FLOAT_DTYPES))
    return shape, Rows(np.array(indices, kind), np.array(numbers, dtype).reshape(len(indices), *shape[1:]))


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(gradients(), st.sampled_from(FLOAT_DTYPES), st.sampled_from([1.0, -0.5, 2.0]), st.booleans())
def test_any_rows_add_exactly(
    gradient: tuple[tuple[int, ...], Rows], dtype: Any, weight: float, overwrite: bool
) -> None:
    shape, sparse = gradient
    with closing(MemoryStore()) as store:
        create(store, "a", shape=shape, dtype=NAMES[dtype])
        add(store, "a", ones(*shape))
        add(store, "a", sparse, weight=weight, overwrite=overwrite)
        expected = np.zeros(shape) if overwrite else np.ones(shape)
        np.testing.assert_array_equal(value(store, "a").astype(np.float64), expected + weight * dense(shape, sparse))


@pytest.mark.parametrize("numbers", [np.ones((0, 2), np.float32), np.ones(0, np.float32)])
def test_no_rows_are_a_gradient_of_nothing(store: Store, numbers: Array) -> None:
    create(store, "a", shape=(ROWS, 2), max_norm=5.0)
    add(store, "a", np.float32(0.01) * ones(ROWS, 2))
    before = value(store, "a").tobytes()
    values = [record.value for record in store.records()]
    receipt = add(store, "a", Rows(np.zeros(0, np.int32), numbers), weight=3.0)
    assert (receipt["count"], receipt["weight"]) == (2, 4.0)
    assert (value(store, "a").tobytes(), [record.value for record in store.records()]) == (before, values)
    add(store, "a", Rows(np.zeros(0, np.int32), numbers), overwrite=True)
    assert not value(store, "a").any()


def test_rows_of_weight_0_add_nothing_but_must_fit(store: Store) -> None:
    create(store, "a", shape=(2, 1), max_norm=1.0, nonfinite="reject")
    assert add(store, "a", rows([1], [[np.nan]]), weight=0.0)["count"] == 1
    fails_alone(store, errors.IndexOutOfRange, Add(name="a", gradient=rows([2], [[np.nan]]), weight=0.0))
    assert add(store, "a", rows([2], [[1, 2, 3]]), do_update=False)["updated"] is False
    assert value(store, "a").tolist() == [[0], [0]]


UNFIT: dict[str, tuple[tuple[int, ...], Any, Any, type[Exception], str]] = {
    "no dimensions": ((), [0], [1], errors.ShapeMismatch, "rows"),
    "too few rows": ((3, 2), [0, 1], [[1, 2]], errors.ShapeMismatch, "rows"),
    "too many rows": ((3,), [0], [1, 2], errors.ShapeMismatch, "rows"),
    "rows that would broadcast": ((3, 2), [0, 1], [[1], [2]], errors.ShapeMismatch, "rows"),
    "rows of another rank": ((3, 2), [0], [1], errors.ShapeMismatch, "rows"),
    "an index too large": ((3,), [0, 3], [1, 2], errors.IndexOutOfRange, "indices"),
    "an index too small": ((3,), [-4], [1], errors.IndexOutOfRange, "indices"),
    "an index of nothing": ((0,), [0], [1], errors.IndexOutOfRange, "indices"),
    "an index of empty rows": ((3, 0), [3], [[]], errors.IndexOutOfRange, "indices"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_rows_that_do_not_fit_are_refused(store: Store, case: str) -> None:
    shape, indices, numbers, error, part = UNFIT[case]
    create(store, "a", shape=shape)
    create(store, "b")
    changes = Add(name="b", gradient=ones(2)), Add(name="a", tensor="a", gradient=rows(indices, numbers))
    caught = fails_alone(store, error, *changes)  # type: ignore[arg-type]
    assert caught.context["tensor"] == f"a/{part}"
    assert caught.context["buffer"] == "a"


def test_rules_hold_for_rows(store: Store) -> None:
    create(store, "finite", shape=(ROWS, 2), nonfinite="reject")
    create(store, "short", shape=(ROWS, 2), max_norm=5.0)
    create(store, "named", shape=(ROWS, 2), quorum=2)
    fails_alone(store, errors.NonfiniteGradient, Add(name="finite", gradient=rows([ROWS - 1], [[1, np.inf]])))
    add(store, "short", rows([7, -1, 7], [[1, 0], [0, 4], [2, 0]]))
    assert (
        fails_alone(store, errors.NormTooLarge, Add(name="short", gradient=rows([7, 7], [[3, 0], [3, 0]]))).context[
            "norm"
        ]
        == 6.0
    )
    fails_alone(store, errors.StaleStep, Add(name="named", gradient=rows([0], [[1, 1]]), step=1))
    add(store, "named", rows([0], [[1, 1]]), contributor="ann")
    fails_alone(store, errors.DuplicateContributor, Add(name="named", gradient=rows([0], [[1, 1]]), contributor="ann"))
    receipt = add(store, "named", rows([0, -1], [[1, 1], [2, 3]]), weight=2.0, contributor="bob")
    assert (receipt["closed"], receipt["closed_by"], receipt["weight"]) == (True, "quorum", 3.0)
    closed = value(store, "named", 0)
    assert (closed[0].tolist(), closed[-1].tolist(), float(closed.sum())) == ([3, 3], [4, 6], 16.0)


def test_rows_with_a_key_count_once_also_after_the_buffer_has_gone(store: Store) -> None:
    create(store, "a", shape=(ROWS, 2))
    create(store, "b", shape=(3, 2))
    changes = [Add(name=name, gradient=rows([-1], [[1, 2]])) for name in ("a", "b")]
    first = do(store, *changes, key=key())
    again = [Add(name=name, gradient=rows([-1], [[1, 2]])) for name in ("a", "b")]
    repeated = do(store, *again, key=key())
    assert (repeated.replayed, repeated.receipts) == (True, first.receipts)
    assert (value(store, "a")[-1].tolist(), value(store, "b")[-1].tolist()) == ([1, 2], [1, 2])
    with pytest.raises(errors.KeyReused):
        do(store, *again, key=key(request="another"))


def test_rows_find_the_buffer_that_is_there_when_they_are_added(store: Store) -> None:
    """The rows were sorted for a buffer of another shape, which has been deleted since."""
    gradient = rows([-1, 0], [[1, 2], [3, 4]])
    gradient.onto((3, 2))
    create(store, "a", shape=(ROWS, 2))
    create(store, "b", shape=(1, 3))
    add(store, "a", gradient)
    assert (value(store, "a")[0].tolist(), value(store, "a")[-1].tolist()) == ([3, 4], [1, 2])
    fails_alone(store, errors.ShapeMismatch, Add(name="b", gradient=gradient))


def test_few_rows_take_little_memory(store: Store) -> None:
    """A whole gradient has 16 MB. No store makes anything of that size for an add."""
    shape = (1 << 18, 16)
    do(store, Create(name="a", spec=spec(shape)))
    gradients = [rows([1, -1, 5 * number], ones(3, 16)) for number in range(2)]
    add(store, "a", gradients[0])
    peak = peak_bytes(lambda: add(store, "a", gradients[1]))
    assert peak < 4 << 20
    assert value(store, "a")[[0, 1, 5, -1]].sum(axis=1).tolist() == [16, 32, 16, 32]


def test_bfloat16_rows_are_rounded_once(store: Store) -> None:
    create(store, "a", shape=(2,), dtype="float32")
    add(store, "a", Rows(np.zeros(3, np.int32), np.array([256, 1, 1], ml_dtypes.bfloat16)))
    assert value(store, "a").tolist() == [258, 0]
