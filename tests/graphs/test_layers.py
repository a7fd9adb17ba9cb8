"""Convolutions, pools and normalizations, against PyTorch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch

from service.dtypes import BFLOAT16, FLOAT16, Array
from service.errors import GradserveError, InvalidGraph
from service.graphs.nodes import step_of
from service.graphs.plan import Node
from service.kernels.resize import resize_grad
from tests.graphs.gradients.layers import LAYERS
from tests.graphs.gradients.question import Question
from tests.graphs.gradients.questions import QUESTIONS
from tests.graphs.gradients.recurrent import RECURRENT
from tests.graphs.test_nodes import reference

ALL = QUESTIONS | LAYERS | RECURRENT
each_layer = pytest.mark.parametrize("layer", (LAYERS | RECURRENT).values(), ids=LAYERS | RECURRENT)


def node(op: str, inputs: int, outputs: int = 1, **attributes: Any) -> Node:
    names = tuple(f"x{k}" for k in range(inputs)), tuple(f"y{k}" for k in range(outputs))
    return Node(op, "", 21, names[0], names[1], attributes)


def run(op: str, *given: Array | None, outputs: int = 1, **attributes: Any) -> Any:
    return step_of(node(op, len(given), outputs, **attributes)).function(*given)


@pytest.mark.parametrize("question", ALL.values(), ids=ALL)
def test_a_node_gives_what_pytorch_gives(question: Question) -> None:
    given = [None if one is None else torch.from_numpy(one.copy()) for one in question.inputs]
    expected = question.torch(*given)
    for got, one in zip(question.outputs_of(question.tensors(np.float64)), _tuple(expected), strict=True):
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, one.numpy(), rtol=1e-12, atol=1e-12)


@each_layer
def test_a_layer_of_narrower_floats_is_rounded_once(layer: Question) -> None:
    for dtype, rounding in ((np.dtype(np.float32), 2e-6), (FLOAT16, 6e-4), (BFLOAT16, 5e-3)):
        given = layer.tensors(dtype)
        wide = {k: one.astype(np.float64) if getattr(one, "dtype", None) == dtype else one for k, one in given.items()}
        for got, expected in zip(layer.outputs_of(given), layer.outputs_of(wide), strict=True):
            assert got.dtype == dtype
            most = rounding * np.abs(expected).max()
            np.testing.assert_allclose(got.astype(np.float64), expected, rtol=rounding, atol=most)


@each_layer
def test_tensors_may_lie_in_any_order(layer: Question) -> None:
    inputs = tuple(None if one is None else np.asfortranarray(one) for one in layer.inputs)
    turned = replace(layer, inputs=inputs)
    got, expected = turned.by_rule(np.dtype(np.float64)), layer.by_rule(np.dtype(np.float64))
    for name in layer.trained:
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-12, atol=1e-12)


def _tuple(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def test_the_indices_of_a_pool_are_places_in_all_of_the_tensor() -> None:
    X = np.round(np.random.default_rng(1).normal(size=(2, 3, 6, 6)), 1)  # with equal numbers: the first one counts
    Y, indices = run("MaxPool", X, outputs=2, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    expected, places = torch.nn.functional.max_pool2d(torch.from_numpy(X), 3, 2, 1, return_indices=True)
    assert Y.tolist() == expected.tolist()
    assert indices.dtype == np.int64
    assert indices.tolist() == (places.numpy() + np.arange(6).reshape(2, 3, 1, 1) * 36).tolist()
    assert (X.reshape(-1)[indices] == Y).all()


def test_pools_take_bytes_and_nan() -> None:
    given = np.array([[[3, 200, 7]]], np.uint8)
    assert run("MaxPool", given, kernel_shape=[2], storage_order=0).tolist() == [[[200, 200]]]
    assert np.isnan(run("MaxPool", np.array([[[1, np.nan, 2, 1]]]), kernel_shape=[2])).tolist() == [
        [[True, True, False]]
    ]
    Y, indices = run("MaxPool", np.array([[[5.0]]]), outputs=2, kernel_shape=[1], pads=[1, 0])
    assert (Y.tolist(), indices.tolist()) == ([[[-np.inf, 5.0]]], [[[-1, 0]]])


@pytest.mark.parametrize(
    ("op", "attributes", "detail"),
    [
        ("Conv", {"strides": [0, 1]}, "strides is .*, but must be .* of at least 1"),
        ("Conv", {"padding": [1]}, "Conv has no attribute 'padding'"),
        ("AveragePool", {}, "AveragePool needs the attribute kernel_shape"),
        ("GroupNormalization", {}, "num_groups is 0, but must be an integer of at least 1"),
    ],
)
def test_wrong_attributes_are_refused_at_upload(op: str, attributes: dict[str, Any], detail: str) -> None:
    with pytest.raises(InvalidGraph, match=detail):
        step_of(node(op, 1, **attributes))


X = np.ones((1, 4, 5, 5))


@pytest.mark.parametrize(
    ("op", "given", "attributes", "detail"),
    [
        ("Conv", [X, np.ones((2, 3, 3, 3))], {}, r"X has shape \[1, 4, 5, 5\], but must have \[1, 3, 5, 5\]"),
        ("Conv", [X, np.ones((2, 4, 3, 3)), np.ones(3)], {}, r"B has shape \[3\], but must have \[2\]"),
        ("Conv", [X, np.ones((2, 4, 3, 3))], {"pads": [1 << 21] * 4}, "multiplications and additions"),
        ("ConvTranspose", [X, np.ones((4, 2, 3, 3))], {"strides": [1 << 30] * 2}, "does not fit in memory"),
        ("MaxPool", [X], {"kernel_shape": [9, 1]}, "a window takes 9"),
        ("MaxPool", [X], {"kernel_shape": [1 << 30] * 2, "pads": [1 << 30] * 4}, "multiplications and additions"),
        ("AveragePool", [X[0, 0]], {"kernel_shape": []}, "must have 3 dimensions or more"),
        ("LayerNormalization", [X, np.ones(5)], {"axis": 4}, r"axis 4 is not in \[-4, 3\]"),
        ("GroupNormalization", [X, np.ones(4), np.ones(4)], {"num_groups": 3}, "channels, in 3 groups"),
        ("InstanceNormalization", [X, np.ones(3), np.ones(3)], {}, r"scale has shape \[3\], but must have \[4\]"),
    ],
)
def test_wrong_tensors_are_refused(op: str, given: list[Array], attributes: dict[str, Any], detail: str) -> None:
    with pytest.raises(GradserveError, match=detail):
        step_of(node(op, len(given), **attributes)).function(*given)


@pytest.mark.parametrize(
    ("op", "attributes", "detail"),
    [
        ("LSTM", {"layout": 1}, "layout is 1, but must be 0: X and Y begin with the steps"),
        ("LSTM", {"direction": "backward"}, "direction is 'backward'"),
        ("RNN", {"activations": ["Affine"]}, r"activations is \['affine'\], but must be 1 of tanh and relu"),
        ("GRU", {"clip": 0.5}, "clip is 0.5, but must be left out"),
    ],
)
def test_what_recurrent_nodes_cannot_do_is_refused(op: str, attributes: dict[str, Any], detail: str) -> None:
    given = [one.astype(np.float32) for one in RECURRENT[f"{op} forward"].inputs[:3] if one is not None]
    with pytest.raises(GradserveError, match=detail):
        run(op, *given, **attributes)


RESIZES: list[dict[str, Any]] = [
    {"mode": mode, "coordinate_transformation_mode": places, "nearest_mode": rounding}
    for mode in ("nearest", "linear", "cubic")
    for places in get_args(get_type_hints(resize_grad)["coordinate_transformation_mode"])
    for rounding in (get_args(get_type_hints(resize_grad)["nearest_mode"]) if mode == "nearest" else ["floor"])
] + [{"mode": "cubic", "exclude_outside": 1, "cubic_coeff_a": -0.5}]


def test_resize_fits_its_gradient_in_every_mode() -> None:
    """The gradient has answers of ONNX Runtime and PyTorch in tests/golden."""
    image, crop = np.random.default_rng(2).normal(size=(1, 4, 6)), np.array([0, 0.2, -0.3, 1, 0.9, 1.2])
    for attributes in RESIZES:
        roi = crop if attributes.get("coordinate_transformation_mode") == "tf_crop_and_resize" else None
        for scales in (np.array([1, 1.75, 0.5], np.float32), np.array([1, 0.6, 2.5], np.float32)):
            Y = run("Resize", image, roi, scales, **attributes)
            dY = np.random.default_rng(3).normal(size=Y.shape)
            dX = resize_grad(dY, image, roi, scales, **attributes)
            assert float((dX * image).sum()) == pytest.approx(float((dY * Y).sum()), abs=1e-9), attributes


def test_what_lies_outside_of_a_crop_gets_the_extrapolation_value() -> None:
    options: dict[str, Any] = {
        "mode": "linear",
        "coordinate_transformation_mode": "tf_crop_and_resize",
        "extrapolation_value": 9.0,
    }
    Y = run("Resize", np.array([1.0, 2, 3]), np.array([-1.0, 1]), np.array([5 / 3]), **options)
    assert Y.tolist() == [9, 9, 1, 2, 3]


def test_resize_of_integers_and_of_kept_ratios() -> None:
    pixels = np.arange(6, dtype=np.uint8).reshape(1, 2, 3)
    for policy in ("stretch", "not_larger", "not_smaller"):
        given = pixels, None, None, np.array([4, 9])
        options: dict[str, Any] = {
            "keep_aspect_ratio_policy": policy,
            "axes": [1, 2],
            "coordinate_transformation_mode": "asymmetric",
        }
        got, expected = run("Resize", *given, **options), reference("Resize", *given, **options)
        assert (got.dtype, got.tolist()) == (np.uint8, expected.tolist())
    with pytest.raises(GradserveError, match="X is uint8, but must have floats"):
        run("Resize", pixels, None, np.array([1.0, 2, 2]), mode="linear")
    with pytest.raises(GradserveError, match=r"The sizes are \[1, 0, 3\], but must be 1 or more"):
        run("Resize", pixels, None, np.array([1.0, 0.4, 1]))
    with pytest.raises(GradserveError, match="Resize needs elements, and the input 'scales' or 'sizes'"):
        run("Resize", pixels)
