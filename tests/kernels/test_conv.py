"""ConvGrad and ConvTransposeGrad: finite differences, threads, empty tensors, and calls that end ONNX Runtime."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest

from service.dtypes import BFLOAT16, FLOAT16, Array, cast
from service.errors import GradserveError, InvalidParameter, ShapeMismatch
from service.kernels import MAX_MULTIPLY_ADDS, OPERATORS
from service.kernels.conv import conv_grad, conv_transpose_grad
from tests.kernels.calls import peak_bytes
from tests.kernels.equality import assert_same_bits
from tests.kernels.gradcheck import check_gradient
from tests.kernels.threads import threads

OUTPUTS = ("dX", "dW", "dB")


def drawn(*shapes: tuple[int, ...], dtype: Any = np.float64) -> list[Array]:
    random = np.random.default_rng(3)
    return [np.asarray(random.normal(size=shape), dtype) for shape in shapes]


def conv(X: Array, W: Array, *, group: int, stride: int, dilation: int, pad: int) -> Array:
    """Conv with one spatial axis and the same padding at both ends, number by number."""
    N, M, k = len(X), len(W), W.shape[2]
    padded = np.pad(X, ((0, 0), (0, 0), (pad, pad)))
    count = (padded.shape[2] - (k - 1) * dilation - 1) // stride + 1
    Y = np.zeros((N, M, count))
    for n, m, w, c, t in itertools.product(range(N), range(M), range(count), range(W.shape[1]), range(k)):
        first = m // (M // group) * W.shape[1]
        Y[n, m, w] += W[m, c, t] * padded[n, first + c, w * stride + t * dilation]
    return Y


def conv_transpose(X: Array, W: Array, *, group: int, stride: int, dilation: int, pad: int) -> Array:
    """ConvTranspose with one spatial axis and the same pads at both ends, number by number."""
    N, C, size = X.shape
    whole = np.zeros((N, W.shape[1] * group, (size - 1) * stride + (W.shape[2] - 1) * dilation + 1))
    for n, c, x, m, t in itertools.product(range(N), range(C), range(size), range(W.shape[1]), range(W.shape[2])):
        first = c // (C // group) * W.shape[1]
        whole[n, first + m, x * stride + t * dilation] += X[n, c, x] * W[c, m, t]
    return whole[:, :, pad : whole.shape[2] - pad]


@pytest.mark.parametrize(
    ("kernel", "forward", "shapes"),
    [(conv_grad, conv, [(2, 4, 8), (6, 2, 3)]), (conv_transpose_grad, conv_transpose, [(2, 4, 4), (4, 3, 3)])],
    ids=["Conv", "ConvTranspose"],
)
def test_gradients_are_finite_differences(
    kernel: Callable[..., Any], forward: Callable[..., Array], shapes: list[tuple[int, ...]]
) -> None:
    X, W = drawn(*shapes)
    for stride, dilation, pad in [(1, 1, 0), (2, 1, 1), (3, 2, 2), (2, 3, 1)]:
        run = partial(forward, group=2, stride=stride, dilation=dilation, pad=pad)
        grad = partial(kernel, strides=[stride], dilations=[dilation], pads=[pad, pad], group=2)
        check_gradient(partial(lambda run, x: run(x, W), run), partial(lambda grad, dY, x: grad(dY, x, W)[0], grad), X)
        check_gradient(partial(run, X), partial(lambda grad, dY, w: grad(dY, X, w)[1], grad), W)
        (dY,) = drawn(run(X, W).shape)
        np.testing.assert_allclose(grad(dY, X, W)[2], dY.sum(axis=(0, 2)), rtol=1e-12)


LARGE: dict[str, tuple[str, list[tuple[int, ...]], dict[str, Any]]] = {
    "windows over dY": ("ConvGrad", [(5, 40, 40, 40), (5, 40, 40, 40), (40, 40, 3, 3)], {"pads": [1] * 4}),
    "windows over X": (
        "ConvGrad",
        [(3, 32, 50, 50), (3, 3, 100, 100), (32, 3, 7, 7)],
        {"strides": [2, 2], "pads": [3] * 4},
    ),
    "groups": ("ConvGrad", [(3, 64, 30, 30), (3, 64, 30, 30), (64, 1, 3, 3)], {"pads": [1] * 4, "group": 64}),
    "rows": ("ConvGrad", [(5000, 100), (5000, 80), (100, 40)], {"group": 2}),
    "transposed": ("ConvTransposeGrad", [(4, 20, 60, 60), (4, 30, 30, 30), (30, 20, 2, 2)], {"strides": [2, 2]}),
}
"""Calls of several parts."""


@pytest.mark.parametrize("name", LARGE)
def test_bits_depend_on_neither_threads_nor_wanted_outputs(name: str) -> None:
    operator, shapes, attributes = LARGE[name]
    inputs = dict(zip(("dY", "X", "W"), drawn(*shapes, dtype=np.float32), strict=True))
    run = OPERATORS[operator]
    whole = run(inputs, attributes)
    with threads(2):
        for output in OUTPUTS:
            assert_same_bits(run(inputs, attributes)[output], whole[output])
            assert_same_bits(run(inputs, attributes, [output])[output], whole[output])
    exact = run({key: array.astype(np.float64) for key, array in inputs.items()}, attributes)
    for output in OUTPUTS:
        np.testing.assert_allclose(whole[output], exact[output], atol=2e-6 * np.abs(exact[output]).max(), rtol=0)


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16])
def test_16_bit_floats_are_rounded_once(dtype: Any) -> None:
    for operator, shapes in {
        "ConvGrad": [(2, 3, 4, 4), (2, 2, 5, 5), (3, 2, 2, 2)],
        "ConvTransposeGrad": [(2, 2, 5, 5), (2, 3, 4, 4), (3, 2, 2, 2)],
    }.items():
        inputs = dict(zip(("dY", "X", "W"), drawn(*shapes, dtype=dtype), strict=True))
        wide = OPERATORS[operator]({name: array.astype(np.float32) for name, array in inputs.items()}, {})
        for name, got in OPERATORS[operator](inputs, {}).items():
            assert_same_bits(got, cast(wide[name], np.dtype(dtype)))


def test_nothing_gives_zeros() -> None:
    for shapes in (
        [(0, 4, 3, 3), (0, 2, 5, 5), (4, 2, 3, 3)],
        [(2, 4, 3, 3), (2, 0, 5, 5), (4, 0, 3, 3)],
        [(2, 0, 3, 3), (2, 2, 5, 5), (0, 2, 3, 3)],
        [(0, 3), (0, 2), (3, 2)],
    ):
        dY, X, W = drawn(*shapes)
        dX, dW, dB = conv_grad(dY, X, W)
        assert_same_bits(dX, np.zeros_like(X))
        assert_same_bits(dW, np.zeros_like(W))
        np.testing.assert_allclose(dB, dY.reshape(*dY.shape[:2], -1 if dY.size else 0).sum(axis=(0, 2)))
    dY, X, W = drawn((0, 3, 6, 6), (0, 2, 4, 4), (2, 3, 3, 3))
    assert all(not gradient.any() for gradient in conv_transpose_grad(dY, X, W))


def test_rows_are_products_of_matrices() -> None:
    dY, X, W = drawn((5, 6), (5, 4), (6, 2))
    dX, dW, dB = conv_grad(dY, X, W, group=2)
    halves = [(slice(0, 3), slice(0, 2)), (slice(3, 6), slice(2, 4))]
    np.testing.assert_allclose(dX, np.concatenate([dY[:, m] @ W[m] for m, _ in halves], axis=1))
    np.testing.assert_allclose(dW, np.concatenate([dY[:, m].T @ X[:, c] for m, c in halves]))
    np.testing.assert_allclose(dB, dY.sum(axis=0))


def test_nan_stays_in_its_image_and_in_dW() -> None:
    dY, X, W = drawn((2, 3, 4, 4), (2, 2, 5, 5), (3, 2, 2, 2))
    dY[1, 0, 0, 0] = np.nan
    dX, dW, dB = conv_grad(dY, X, W)
    assert np.isfinite(dX[0]).all()
    assert np.isnan(dX[1, :, 0, 0]).all()
    assert np.isnan(dW[0, 0, 0, 0])
    np.testing.assert_array_equal(np.isnan(dB), [True, False, False])


SHAPES = [(1, 2, 3, 3), (1, 2, 5, 5), (2, 2, 3, 3)]
WRONG: dict[str, tuple[type[GradserveError], dict[str, Any], str]] = {
    "strides 0": (InvalidParameter, {"strides": [0, 1]}, r"strides\[0\] is 0"),
    "strides negative": (InvalidParameter, {"strides": [1, -1]}, r"strides\[1\] is -1"),
    "strides short": (InvalidParameter, {"strides": [1]}, "strides has the length 1, but must have 2"),
    "strides huge": (InvalidParameter, {"strides": [1, 1 << 62]}, r"strides\[1\]"),
    "dilations 0": (InvalidParameter, {"dilations": [0, 1]}, r"dilations\[0\] is 0"),
    "pads negative": (InvalidParameter, {"pads": [0, 0, -1, 0]}, r"pads\[2\] is -1"),
    "pads short": (InvalidParameter, {"pads": [1, 1]}, "pads has the length 2, but must have 4"),
    "kernel_shape": (InvalidParameter, {"kernel_shape": [3]}, r"kernel_shape is \[3\], but must be \[3, 3\]"),
    "group": (InvalidParameter, {"group": 3}, "group is 3, but must divide the 2 channels"),
    "dY": (ShapeMismatch, {"dY": (1, 2, 4, 3)}, r"dY has shape \[1, 2, 4, 3\], but must have"),
    "dY's rank": (ShapeMismatch, {"dY": (1, 2, 9)}, "dY has shape"),
    "X's rank": (ShapeMismatch, {"X": (2,)}, r"X has shape \[2\], but must have 2 dimensions or more"),
    "W's rank": (ShapeMismatch, {"W": (2, 2, 3)}, "W has shape"),
    "W's kernel": (ShapeMismatch, {"W": (2, 2, 0, 3)}, "kernel must have elements"),
    "channels": (ShapeMismatch, {"X": (1, 3, 5, 5)}, "X has shape"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_refused(name: str) -> None:
    error, given, message = WRONG[name]
    attributes = {key: value for key, value in given.items() if not isinstance(value, tuple)}
    dY, X, W = drawn(*(given.get(tensor, shape) for tensor, shape in zip(("dY", "X", "W"), SHAPES, strict=True)))
    with pytest.raises(error, match=message):
        conv_grad(dY, X, W, **attributes)


def test_a_kernel_larger_than_the_padded_input_is_refused() -> None:
    dY, X, W = drawn((1, 2, 1, 1), (1, 2, 5, 2), (2, 2, 3, 3))
    with pytest.raises(ShapeMismatch, match="X has 2 elements, padding included, along axis 3, but a window takes 3"):
        conv_grad(dY, X, W)
    dY, X, W = drawn((1, 2, 3, 1), (1, 2, 5, 2), (2, 2, 3, 3))
    assert conv_grad(dY, X, W, pads=[0, 0, 0, 1])[0].shape == X.shape


def test_conv_transpose_refuses_outputs_that_cannot_be() -> None:
    dY, X, W = drawn((1, 2, 3, 3), (1, 2, 3, 3), (2, 2, 2, 2))
    with pytest.raises(InvalidParameter, match=r"output_shape is \[9, 3\], but must be at most \[4, 4\]"):
        conv_transpose_grad(dY, X, W, output_shape=[9, 3])
    with pytest.raises(InvalidParameter, match=r"pads leave an output of shape \[-6, 4\]"):
        conv_transpose_grad(dY, X, W, pads=[5, 0, 5, 0])
    with pytest.raises(ShapeMismatch, match=r"dY has shape \[1, 2, 3, 3\], but must have \[1, 2, 4, 4\]"):
        conv_transpose_grad(dY, X, W)


def work(dY: tuple[int, ...], X: tuple[int, ...], W: tuple[int, ...]) -> int:
    tensors: Mapping[str, Array] = {
        name: np.broadcast_to(np.float32(1), shape) for name, shape in {"dY": dY, "X": X, "W": W}.items()
    }
    return OPERATORS["ConvGrad"].work(tensors, {})


def test_work_is_counted_before_it_is_done() -> None:
    usual = work((8, 64, 56, 56), (8, 64, 56, 56), (64, 64, 3, 3))
    products = 2 * 8 * 64 * 56 * 56 * 64 * 9
    assert products < usual < 3 * products
    assert work((1, 1, 200, 200), (1, 1, 1199, 1199), (1, 1, 1000, 1000)) > MAX_MULTIPLY_ADDS
    assert work((1, 0, 3, 3), (1, 0, 5, 5), (0, 0, 1 << 40, 1)) == 0


def test_padding_takes_no_memory() -> None:
    """The largest pads, with windows so far apart that each sees one element or none."""
    dY, X, W = drawn((1, 1, 3), (1, 1, 4), (1, 1, 2))
    attributes: dict[str, Any] = {"pads": [1 << 31, 1 << 31], "strides": [1 << 31], "dilations": [3]}
    assert peak_bytes(lambda: conv_grad(dY, X, W, **attributes)) < 1 << 16
    dX, dW, _ = conv_grad(dY, X, W, **attributes)
    np.testing.assert_array_equal(dX[0, 0], [dY[0, 0, 1] * W[0, 0, 0], 0, 0, dY[0, 0, 1] * W[0, 0, 1]])
    np.testing.assert_array_equal(dW[0, 0], dY[0, 0, 1] * X[0, 0, [0, 3]])


def test_memory_is_bounded() -> None:
    dY, X, W = drawn((4, 64, 48, 48), (4, 64, 48, 48), (64, 64, 3, 3), dtype=np.float32)
    columns = 9 * dY.nbytes
    assert peak_bytes(lambda: conv_grad(dY, X, W, pads=[1] * 4)) < X.nbytes + (12 << 20) < columns


def test_many_empty_images_take_no_memory() -> None:
    dY, X, W = np.zeros((1 << 40, 4, 0)), np.zeros((1 << 40, 0, 4)), np.zeros((0, 4, 1))
    assert peak_bytes(lambda: conv_transpose_grad(dY, X, W, pads=[2, 2])) < 1 << 16
