"""LSTMTraining against an LSTM written for reading, LSTMGrad against central differences and its back-propagation.

The engine that runs them also runs the GRU: `test_gru.py` tests what is the engine's alone.
"""

from __future__ import annotations

import itertools
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from service.dtypes import DTYPES, Array
from service.errors import GradserveError, InvalidParameter, InvalidTensor, ShapeMismatch
from service.kernels import MAX_MULTIPLY_ADDS, OPERATORS, Workspace, workspace
from service.kernels.lstm import lstm_grad, lstm_training
from tests import cases
from tests.kernels.lstm_reference import lstm, lstm_gradient
from tests.kernels.recurrent import DIRECTIONS, LENGTHS, cut, pairwise

train: Any = lstm_training  # called with dictionaries, which the type checker cannot follow
back: Any = lstm_grad
forward: Any = lstm
backward: Any = lstm_gradient

STATES = ("HAll", "HFinal", "CFinal", "CAll", "iofc")
KEPT = ("HAll", "CAll", "iofc")
OUTPUTS = {"dX": "X", "dW": "W", "dR": "R", "dB": "B", "dH0": "Ht0", "dC0": "Ct0", "dP": "P"}
"""The gradients, and the inputs that they are of."""
STARTS = ("", "Ht0", "Ct0", "Ht0 Ct0")
OPTIONS = list(itertools.product(DIRECTIONS, (True, False), (True, False), STARTS, LENGTHS))
NAMES = ("direction", "bias", "peepholes", "starts", "lengths")
CUTS = {"alone": OPTIONS, "shared": pairwise(OPTIONS), "cut": pairwise(OPTIONS)}

every_direction = pytest.mark.parametrize("direction", DIRECTIONS)


@pytest.fixture(params=["alone", "shared", "cut"])
def shared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    cut(request.param, monkeypatch)
    return str(request.param)


def case(
    direction: str = "forward",
    bias: bool = True,
    peepholes: bool = True,
    starts: str = "Ht0 Ct0",
    lengths: list[int] | None = None,
    *,
    S: int = 3,
    N: int = 3,
    inputs: int = 2,
    H: int = 4,
    dtype: Any = np.float64,
) -> dict[str, Any]:
    """Inputs of LSTMTraining, by name."""
    D, rng = 2 if direction == "bidirectional" else 1, np.random.default_rng(5)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(dtype)

    return {
        "X": normal(S, N, inputs),
        "W": normal(D, 4 * H, inputs),
        "R": normal(D, 4 * H, H),
        "B": normal(D, 8 * H) if bias else None,
        "SL": None if lengths is None else np.array(lengths),
        "Ht0": normal(D, N, H) if "Ht0" in starts else None,
        "Ct0": normal(D, N, H) if "Ct0" in starts else None,
        "P": normal(D, 3 * H) if peepholes else None,
    }


def states(given: dict[str, Any], direction: str = "forward") -> dict[str, Array]:
    """What LSTMTraining makes of these inputs."""
    return dict(zip(STATES, train(*given.values(), direction=direction), strict=True))


def incoming(made: dict[str, Array]) -> dict[str, Array]:
    """Random gradients of HAll, HFinal and CFinal."""
    rng = np.random.default_rng(7)
    return {f"d{name}": np.asarray(rng.standard_normal(made[name].shape), made[name].dtype) for name in STATES[:3]}


def of_grad(given: dict[str, Any], made: dict[str, Array], grads: dict[str, Any]) -> list[Any]:
    """LSTMGrad's inputs, in order."""
    everything = {**given, **made, **grads}
    return [everything.get(tensor.name) for tensor in OPERATORS["LSTMGrad"].inputs]


def gradients(given: dict[str, Any], direction: str = "forward", **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """LSTMGrad's outputs for random gradients of HAll, HFinal and CFinal, and these."""
    made = states(given, direction)
    grads = incoming(made)
    results = back(*of_grad(given, made, grads), direction=direction, **more)
    return dict(zip(OUTPUTS, results, strict=True)), grads


def difference(given: dict[str, Any], name: str, grads: dict[str, Array], direction: str) -> Array:
    """The central differences of sum(HAll * dHAll) + sum(HFinal * dHFinal) + sum(CFinal * dCFinal) by an input."""
    D, N, H = grads["dHFinal"].shape
    zeros = {"B": np.zeros((D, 8 * H)), "P": np.zeros((D, 3 * H))} | dict.fromkeys(("Ht0", "Ct0"), np.zeros((D, N, H)))
    point: Array = zeros[name] if given[name] is None else given[name]
    steps = 1e-6 * np.eye(point.size).reshape(point.size, *point.shape)
    made = forward(**{**given, name: np.concatenate([point + steps, point - steps])}, direction=direction)
    products = [state * gradient for state, gradient in zip(made, grads.values(), strict=False)]
    values = np.sum([product.sum(tuple(range(1, product.ndim))) for product in products], axis=0)
    above, below = np.split(values, 2)
    return np.asarray((above - below) / 2e-6).reshape(point.shape)


def test_forward(shared: str) -> None:
    for option in CUTS[shared]:
        with cases.case(*option):
            assert_forward(*option)


def assert_forward(direction: str, bias: bool, peepholes: bool, starts: str, lengths: list[int] | None) -> None:
    for dtype, tolerance in ((np.float64, 1e-13), (np.float32, 2e-6)):
        given = case(direction, bias, peepholes, starts, lengths, dtype=dtype)
        for mine, expected in zip(
            states(given, direction).values(), forward(**given, direction=direction), strict=True
        ):
            assert mine.dtype == dtype
            np.testing.assert_allclose(mine, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(NAMES, pairwise(OPTIONS))
def test_gradient(direction: str, bias: bool, peepholes: bool, starts: str, lengths: list[int] | None) -> None:
    given = case(direction, bias, peepholes, starts, lengths)
    made, grads = gradients(given, direction)
    for name, of in OUTPUTS.items():
        expected = difference(given, of, grads, direction)
        np.testing.assert_allclose(made[name], expected, rtol=1e-7, atol=1e-8, err_msg=name)


def test_last_bits(shared: str) -> None:
    for option in CUTS[shared]:
        with cases.case(*option):
            assert_last_bits(*option)


def assert_last_bits(direction: str, bias: bool, peepholes: bool, starts: str, lengths: list[int] | None) -> None:
    """Central differences are good for 8 digits only. Here sums of 9 numbers run in another order: 16 eps."""
    given = case(direction, bias, peepholes, starts, lengths)
    made, grads = gradients(given, direction)
    expected = backward(*of_grad(given, states(given, direction), grads), direction=direction)
    for name, array in zip(OUTPUTS, expected, strict=True):
        np.testing.assert_allclose(made[name], array, rtol=4e-15, atol=8e-15, err_msg=name)


@every_direction
@pytest.mark.usefixtures("shared")
def test_many_lengths_in_no_order(direction: str) -> None:
    lengths = np.random.default_rng(3).integers(0, 20, 40).tolist()
    given = case(direction, lengths=lengths, S=21, N=40)
    got = states(given, direction)
    for mine, right in zip(got.values(), forward(**given, direction=direction), strict=True):
        np.testing.assert_allclose(mine, right, rtol=1e-12, atol=1e-12)
    made, grads = gradients(given, direction)
    expected = backward(*of_grad(given, got, grads), direction=direction)
    for name, right in zip(OUTPUTS, expected, strict=True):
        np.testing.assert_allclose(made[name], right, rtol=1e-10, atol=1e-11, err_msg=name)


@pytest.mark.parametrize("lengths", [None, [1, 3, 0]])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_floats_are_computed_in_float32(dtype: str, lengths: list[int] | None) -> None:
    narrow = case(dtype=DTYPES[dtype], lengths=lengths)

    def wide(given: dict[str, Any]) -> dict[str, Any]:
        return {
            name: array.astype(np.float32) if array is not None and name != "SL" else array
            for name, array in given.items()
        }

    made = states(narrow)
    grads = incoming(made)
    pairs = [
        zip(made.values(), states(wide(narrow)).values(), strict=True),
        zip(back(*of_grad(narrow, made, grads)), back(*of_grad(wide(narrow), wide(made), wide(grads))), strict=True),
    ]
    for got, expected in itertools.chain(*pairs):
        assert got.dtype == DTYPES[dtype]
        np.testing.assert_array_equal(got.astype(np.float32), expected.astype(DTYPES[dtype]).astype(np.float32))


@every_direction
@pytest.mark.parametrize(
    ("S", "N", "inputs", "lengths"),
    [(0, 3, 2, None), (3, 0, 2, None), (3, 3, 0, None), (0, 0, 0, None), (3, 0, 2, []), (3, 3, 0, [1, 0, 3])],
)
def test_empty_dimensions(S: int, N: int, inputs: int, lengths: list[int] | None, direction: str) -> None:
    given = case(direction, S=S, N=N, inputs=inputs, lengths=lengths)
    for got, expected in zip(states(given, direction).values(), forward(**given, direction=direction), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-13)
    made, grads = gradients(given, direction)
    if S == 0:
        np.testing.assert_array_equal(made["dH0"], grads["dHFinal"])
        np.testing.assert_array_equal(made["dC0"], grads["dCFinal"])
        assert not any(made[name].any() for name in ("dX", "dW", "dR", "dB", "dP"))
    for name, of in OUTPUTS.items():
        assert made[name].shape == given[of].shape
        np.testing.assert_allclose(made[name], difference(given, of, grads, direction), rtol=1e-7, atol=1e-8)


@every_direction
@pytest.mark.parametrize("peepholes", [True, False])
def test_a_subset_is_what_the_whole_has(direction: str, peepholes: bool) -> None:
    given = case(direction, peepholes=peepholes)
    whole, _ = gradients(given, direction)
    for count in range(1, 7):
        for wanted in itertools.combinations(OUTPUTS, count):
            some, _ = gradients(given, direction, wanted=wanted)
            assert {name for name, got in some.items() if got is not None} == {*wanted}
            for name in wanted:
                np.testing.assert_array_equal(some[name], whole[name])


@every_direction
@pytest.mark.usefixtures("shared")
def test_what_stands_beyond_a_length_does_not_count(direction: str) -> None:
    given = case(direction, lengths=[3, 1, 0])
    beyond = np.arange(3)[:, None, None, None] >= given["SL"][:, None]
    spoilt = {**given, "X": np.where(beyond[:, 0], np.nan, given["X"])}
    whole = states(given, direction)
    for got, expected in zip(states(spoilt, direction).values(), whole.values(), strict=True):
        np.testing.assert_array_equal(got, expected)
    results = []
    for inputs, in_grad, in_made in ((given, 5.0, 0.0), (spoilt, np.nan, np.nan), (spoilt, np.inf, np.inf)):
        made = {name: np.where(beyond, in_made, whole[name]) for name in KEPT}
        grad = np.where(beyond, in_grad, 1.0) * np.ones(whole["HAll"].shape)
        results.append(back(*of_grad(inputs, made, {"dHAll": grad}), direction=direction))
    for other in results[1:]:
        for got, expected in zip(other, results[0], strict=True):
            np.testing.assert_array_equal(got, expected)
    assert not results[0][0][1:, 1].any()
    assert not results[0][0][:, 2].any()


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
            given["B"][:, 16:] = other
            made = states(given)
        grads = {name: np.full_like(one, largest) for name, one in incoming(made).items()}
        made = {
            "HAll": np.full_like(made["HAll"], 0.5),
            **{name: np.full_like(made[name], largest) for name in KEPT[1:]},
        }
        dX, *_ = back(*of_grad(given, made, grads))
    assert not np.isfinite(dX.astype(np.float64)).all()


def test_nan_propagates_with_bias_and_without() -> None:
    for bias, peepholes in itertools.product((True, False), (True, False)):
        given = case(bias=bias, peepholes=peepholes)
        given["X"][1, 0, 0] = np.nan
        made = states(given)
        assert all(np.isnan(made[name][1:, 0, 0]).all() for name in KEPT)
        assert all(np.isnan(made[name][0, 0]).all() for name in ("HFinal", "CFinal"))
        assert all(np.isfinite(made[name][:, 0, 1:]).all() for name in KEPT)
        assert all(np.isfinite(made[name][0]).all() for name in KEPT)


def test_a_nan_in_a_gradient_reaches_the_steps_before_it() -> None:
    given = case()
    made = states(given)
    dHAll = np.zeros_like(made["HAll"])
    dHAll[1, 0, 0] = np.nan
    results = dict(zip(OUTPUTS, back(*of_grad(given, made, {"dHAll": dHAll})), strict=True))
    assert np.isnan(results["dX"][:2, 0]).all()
    assert not results["dX"][2].any()
    assert all(np.isnan(results[name][0, 0]).all() for name in ("dH0", "dC0"))
    assert all(np.isfinite(results[name][0, 1:]).all() for name in ("dH0", "dC0"))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gates_stay_in_their_range(dtype: Any) -> None:
    given = case(dtype=dtype)
    for factor in (1e3, 1e30):
        given["X"] = (given["X"] * dtype(factor)).astype(dtype)
        i, o, f, c = np.split(states(given)["iofc"], 4, axis=-1)
        assert all(((gate >= 0) & (gate <= 1)).all() for gate in (i, o, f))
        assert ((c >= -1) & (c <= 1)).all()


@every_direction
@pytest.mark.usefixtures("shared")
def test_any_number_of_threads_gives_the_same_bits(direction: str) -> None:
    given = case(direction, S=40, N=37, inputs=20, H=24, dtype=np.float32, lengths=[40] * 30 + [7] * 7)
    results = []
    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(5) as pool:
        for threads in (1, 2, 5):
            with workspace(Workspace(pool, threads)):
                made, _ = gradients(given, direction)
                results.append([*made.values(), *states(given, direction).values()])
    for other in results[1:]:
        for got, expected in zip(other, results[0], strict=True):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("wanted", [(*OUTPUTS,), ("dX",), ("dW", "dP"), ("dC0",)])
def test_only_what_is_asked_for_has_memory_as_an_output(dtype: str, wanted: tuple[str, ...]) -> None:
    """Except for dH0 and dC0: the gradient goes through them."""
    given = case(dtype=DTYPES[dtype])
    asked: list[str] = []

    def allocate(shape: tuple[int, ...], dtype: Any) -> Array:
        asked.append(str((shape, dtype)))
        return np.empty(shape, dtype)

    made = states(given)
    arguments = of_grad(given, made, incoming(made))
    with workspace(Workspace(allocate=allocate)):
        back(*arguments, wanted=wanted)
    expected = [given[of] for name, of in OUTPUTS.items() if name in {*wanted, "dH0", "dC0"}]
    assert sorted(asked) == sorted(str((one.shape, one.dtype)) for one in expected)


def test_inputs_stay_untouched() -> None:
    given = case("bidirectional", lengths=[3, 1, 0])
    made = states(given, "bidirectional")
    arguments = of_grad(given, made, incoming(made))
    for array in (*given.values(), *arguments):
        array.flags.writeable = False
    states(given, "bidirectional")
    back(*arguments, direction="bidirectional")


MISTAKES: list[tuple[dict[str, Any], dict[str, Any], type[GradserveError], str]] = [
    ({"X": np.zeros((2, 3))}, {}, ShapeMismatch, r"X has shape \[2, 3\], but must have 3 dimensions"),
    ({"W": np.zeros((1, 12, 2))}, {}, ShapeMismatch, r"W has shape \[1, 12, 2\], but must have \[1, 16, 2\]"),
    ({"R": np.zeros((1, 12, 4))}, {}, ShapeMismatch, r"R has shape \[1, 12, 4\], but must have \[1, 16, 4\]"),
    ({"R": np.zeros((1, 12, 3))}, {}, ShapeMismatch, r"W has shape \[1, 16, 2\], but must have \[1, 12, 2\]"),
    ({"R": np.zeros((1, 0, 0))}, {}, ShapeMismatch, "there must be a hidden unit"),
    ({"Ht0": np.zeros((2, 3, 4))}, {}, ShapeMismatch, r"Ht0 has shape \[2, 3, 4\], but must have \[1, 3, 4\]"),
    ({"Ct0": np.zeros((1, 4, 3))}, {}, ShapeMismatch, r"Ct0 has shape \[1, 4, 3\], but must have \[1, 3, 4\]"),
    ({"P": np.zeros((1, 16))}, {}, ShapeMismatch, r"P has shape \[1, 16\], but must have \[1, 12\]"),
    ({"SL": np.array([1, 2])}, {}, ShapeMismatch, r"SL has shape \[2\], but must have \[3\]"),
    ({"SL": np.array([1, 2, 4])}, {}, InvalidTensor, r"SL\[2\] is 4, but must be in \[0, 3\]"),
    ({}, {"direction": "FORWARD"}, InvalidParameter, "direction is 'FORWARD', but must be one of forward, reverse"),
    ({}, {"direction": "bidirectional"}, ShapeMismatch, r"R has shape \[1, 16, 4\], but must have \[2, 16, 4\]"),
    ({}, {"hidden_size": 5}, InvalidParameter, "hidden_size is 5, but must be 4"),
    ({}, {"activations": ["Sigmoid", "Tanh"]}, InvalidParameter, r"activations is \['Sigmoid', 'Tanh'\], but must be"),
    ({}, {"activations": ["Sigmoid", "Tanh", "Relu"]}, InvalidParameter, r"\['sigmoid', 'tanh', 'tanh'\]"),
    ({}, {"clip": 0.0}, InvalidParameter, "clip is 0.0, but must be left out"),
    ({}, {"input_forget": 1}, InvalidParameter, "input_forget is 1, but must be 0"),
]


@pytest.mark.parametrize(("inputs", "attributes", "error", "message"), MISTAKES)
def test_mistakes(inputs: Any, attributes: Any, error: type[GradserveError], message: str) -> None:
    made = states(case())
    given = {**case(), **inputs}
    with pytest.raises(error, match=message):
        train(*given.values(), **attributes)
    with pytest.raises(error, match=message):
        back(*of_grad(given, made, incoming(made)), **attributes)


def test_shapes_of_what_only_one_of_them_takes() -> None:
    with pytest.raises(ShapeMismatch, match=r"B has shape \[1, 24\], but must have \[1, 32\]"):
        train(*{**case(), "B": np.zeros((1, 24))}.values())
    made = states(case())
    for name in (*KEPT, "dHAll", "dHFinal", "dCFinal"):
        with pytest.raises(ShapeMismatch, match=rf"{name} has shape \[1, 2\], but must have \["):
            back(*of_grad(case(), made, {**incoming(made), name: np.zeros((1, 2))}))


@every_direction
def test_attributes_in_any_letter_case(direction: str) -> None:
    given = case(direction)
    names = ["Sigmoid", "TANH", "tanh", "sigmoid", "tanh", "Tanh"][: 3 * len(given["W"])]
    got = train(*given.values(), direction=direction, activations=names, hidden_size=4, input_forget=0)
    for mine, theirs in zip(got, states(given, direction).values(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_left_out_gradients_are_zeros() -> None:
    given = case()
    assert not any(made.any() for made in back(*of_grad(given, states(given), {})))


def test_work_of_minutes_is_refused_however_few_bytes_ask_for_it() -> None:
    zero = np.zeros((), np.float32)
    weights = {"W": np.broadcast_to(zero, (1, 4096, 0)), "R": np.broadcast_to(zero, (1, 4096, 1024))}
    for name in ("LSTMTraining", "LSTMGrad"):
        states = dict.fromkeys(OPERATORS[name].needed_names, np.zeros(0))
        for S, lengths, too_much in (
            (24_000, None, True),
            (6000, None, False),
            (24_000, [22_000], True),
            (24_000, [3], False),
        ):
            given: dict[str, Array] = {**states, **weights, "X": np.zeros((S, 1, 0), np.float32)}
            given |= {} if lengths is None else {"SL": np.array(lengths)}
            assert (OPERATORS[name].work(given, {}) > MAX_MULTIPLY_ADDS) is too_much
