"""The contract of every store for adds: sums, sparse gradients and nonfinite numbers."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from service.buffers.changes import Add, Take, Zero
from service.buffers.lmdb.slots import CHUNK_BYTES
from service.buffers.store import Store
from service.dtypes import Array
from service.errors import InvalidParameter, NonfiniteGradient, NormTooLarge, ShapeMismatch
from service.kernels.accumulate import in_place_accumulator, in_place_accumulator_v2
from service.kernels.gather import GatheredRows, gather_grad
from tests.buffers.calls import LARGE, add, create, do, fails_alone, ones, state, told, value
from tests.buffers.stores import Clock
from tests.kernels.calls import FLOAT_DTYPES, NARROW_DTYPES, peak_bytes
from tests.kernels.equality import assert_same_bits
from tests.kernels.test_accumulate import FITTING, UNFIT, numbers

INF, NAN = np.inf, np.nan

every_pair = pytest.mark.parametrize(
    ("dtype", "gradient_dtype"), [(a, b) for a in FLOAT_DTYPES for b in FLOAT_DTYPES], ids=str
)


@pytest.fixture
def store(namespace: Store) -> Store:
    return namespace


# ----- add -----


@every_pair
def test_an_add_equals_in_place_accumulator(store: Store, dtype: Any, gradient_dtype: Any) -> None:
    create(store, "a", shape=(3, 50), dtype=str(dtype))
    expected = np.zeros((3, 50), dtype)
    for seed, shape in enumerate([(3, 50), (50,), (3, 1), (), (1, 50)]):
        gradient = numbers(shape, gradient_dtype, seed)
        expected = in_place_accumulator(expected, gradient)
        receipt = add(store, "a", gradient)
        assert_same_bits(value(store, "a"), expected)
        assert receipt == told("a", step=0, version=seed + 1, count=seed + 1, weight=seed + 1)


@every_pair
@pytest.mark.parametrize("weight", [0.3, -2.5, 1e-9])
def test_the_weight_multiplies_in_the_dtype_of_the_sum(
    store: Store, dtype: Any, gradient_dtype: Any, weight: float
) -> None:
    create(store, "a", shape=(64,), dtype=str(dtype))
    first, gradient = numbers((64,), dtype, 1), numbers((64,), gradient_dtype, 2)
    add(store, "a", first)
    receipt = add(store, "a", gradient, weight=weight)
    compute = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    product = gradient.astype(compute) * compute.type(weight)
    assert_same_bits(value(store, "a"), (first.astype(compute) + product).astype(dtype))
    assert receipt["weight"] == 1 + weight
    add(store, "a", gradient, weight=weight, overwrite=True)
    assert_same_bits(value(store, "a"), product.astype(dtype))


@every_pair
def test_an_overwrite_equals_in_place_accumulator_v2(store: Store, dtype: Any, gradient_dtype: Any) -> None:
    create(store, "a", shape=(2, 3), dtype=str(dtype))
    add(store, "a", np.full((2, 3), NAN))
    add(store, "a", ones(3), weight=0.5)
    gradient = numbers((3,), gradient_dtype, 3)
    receipt = add(store, "a", gradient, overwrite=True)
    assert_same_bits(value(store, "a"), in_place_accumulator_v2(ones(2, 3, dtype=dtype), gradient, np.array(True))[1])
    assert (receipt["version"], receipt["count"], receipt["weight"]) == (3, 1, 1.0)


def test_special_values_keep_their_bits(store: Store) -> None:
    special = np.array([-0.0, 0.0, INF, -INF, NAN, 1e-45, 3.4e38], np.float32)
    create(store, "a", "b", shape=(7,))
    add(store, "a", special, overwrite=True)
    assert_same_bits(value(store, "a"), special)
    add(store, "a", special)
    with np.errstate(over="ignore"):
        assert_same_bits(value(store, "a"), special + special)
    add(store, "b", special)
    assert_same_bits(value(store, "b"), special + 0)


def test_a_cast_that_overflows_is_infinite(store: Store) -> None:
    create(store, "a", shape=(2,), dtype="float16")
    add(store, "a", np.array([7e4, 1e300]))
    add(store, "a", np.array([1.0, -INF]))
    assert_same_bits(value(store, "a"), np.array([INF, NAN], np.float16))


@pytest.mark.parametrize(("shape", "gradient_shape"), FITTING)
def test_a_gradient_is_broadcast(store: Store, shape: tuple[int, ...], gradient_shape: tuple[int, ...]) -> None:
    create(store, "a", shape=shape)
    gradient = numbers(gradient_shape, np.float32, 1)
    add(store, "a", gradient)
    assert_same_bits(value(store, "a"), in_place_accumulator(np.zeros(shape, np.float32), gradient))
    add(store, "a", gradient, overwrite=True)
    assert_same_bits(value(store, "a"), np.ascontiguousarray(np.broadcast_to(gradient, shape)).reshape(shape))


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(("shape", "gradient_shape"), UNFIT)
def test_a_gradient_must_broadcast_into_the_buffer(
    store: Store, shape: tuple[int, ...], gradient_shape: tuple[int, ...], overwrite: bool
) -> None:
    create(store, "a", shape=shape)
    change = Add(name="a", gradient=ones(*gradient_shape), overwrite=overwrite)
    error = fails_alone(store, ShapeMismatch, change)
    assert error.detail.startswith(f"gradient has shape {list(gradient_shape)}, ")
    assert error.detail.endswith(f"the buffer's, {list(shape)}")


def test_a_gradient_may_have_any_memory_layout(store: Store) -> None:
    create(store, "a", shape=(40, 60))
    whole = numbers((60, 80), np.float32, 1)
    add(store, "a", whole[:, ::2].T)
    add(store, "a", whole[::-1, 40:].T)
    assert_same_bits(value(store, "a"), whole[:, ::2].T + whole[::-1, 40:].T)


def test_an_add_without_update_changes_nothing(store: Store, module_clock: Clock) -> None:
    create(store, "a", ttl_seconds=10.0, quorum=2)
    add(store, "a", [1, 2], weight=0.5)
    before = state(store)
    module_clock.advance(1)
    outcome = do(store, Add(name="a", gradient=ones(7, 7), do_update=False, want_value=True))
    assert outcome.receipts["a"] == told("a", step=0, version=1, count=1, weight=0.5, updated=False)
    assert outcome.values["a"].tolist() == [0.5, 1.0]
    assert state(store) == before


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("nonfinite", ["allow", "reject"])
@pytest.mark.parametrize("size", [3, LARGE])
def test_nothing_of_a_gradient_of_weight_0_counts(store: Store, size: int, nonfinite: str, dtype: Any) -> None:
    names = ["dense", "broadcast", "sparse"]
    create(store, *names, shape=(size, 1), dtype=str(dtype), nonfinite=nonfinite)
    bad = np.full((size, 1), NAN, np.float32)
    bad[0] = INF
    rows = GatheredRows(np.array([size, 1]), np.array([1]), np.full((1, 1), NAN, np.float32))
    gradients: dict[str, Any] = {"dense": bad, "broadcast": np.array(INF, np.float16), "sparse": rows}
    for overwrite in (False, True):
        for name in names:
            add(store, name, np.array(-0.0), overwrite=True)
            add(store, name, ones(1), weight=2.0)
        old = value(store, "dense")
        adds = [Add(name=name, gradient=gradients[name], weight=0.0, overwrite=overwrite) for name in names]
        receipts = do(store, *adds).receipts
        for name in names:
            assert_same_bits(value(store, name), np.zeros_like(old) if overwrite else old)
            assert (receipts[name]["count"], receipts[name]["weight"]) == ((1, 0.0) if overwrite else (3, 3.0))
        assert add(store, "dense", ones(1))["count"] == (2 if overwrite else 4)
        assert (value(store, "dense") == (1 if overwrite else old + ones(1))).all()


def test_a_gradient_of_weight_0_completes_the_quorum(store: Store) -> None:
    create(store, "a", quorum=2)
    add(store, "a", [1, 2])
    receipt = add(store, "a", [NAN, INF], weight=0.0)
    assert (receipt["closed"], receipt["count"], receipt["weight"]) == (True, 2, 1.0)
    assert value(store, "a", 0).tolist() == [1, 2]


def test_a_gradient_of_weight_0_must_broadcast_into_the_buffer(store: Store) -> None:
    create(store, "a")
    fails_alone(store, ShapeMismatch, Add(name="a", gradient=ones(3), weight=0.0))


@pytest.mark.parametrize("weight", [NAN, INF, -INF, 1e39])
def test_a_weight_must_be_finite_in_the_dtype_of_the_sum(store: Store, weight: float) -> None:
    create(store, "a", dtype="bfloat16")
    error = fails_alone(store, InvalidParameter, Add(name="a", gradient=ones(2), weight=weight))
    assert error.context["parameter"] == "weight"


def test_the_sum_of_the_weights_must_be_finite(store: Store) -> None:
    """An overwrite begins a new sum."""
    create(store, "a", dtype="float64")
    add(store, "a", [0, 0], weight=1.5e308)
    fails_alone(store, InvalidParameter, Add(name="a", gradient=ones(2), weight=1.5e308))
    assert add(store, "a", [0, 0], weight=1.5e308, overwrite=True)["weight"] == 1.5e308


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_add_may_answer_the_value_after_it(store: Store, overwrite: bool) -> None:
    create(store, "a", "b")
    add(store, "a", [1, 2])
    change = Add(name="a", gradient=np.array([10, 20], np.float32), overwrite=overwrite, want_value=True)
    outcome = do(store, change, Add(name="b", gradient=ones(2)))
    assert {name: array.tolist() for name, array in outcome.values.items()} == {
        "a": [10, 20] if overwrite else [11, 22]
    }


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (3, 0, 2)])
def test_scalar_and_empty_buffers_take_gradients(store: Store, shape: tuple[int, ...], dtype: Any) -> None:
    create(store, "a", shape=shape, dtype=str(dtype), keep=3)
    assert_same_bits(value(store, "a"), np.zeros(shape, dtype))
    add(store, "a", np.full(shape, 1.5, dtype))
    add(store, "a", np.full(shape, 2.0, dtype), weight=2.0)
    assert_same_bits(value(store, "a"), np.full(shape, 5.5, dtype))
    assert_same_bits(do(store, Take(name="a")).values["a"], np.full(shape, 5.5, dtype))
    add(store, "a", np.asarray(3.0, dtype), overwrite=True)
    assert_same_bits(value(store, "a"), np.full(shape, 3.0, dtype))
    do(store, Zero(name="a"))
    assert_same_bits(value(store, "a"), np.zeros(shape, dtype))
    assert_same_bits(value(store, "a", 0), np.full(shape, 5.5, dtype))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("size", [LARGE, CHUNK_BYTES, CHUNK_BYTES // 8, CHUNK_BYTES // 8 + 1, CHUNK_BYTES // 2])
def test_buffers_may_have_several_chunks(store: Store, size: int, dtype: Any) -> None:
    create(store, "a", "b", shape=(size,), dtype=str(dtype), keep=2)
    first, second = numbers((size,), np.float64, 1), numbers((size,), dtype, 2)
    expected = in_place_accumulator(in_place_accumulator(np.zeros(size, dtype), first), second)
    add(store, "a", first)
    add(store, "a", second)
    assert_same_bits(value(store, "a"), expected)
    assert_same_bits(do(store, Take(name="a")).values["a"], expected)
    add(store, "a", second, overwrite=True)
    add(store, "a", ones(1))
    assert_same_bits(value(store, "a"), in_place_accumulator(second, ones(1)))
    assert_same_bits(value(store, "a", 0), expected)
    assert not value(store, "b").any()


# ----- scalar gradients -----


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("gradient", [0.0, -0.0, [[0.0]]])
@pytest.mark.parametrize("size", [3, LARGE])
def test_a_single_0_changes_count_and_weight_only(store: Store, size: int, gradient: Any, dtype: Any) -> None:
    create(store, "a", shape=(size, 1), dtype=str(dtype))
    add(store, "a", -0.0, overwrite=True)
    before, old = store.record("a"), value(store, "a")
    receipt = add(store, "a", np.array(gradient, dtype), weight=3.0)
    assert (receipt["updated"], receipt["version"], receipt["count"], receipt["weight"]) == (True, 2, 2, 4.0)
    assert store.record("a") == before.changed(version=2, count=2, weight=4.0)
    assert_same_bits(value(store, "a"), old)
    add(store, "a", np.array(gradient, dtype), overwrite=True)
    assert_same_bits(value(store, "a"), np.broadcast_to(np.array(gradient, dtype), (size, 1)))


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_scalar_is_added_without_a_copy_for_each_element(store: Store, overwrite: bool) -> None:
    create(store, "a", shape=(4, 1 << 19))
    add(store, "a", 1.0)
    peak = peak_bytes(lambda: add(store, "a", np.array(2.0, np.float32), weight=3.0, overwrite=overwrite))
    assert peak < 1.25 * store.record("a").spec.nbytes  # memory stores have the sum beside the old value
    assert (value(store, "a") == (6 if overwrite else 7)).all()


# ----- sparse gradients -----


def rows_for(shape: tuple[int, ...], axis: int, count: int, dtype: Any, seed: int) -> tuple[Array, Array, Array]:
    """Return shape, indices and gradients of `count` rows, about half of them duplicates."""
    random = np.random.default_rng(seed)
    few = random.integers(-shape[axis], shape[axis], max(1, count // 2))
    grad = random.normal(size=(*shape[:axis], count, *shape[axis + 1 :]))
    return np.array(shape), random.choice(few, count), np.asarray(grad, dtype)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("gradient_dtype", [FLOAT_DTYPES[0], NARROW_DTYPES[1]], ids=str)
@pytest.mark.parametrize(
    ("shape", "axis", "count"), [((3,), 0, 5), ((LARGE // 20, 21), 0, 6), ((7, LARGE // 6), 1, 9), ((4, 5), 0, 0)]
)
def test_a_sparse_gradient_adds_as_its_dense_form(
    store: Store, dtype: Any, gradient_dtype: Any, shape: tuple[int, ...], axis: int, count: int
) -> None:
    create(store, "sparse", "dense", shape=shape, dtype=str(dtype))
    calls: list[dict[str, Any]] = [{}, {"weight": -0.3}, {"overwrite": True}, {"overwrite": True, "weight": 2.0}, {}]
    for seed, how in enumerate(calls):
        inputs = rows_for(shape, axis, count, gradient_dtype, seed)
        one = add(store, "sparse", GatheredRows(*inputs, axis=axis), **how)
        other = add(store, "dense", gather_grad(*inputs, axis=axis), **how)
        assert {**one, "name": "dense"} == other
        assert_same_bits(value(store, "sparse"), value(store, "dense"))


def test_a_sparse_gradient_may_leave_negative_zeros(store: Store) -> None:
    """A store may leave -0 in rows without an index, where the dense form adds 0."""
    inputs = np.array([LARGE, 2]), np.array([3]), ones(1, 2)
    create(store, "sparse", "dense", shape=(LARGE, 2))
    for name, gradient in [("sparse", GatheredRows(*inputs)), ("dense", gather_grad(*inputs))]:
        add(store, name, np.array(-0.0, np.float32), overwrite=True)
        add(store, name, gradient)
    assert (value(store, "sparse") == value(store, "dense")).all()


def test_a_sparse_sum_that_overflows_is_infinite(store: Store) -> None:
    create(store, "a", shape=(3,), dtype="float16")
    grad = np.full(2, 6e4, np.float16)
    add(store, "a", GatheredRows(np.array([3]), np.array([1, 1]), grad))
    assert value(store, "a").tolist() == [0, INF, 0]


def test_a_sparse_gradient_broadcasts_as_its_dense_form(store: Store) -> None:
    create(store, "a", shape=(3, 2))
    for shape in ([1, 2], [2], [3, 1]):
        add(store, "a", GatheredRows(np.array(shape), np.array([0]), ones(1, *shape[1:])))
    add(store, "a", GatheredRows(np.array([2]), np.zeros(0, np.int64), ones(0)))
    assert value(store, "a").tolist() == [[3, 2], [2, 1], [2, 1]]
    for shape in ([3], [2, 2], [1, 3, 2], [4, 2], [0]):
        rows = GatheredRows(np.array(shape), np.zeros(0, np.int64), ones(0, *shape[1:]))
        fails_alone(store, ShapeMismatch, Add(name="a", gradient=rows))


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("rank", [32, 33, 64])
def test_a_gradient_broadcasts_into_any_number_of_dimensions(store: Store, rank: int, empty: bool) -> None:
    shape = (*[1] * (rank - 3), 3, 0 if empty else 1, 2)
    create(store, "a", shape=shape)
    for gradient in (ones(), ones(2), ones(3, 1, 1), ones(*[1] * (rank - 1), 2)):
        add(store, "a", gradient)
    np.testing.assert_array_equal(value(store, "a"), np.full(shape, 4, np.float32))


def test_a_gradient_broadcasts_into_many_dimensions_larger_than_one(store: Store) -> None:
    create(store, "a", shape=(*[2] * 17, *[1] * 20, 2), dtype="float16")
    add(store, "a", np.arange(2, dtype=np.float16))
    assert value(store, "a").reshape(-1, 2).mean(0).tolist() == [0, 1]


# ----- nonfinite -----


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("overwrite", [False, True])
def test_nonfinite_gradients_are_refused(store: Store, dtype: Any, bad: float, overwrite: bool) -> None:
    create(store, "a", shape=(LARGE,), dtype=str(dtype), nonfinite="reject")
    add(store, "a", ones(LARGE))
    gradient = ones(LARGE, dtype=dtype)
    gradient[-1] = bad
    fails_alone(store, NonfiniteGradient, Add(name="a", gradient=gradient, overwrite=overwrite))
    assert add(store, "a", ones(LARGE))["count"] == 2


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_a_sum_that_overflows_is_refused(store: Store, dtype: Any) -> None:
    create(store, "a", shape=(3,), dtype=str(dtype), nonfinite="reject")
    most = ml_dtypes.finfo(dtype).max  # type: ignore[no-untyped-call]
    largest = np.array([1, 1, most], dtype)
    add(store, "a", largest)
    ways: list[dict[str, Any]] = [{}, {"weight": 10.0}, {"weight": 10.0, "overwrite": True}]
    for how in ways:
        fails_alone(store, NonfiniteGradient, Add(name="a", gradient=largest, **how))
    add(store, "a", -largest)
    assert value(store, "a").tolist() == [0, 0, 0]


def test_nonfinite_sparse_gradients_are_refused(store: Store) -> None:
    create(store, "a", shape=(LARGE, 2), nonfinite="reject")
    rows = GatheredRows(np.array([LARGE, 2]), np.array([LARGE - 1]), np.full((1, 2), NAN, np.float32))
    fails_alone(store, NonfiniteGradient, Add(name="a", gradient=rows))


# ----- max_norm -----


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("gradient_dtype", FLOAT_DTYPES, ids=str)
def test_a_gradient_with_a_larger_norm_is_refused(store: Store, dtype: Any, gradient_dtype: Any) -> None:
    create(store, "a", "b", shape=(2,), dtype=str(dtype), max_norm=5.0)
    three_four = np.array([3, -4], gradient_dtype)
    for how in ({}, {"weight": 1000.0}, {"overwrite": True}):
        add(store, "a", three_four, **how)
        error = fails_alone(
            store, NormTooLarge, Add(name="b", gradient=three_four), Add(name="a", gradient=2 * three_four, **how)
        )
        context = {name: error.context[name] for name in ("norm", "max_norm", "buffer", "tensor")}
        assert context == {"norm": 10.0, "max_norm": 5.0, "buffer": "a", "tensor": "gradient"}
    assert add(store, "a", 2 * three_four, do_update=False)["count"] == 1
    assert add(store, "a", 2 * three_four, weight=0.0)["count"] == 2


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_gradient_without_a_finite_norm_is_refused(store: Store, bad: float) -> None:
    create(store, "a", shape=(LARGE,), max_norm=1e300)
    gradient = ones(LARGE)
    gradient[-1] = bad
    rows = GatheredRows(np.array([LARGE]), np.array([7]), np.array([bad], np.float32))
    for one in (gradient, rows, np.array(bad)):
        error = fails_alone(store, NormTooLarge, Add(name="a", gradient=one))
        assert error.context["norm"] is None
    assert add(store, "a", gradient, weight=0.0)["count"] == 1


@pytest.mark.parametrize(
    ("dtype", "number"),
    [(np.float16, 6e4), (ml_dtypes.bfloat16, 3e38), (np.float32, 3e38), (np.float64, 1e300), (np.float64, 1e-300)],
)
def test_no_square_of_a_norm_overflows_or_vanishes(store: Store, dtype: Any, number: float) -> None:
    one = float(np.array(number, dtype))
    norm = one * LARGE**0.5
    create(store, "takes", shape=(LARGE,), dtype="float64", max_norm=norm * (1 + 1e-9))
    create(store, "refuses", shape=(LARGE,), dtype="float64", max_norm=norm * (1 - 1e-9))
    gradient = np.full(LARGE, number, dtype)
    assert add(store, "takes", gradient)["count"] == 1
    error = fails_alone(store, NormTooLarge, Add(name="refuses", gradient=gradient))
    assert error.context["norm"] == pytest.approx(norm, rel=1e-12)


def test_the_norm_of_a_broadcast_gradient_counts_each_element(store: Store) -> None:
    create(store, "a", shape=(9, 4, 4), max_norm=12.0)
    for takes, refuses in [(1.0, 1.001), (ones(4), [1, 1, 1, 1.001]), (ones(9, 1, 4), 1.001 * ones(9, 1, 4))]:
        add(store, "a", takes)
        fails_alone(store, NormTooLarge, Add(name="a", gradient=np.asarray(refuses, np.float32)))
    assert value(store, "a").max() == 3


@pytest.mark.parametrize("inner", [1, LARGE])
def test_the_norm_of_a_sparse_gradient_adds_rows_of_one_index_first(store: Store, inner: int) -> None:
    create(store, "a", shape=(5, inner), max_norm=5.0)
    rows = np.zeros((3, inner), np.float32)
    rows[:, -1] = [1, 4, 2]

    def gathered(scale: float) -> GatheredRows:
        return GatheredRows(np.array([5, inner]), np.array([4, 1, -1]), rows * np.float32(scale))

    add(store, "a", gathered(1.0))  # 3 and 4
    assert fails_alone(store, NormTooLarge, Add(name="a", gradient=gathered(-2.0))).context["norm"] == 10.0
    add(store, "a", GatheredRows(np.array([5, inner]), np.zeros(0, np.int64), rows[:0]))
    assert value(store, "a")[:, -1].tolist() == [0, 4, 0, 0, 3]
