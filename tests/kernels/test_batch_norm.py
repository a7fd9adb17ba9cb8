"""BatchNormInternal and BatchNormalizationGrad: finite differences, threads, 16-bit floats, and few numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from service.dtypes import BFLOAT16, FLOAT16, Array, cast
from service.errors import DtypeMismatch, GradserveError, ShapeMismatch
from service.kernels import OPERATORS
from service.kernels.batch_norm import batch_norm_internal, batch_normalization_grad
from tests.kernels.equality import assert_same_bits
from tests.kernels.gradcheck import check_gradient
from tests.kernels.threads import threads


def drawn(*shapes: tuple[int, ...], dtype: Any = np.float64) -> list[Array]:
    random = np.random.default_rng(9)
    return [np.asarray(random.normal(2, 1, size=shape), dtype) for shape in shapes]


def forward(X: Array, scale: Array, B: Array) -> tuple[Array, ...]:
    return batch_norm_internal(X, scale, B, np.zeros_like(scale), np.ones_like(scale))


@pytest.mark.parametrize("shape", [(5, 3), (2, 3, 2, 2)])
def test_gradients_are_finite_differences(shape: tuple[int, ...]) -> None:
    X, scale, B = drawn(shape, shape[1:2], shape[1:2])

    def gradients(dY: Array, X: Array, scale: Array) -> tuple[Array, ...]:
        return batch_normalization_grad(dY, X, scale, *forward(X, scale, B)[3:])

    check_gradient(lambda X: forward(X, scale, B)[0], lambda dY, X: gradients(dY, X, scale)[0], X)
    check_gradient(lambda scale: forward(X, scale, B)[0], lambda dY, scale: gradients(dY, X, scale)[1], scale)
    check_gradient(lambda B: forward(X, scale, B)[0], lambda dY, B: gradients(dY, X, scale)[2], B)


def test_without_training_mode_the_statistics_are_given() -> None:
    X, scale, B, mean, variance = drawn((4, 3, 5), (3,), (3,), (3,), (3,))
    Y, *rest = batch_norm_internal(X, scale, B, mean, variance**2, training_mode=0, epsilon=0.5)
    column = (slice(None), None)
    inv = 1 / np.sqrt(variance**2 + 0.5)
    expected = (X - mean[column]) * inv[column] * scale[column] + B[column]
    np.testing.assert_allclose(Y, expected, rtol=1e-12)
    for got, statistic in zip(rest, (mean, variance**2, mean, inv), strict=True):
        np.testing.assert_allclose(got, statistic, rtol=1e-15)


LARGE = [(40, 30, 24, 24), (30000, 20), (2, 2, 600, 600)]
"""Shapes with several tiles: of several images, of all channels, and of a part of a plane."""


@pytest.mark.parametrize("shape", LARGE)
def test_bits_depend_on_neither_threads_nor_wanted_outputs(shape: tuple[int, ...]) -> None:
    X, dY, *rest = drawn(shape, shape, *[shape[1:2]] * 4, dtype=np.float32)
    calls = {
        "BatchNormInternal": dict(zip(("X", "scale", "B", "input_mean", "input_var"), (X, *rest), strict=True)),
        "BatchNormalizationGrad": dict(zip(("dY", "X", "scale", "mean", "variance"), (dY, X, *rest[:3]), strict=True)),
    }
    for name, inputs in calls.items():
        operator = OPERATORS[name]
        attributes = dict(operator.example_attributes)
        whole = operator(inputs, attributes)
        exact = operator({key: one.astype(np.float64) for key, one in inputs.items()}, attributes)
        with threads(2):
            for output, got in operator(inputs, attributes).items():
                assert_same_bits(got, whole[output])
                assert_same_bits(operator(inputs, attributes, [output])[output], whole[output])
                np.testing.assert_allclose(got, exact[output], rtol=0, atol=3e-6 * np.abs(exact[output]).max())


def test_the_sum_of_many_numbers_keeps_its_digits() -> None:
    """A float32 that counts stops at 2 ** 24."""
    count = (1 << 24) + (1 << 22)
    X, one = np.broadcast_to(np.float32(1), (count, 1)), np.ones(1, np.float32)
    assert batch_normalization_grad(X, X, one, one, one, wanted=["bias_grad"])[2] == count


@pytest.mark.parametrize("shape", [(1, 1, 300, 300), (2, 2, 65000)])
def test_sums_over_many_equal_pixels_are_exact(shape: tuple[int, ...]) -> None:
    dY, one = np.full(shape, 0.1, np.float32), np.ones(shape[1], np.float32)
    for got in batch_normalization_grad(dY, np.ones_like(dY), one, 0 * one, one)[1:]:
        np.testing.assert_allclose(got, dY.size // shape[1] * float(np.float32(0.1)), rtol=1e-6)


def test_a_mean_that_float32_cannot_hold_is_infinite() -> None:
    one, large = np.ones(1, np.float32), np.array([1e300])
    outputs = batch_normalization_grad(np.ones((2, 1), np.float32), np.ones((2, 1), np.float32), one, large, large)
    assert outputs[2] == 2


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16])
def test_16_bit_floats_are_rounded_once(dtype: Any) -> None:
    X, dY, *rest = drawn((3, 4, 5), (3, 4, 5), *[(4,)] * 4, dtype=dtype)
    wide = [one.astype(np.float32) for one in (X, dY, *rest)]
    for got, expected in zip(
        (*batch_norm_internal(X, *rest), *batch_normalization_grad(dY, X, *rest[:3])),
        (*batch_norm_internal(wide[0], *wide[2:]), *batch_normalization_grad(wide[1], wide[0], *wide[2:5])),
        strict=True,
    ):
        assert_same_bits(got, cast(expected, np.dtype(dtype)))


def test_each_tensor_keeps_its_dtype() -> None:
    X, dY = drawn((3, 4, 5), (3, 4, 5), dtype=FLOAT16)
    scale, mean = drawn((4,), (4,), dtype=np.float32)
    statistics = mean.astype(np.float64)
    outputs = batch_norm_internal(X, scale, scale, statistics, statistics)
    assert [one.dtype for one in outputs] == [np.float16, *[np.float64] * 4]
    gradients = batch_normalization_grad(dY, X, scale, statistics, statistics)
    assert [one.dtype for one in gradients] == [np.float16, np.float32, np.float32]


def test_nothing_and_one_number() -> None:
    dY, X, one = drawn((0, 3, 2), (0, 3, 2), (3,))
    X_grad, scale_grad, bias_grad = batch_normalization_grad(dY, X, one, one, one)
    assert X_grad.shape == (0, 3, 2)
    np.testing.assert_array_equal([scale_grad, bias_grad], np.zeros((2, 3)))
    with pytest.raises(ShapeMismatch, match=r"X has shape \[0, 3, 2\], but needs numbers"):
        batch_norm_internal(X, one, one, one, one)
    assert batch_norm_internal(X, one, one, one, one, training_mode=0)[0].shape == (0, 3, 2)
    assert batch_norm_internal(np.ones((2, 0)), *[np.ones(0)] * 4)[0].shape == (2, 0)
    dY, X, scale = drawn((1, 3, 1, 1), (1, 3, 1, 1), (3,))
    Y, _, _, mean, inv = batch_norm_internal(X, scale, one, one, one)
    np.testing.assert_array_equal(Y[0, :, 0, 0], one)
    np.testing.assert_allclose(batch_normalization_grad(dY, X, scale, mean, inv)[0], 0, atol=1e-10)


def test_a_nan_stays_in_its_channel() -> None:
    dY, X, one = drawn((2, 3, 4), (2, 3, 4), (3,))
    X[0, 1, 2] = np.nan
    X_grad, scale_grad, bias_grad = batch_normalization_grad(dY, X, one, one, one)
    assert np.isnan(X_grad[:, 1]).all()
    assert np.isfinite(X_grad[:, [0, 2]]).all()
    np.testing.assert_array_equal(np.isnan(scale_grad), [False, True, False])
    assert np.isfinite(bias_grad).all()


def test_bad_input_is_refused() -> None:
    shapes = {"dY": (2, 3, 4), "X": (2, 3, 4), "scale": (3,), "mean": (3,), "variance": (3,)}
    wrong: list[tuple[str, tuple[int, ...], type[GradserveError], str]] = [
        ("X", (6,), ShapeMismatch, r"X has shape \[6\], but must have 2 dimensions or more"),
        ("dY", (2, 3, 3), ShapeMismatch, "dY has shape"),
        ("scale", (4,), ShapeMismatch, r"scale has shape \[4\], but must have \[3\]"),
        ("mean", (3, 1), ShapeMismatch, "mean has shape"),
        ("variance", (0,), ShapeMismatch, "variance has shape"),
    ]
    for name, shape, error, message in wrong:
        with pytest.raises(error, match=message):
            batch_normalization_grad(*drawn(*{**shapes, name: shape}.values()))
    dY, X, one = drawn((2, 3), (2, 3), (3,))
    with pytest.raises(DtypeMismatch):
        batch_normalization_grad(dY.astype(np.float32), X, one, one, one)
