"""What every store promises."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import ml_dtypes
import numpy as np
import pytest

from service.buffers._slots import CHUNK
from service.buffers.changes import Add, Change, Create, Delete, Outcome, Request, Restore, Take, Zero
from service.buffers.namespaced import Namespaced
from service.buffers.store import Record, Store
from service.errors import (
    BufferExists,
    EpochGone,
    EpochOpen,
    GradserveError,
    Invalid,
    InvalidParameter,
    KeyReused,
    NonfiniteGradient,
    PreconditionFailed,
    ShapeMismatch,
    StaleEpoch,
    TooFewGradients,
    UnknownBuffer,
)
from service.kernels.accumulate import in_place_accumulator, in_place_accumulator_v2
from service.kernels.gather import GatheredRows, gather_grad
from tests.buffers.calls import (
    KEY_SECONDS,
    PATIENCE,
    Array,
    Clock,
    add,
    create,
    do,
    key,
    ones,
    open_lmdb,
    open_memory,
    spec,
    state,
    value,
)
from tests.kernels.calls import FLOAT_DTYPES, NARROW_DTYPES
from tests.kernels.equality import assert_same_bits
from tests.kernels.test_accumulate import FITTING, UNFIT, numbers

INF, NAN = np.inf, np.nan
LARGE = 5 * (CHUNK // 8) + 3
"""Elements of a buffer of several chunks, the last one of which is not full, in any dtype."""

every_pair = pytest.mark.parametrize(
    ("dtype", "gradient_dtype"), [(a, b) for a in FLOAT_DTYPES for b in FLOAT_DTYPES], ids=str
)


@pytest.fixture(params=["memory", "lmdb"])
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[Store]:
    store: Store = open_memory(clock) if request.param == "memory" else open_lmdb(tmp_path / "store", clock)
    yield store
    store.close()


def fails_alone(store: Store, error: type[GradserveError], *changes: Change) -> GradserveError:
    """The error of a request that changes nothing."""
    before = state(store)
    with pytest.raises(error) as caught:
        do(store, *changes)
    assert state(store) == before
    return caught.value


# ----- create -----


def test_a_new_buffer_is_zero(store: Store, clock: Clock) -> None:
    rules: dict[str, Any] = {"nonfinite": "reject", "quorum": 3, "keep": 2, "ttl_seconds": 60.0}
    outcome = do(store, Create(name="a", spec=spec((2, 3), "float16", **rules)))
    expected = {
        "name": "a",
        "shape": [2, 3],
        "dtype": "float16",
        **rules,
        "epoch": 0,
        "version": 0,
        "count": 0,
        "weight": 0.0,
        "bytes": 12,
        "closed_epochs": [],
        "created_at": clock.now,
        "updated_at": clock.now,
        "expires_at": clock.now + 60,
    }
    assert outcome == Outcome({"a": {**expected, "created": True}})
    assert store.record("a").as_json() == expected
    assert_same_bits(value(store, "a"), np.zeros((2, 3), np.float16))


def test_the_same_again_is_no_change(store: Store, clock: Clock) -> None:
    create(store, "a")
    add(store, "a", [1, 2])
    before = state(store)
    clock.advance(1)
    receipt = do(store, Create(name="a", spec=spec())).receipts["a"]
    assert receipt == {**store.record("a").as_json(), "created": False}
    assert state(store) == before


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (spec((3,)), "shape [2], not [3]"),
        (spec((2, 1)), "shape [2], not [2, 1]"),
        (spec(dtype="bfloat16"), "dtype 'float32', not 'bfloat16'"),
        (spec(nonfinite="reject"), "nonfinite 'allow', not 'reject'"),
        (spec(quorum=2), "quorum None, not 2"),
        (spec(keep=2), "keep 1, not 2"),
        (spec(ttl_seconds=1.5), "ttl_seconds None, not 1.5"),
        (spec((), keep=7), "shape [2], not [], keep 1, not 7"),
    ],
    ids=str,
)
def test_a_different_one_is_refused(store: Store, other: Any, what: str) -> None:
    create(store, "a")
    error = fails_alone(store, BufferExists, Create(name="a", spec=other))
    assert error.detail == f"There is a buffer 'a' with {what}"
    assert error.context == {"buffer": "a"}


@pytest.mark.parametrize(
    "change",
    [
        Add(name="a", gradient=ones(2)),
        Add(name="a", gradient=ones(2), do_update=False),
        Zero(name="a"),
        Take(name="a"),
        Delete(name="a"),
        Zero(name="a", match=frozenset({"*"})),
    ],
    ids=str,
)
def test_unknown_buffer(store: Store, change: Change) -> None:
    error = fails_alone(store, UnknownBuffer, change)
    assert "'a'" in error.detail
    assert error.context == {"buffer": "a"}
    with pytest.raises(UnknownBuffer):
        store.record("a")
    create(store, "b")
    with pytest.raises(UnknownBuffer):
        store.read(["b", "a"])


# ----- add -----


@every_pair
def test_add_is_in_place_accumulator(store: Store, dtype: Any, gradient_dtype: Any) -> None:
    create(store, "a", shape=(3, 50), dtype=str(dtype))
    expected = np.zeros((3, 50), dtype)
    for seed, shape in enumerate([(3, 50), (50,), (3, 1), (), (1, 50)]):
        gradient = numbers(shape, gradient_dtype, seed)
        expected = in_place_accumulator(expected, gradient)
        receipt = add(store, "a", gradient)
        assert_same_bits(value(store, "a"), expected)
        assert receipt == {
            "name": "a",
            "updated": True,
            "closed": False,
            "epoch": 0,
            "version": seed + 1,
            "count": seed + 1,
            "weight": seed + 1,
        }


@every_pair
@pytest.mark.parametrize("weight", [0.0, 0.3, -2.5, 1e-9])
def test_weight_multiplies_in_the_dtype_of_the_sum(
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
def test_overwrite_is_in_place_accumulator_v2(store: Store, dtype: Any, gradient_dtype: Any) -> None:
    create(store, "a", shape=(2, 3), dtype=str(dtype))
    add(store, "a", np.full((2, 3), NAN))
    add(store, "a", ones(3), weight=0.5)
    gradient = numbers((3,), gradient_dtype, 3)
    receipt = add(store, "a", gradient, overwrite=True)
    assert_same_bits(value(store, "a"), in_place_accumulator_v2(ones(2, 3, dtype=dtype), gradient, np.array(True))[1])
    assert (receipt["version"], receipt["count"], receipt["weight"]) == (3, 1, 1.0)


def test_special_values_travel_as_they_are(store: Store) -> None:
    special = np.array([-0.0, 0.0, INF, -INF, NAN, 1e-45, 3.4e38], np.float32)
    create(store, "a", "b", shape=(7,))
    add(store, "a", special, overwrite=True)
    assert_same_bits(value(store, "a"), special)
    add(store, "a", special)
    with np.errstate(over="ignore"):
        assert_same_bits(value(store, "a"), special + special)
    add(store, "b", special)
    assert_same_bits(value(store, "b"), special + 0)


def test_overflow_of_a_cast_is_infinite(store: Store) -> None:
    create(store, "a", shape=(2,), dtype="float16")
    add(store, "a", np.array([7e4, 1e300]))
    add(store, "a", np.array([1.0, -INF]))
    assert_same_bits(value(store, "a"), np.array([INF, NAN], np.float16))


@pytest.mark.parametrize(("shape", "gradient_shape"), FITTING)
def test_gradient_is_broadcast(store: Store, shape: tuple[int, ...], gradient_shape: tuple[int, ...]) -> None:
    create(store, "a", shape=shape)
    gradient = numbers(gradient_shape, np.float32, 1)
    add(store, "a", gradient)
    assert_same_bits(value(store, "a"), in_place_accumulator(np.zeros(shape, np.float32), gradient))
    add(store, "a", gradient, overwrite=True)
    assert_same_bits(value(store, "a"), np.ascontiguousarray(np.broadcast_to(gradient, shape)).reshape(shape))


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(("shape", "gradient_shape"), UNFIT)
def test_gradient_must_broadcast_into_the_buffer(
    store: Store, shape: tuple[int, ...], gradient_shape: tuple[int, ...], overwrite: bool
) -> None:
    create(store, "a", shape=shape)
    change = Add(name="a", gradient=ones(*gradient_shape), overwrite=overwrite)
    error = fails_alone(store, ShapeMismatch, change)
    assert error.detail.startswith(f"gradient has shape {list(gradient_shape)}, ")
    assert error.detail.endswith(f"the buffer's, {list(shape)}")


def test_gradient_may_lie_in_memory_anyhow(store: Store) -> None:
    create(store, "a", shape=(40, 60))
    whole = numbers((60, 80), np.float32, 1)
    add(store, "a", whole[:, ::2].T)
    add(store, "a", whole[::-1, 40:].T)
    assert_same_bits(value(store, "a"), whole[:, ::2].T + whole[::-1, 40:].T)


def test_without_update_nothing_changes(store: Store, clock: Clock) -> None:
    create(store, "a", ttl_seconds=10.0, quorum=2)
    add(store, "a", [1, 2], weight=0.5)
    before = state(store)
    clock.advance(1)
    outcome = do(store, Add(name="a", gradient=ones(7, 7), do_update=False, want_value=True))
    assert outcome.receipts["a"] == {
        "name": "a",
        "updated": False,
        "closed": False,
        "epoch": 0,
        "version": 1,
        "count": 1,
        "weight": 0.5,
    }
    assert outcome.values["a"].tolist() == [0.5, 1.0]
    assert state(store) == before


@pytest.mark.parametrize("weight", [NAN, INF, -INF, 1e39])
def test_weight_must_be_finite_in_the_dtype_of_the_sum(store: Store, weight: float) -> None:
    create(store, "a", dtype="bfloat16")
    error = fails_alone(store, InvalidParameter, Add(name="a", gradient=ones(2), weight=weight))
    assert error.context["parameter"] == "weight"


def test_sum_of_the_weights_must_be_finite(store: Store) -> None:
    create(store, "a", dtype="float64")
    add(store, "a", [0, 0], weight=1.5e308)
    fails_alone(store, InvalidParameter, Add(name="a", gradient=ones(2), weight=1.5e308))


def test_overwriting_begins_the_weights_anew(store: Store) -> None:
    create(store, "a", dtype="float64")
    add(store, "a", [0, 0], weight=1.5e308)
    assert add(store, "a", [0, 0], weight=1.5e308, overwrite=True)["weight"] == 1.5e308


@pytest.mark.parametrize("overwrite", [False, True])
def test_value_after_the_add_is_answered(store: Store, overwrite: bool) -> None:
    create(store, "a", "b")
    add(store, "a", [1, 2])
    change = Add(name="a", gradient=np.array([10, 20], np.float32), overwrite=overwrite, want_value=True)
    outcome = do(store, change, Add(name="b", gradient=ones(2)))
    assert {name: array.tolist() for name, array in outcome.values.items()} == {
        "a": [10, 20] if overwrite else [11, 22]
    }


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (3, 0, 2)])
def test_scalars_and_empty_buffers(store: Store, shape: tuple[int, ...], dtype: Any) -> None:
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
@pytest.mark.parametrize("size", [LARGE, CHUNK, CHUNK // 8, CHUNK // 8 + 1, CHUNK // 2])
def test_buffers_of_several_chunks(store: Store, size: int, dtype: Any) -> None:
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


# ----- sparse gradients -----


def rows_for(shape: tuple[int, ...], axis: int, count: int, dtype: Any, seed: int) -> tuple[Array, Array, Array]:
    """`count` rows, about half of them duplicates, of few indices."""
    random = np.random.default_rng(seed)
    few = random.integers(-shape[axis], shape[axis], max(1, count // 2))
    grad = random.normal(size=(*shape[:axis], count, *shape[axis + 1 :]))
    return np.array(shape), random.choice(few, count), np.asarray(grad, dtype)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("gradient_dtype", [FLOAT_DTYPES[0], NARROW_DTYPES[1]], ids=str)
@pytest.mark.parametrize(
    ("shape", "axis", "count"), [((3,), 0, 5), ((LARGE // 20, 21), 0, 6), ((7, LARGE // 6), 1, 9), ((4, 5), 0, 0)]
)
def test_sparse_gradients_are_added_as_dense_ones(
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


def test_sparse_gradients_onto_negative_zeros(store: Store) -> None:
    """Where no index leads, a store may leave -0 as it is."""
    inputs = np.array([LARGE, 2]), np.array([3]), ones(1, 2)
    create(store, "sparse", "dense", shape=(LARGE, 2))
    for name, gradient in [("sparse", GatheredRows(*inputs)), ("dense", gather_grad(*inputs))]:
        add(store, name, np.array(-0.0, np.float32), overwrite=True)
        add(store, name, gradient)
    assert (value(store, "sparse") == value(store, "dense")).all()


def test_sparse_sums_that_overflow(store: Store) -> None:
    create(store, "a", shape=(3,), dtype="float16")
    grad = np.full(2, 6e4, np.float16)
    add(store, "a", GatheredRows(np.array([3]), np.array([1, 1]), grad))
    assert value(store, "a").tolist() == [0, INF, 0]


def test_sparse_gradients_broadcast_as_dense_ones_do(store: Store) -> None:
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
def test_gradients_broadcast_into_as_many_dimensions_as_a_buffer_has(store: Store, rank: int, empty: bool) -> None:
    shape = (*[1] * (rank - 3), 3, 0 if empty else 1, 2)
    create(store, "a", shape=shape)
    for gradient in (ones(), ones(2), ones(3, 1, 1), ones(*[1] * (rank - 1), 2)):
        add(store, "a", gradient)
    np.testing.assert_array_equal(value(store, "a"), np.full(shape, 4, np.float32))


def test_gradients_broadcast_into_many_dimensions_none_of_which_is_one(store: Store) -> None:
    create(store, "a", shape=(*[2] * 17, *[1] * 20, 2), dtype="float16")
    add(store, "a", np.arange(2, dtype=np.float16))
    assert value(store, "a").reshape(-1, 2).mean(0).tolist() == [0, 1]


# ----- epochs -----


def test_zero_begins_the_next_epoch(store: Store, clock: Clock) -> None:
    create(store, "a")
    add(store, "a", [1, 2])
    clock.advance(5)
    receipt = do(store, Zero(name="a")).receipts["a"]
    assert receipt == {
        "name": "a",
        "updated": True,
        "closed": False,
        "epoch": 1,
        "version": 2,
        "count": 0,
        "weight": 0.0,
    }
    assert_same_bits(value(store, "a"), np.zeros(2, np.float32))
    assert store.record("a").updated == clock.now
    with pytest.raises(EpochGone):
        store.read(["a"], 0)


def test_take_closes_the_epoch(store: Store) -> None:
    create(store, "a")
    add(store, "a", [1, 2], weight=2.0)
    outcome = do(store, Take(name="a"))
    assert outcome.receipts["a"] == {
        "name": "a",
        "updated": True,
        "closed": True,
        "epoch": 0,
        "version": 2,
        "count": 1,
        "weight": 2.0,
    }
    assert outcome.values["a"].tolist() == [2, 4]
    record = store.record("a")
    assert (record.epoch, record.version, record.count, record.weight) == (1, 2, 0, 0.0)
    assert not value(store, "a").any()
    (snapshot,) = store.read(["a"], 0)
    assert snapshot.receipt() == {**outcome.receipts["a"], "updated": False}
    assert (snapshot.etag, snapshot.weight, snapshot.value.tolist()) == ('"0-2"', 2.0, [2, 4])


def test_take_of_what_was_never_added_to_is_zero(store: Store) -> None:
    create(store, "a")
    assert not do(store, Take(name="a")).values["a"].any()
    assert not value(store, "a", 0).any()


def test_take_needs_min_count(store: Store) -> None:
    create(store, "a")
    add(store, "a", [1, 2])
    error = fails_alone(store, TooFewGradients, Take(name="a", min_count=2))
    assert error.context == {"buffer": "a", "epoch": 0, "count": 1}
    add(store, "a", [1, 2])
    assert do(store, Take(name="a", min_count=2)).receipts["a"]["count"] == 2


def test_quorum_closes_the_epoch(store: Store) -> None:
    create(store, "a", quorum=3)
    for epoch in range(3):
        receipts = [add(store, "a", [1, 2], epoch=epoch, weight=0.5) for _ in range(3)]
        assert [one["closed"] for one in receipts] == [False, False, True]
        assert {one["epoch"] for one in receipts} == {epoch}
        assert receipts[-1]["version"] == 3 * epoch + 3
        assert (receipts[-1]["count"], receipts[-1]["weight"]) == (3, 1.5)
        assert value(store, "a", epoch).tolist() == [1.5, 3.0]
        assert not value(store, "a").any()
        assert store.record("a").count == 0


def test_add_that_reaches_the_quorum_answers_the_closed_value(store: Store) -> None:
    create(store, "a", quorum=2)
    add(store, "a", [1, 2])
    assert do(store, Add(name="a", gradient=ones(2), want_value=True)).values["a"].tolist() == [2, 3]


def test_overwriting_counts_from_one_to_the_quorum(store: Store) -> None:
    create(store, "a", quorum=2)
    for _ in range(3):
        assert not add(store, "a", [1, 2], overwrite=True)["closed"]
    assert add(store, "a", [1, 2])["closed"]
    create(store, "b", quorum=1)
    assert add(store, "b", [1, 2], overwrite=True)["closed"]


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_last_closed_epochs_are_kept(store: Store, keep: int) -> None:
    create(store, "a", keep=keep)
    for epoch in range(8):
        add(store, "a", [epoch, 1])
        do(store, Take(name="a"))
        kept = range(max(0, epoch + 1 - keep), epoch + 1)
        assert store.record("a").as_json()["closed_epochs"] == list(kept)
        for old in range(epoch + 1):
            if old in kept:
                assert value(store, "a", old).tolist() == [old, 1]
            else:
                with pytest.raises(EpochGone, match=rf"^Epoch {old} of 'a' is not kept: .* the last {keep} that"):
                    store.read(["a"], old)


def test_zero_keeps_what_was_closed(store: Store) -> None:
    create(store, "a", keep=2)
    add(store, "a", [1, 2])
    do(store, Take(name="a"))
    for _ in range(5):
        add(store, "a", [9, 9])
        do(store, Zero(name="a"))
    assert value(store, "a", 0).tolist() == [1, 2]


@pytest.mark.parametrize(("epoch", "count"), [(1, 1), (2, 0)])
def test_an_epoch_is_open_until_it_closes(store: Store, epoch: int, count: int) -> None:
    create(store, "a", quorum=5)
    do(store, Take(name="a"))
    add(store, "a", [1, 2])
    with pytest.raises(EpochOpen, match=r"^Epoch \d of 'a' .* in epoch 1\b.* of 5$") as caught:
        store.read(["a"], epoch)
    assert caught.value.context == {"buffer": "a", "epoch": 1, "count": count}


@pytest.mark.parametrize(("epoch", "message"), [(0, "has passed"), (2, "has not begun")])
@pytest.mark.parametrize("do_update", [True, False])
def test_add_to_another_epoch_is_refused(store: Store, epoch: int, message: str, do_update: bool) -> None:
    create(store, "a")
    do(store, Take(name="a"))
    change = Add(name="a", gradient=ones(2), epoch=epoch, do_update=do_update)
    error = fails_alone(store, StaleEpoch, change)
    assert error.detail == f"Epoch {epoch} of 'a' {message}: the buffer is in epoch 1"
    assert error.context == {"buffer": "a", "epoch": 1}
    assert add(store, "a", [1, 2], epoch=1)["count"] == 1


# ----- match -----

MATCHABLE: list[Callable[..., Change]] = [
    lambda **rest: Add(name="a", gradient=ones(2), **rest),
    lambda **rest: Zero(name="a", **rest),
    lambda **rest: Take(name="a", **rest),
    lambda **rest: Delete(name="a", **rest),
    lambda **rest: Create(name="a", spec=spec(), **rest),
]


@pytest.mark.parametrize("make", MATCHABLE, ids=["add", "zero", "take", "delete", "create"])
def test_a_change_needs_a_tag_that_matches(store: Store, make: Callable[..., Change]) -> None:
    create(store, "a")
    add(store, "a", [1, 2])
    for tags in [{'"0-0"'}, {'"1-1"', '"0-2"'}, set(), {"0-1"}]:
        error = fails_alone(store, PreconditionFailed, make(match=frozenset(tags)))
        assert error.detail.endswith("""but 'a' is at "0-1\"""")
    do(store, make(match=frozenset({'"7-7"', '"0-1"'})))


@pytest.mark.parametrize("make", MATCHABLE, ids=["add", "zero", "take", "delete", "create"])
def test_any_tag_matches_a_star(store: Store, make: Callable[..., Change]) -> None:
    create(store, "a")
    do(store, make(match=frozenset({"*"})))


def test_a_buffer_that_is_not_there_matches_nothing(store: Store) -> None:
    fails_alone(store, PreconditionFailed, Create(name="a", spec=spec(), match=frozenset({"*"})))


def test_every_change_has_a_tag_of_its_own(store: Store) -> None:
    create(store, "a", keep=3)
    tags = [store.record("a").etag]
    for change in [Add(name="a", gradient=ones(2)), Zero(name="a"), Add(name="a", gradient=ones(2)), Take(name="a")]:
        do(store, change)
        (snapshot,) = store.read(["a"])
        assert snapshot.etag == store.record("a").etag
        tags.append(snapshot.etag)
    assert tags == ['"0-0"', '"0-1"', '"1-2"', '"1-3"', '"2-4"']


# ----- delete, restore, ttl -----


def test_a_deleted_buffer_is_gone_and_can_be_created_anew(store: Store) -> None:
    create(store, "a", "b")
    add(store, "a", [1, 2])
    do(store, Take(name="a"))
    add(store, "a", [3, 4])
    receipt = do(store, Delete(name="a")).receipts["a"]
    assert (receipt["updated"], receipt["epoch"], receipt["count"]) == (True, 1, 1)
    with pytest.raises(UnknownBuffer):
        store.record("a")
    assert [record.name for record in store.records()] == ["b"]
    create(store, "a", shape=(3,), dtype="float64")
    assert_same_bits(value(store, "a"), np.zeros(3))
    with pytest.raises(EpochOpen):
        store.read(["a"], 0)


def test_a_buffer_is_restored_as_it_was(store: Store, clock: Clock) -> None:
    rules = spec((2, 2), "float16", quorum=9, keep=2)
    saved = Record("a", rules, 0, 5.0, 6.0, epoch=4, version=30, count=3, weight=1.5)
    numbers = np.array([[-0.0, NAN], [INF, 0.1]], np.float16)
    receipt = do(store, Restore(name="a", record=saved, value=numbers)).receipts["a"]
    assert (receipt["epoch"], receipt["version"], receipt["count"], receipt["weight"]) == (4, 30, 3, 1.5)
    assert replace(store.record("a"), id=0, value=None) == replace(saved, updated=clock.now)
    assert_same_bits(value(store, "a"), numbers)
    fails_alone(store, BufferExists, Restore(name="a", record=saved, value=numbers))


def test_an_expired_buffer_is_gone(store: Store, clock: Clock) -> None:
    create(store, "a", ttl_seconds=10.0)
    create(store, "b")
    clock.advance(9.75)
    add(store, "a", [1, 2])
    do(store, Take(name="a"))
    clock.advance(9.75)
    assert value(store, "a", 0).tolist() == [1, 2]
    assert len(store.records()) == 2
    clock.advance(0.25)
    with pytest.raises(UnknownBuffer):
        store.record("a")
    for epoch in (None, 0, 1):
        with pytest.raises(UnknownBuffer):
            store.read(["a"], epoch)
    assert [record.name for record in store.records()] == ["b"]
    for make in MATCHABLE[:4]:
        for more in [{}, {"match": frozenset({"*"})}]:
            fails_alone(store, UnknownBuffer, make(**more))
            fails_alone(store, UnknownBuffer, Add(name="b", gradient=ones(2)), make(**more))


def test_an_expired_buffer_can_be_created_anew(store: Store, clock: Clock) -> None:
    create(store, "a", ttl_seconds=10.0)
    add(store, "a", [1, 2])
    clock.advance(10)
    receipt = do(store, Create(name="a", spec=spec((3,), "float64"))).receipts["a"]
    assert receipt["created"]
    assert receipt["created_at"] == clock.now
    assert_same_bits(value(store, "a"), np.zeros(3))
    clock.advance(1000)
    for _ in range(5):
        clock.advance(2)
        add(store, "a", ones(3))
    assert value(store, "a").tolist() == [5, 5, 5]


def test_reading_and_creating_again_do_not_prolong_a_life(store: Store, clock: Clock) -> None:
    create(store, "a", ttl_seconds=10.0)
    clock.advance(9)
    store.read(["a"])
    create(store, "a", ttl_seconds=10.0)
    add(store, "a", [1, 2], do_update=False)
    clock.advance(1)
    with pytest.raises(UnknownBuffer):
        store.record("a")


def test_every_change_prolongs_a_life(store: Store, clock: Clock) -> None:
    create(store, "a", "other", ttl_seconds=10.0)
    for change in [Add(name="a", gradient=ones(2)), Zero(name="a"), Take(name="a")] * 3:
        clock.advance(9)
        do(store, change)
        assert store.record("a").expires == clock.now + 10


def test_space_of_expired_buffers_is_freed(tmp_path: Path, clock: Clock) -> None:
    store = open_lmdb(tmp_path, clock)
    create(store, "a", "b", "c", shape=(LARGE,), ttl_seconds=10.0, keep=2)
    create(store, "stays")
    create(store, "lives", ttl_seconds=40.0)
    for name in ("a", "b", "c"):
        add(store, name, ones(LARGE))
        do(store, Take(name=name))
        add(store, name, ones(LARGE))
    clock.advance(10)
    for _ in range(8):
        clock.advance(2)
        add(store, "stays", ones(2))
    store.close()
    entries = entries_of(tmp_path)
    assert (entries["buffers"], entries["values"], entries["deadlines"]) == (2, 1, 1)


def entries_of(path: Path) -> dict[str, int]:
    """How many entries the environment has in each database."""
    with lmdb.open(str(path), max_dbs=8, readonly=True) as env, env.begin() as txn:
        names = [bytes(name) for name, _ in txn.cursor()]
        return {name.decode(): txn.stat(env.open_db(name, txn=txn, create=False))["entries"] for name in names}


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


# ----- many buffers -----

NAMES = [f"b{number}" for number in range(5)]


def test_many_buffers_change_together(store: Store) -> None:
    create(store, *NAMES)
    outcome = do(
        store,
        Add(name="b0", gradient=ones(2)),
        Add(name="b1", gradient=ones(2), overwrite=True, weight=2.0, want_value=True),
        Zero(name="b2"),
        Take(name="b3"),
        Delete(name="b4"),
        Create(name="new", spec=spec((3,))),
    )
    assert list(outcome.receipts) == [*NAMES, "new"]
    assert all(outcome.receipts[name]["name"] == name for name in outcome.receipts)
    assert sorted(outcome.values) == ["b1", "b3"]
    assert [record.name for record in store.records()] == [*NAMES[:4], "new"]
    assert [one.value.tolist() for one in store.read(["b1", "b0"])] == [[2, 2], [1, 1]]


FAILURES: list[tuple[type[GradserveError], Change]] = [
    (UnknownBuffer, Add(name="nowhere", gradient=ones(2))),
    (UnknownBuffer, Zero(name="nowhere")),
    (UnknownBuffer, Take(name="nowhere")),
    (UnknownBuffer, Delete(name="nowhere")),
    (PreconditionFailed, Add(name="last", gradient=ones(2), match=frozenset({'"9-9"'}))),
    (PreconditionFailed, Delete(name="last", match=frozenset({'"9-9"'}))),
    (PreconditionFailed, Create(name="nowhere", spec=spec(), match=frozenset({"*"}))),
    (BufferExists, Create(name="last", spec=spec((9,)))),
    (StaleEpoch, Add(name="last", gradient=ones(2), epoch=0)),
    (StaleEpoch, Add(name="last", gradient=ones(2), epoch=2)),
    (InvalidParameter, Add(name="last", gradient=ones(2), weight=NAN)),
    (ShapeMismatch, Add(name="last", gradient=ones(3))),
    (TooFewGradients, Take(name="last", min_count=2)),
    (NonfiniteGradient, Add(name="last", gradient=np.array([1, INF], np.float32))),
    (NonfiniteGradient, Add(name="last", gradient=np.array([1, NAN], np.float32), overwrite=True)),
    (Invalid, Add(name="b0", gradient=ones(2))),
    (Invalid, Zero(name="b1")),
    (Invalid, Create(name="fresh", spec=spec())),
]


@pytest.mark.parametrize(("error", "last"), FAILURES, ids=lambda part: getattr(part, "__name__", type(part).__name__))
def test_one_that_fails_undoes_the_others(store: Store, error: type[GradserveError], last: Change) -> None:
    create(store, *NAMES)
    create(store, "last", nonfinite="reject")
    create(store, "old", ttl_seconds=0.0)
    do(store, Take(name="last"))
    for name in [*NAMES, "last"]:
        add(store, name, [1, 2])
    fails_alone(
        store,
        error,
        Add(name="b0", gradient=ones(2)),
        Add(name="b1", gradient=ones(2), overwrite=True),
        Zero(name="b2"),
        Take(name="b3"),
        Delete(name="b4"),
        Create(name="fresh", spec=spec()),
        Create(name="old", spec=spec((3,))),
        last,
    )
    with pytest.raises(UnknownBuffer):
        store.record("fresh")
    with pytest.raises(UnknownBuffer):
        store.record("old")
    do(store, *[Add(name=name, gradient=ones(2)) for name in NAMES])


def test_no_changes_are_a_request(store: Store) -> None:
    assert do(store) == Outcome({})


# ----- keys -----


def test_the_same_key_again_changes_nothing(store: Store) -> None:
    create(store, "a", "b")
    changes = Add(name="a", gradient=ones(2), weight=0.1), Zero(name="b")
    first = do(store, *changes, key=key())
    before = state(store)
    again = do(store, *changes, key=key())
    assert (first.replayed, again.replayed) == (False, True)
    assert again.receipts == first.receipts
    assert state(store) == before
    add(store, "a", [1, 2])
    assert do(store, *changes, key=key()).receipts == first.receipts


@pytest.mark.parametrize(
    "change",
    [
        Create(name="new", spec=spec((2, 3), "bfloat16", quorum=2, ttl_seconds=7.25)),
        Create(name="a", spec=spec()),
        Add(name="a", gradient=ones(2), weight=0.1),
        Add(name="a", gradient=ones(2), do_update=False),
        Zero(name="a"),
        Delete(name="a"),
    ],
    ids=lambda change: type(change).__name__,
)
def test_every_receipt_is_the_same_again(store: Store, change: Change) -> None:
    create(store, "a")
    first = do(store, change, key=key())
    before = state(store)
    assert do(store, change, key=key()) == Outcome(first.receipts, {}, True)
    assert state(store) == before


def test_a_take_that_is_repeated_answers_the_same_value(store: Store) -> None:
    create(store, "a", "b", shape=(LARGE,), keep=2)
    gradient = numbers((LARGE,), np.float32, 1)
    add(store, "a", gradient)
    changes = Take(name="a"), Take(name="b")
    first = do(store, *changes, key=key())
    for _ in range(2):
        again = do(store, *changes, key=key())
        assert again.replayed
        assert again.receipts == first.receipts
        assert_same_bits(again.values["a"], gradient)
        assert not again.values["b"].any()
        add(store, "a", ones(1))
    do(store, Take(name="a"))
    assert_same_bits(do(store, *changes, key=key()).values["a"], gradient)


def test_an_add_that_closed_the_epoch_answers_the_same_value_again(store: Store) -> None:
    create(store, "a", quorum=2)
    add(store, "a", [1, 2])
    change = Add(name="a", gradient=ones(2), want_value=True)
    first = do(store, change, key=key())
    add(store, "a", [5, 5])
    again = do(store, change, key=key())
    assert again.receipts == first.receipts
    assert first.values["a"].tolist() == again.values["a"].tolist() == [2, 3]


def test_a_take_that_is_repeated_too_late(store: Store) -> None:
    create(store, "a")
    do(store, Take(name="a"), key=key())
    do(store, Take(name="a"))
    before = state(store)
    with pytest.raises(EpochGone):
        do(store, Take(name="a"), key=key())
    assert state(store) == before


def test_a_take_that_is_repeated_after_the_buffer_was_deleted(store: Store) -> None:
    create(store, "a")
    do(store, Take(name="a"), key=key())
    do(store, Delete(name="a"))
    with pytest.raises((EpochGone, UnknownBuffer)):
        do(store, Take(name="a"), key=key())


def test_a_take_that_is_repeated_after_the_buffer_expired(store: Store, clock: Clock) -> None:
    create(store, "a", ttl_seconds=10.0)
    do(store, Take(name="a"), key=key())
    clock.advance(10)
    with pytest.raises((EpochGone, UnknownBuffer)):
        do(store, Take(name="a"), key=key())


@pytest.mark.parametrize("taken", [True, False])
def test_a_take_that_is_repeated_knows_its_buffer_from_another_of_the_same_name(store: Store, taken: bool) -> None:
    create(store, "a")
    add(store, "a", [1, 2])
    do(store, Take(name="a"), key=key())
    do(store, Delete(name="a"))
    create(store, "a")
    add(store, "a", [5, 5])
    if taken:
        do(store, Take(name="a"))
    with pytest.raises((EpochGone, UnknownBuffer)):
        do(store, Take(name="a"), key=key())


def test_a_request_for_all_of_a_prefix_is_repeated_for_those_of_then(store: Store) -> None:
    """The buffers that a prefix means may have become more between the look and the transaction."""
    create(store, "p.a", "p.b")
    add(store, "p.a", [1, 2])
    first = do(store, Take(name="p.a"), key=key())
    again = do(store, Take(name="p.a"), Take(name="p.b"), key=key())
    assert (again.receipts, again.replayed) == (first.receipts, True)
    assert list(again.values) == ["p.a"]
    assert store.record("p.b").epoch == 0


def test_a_key_is_for_one_request(store: Store) -> None:
    create(store, "a")
    do(store, Add(name="a", gradient=ones(2)), key=key())
    before = state(store)
    with pytest.raises(KeyReused, match="'k' was used for another request"):
        do(store, Add(name="a", gradient=ones(2)), key=key(request="another"))
    assert state(store) == before


def test_keys_of_different_callers_are_apart(store: Store) -> None:
    create(store, "a")
    for caller in ("ann", "bob", ""):
        outcome = do(store, Add(name="a", gradient=ones(2)), key=key(caller=caller, request=f"of {caller}"))
        assert not outcome.replayed
    assert store.record("a").count == 3


@pytest.mark.parametrize(("error", "last"), FAILURES, ids=lambda part: getattr(part, "__name__", type(part).__name__))
def test_a_failed_request_stores_no_key(store: Store, error: type[GradserveError], last: Change) -> None:
    create(store, "b0", "b1", "fresh")
    create(store, "last", nonfinite="reject")
    do(store, Take(name="last"))
    twice = [Add(name=name, gradient=ones(2)) for name in ("b0", "b1", "fresh")]
    with pytest.raises(error):
        do(store, *twice, last, key=key())
    assert store.recall(key()) is None
    assert not do(store, *twice, key=key(request="another")).replayed


def test_what_is_stored_with_a_key(store: Store) -> None:
    create(store, "a")
    assert store.recall(key()) is None
    outcome = do(store, Add(name="a", gradient=ones(2)), key=key())
    known = store.recall(key())
    assert known is not None
    assert known[:2] == (key().fingerprint, outcome.receipts)
    assert store.recall(key(request="another")) == known
    assert store.recall(key(caller="bob")) is None


@pytest.mark.parametrize("namespace", ["", "team"])
def test_what_a_request_was_computed_from_is_stored_with_its_key(store: Store, namespace: str) -> None:
    store = Namespaced(store, namespace)
    create(store, "a")
    states: list[str] = []

    def look() -> str:
        (snapshot,) = store.read(["a"])
        states.append(snapshot.state)
        return snapshot.state

    def ask() -> Outcome:
        return store.submit(Request([Add(name="a", gradient=ones(2))], key(caller=""), [look(), "more"])).result(
            PATIENCE
        )

    assert not ask().replayed
    again = ask()
    assert (again.replayed, again.sources) == (True, (states[0], "more"))
    known = store.recall(key(caller=""))
    assert known is not None
    assert known.sources == again.sources
    for change in (Zero(name="a"), Delete(name="a"), Create(name="a", spec=spec()), Take(name="a")):
        do(store, change)
        if not isinstance(change, Delete):
            look()
    assert len(set(states)) == 5


def test_keys_expire_when_they_are_old_enough_and_not_before(store: Store, clock: Clock) -> None:
    create(store, "a")
    change = Add(name="a", gradient=ones(2))
    do(store, change, key=key())
    clock.advance(KEY_SECONDS - 0.25)
    do(store, change, key=key("younger"))
    assert do(store, change, key=key()).replayed
    assert store.recall(key()) is not None
    clock.advance(0.5)
    assert store.recall(key()) is None
    assert not do(store, change, key=key(request="another")).replayed
    assert do(store, change, key=key("younger")).replayed
    assert store.record("a").count == 3


def test_a_key_that_has_expired_serves_again(store: Store, clock: Clock) -> None:
    create(store, "a")
    change = Add(name="a", gradient=ones(2))
    for number in range(1, 4):
        assert not do(store, change, key=key()).replayed
        for _ in range(3):
            assert do(store, change, key=key()).replayed
            add(store, "a", [0, 0], overwrite=False, do_update=False)
        assert store.record("a").count == number
        clock.advance(KEY_SECONDS + 1)


# ----- listing -----

LISTED = ["A", "a", "a-b", "a.b", "a.c", "aa", "b", "b:1", "z_", "layers.0.weight", "layers.1.weight", "layers.10.bias"]


@pytest.mark.parametrize("prefix", ["", "a", "a.", "layers.", "layers.1", "z", "zz", "0", "b", "B"])
@pytest.mark.parametrize("after", ["", "A", "a", "a.b", "a.bb", "layers.0.weight", "z_", "~", "0"])
@pytest.mark.parametrize("limit", [None, 0, 1, 2, 100])
def test_listing(listed: Store, prefix: str, after: str, limit: int | None) -> None:
    names = [name for name in sorted(LISTED) if name.startswith(prefix) and name > after]
    assert [record.name for record in listed.records(prefix, after, limit)] == names[:limit]


@pytest.fixture(scope="module", params=["memory", "lmdb"])
def listed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A store of buffers with these names, and of some that have expired."""
    clock = Clock()
    store: Store = (
        open_memory(clock) if request.param == "memory" else open_lmdb(tmp_path_factory.mktemp("listed"), clock)
    )
    for name in LISTED:
        create(store, name)
        create(store, name + "0", ttl_seconds=1.0)
    clock.advance(1)
    yield store
    store.close()


def test_pages_of_a_listing(listed: Store) -> None:
    names: list[str] = []
    while page := listed.records(after=names[-1] if names else "", limit=5):
        names += [record.name for record in page]
    assert names == sorted(LISTED)


def test_an_empty_store_lists_nothing(store: Store) -> None:
    assert store.records() == store.records("a", "b", 3) == []
    assert store.read([]) == []


def test_names_of_two_hundred_characters(store: Store) -> None:
    name = "n" * 200
    create(store, name, ttl_seconds=5.0)
    add(store, name, [1, 2])
    assert [record.name for record in store.records("n" * 199)] == [name]


# ----- nothing is shared -----


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_gradient_may_change_once_it_is_added(store: Store, overwrite: bool) -> None:
    create(store, "a", shape=(LARGE,))
    gradient = ones(LARGE)
    add(store, "a", gradient, overwrite=overwrite)
    gradient[:] = 7
    assert value(store, "a").tolist() == [1.0] * LARGE
    assert (gradient == 7).all()


def test_gradients_stay_as_they_are(store: Store) -> None:
    create(store, "a", shape=(3,))
    gradient = np.array([1, 2, 3], np.float32)
    gradient.setflags(write=False)
    add(store, "a", gradient, weight=3.0, overwrite=True)
    add(store, "a", gradient, weight=3.0)
    assert gradient.tolist() == [1, 2, 3]


def test_values_are_the_callers_own(store: Store) -> None:
    create(store, "a")
    adding = Add(name="a", gradient=ones(2), want_value=True)
    do(store, adding).values["a"][:] = 7
    value(store, "a")[:] = 7
    assert value(store, "a").tolist() == [1, 1]
    take = Take(name="a")
    do(store, take, key=key()).values["a"][:] = 7
    do(store, take, key=key()).values["a"][:] = 7
    value(store, "a", 0)[:] = 7
    assert value(store, "a", 0).tolist() == do(store, take, key=key()).values["a"].tolist() == [1, 1]
    value(store, "a")[:] = 7
    assert value(store, "a").tolist() == [0, 0]


def test_receipts_are_the_callers_own(store: Store) -> None:
    changes = [Create(name="a", spec=spec())]
    expected = do(store, *changes).receipts["a"]
    do(store, Delete(name="a"))
    first = do(store, *changes, key=key()).receipts["a"]
    assert first == expected
    for _ in range(3):
        first["shape"].append(9)
        first["count"] = 9
        known = store.recall(key())
        assert known is not None
        assert known.receipts == {"a": expected}
        known.receipts["a"]["count"] = 9
        first = do(store, *changes, key=key()).receipts["a"]
        assert first == expected


def test_a_snapshot_stays_as_it_was(store: Store) -> None:
    create(store, "a")
    add(store, "a", [1, 2])
    (snapshot,) = store.read(["a"])
    add(store, "a", [1, 2])
    do(store, Delete(name="a"))
    assert snapshot.value.tolist() == [1, 2]
    assert snapshot.receipt()["count"] == 1


# ----- generation -----


def test_generation_is_another_after_every_change(store: Store) -> None:
    seen = [store.generation()]
    for change in [
        Create(name="a", spec=spec()),
        Add(name="a", gradient=ones(2)),
        Add(name="a", gradient=ones(2)),
        Add(name="a", gradient=ones(2), overwrite=True),
        Zero(name="a"),
        Zero(name="a"),
        Take(name="a"),
        Delete(name="a"),
    ]:
        do(store, change)
        seen.append(store.generation())
    assert len(set(seen)) == len(seen)


def test_generation_stays_while_nothing_changes(store: Store) -> None:
    create(store, "a")
    before = store.generation()
    store.read(["a"])
    store.records()
    fails_alone(store, StaleEpoch, Add(name="a", gradient=ones(2), epoch=3))
    assert store.generation() == before


# ----- threads -----


def test_threads(store: Store) -> None:
    """8 threads add integers, to a buffer of all and to those of some, with keys that are sent twice."""
    names = ["all", "even", "odd", *(f"own{number}" for number in range(8))]
    create(store, *names, shape=(1000,))
    failed: list[BaseException] = []

    def work(number: int) -> None:
        parity = ["even", "odd"][number % 2]
        try:
            for turn in range(50):
                gradient = np.full(1000, number + 1, np.float32)
                changes = [Add(name=name, gradient=gradient) for name in ("all", parity, f"own{number}")]
                used = key(f"{number}-{turn}") if turn % 5 == 0 else None
                outcomes = [do(store, *changes, key=used) for _ in range(1 if used is None else 2)]
                assert [one.replayed for one in outcomes] == [False, True][: len(outcomes)]
                assert (value(store, "all") % 1 == 0).all()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not failed
    expected = {
        "all": (400, 50 * 36),
        "even": (200, 50 * 16),
        "odd": (200, 50 * 20),
        **{f"own{number}": (50, 50 * (number + 1)) for number in range(8)},
    }
    for name, (count, total) in expected.items():
        record = store.record(name)
        assert (record.count, record.version, record.weight) == (count, count, count)
        assert (value(store, name) == total).all()


def test_readers_see_many_buffers_at_one_moment(store: Store) -> None:
    create(store, "a", "b", shape=(20_000,))
    gradient = ones(20_000)
    waiting: list[Future[Outcome]] = []
    done = threading.Event()

    def work() -> None:
        for _ in range(60):
            waiting.append(store.submit(Request([Add(name=name, gradient=gradient) for name in ("a", "b")])))
        for one in waiting:
            one.result(PATIENCE)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not done.is_set():
        first, second = store.read(["a", "b"])
        assert first.record.count == second.record.count
        assert (first.value == first.record.count).all()
        assert (second.value == second.record.count).all()
    thread.join(PATIENCE)
    assert value(store, "a")[0] == 60
