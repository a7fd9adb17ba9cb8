"""ResizeGrad: places computed by hand, threads, 16-bit floats, and calls that are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from service.dtypes import BFLOAT16, FLOAT16, Array, cast
from service.errors import AxisOutOfRange, GradserveError, InvalidParameter, InvalidTensor, MissingTensor, ShapeMismatch
from service.kernels.resize import resize_grad
from tests.kernels.equality import assert_same_bits
from tests.kernels.threads import threads


def matrix(size: int, count: int, **given: Any) -> Array:
    """How much each of the `count` resized elements takes from each of `size` elements, as the gradient says."""
    scales = None if "scale" not in given else np.array([given.pop("scale")])
    roi = None if "roi" not in given else np.array(given.pop("roi"))
    X = np.zeros(size)
    return np.stack([resize_grad(one, X, roi, scales, **given) for one in np.eye(count)])


# Attributes, sizes, and the matrix that ONNX's formulas give
BY_HAND: list[tuple[dict[str, Any], int, int, list[list[float]]]] = [
    ({"mode": "linear"}, 2, 4, [[1, 0], [0.75, 0.25], [0.25, 0.75], [0, 1]]),
    ({"mode": "linear", "coordinate_transformation_mode": "align_corners"}, 2, 3, [[1, 0], [0.5, 0.5], [0, 1]]),
    ({"mode": "linear", "coordinate_transformation_mode": "asymmetric"}, 2, 4, [[1, 0], [0.5, 0.5], [0, 1], [0, 1]]),
    ({"mode": "linear", "coordinate_transformation_mode": "pytorch_half_pixel"}, 3, 1, [[1, 0, 0]]),
    ({"mode": "linear"}, 3, 1, [[0, 1, 0]]),
    ({"mode": "linear", "coordinate_transformation_mode": "half_pixel_symmetric", "scale": 0.6}, 4, 2,
     [[1 / 3, 2 / 3, 0, 0], [0, 0, 2 / 3, 1 / 3]]),
    ({"nearest_mode": "floor"}, 2, 3, [[1, 0], [1, 0], [0, 1]]),
    ({"nearest_mode": "round_prefer_floor"}, 4, 2, [[1, 0, 0, 0], [0, 0, 1, 0]]),
    ({"nearest_mode": "round_prefer_ceil"}, 4, 2, [[0, 1, 0, 0], [0, 0, 0, 1]]),
    ({"nearest_mode": "ceil", "coordinate_transformation_mode": "asymmetric"}, 2, 4, [[1, 0], [0, 1], [0, 1], [0, 1]]),
    ({"nearest_mode": "floor", "coordinate_transformation_mode": "tf_half_pixel_for_nn"}, 3, 2, [[1, 0, 0], [0, 0, 1]]),
    ({"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize", "roi": [0.25, 1.25]}, 3, 5,
     [[0.5, 0.5, 0], [0, 1, 0], [0, 0.5, 0.5], [0, 0, 1], [0, 0, 0]]),
]  # fmt: skip


def test_places_and_weights_are_those_of_onnx() -> None:
    for attributes, size, count, expected in BY_HAND:
        np.testing.assert_allclose(matrix(size, count, **attributes), expected, atol=1e-15, err_msg=str(attributes))


def test_cubic_weights() -> None:
    """Half-way between elements the weights are -1/16, 9/16, 9/16, -1/16. Outside counts as the edge, or not at all."""
    edge = matrix(4, 2, mode="cubic", cubic_coeff_a=-0.5)
    np.testing.assert_allclose(edge, [[0.5, 0.5625, -0.0625, 0], [0, -0.0625, 0.5625, 0.5]], atol=1e-15)
    without = matrix(4, 2, mode="cubic", cubic_coeff_a=-0.5, exclude_outside=1)
    np.testing.assert_allclose(without[0] * (17 / 16), [0.5625, 0.5625, -0.0625, 0], atol=1e-15)


def test_what_does_not_change_passes_through() -> None:
    dY = np.random.default_rng(1).normal(size=(2, 3, 4))
    for scales in (None, np.ones(3), np.array([1, 1.1, 1.2])):
        np.testing.assert_array_equal(resize_grad(dY, np.zeros_like(dY), None, scales, mode="cubic"), dY)


def test_axes_choose() -> None:
    dY = np.random.default_rng(1).normal(size=(6, 2, 4))
    X = np.zeros((3, 2, 2))
    got = resize_grad(dY, X, None, np.array([2.0, 2.0]), axes=[-1, 0], mode="linear")
    np.testing.assert_allclose(got, resize_grad(dY, X, None, np.array([2.0, 1.0, 2.0]), mode="linear"))


def test_threads_and_16_bit_floats() -> None:
    dY = np.random.default_rng(1).normal(size=(4, 8, 96, 70)).astype(np.float32)
    X = np.zeros((4, 8, 64, 96), np.float32)
    whole = resize_grad(dY, X, mode="linear")
    with threads(2):
        assert_same_bits(resize_grad(dY, X, mode="linear"), whole)
    exact = resize_grad(dY.astype(np.float64), X.astype(np.float64), mode="linear")
    np.testing.assert_allclose(whole, exact, rtol=0, atol=1e-6 * np.abs(exact).max())
    for dtype in (FLOAT16, BFLOAT16):
        narrow = cast(dY, dtype)
        expected = resize_grad(narrow.astype(np.float32), X, mode="linear")
        assert_same_bits(resize_grad(narrow, X.astype(dtype), mode="linear"), cast(expected, dtype))


def test_nothing_gives_zeros() -> None:
    np.testing.assert_array_equal(resize_grad(np.ones((0, 4)), np.ones((0, 2)), mode="linear"), np.ones((0, 2)))
    np.testing.assert_array_equal(resize_grad(np.ones((3, 0)), np.ones((3, 2)), mode="linear"), np.zeros((3, 2)))


CROP = {"coordinate_transformation_mode": "tf_crop_and_resize"}
WRONG: list[tuple[dict[str, Any], type[GradserveError], str]] = [
    ({"X": (2, 2)}, ShapeMismatch, r"dY has shape \[4\], but must have the rank of X, 2"),
    ({"X": (0,)}, ShapeMismatch, r"X, \[0\], is empty"),
    ({"axes": []}, ShapeMismatch, "along all but"),
    ({"axes": [1]}, AxisOutOfRange, "axis 1"),
    ({"axes": [0, -1]}, InvalidParameter, "must not have an axis twice"),
    ({"scales": [0.0]}, InvalidTensor, r"scales\[0\] is 0.0, but must be above 0 and finite"),
    ({"scales": [np.nan]}, InvalidTensor, r"scales\[0\] is nan"),
    ({"scales": [2.0, 1.0]}, ShapeMismatch, r"scales has shape \[2\], but must have \[1\]"),
    ({"scales": [3.0]}, ShapeMismatch, "dY has 4 elements along axis 0, but must have 6: 2 times 3.0"),
    ({"scales": [1e300]}, ShapeMismatch, "2 times 1e[+]300"),
    ({"scales": [1.5e308]}, ShapeMismatch, "must have inf: 2 times 1.5e[+]308"),
    ({"exclude_outside": 1}, InvalidParameter, "exclude_outside is 1, but must be 0 in mode nearest"),
    (CROP, MissingTensor, "needs the input 'roi'"),
    ({**CROP, "roi": [0.0]}, ShapeMismatch, "roi has shape"),
    ({**CROP, "roi": [0.0, np.inf]}, InvalidTensor, "roi must be finite"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "error", "message"), WRONG)
def test_bad_input_is_refused(given: dict[str, Any], error: type[GradserveError], message: str) -> None:
    given = dict(given)
    X = np.zeros(given.pop("X", (2,)))
    roi, scales = (
        None if one is None else np.array(one) for one in (given.pop("roi", None), given.pop("scales", None))
    )
    with pytest.raises(error, match=message):
        resize_grad(np.ones(4), X, roi, scales, **given)
