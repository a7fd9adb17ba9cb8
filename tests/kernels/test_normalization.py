from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from service.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, Array
from service.errors import AxisOutOfRange, ShapeMismatch
from service.kernels import OPERATORS
from service.kernels._row_gradients import BLOCK_ELEMENTS, MAX_COLUMNS, MAX_ROWS
from tests.kernels.equality import assert_close, assert_same_bits
from tests.kernels.gradcheck import check_gradient
from tests.kernels.threads import threads

EPSILON = 1e-5
NAMES = ["LayerNormalizationGrad", "SimplifiedLayerNormalizationGrad", "InvertibleLayerNormalizationGrad"]
every_operator = pytest.mark.parametrize("name", NAMES)

Inputs = dict[str, Array]


def statistics(name: str, X: Array, axis: int) -> tuple[Array, Array]:
    """The mean, 0 for RMSNorm, and the inverse of the standard deviation, in X's dtype or float32 at least."""
    wide, over = X.astype(np.result_type(X, np.float32)), tuple(range(axis % X.ndim, X.ndim))
    mean = np.zeros_like(wide.mean(over, keepdims=True)) if name == NAMES[1] else wide.mean(over, keepdims=True)
    return mean, 1 / np.sqrt(((wide - mean) ** 2).mean(over, keepdims=True) + EPSILON)


def make_inputs(name: str, shape: tuple[int, ...], axis: int = -1, dtype: Any = np.float64) -> Inputs:
    """Inputs that fit together, as the forward operator would give them."""
    random = np.random.default_rng(0)
    X, dY = random.normal(1, 2, shape), random.normal(size=shape)
    scale, bias = random.uniform(0.5, 2, (2, *shape[axis % len(shape) :]))
    given = {"Y_grad": dY.astype(dtype), "X": X.astype(dtype), "scale": scale.astype(dtype)}
    return with_statistics(name, given, axis, bias.astype(dtype))


def with_statistics(name: str, given: Inputs, axis: int, bias: Array) -> Inputs:
    X = given["X"]
    mean, inverse = statistics(name, X, axis)
    if name == NAMES[0]:
        return {**given, "mean": mean, "inv_std_dev": inverse}
    if name == NAMES[1]:
        return {**given, "inv_std_var": inverse}
    Y = ((X - mean) * inverse * given["scale"] + bias).astype(X.dtype)
    return {"Y_grad": given["Y_grad"], "Y": Y, "scale": given["scale"], "bias": bias, "inv_std_var": inverse}


def run(name: str, inputs: Inputs, **more: Any) -> tuple[Array, ...]:
    outputs: tuple[Array, ...] = OPERATORS[name].kernel(*inputs.values(), **more)
    return outputs


def expected(inputs: Inputs, axis: int = -1) -> list[Array]:
    """The gradients in float64, from the definition."""
    wide = {key: array.astype(np.float64) for key, array in inputs.items()}
    dY, scale, inverse = wide["Y_grad"], wide["scale"], list(wide.values())[-1]
    x = (wide["Y"] - wide["bias"]) / scale if "Y" in wide else (wide["X"] - wide.get("mean", 0)) * inverse
    over, before = tuple(range(axis % dY.ndim, dY.ndim)), tuple(range(axis % dY.ndim))
    b = dY * scale
    mean = np.zeros(()) if "X" in wide and "mean" not in wide else b.mean(over, keepdims=True)
    return [inverse * (b - mean - x * (b * x).mean(over, keepdims=True)), (dY * x).sum(before), dY.sum(before)]


@every_operator
@pytest.mark.parametrize("axis", [-1, 1, 0])
def test_gradients_are_those_of_the_forward_function(name: str, axis: int) -> None:
    inputs = make_inputs(name, (3, 2, 4), axis)
    scale, bias = inputs["scale"], np.zeros_like(inputs["scale"])

    def forward(X: Array, scale: Array = scale) -> Array:
        mean, inverse = statistics(name, X, axis)
        return np.asarray((X - mean) * inverse * scale)

    X = np.random.default_rng(1).normal(1, 2, (3, 2, 4))

    def gradients(dY: Array, X: Array, scale: Array = scale) -> tuple[Array, ...]:
        return run(name, with_statistics(name, {"Y_grad": dY, "X": X, "scale": scale}, axis, bias), axis=axis)

    check_gradient(forward, lambda dY, X: gradients(dY, X)[0], X)
    check_gradient(lambda scale: forward(X, scale), lambda dY, scale: gradients(dY, X, scale)[1], scale)
    if name != NAMES[1]:
        check_gradient(lambda bias: forward(X) + bias, lambda dY, _: gradients(dY, X)[2], bias)


@every_operator
@pytest.mark.parametrize("shape", [(3000, 96), (3 * MAX_ROWS + 5, 1), (MAX_ROWS, 7), (13, 2 * MAX_COLUMNS + 9)])
def test_many_blocks_strips_and_tiles(name: str, shape: tuple[int, int]) -> None:
    assert np.prod(shape) > BLOCK_ELEMENTS or shape[0] >= MAX_ROWS
    inputs = make_inputs(name, shape, dtype=np.float32)
    for got, exact in zip(run(name, inputs), expected(inputs), strict=False):
        assert_close(got.astype(np.float64), exact, atol=1e-6 * float(np.abs(exact).max() + 1))
    with threads(2):
        shared = run(name, inputs)
    for one, other in zip(shared, run(name, inputs), strict=True):
        assert_same_bits(one, other)


@every_operator
@pytest.mark.parametrize("shape", [(300, 96), (3, 2 * MAX_COLUMNS + 9)])
def test_each_output_alone_has_the_same_bits(name: str, shape: tuple[int, int]) -> None:
    inputs, names = make_inputs(name, shape, dtype=np.float32), OPERATORS[name].output_names
    whole = run(name, inputs)
    assert inspect.signature(OPERATORS[name].kernel).parameters["wanted"].default == names
    for place, output in enumerate(names):
        alone = run(name, inputs, wanted=[output])
        assert [one is None for one in alone] == [one != output for one in names]
        assert_same_bits(alone[place], whole[place])


@every_operator
def test_every_dtype_is_rounded_once(name: str) -> None:
    for dtype in (FLOAT16, BFLOAT16, FLOAT32):
        inputs = make_inputs(name, (40, 24), dtype=dtype)
        wide = {key: array.astype(np.float32) for key, array in inputs.items()}
        for got, exact in zip(run(name, inputs), run(name, wide), strict=True):
            assert_same_bits(got, exact.astype(dtype))


def test_three_type_variables() -> None:
    """X, the gradient with the scale, and the statistics may each have a dtype of their own."""
    whole = make_inputs(NAMES[0], (6, 4))
    exact = expected(whole)
    for of_X, of_scale, of_mean in (
        (FLOAT16, FLOAT32, FLOAT32),
        (FLOAT64, FLOAT64, FLOAT32),
        (FLOAT32, BFLOAT16, FLOAT64),
    ):
        dtypes = {"X": of_X, "Y_grad": of_scale, "scale": of_scale}
        inputs = {key: array.astype(dtypes.get(key, of_mean)) for key, array in whole.items()}
        got = run(NAMES[0], inputs)
        assert [one.dtype for one in got] == [of_X, of_scale, of_scale]
        for one, other in zip(got, exact, strict=True):
            assert_close(one.astype(np.float64), other, atol=0.1 if BFLOAT16 in dtypes.values() else 5e-3)


@every_operator
def test_one_number_in_a_row(name: str) -> None:
    """ONNX Runtime refuses M = 1."""
    inputs = make_inputs(name, (5, 1))
    got = run(name, inputs)
    for one, exact in zip(got, expected(inputs), strict=False):
        assert_close(one, exact, atol=1e-9)
    if name == NAMES[0]:
        assert not got[0].any()
        assert not got[1].any()
        assert_close(got[2], inputs["Y_grad"].sum(0), rtol=1e-15)


@every_operator
@pytest.mark.parametrize(
    ("shape", "axis"), [((0,), 0), ((0, 3), -1), ((3, 0), -1), ((2, 0, 3), 2), ((2, 0, 3), 1), ((2, 0, 3), 0)]
)
def test_empty_tensors(name: str, shape: tuple[int, ...], axis: int) -> None:
    with np.errstate(all="ignore"):
        given = make_inputs(name, tuple(dim or 1 for dim in shape), axis)
    kept = (*shape[:axis], *[1] * (len(shape) - axis % len(shape))) if axis >= 0 else (shape[0], 1)
    fit = {"scale": shape[axis:], "bias": shape[axis:], "X": shape, "Y": shape, "Y_grad": shape}
    inputs = {key: np.ones(fit.get(key, kept)) for key in given}
    got = run(name, inputs, axis=axis)
    assert [one.shape for one in got] == [shape, shape[axis:], shape[axis:]][: len(got)]
    assert not any(one.any() for one in got)


@every_operator
def test_nan_stays_in_its_row_and_column(name: str) -> None:
    for key in ("Y_grad", "Y" if name == NAMES[2] else "X"):
        inputs = make_inputs(name, (4, 3), dtype=np.float32)
        inputs[key][1, 2] = np.nan
        X_grad, scale_grad, *bias_grad = run(name, inputs)
        assert (
            np.isnan(X_grad).all(axis=1).tolist()
            == np.isnan(X_grad).any(axis=1).tolist()
            == [False, True, False, False]
        )
        assert np.isnan(scale_grad).tolist() == [False, False, True]
        assert all(np.isnan(one).tolist() == [False, False, key == "Y_grad"] for one in bias_grad)


def test_a_scale_of_zero_has_lost_the_forward_value() -> None:
    inputs = make_inputs(NAMES[2], (4, 3), dtype=np.float32)
    inputs["scale"][1], inputs["Y"][:, 1] = 0, inputs["bias"][1]
    X_grad, scale_grad, bias_grad = run(NAMES[2], inputs)
    assert np.isnan(X_grad).all()
    assert np.isnan(scale_grad).tolist() == [False, True, False]
    assert np.isfinite(bias_grad).all()


def test_long_sums_stay_exact() -> None:
    """ONNX Runtime adds in float32: with 300,000 rows it is 8e-6 off."""
    inputs = make_inputs(NAMES[0], (300_000, 2), dtype=np.float32)
    inputs["Y_grad"] += 1
    for got, exact in list(zip(run(NAMES[0], inputs), expected(inputs), strict=True))[1:]:
        assert_close(got.astype(np.float64), exact, atol=3e-7 * float(np.abs(inputs["Y_grad"]).sum()) / 2)


def test_flat_statistics_and_unused_attributes() -> None:
    inputs = make_inputs(NAMES[0], (2, 3, 4))
    whole = run(NAMES[0], inputs)
    flat = {**inputs, "mean": inputs["mean"].ravel(), "inv_std_dev": inputs["inv_std_dev"].ravel()}
    for one, other in zip(run(NAMES[0], flat, epsilon=1.0, stash_type=0), whole, strict=True):
        assert_same_bits(one, other)


@every_operator
def test_strided_inputs(name: str) -> None:
    inputs = make_inputs(name, (6, 4))
    for change in (np.asfortranarray, lambda array: np.flip(np.flip(array).copy())):
        strided = {key: change(array) for key, array in inputs.items()}
        for one, other in zip(run(name, strided), run(name, inputs), strict=True):
            assert_same_bits(one, other)


@every_operator
def test_shapes_that_do_not_fit_are_refused(name: str) -> None:
    """ONNX Runtime reads out of bounds."""
    inputs = make_inputs(name, (2, 3, 4), 1)
    forward = "Y" if name == NAMES[2] else "X"
    for key in inputs.keys() - {forward}:
        for shape in ((), (1,), (7,), (3,), (4,), (2, 3), (3, 2), (2, 1), (2, 3, 4, 1), (2, 3, 1), (0,), (1, 1, 1)):
            if shape == inputs[key].shape:
                continue
            with pytest.raises(ShapeMismatch) as caught:
                run(name, {**inputs, key: np.ones(shape)}, axis=1)
            assert caught.value.context == {"tensor": key}
            assert f"{key} has shape {list(shape)}, but must have" in caught.value.detail


@every_operator
def test_an_axis_outside_the_tensor_is_refused(name: str) -> None:
    kernel: Callable[..., Any] = OPERATORS[name].kernel
    for shape, axis in (((2, 3), 2), ((2, 3), -3), ((), 0), ((), -1)):
        count = len(OPERATORS[name].inputs)
        with pytest.raises(AxisOutOfRange):
            kernel(*[np.ones(shape)] * count, axis=axis)
