"""GRUTraining against a GRU written for reading, GRUGrad against central differences of it and its back-propagation."""

from __future__ import annotations

import itertools
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from service.dtypes import DTYPES, Array
from service.errors import GradserveError, InvalidParameter, InvalidTensor, ShapeMismatch
from service.kernels import (
    MAX_MULTIPLY_ADDS,
    OPERATORS,
    Workspace,
    _blocks,
    _recurrent_pass,
    _recurrent_plan,
    workspace,
)
from service.kernels.gru import gru_grad, gru_training
from tests import cases
from tests.kernels.gru_reference import gru, gru_gradient
from tests.kernels.recurrent import DIRECTIONS, LENGTHS, cut, pairwise

train: Any = gru_training  # called with dictionaries, which the type checker cannot follow
back: Any = gru_grad
forward: Any = gru
backward: Any = gru_gradient

OUTPUTS = ("dX", "dW", "dR", "dB", "dH0")
OPTIONS = list(itertools.product(DIRECTIONS, (0, 1), (True, False), (True, False), LENGTHS))
NAMES = ("direction", "linear_before_reset", "bias", "start", "lengths")


every_kind = pytest.mark.parametrize(
    "attributes", [{"direction": one, "linear_before_reset": flag} for one in DIRECTIONS for flag in (0, 1)], ids=str
)


CUTS = {"alone": OPTIONS, "shared": pairwise(OPTIONS), "cut": pairwise(OPTIONS)}


@pytest.fixture(params=["alone", "shared", "cut"])
def shared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The work is cut as if it were too little for several threads, as here it is, or not, or as if it were much."""
    cut(request.param, monkeypatch)
    return str(request.param)


def case(
    direction: str = "forward",
    bias: bool = True,
    start: bool = True,
    lengths: list[int] | None = None,
    *,
    S: int = 3,
    N: int = 3,
    inputs: int = 2,
    H: int = 4,
    dtype: Any = np.float64,
    lengths_dtype: Any = np.int64,
) -> dict[str, Any]:
    """Inputs of GRUTraining, by name."""
    D, rng = 2 if direction == "bidirectional" else 1, np.random.default_rng(5)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(dtype)

    return {
        "X": normal(S, N, inputs),
        "W": normal(D, 3 * H, inputs),
        "R": normal(D, 3 * H, H),
        "B": normal(D, 6 * H) if bias else None,
        "SL": None if lengths is None else np.array(lengths, lengths_dtype),
        "H0": normal(D, N, H) if start else None,
    }


def gradients(given: dict[str, Any], **attributes: Any) -> tuple[dict[str, Array], Array, Array]:
    """GRUGrad's outputs for random gradients of HAll and HFinal, and these."""
    HAll, HFinal, ZRH = train(*given.values(), **attributes)
    rng = np.random.default_rng(7)
    grad_HAll, grad_Ht = rng.standard_normal(HAll.shape), rng.standard_normal(HFinal.shape)
    dtype = HAll.dtype
    made = back(*given.values(), HAll, ZRH, grad_HAll.astype(dtype), grad_Ht.astype(dtype), **attributes)
    return dict(zip(OUTPUTS, made, strict=True)), grad_HAll, grad_Ht


def difference(given: dict[str, Any], name: str, grad_HAll: Array, grad_Ht: Array, **attributes: Any) -> Array:
    """The central differences of sum(HAll * grad_HAll) + sum(HFinal * grad_Ht) by the input `name`."""
    D, N, H = grad_Ht.shape
    zeros = {"B": np.zeros((D, 6 * H)), "H0": np.zeros((D, N, H))}
    point: Array = zeros[name] if given[name] is None else given[name]

    steps = 1e-6 * np.eye(point.size).reshape(point.size, *point.shape)
    HAll, HFinal, _ = forward(**{**given, name: np.concatenate([point + steps, point - steps])}, **attributes)
    values = (HAll * grad_HAll).sum((1, 2, 3, 4)) + (HFinal * grad_Ht).sum((1, 2, 3))
    above, below = np.split(values, 2)
    return np.asarray((above - below) / 2e-6).reshape(point.shape)


def test_forward(shared: str) -> None:
    for option in CUTS[shared]:
        with cases.case(*option):
            assert_forward(*option)


def assert_forward(
    direction: str, linear_before_reset: int, bias: bool, start: bool, lengths: list[int] | None
) -> None:
    attributes: Any = {"direction": direction, "linear_before_reset": linear_before_reset}
    for dtype, tolerance in ((np.float64, 1e-13), (np.float32, 2e-6)):
        given = case(direction, bias, start, lengths, dtype=dtype)
        got = train(*given.values(), **attributes)
        for mine, expected in zip(got, forward(**given, **attributes), strict=True):
            assert mine.dtype == dtype
            np.testing.assert_allclose(mine, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(NAMES, OPTIONS)
def test_gradient(direction: str, linear_before_reset: int, bias: bool, start: bool, lengths: list[int] | None) -> None:
    attributes: Any = {"direction": direction, "linear_before_reset": linear_before_reset}
    given = case(direction, bias, start, lengths)
    made, grad_HAll, grad_Ht = gradients(given, **attributes)
    for name in OUTPUTS:
        expected = difference(given, name.removeprefix("d"), grad_HAll, grad_Ht, **attributes)
        np.testing.assert_allclose(made[name], expected, rtol=1e-7, atol=1e-8, err_msg=name)


def test_last_bits(shared: str) -> None:
    for option in CUTS[shared]:
        with cases.case(*option):
            assert_last_bits(*option)


def assert_last_bits(
    direction: str, linear_before_reset: int, bias: bool, start: bool, lengths: list[int] | None
) -> None:
    """Central differences are good for 8 digits only. Here sums of 9 numbers run in another order: 16 eps."""
    attributes: Any = {"direction": direction, "linear_before_reset": linear_before_reset}
    given = case(direction, bias, start, lengths)
    HAll, _, ZRH = train(*given.values(), **attributes)
    made, grad_HAll, grad_Ht = gradients(given, **attributes)
    expected = backward(*given.values(), HAll, ZRH, grad_HAll, grad_Ht, **attributes)
    for name, array in zip(OUTPUTS, expected, strict=True):
        np.testing.assert_allclose(made[name], array, rtol=4e-15, atol=4e-15, err_msg=name)


@every_kind
@pytest.mark.usefixtures("shared")
def test_many_lengths_in_no_order(attributes: dict[str, Any]) -> None:
    lengths = np.random.default_rng(3).integers(0, 20, 40).tolist()
    given = case(attributes["direction"], lengths=lengths, S=21, N=40)
    got, expected = train(*given.values(), **attributes), forward(**given, **attributes)
    for mine, right in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine, right, rtol=1e-13, atol=1e-13)
    made, *grads = gradients(given, **attributes)
    for name, right in zip(OUTPUTS, backward(*given.values(), got[0], got[2], *grads, **attributes), strict=True):
        np.testing.assert_allclose(made[name], right, rtol=1e-11, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_lengths_of_32_bits(direction: str) -> None:
    narrow, wide = (case(direction, lengths=[3, 1, 0], lengths_dtype=dtype) for dtype in (np.int32, np.int64))
    pairs = [
        zip(train(*narrow.values(), direction=direction), train(*wide.values(), direction=direction), strict=True),
        zip(*(gradients(given, direction=direction)[0].values() for given in (narrow, wide)), strict=True),
    ]
    for got, expected in itertools.chain(*pairs):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("lengths", [None, [1, 3, 0]])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_floats_are_computed_in_float32(dtype: str, lengths: list[int] | None) -> None:
    narrow = case(dtype=DTYPES[dtype], lengths=lengths)
    wide = {
        name: array.astype(np.float32) if array is not None and name != "SL" else array
        for name, array in narrow.items()
    }
    for got, expected in zip(train(*narrow.values()), train(*wide.values()), strict=True):
        assert got.dtype == DTYPES[dtype]
        np.testing.assert_array_equal(got.astype(np.float32), expected.astype(DTYPES[dtype]).astype(np.float32))


@every_kind
@pytest.mark.parametrize(
    ("S", "N", "inputs", "lengths"),
    [(0, 3, 2, None), (3, 0, 2, None), (3, 3, 0, None), (0, 0, 0, None), (3, 0, 2, []), (3, 3, 0, [1, 0, 3])],
)
def test_empty_dimensions(S: int, N: int, inputs: int, lengths: list[int] | None, attributes: dict[str, Any]) -> None:
    given = case(attributes["direction"], S=S, N=N, inputs=inputs, lengths=lengths)
    for got, expected in zip(train(*given.values(), **attributes), forward(**given, **attributes), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-13)
    made, grad_HAll, grad_Ht = gradients(given, **attributes)
    if S == 0:
        np.testing.assert_array_equal(made["dH0"], grad_Ht)
        assert not any(made[name].any() for name in ("dX", "dW", "dR", "dB"))
    for name in OUTPUTS:
        assert made[name].shape == given[name[1:]].shape
        expected = difference(given, name[1:], grad_HAll, grad_Ht, **attributes)
        np.testing.assert_allclose(made[name], expected, rtol=1e-7, atol=1e-8)


@every_kind
def test_a_subset_is_what_the_whole_has(attributes: dict[str, Any]) -> None:
    given = case(attributes["direction"])
    HAll, _, ZRH = train(*given.values(), **attributes)
    whole = back(*given.values(), HAll, ZRH, HAll, **attributes)
    for count in range(1, 5):
        for wanted in itertools.combinations(OUTPUTS, count):
            some = back(*given.values(), HAll, ZRH, HAll, wanted=wanted, **attributes)
            for name, got, expected in zip(OUTPUTS, some, whole, strict=True):
                if name in wanted:
                    np.testing.assert_array_equal(got, expected)
                else:
                    assert got is None


@every_kind
@pytest.mark.usefixtures("shared")
def test_what_stands_beyond_a_length_does_not_count(attributes: dict[str, Any]) -> None:
    given = case(attributes["direction"], lengths=[3, 1, 0])
    spoilt = {**given, "X": np.where(np.arange(3)[:, None, None] >= given["SL"][:, None], np.nan, given["X"])}
    whole, broken = (train(*inputs.values(), **attributes) for inputs in (given, spoilt))
    for got, expected in zip(broken, whole, strict=True):
        np.testing.assert_array_equal(got, expected)
    HAll, _, ZRH = whole
    beyond = np.arange(3)[:, None, None, None] >= given["SL"][:, None]
    fillers = ((given, 5.0, 0.0), (spoilt, np.nan, np.nan), (spoilt, np.inf, np.inf))
    results = []
    for inputs, in_grad, in_made in fillers:
        grad = np.where(beyond, in_grad, 1.0) * np.ones(HAll.shape)
        made = [np.where(beyond, in_made, array) for array in (HAll, ZRH)]
        results.append(back(*inputs.values(), *made, grad, **attributes))
    for other in results[1:]:
        for got, expected in zip(other, results[0], strict=True):
            np.testing.assert_array_equal(got, expected)
    assert not results[0][0][1:, 1].any()
    assert not results[0][0][:, 2].any()


@every_kind
@pytest.mark.usefixtures("shared")
def test_padding_is_not_computed(attributes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of a sequence takes as many multiplications, and those that no sequence runs take not even a call."""
    work, product = list[int](), np.matmul

    def counting(left: Array, right: Array, **keywords: Any) -> Array:
        work.append(left.size * right.shape[-1])
        made: Array = product(left, right, **keywords)
        return made

    monkeypatch.setattr(np, "matmul", counting)
    took = list[tuple[int, int]]()
    for S, lengths in ((9, [9] * 6), (9, [2, 9, 0, 1, 5, 9]), (400, [2, 9, 0, 1, 5, 9])):
        given = case(attributes["direction"], lengths=lengths, S=S, N=6)
        gradients(given, **attributes)
        took.append((sum(work), len(work)))
        work.clear()
    (full, _), ragged, padded = took
    assert ragged[0] * 9 * 6 == full * (2 + 9 + 0 + 1 + 5 + 9)
    assert padded == ragged


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_stands_beyond_a_length_is_zero_whatever_the_weights_are(direction: str) -> None:
    given = case(direction, lengths=[3, 1, 0])
    HAll, _, ZRH = train(*given.values(), direction=direction)
    given["W"][0, 0, 0] = np.inf
    given["W"][0, 1, 0] = np.nan
    dX, *_ = back(*given.values(), HAll, ZRH, np.ones(HAll.shape), direction=direction)
    assert np.isnan(dX[0, 0]).any()
    assert not dX[1:, 1].any()
    assert not dX[:, 2].any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.usefixtures("shared")
def test_what_overflows_does_not_warn(dtype: str) -> None:
    kind = DTYPES[dtype]
    largest = np.asarray(ml_dtypes.finfo(kind).max, kind)  # type: ignore[no-untyped-call]
    given = case(dtype=kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for bias, other in ((largest, largest), (kind.type(np.inf), kind.type(-np.inf))):
            given["B"][...] = bias
            given["B"][:, 12:] = other
            HAll, _, ZRH = train(*given.values())
        grads = [np.full(array.shape, largest) for array in (HAll, given["H0"])]
        dX, *_ = back(*given.values(), np.full_like(HAll, 0.5), np.full_like(ZRH, largest), *grads)
    assert not np.isfinite(dX.astype(np.float64)).all()


def test_many_products_are_added_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    given = case("bidirectional", S=5)
    whole, *_ = gradients(given, direction="bidirectional")
    monkeypatch.setattr(_recurrent_pass, "MAX_PRODUCT_ELEMENTS", 1)
    parts, *_ = gradients(given, direction="bidirectional")
    for name in OUTPUTS:
        np.testing.assert_allclose(parts[name], whole[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("limit", "kept"), [(2400, [2400]), (2399, [])])
def test_a_thread_keeps_no_large_scratch(limit: int, kept: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step takes is not bounded: here, 5 arrays of 5 steps, 3 sequences and 4 units."""
    monkeypatch.setattr(_blocks, "SCRATCH_BYTES", limit)

    def run() -> tuple[dict[str, Array], list[int]]:
        made, *_ = gradients(case(S=5))
        return made, [memory.nbytes for memory in getattr(_blocks._scratch, "slots", {}).values()]

    with ThreadPoolExecutor(1) as pool:
        made, sizes = pool.submit(run).result()
    assert sizes == kept
    for got, expected in zip(made.values(), gradients(case(S=5))[0].values(), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("linear_before_reset", [0, 1])
def test_only_outputs_are_asked_for_as_such(dtype: str, linear_before_reset: int) -> None:
    """Memory for intermediate results, which may be larger, is no output, on which there is a limit."""
    given = case(dtype=DTYPES[dtype])
    asked: list[str] = []

    def allocate(shape: tuple[int, ...], dtype: Any) -> Array:
        asked.append(str((shape, dtype)))
        return np.empty(shape, dtype)

    with workspace(Workspace(allocate=allocate)):
        made = train(*given.values(), linear_before_reset=linear_before_reset)
        made += back(*given.values(), made[0], made[2], made[0], linear_before_reset=linear_before_reset)
    assert sorted(asked) == sorted(str((one.shape, one.dtype)) for one in made)


@pytest.mark.parametrize("wanted", [("dX",), ("dW", "dB"), ("dR",)])
def test_what_is_not_asked_for_is_not_computed(wanted: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is there memory for it, except for dH0: the gradient goes through it."""
    given = case()
    HAll, _, ZRH = train(*given.values())
    asked, computed = list[tuple[int, ...]](), set[str]()

    def allocate(shape: tuple[int, ...], dtype: Any) -> Array:
        asked.append(shape)
        return np.empty(shape, dtype)

    products = _recurrent_pass.Backward._products

    def counted(self: _recurrent_pass.Backward, d: int, steps: slice) -> Any:
        computed.update(self.outputs)
        return products(self, d, steps)

    monkeypatch.setattr(_recurrent_pass.Backward, "_products", counted)
    with workspace(Workspace(allocate=allocate)):
        made = back(*given.values(), HAll, ZRH, HAll, wanted=wanted)
    assert computed == {*wanted, "dH0"}
    assert sorted(asked) == sorted([given["H0"].shape, *(one.shape for one in made if one is not None)])


def test_nan_propagates_with_bias_and_without() -> None:
    for bias in (True, False):
        given = case(bias=bias)
        given["X"][1, 0, 0] = np.nan
        HAll, HFinal, ZRH = train(*given.values())
        assert np.isnan(HAll[1:, 0, 0]).all()
        assert np.isnan(HFinal[0, 0]).all()
        assert np.isnan(ZRH[1:, 0, 0]).all()
        assert np.isfinite(HAll[:, 0, 1:]).all()
        assert np.isfinite(HAll[0]).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gates_stay_in_their_range(dtype: Any) -> None:
    given = case(dtype=dtype)
    for factor in (1e3, 1e30):
        given["X"] = (given["X"] * dtype(factor)).astype(dtype)
        _, _, ZRH = train(*given.values(), linear_before_reset=1)
        z, r, h = np.split(ZRH, 3, axis=-1)
        assert ((z >= 0) & (z <= 1) & (r >= 0) & (r <= 1) & (h >= -1) & (h <= 1)).all()


@every_kind
@pytest.mark.usefixtures("shared")
def test_any_number_of_threads_gives_the_same_bits(attributes: dict[str, Any]) -> None:
    given = case(attributes["direction"], S=40, N=37, inputs=20, H=24, dtype=np.float32, lengths=[40] * 30 + [7] * 7)
    results = []
    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(5) as pool:
        for threads in (1, 2, 5):
            with workspace(Workspace(pool, threads)):
                made, _, _ = gradients(given, **attributes)
                results.append([*made.values(), *train(*given.values(), **attributes)])
    for other in results[1:]:
        for got, expected in zip(other, results[0], strict=True):
            np.testing.assert_array_equal(got, expected)


def test_inputs_stay_untouched() -> None:
    given = case("bidirectional", lengths=[3, 1, 0])
    for array in given.values():
        array.flags.writeable = False
    HAll, _, ZRH = train(*given.values(), direction="bidirectional")
    HAll.flags.writeable = ZRH.flags.writeable = False
    back(*given.values(), HAll, ZRH, HAll, direction="bidirectional")


MISTAKES: list[tuple[dict[str, Any], dict[str, Any], type[GradserveError], str]] = [
    ({"X": np.zeros((2, 3))}, {}, ShapeMismatch, r"X has shape \[2, 3\], but must have 3 dimensions"),
    ({"W": np.zeros((1, 9, 2))}, {}, ShapeMismatch, r"W has shape \[1, 9, 2\], but must have \[1, 12, 2\]"),
    ({"R": np.zeros((1, 12, 3))}, {}, ShapeMismatch, r"R has shape \[1, 12, 3\], but must have \[1, 9, 3\]"),
    ({"R": np.zeros((1, 9, 3))}, {}, ShapeMismatch, r"W has shape \[1, 12, 2\], but must have \[1, 9, 2\]"),
    ({"R": np.zeros((1, 12, 3))}, {"hidden_size": 4}, ShapeMismatch, r"R has shape .* but must have \[1, 12, 4\]"),
    ({"R": np.zeros((1, 4, 12))}, {"hidden_size": 4}, ShapeMismatch, r"R has shape .* but must have \[1, 12, 4\]"),
    ({"R": np.zeros((1, 12, 3))}, {"hidden_size": 0}, ShapeMismatch, r"R has shape .* but must have \[1, 9, 3\]"),
    ({"R": np.zeros((1, 15, 5))}, {"hidden_size": 4}, InvalidParameter, "hidden_size is 4, but must be 5"),
    ({"R": np.zeros((1, 0, 0))}, {}, ShapeMismatch, "there must be a hidden unit"),
    ({"B": np.zeros((1, 12))}, {}, ShapeMismatch, r"B has shape \[1, 12\], but must have \[1, 24\]"),
    ({"H0": np.zeros((2, 3, 4))}, {}, ShapeMismatch, r"H0 has shape \[2, 3, 4\], but must have \[1, 3, 4\]"),
    ({"SL": np.array([1, 2])}, {}, ShapeMismatch, r"SL has shape \[2\], but must have \[3\]"),
    ({"SL": np.array([1, 2, 4])}, {}, InvalidTensor, r"SL\[2\] is 4, but must be in \[0, 3\]"),
    ({"SL": np.array([1, -1, 3])}, {}, InvalidTensor, r"SL\[1\] is -1"),
    ({}, {"direction": "FORWARD"}, InvalidParameter, "direction is 'FORWARD', but must be one of forward, reverse"),
    ({}, {"direction": "bidirectional"}, ShapeMismatch, r"R has shape \[1, 12, 4\], but must have \[2, 12, 4\]"),
    ({}, {"linear_before_reset": 2}, InvalidParameter, "linear_before_reset is 2, but must be 0 or 1"),
    ({}, {"hidden_size": 5}, InvalidParameter, "hidden_size is 5, but must be 4"),
    ({}, {"activations": ["Relu", "Tanh"]}, InvalidParameter, r"activations is \['Relu', 'Tanh'\], but must be"),
    ({}, {"activations": ["Sigmoid"]}, InvalidParameter, "activations"),
    ({}, {"clip": 0.0}, InvalidParameter, "clip is 0.0, but must be left out"),
]


@pytest.mark.parametrize(("inputs", "attributes", "error", "message"), MISTAKES)
def test_mistakes(inputs: Any, attributes: Any, error: type[GradserveError], message: str) -> None:
    given = {**case(), **inputs}
    with pytest.raises(error, match=message):
        train(*given.values(), **attributes)
    shape = (3, 1, 3, 4)
    with pytest.raises(error, match=message):
        back(*given.values(), np.zeros(shape), np.zeros((3, 1, 3, 12)), **attributes)


@pytest.mark.parametrize(
    ("S", "N", "inputs", "H", "steps"),
    [
        (1 << 22, 1, 0, 1, None),  # the calls of NumPy
        (24_000, 1, 0, 1024, None),  # R is read at each step
        (24_000, 1, 1, 1024, None),  # zeros travel as a few bytes, so X may have elements
        (24_000, 1, 1, 1024, 22_000),
        (1600, 256, 0, 1024, None),  # the products
        (400, 256, 1536, 1024, None),
    ],
)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_work_of_minutes_is_refused_however_few_bytes_ask_for_it(
    S: int, N: int, inputs: int, H: int, steps: int | None, direction: str
) -> None:
    """With a fourth of the steps it is not too much."""
    D, zero = 2 if direction == "bidirectional" else 1, np.zeros((), np.float32)
    weights = {"W": np.broadcast_to(zero, (D, 3 * H, inputs)), "R": np.broadcast_to(zero, (D, 3 * H, H))}
    for height in (S, S // 4):
        given: dict[str, Array] = {"X": np.broadcast_to(zero, (height, N, inputs)), **weights}
        if steps is not None:
            given["SL"] = np.full(N, min(steps, height))
        for operator in (OPERATORS["GRUTraining"], OPERATORS["GRUGrad"]):
            states = dict.fromkeys(operator.needed_names, np.zeros(0))
            work = operator.work({**states, **given}, {"direction": direction})
            assert (work > MAX_MULTIPLY_ADDS) is (height == S)


def test_steps_that_are_not_computed_are_no_work() -> None:
    for S, N, SL in ((1 << 40, 0, None), (1 << 40, 1, np.array([3])), (0, 1 << 40, None)):
        X = np.broadcast_to(np.float32(0), (S, N, 2))
        assert _recurrent_plan.multiply_adds(X, np.zeros((1, 12, 2)), np.zeros((1, 12, 4)), SL) < 1 << 21


@pytest.mark.parametrize("H", [4, 64])
@pytest.mark.parametrize("kernel", [_recurrent_pass.Forward, _recurrent_pass.Backward])
def test_it_ends_between_chunks_once_nobody_waits(kernel: Any, H: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without helpers and with them, for H = 64 is much work. Each chunk has 16 steps."""
    given = case(S=1024, N=40, H=H, dtype=np.float32)
    HAll, _, ZRH = train(*given.values())
    walks, walk = list[slice](), kernel._walk

    def counted(self: Any, d: int, chunk: slice, block: slice) -> None:
        walks.append(chunk)
        walk(self, d, chunk, block)

    def claim(size: int) -> None:
        if len(walks) > 3:
            raise ConnectionError("nobody waits")

    monkeypatch.setattr(kernel, "_walk", counted)
    plan = _recurrent_plan.make_plan(given["X"], given["R"], None, None, "forward", None, None, gates=3)
    assert plan.single_threaded == (H == 4)
    call = (
        partial(back, *given.values(), HAll, ZRH)
        if kernel is _recurrent_pass.Backward
        else partial(train, *given.values())
    )
    with ThreadPoolExecutor(2) as pool, workspace(Workspace(pool, 2, claim=claim)), pytest.raises(ConnectionError):
        call()
    assert 3 < len(walks) < 8


@pytest.mark.parametrize("name", ["HAll", "ZRH", "grad_HAll", "grad_Ht"])
def test_shapes_of_what_comes_back(name: str) -> None:
    given = {"HAll": (3, 1, 3, 4), "ZRH": (3, 1, 3, 12), "grad_HAll": (3, 1, 3, 4), "grad_Ht": (1, 3, 4), name: (1, 2)}
    with pytest.raises(ShapeMismatch, match=rf"{name} has shape \[1, 2\], but must have \["):
        back(*case().values(), *map(np.zeros, given.values()))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_attributes_in_any_letter_case(direction: str) -> None:
    given = case(direction)
    expected = train(*given.values(), direction=direction)
    names = ["Sigmoid", "TANH", "sigmoid", "tanh"][: 2 * len(given["W"])]
    got = train(*given.values(), direction=direction, activations=names, hidden_size=4)
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    for wrong in (names[:-1], [*names, "tanh"], names[:-1] + ["relu"], names[::-1], []):
        with pytest.raises(InvalidParameter, match="activations"):
            train(*given.values(), direction=direction, activations=wrong)


def test_left_out_gradients_are_zeros() -> None:
    given = case()
    HAll, _, ZRH = train(*given.values())
    assert not any(made.any() for made in back(*given.values(), HAll, ZRH))


def test_any_number_of_steps_of_no_sequence_costs_nothing() -> None:
    given = {**case(N=0), "X": np.zeros((1 << 40, 0, 2))}
    HAll, _, ZRH = train(*given.values())
    assert HAll.shape == (1 << 40, 1, 0, 4)
    dX, dW, *_ = back(*given.values(), HAll, ZRH)
    assert dX.shape == given["X"].shape
    assert not dW.any()
