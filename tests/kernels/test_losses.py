from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from scipy.special import log_softmax

from service.dtypes import Array, cast
from service.errors import IndexOutOfRange, Invalid, InvalidTensor, ShapeMismatch
from service.kernels import OPERATORS
from service.kernels.losses import (
    Reduction,
    Total,
    negative_log_likelihood_loss_internal,
    softmax_cross_entropy,
    softmax_cross_entropy_grad,
    softmax_cross_entropy_loss,
    softmax_cross_entropy_loss_grad,
    softmax_cross_entropy_loss_internal,
    softmax_cross_entropy_loss_internal_grad,
    sparse_softmax_cross_entropy,
    sparse_softmax_cross_entropy_grad,
)
from tests.kernels.calls import FLOAT_DTYPES
from tests.kernels.equality import assert_close, assert_same_bits
from tests.kernels.gradcheck import check_gradient
from tests.kernels.threads import threads

REDUCTIONS: tuple[Reduction, ...] = ("mean", "sum", "none")
TOTALS: tuple[Total, ...] = ("mean", "sum")
SHAPES = [(4, 5), (3, 4, 2), (2, 3, 2, 2), (1, 1), (0, 3), (2, 3, 0)]
ONE = np.array(1.0)
INF, NAN = np.inf, np.nan


def numbers(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape)


def samples(shape: tuple[int, ...]) -> tuple[Array, Array, Array]:
    """Scores, labels and the weights of the classes, which are dimension 1."""
    random = np.random.default_rng(1)
    labels = random.integers(0, shape[1], (shape[0], *shape[2:]))
    return random.normal(size=shape), labels, random.uniform(0.5, 2, shape[1])


def loss(scores: Array, labels: Array, weights: Array | None = None, **attributes: Any) -> Array:
    return softmax_cross_entropy_loss(scores, labels, weights, **attributes)[0]


def cases() -> Iterator[tuple[tuple[int, ...], Reduction, bool, int | None]]:
    return product(SHAPES, REDUCTIONS, (False, True), (None, 0))


def test_gradient_of_the_loss() -> None:
    for shape, reduction, weighted, ignored in cases():
        scores, labels, weights = samples(shape)
        given = (labels, weights if weighted else None)
        more: Any = {"reduction": reduction, "ignore_index": ignored}

        def grad(dY: Array, X: Array, given: Any = given, more: Any = more) -> Array:
            return softmax_cross_entropy_loss_grad(dY, log_softmax(X, axis=1) if X.size else X, *given, **more)

        check_gradient(lambda X, given=given, more=more: loss(X, *given, **more), grad, scores)  # type: ignore[misc]


def test_gradient_of_the_dense_loss_for_any_labels() -> None:
    for shape, reduction in product([(4, 5), (2, 3, 4), (3,), (0, 3)], TOTALS):
        scores, label = numbers(2, *shape)
        check_gradient(
            lambda X, label=label, reduction=reduction: softmax_cross_entropy(X, label, reduction=reduction)[0],  # type: ignore[misc]
            lambda dY, X, label=label, reduction=reduction: softmax_cross_entropy_grad(  # type: ignore[misc]
                dY, softmax_cross_entropy(X, label)[1], label, reduction=reduction
            ),
            scores,
        )


def test_gradient_of_the_sparse_loss() -> None:
    for shape, reduction, weighted in product([(4, 5), (2, 3, 4), (3,), (0, 3)], TOTALS, (False, True)):
        random = np.random.default_rng(2)
        label = np.asarray(random.integers(0, shape[-1], shape[:-1]))
        given = (label, np.asarray(random.uniform(0.5, 2, shape[:-1])) if weighted else None)
        check_gradient(
            lambda X, given=given, reduction=reduction: sparse_softmax_cross_entropy(X, *given, reduction=reduction)[0],  # type: ignore[misc]
            lambda dY, X, given=given, reduction=reduction: sparse_softmax_cross_entropy_grad(  # type: ignore[misc]
                dY, sparse_softmax_cross_entropy(X, *given)[1], *given, reduction=reduction
            ),
            numbers(*shape),
        )


def test_the_internal_operators_equal_the_others_bit_by_bit() -> None:
    for shape, reduction, weighted, ignored in cases():
        scores, labels, weights = samples(shape)
        given = (labels, weights if weighted else None)
        index = None if ignored is None else np.array([ignored], np.int32)
        more: Any = {"reduction": reduction, "ignore_index": ignored}
        expected, log_prob = softmax_cross_entropy_loss(scores, *given, **more)
        got, again = softmax_cross_entropy_loss_internal(scores, *given, index, reduction=reduction)
        assert_same_bits(got, expected)
        assert_same_bits(again, log_prob)
        assert_same_bits(negative_log_likelihood_loss_internal(log_prob, *given, index, reduction=reduction), expected)
        dY = np.ones(labels.shape if reduction == "none" else ())
        d_logits = softmax_cross_entropy_loss_grad(dY, log_prob, *given, **more)
        inputs = (dY, log_prob, *given, index)
        assert_same_bits(softmax_cross_entropy_loss_internal_grad(*inputs, reduction=reduction), d_logits)
        bias = numbers(scores.size)
        with_bias = softmax_cross_entropy_loss_internal_grad(*inputs, bias, reduction=reduction)
        assert_same_bits(with_bias, d_logits + bias.reshape(shape))


def test_labels_of_both_integers_and_ignored_ones_of_any_value() -> None:
    scores, labels, weights = samples((6, 3))
    for ignored in (-100, -(10**9), 1 << 40, 1 << 70, 3):
        place = labels.copy()
        if ignored < 1 << 63:
            place[[1, 4]] = ignored
        for kind in ("int32", "int64"):
            if ignored == 1 << 40 and kind == "int32":
                continue
            got = loss(scores, place.astype(kind), weights, reduction="none", ignore_index=ignored)
            expected = loss(scores, labels, weights, reduction="none")
            expected[place != labels] = 0
            assert_same_bits(got, expected)


def test_all_samples_ignored_give_a_loss_of_0_and_no_gradient() -> None:
    scores, labels = np.array([[NAN, 1.0], [INF, 2.0]], np.float32), np.full(2, -100)
    for reduction, weights in product(REDUCTIONS, (None, np.full(2, NAN, np.float32))):
        more: Any = {"reduction": reduction, "ignore_index": -100}
        shape = (2,) if reduction == "none" else ()
        assert_same_bits(loss(scores, labels, weights, **more), np.zeros(shape, np.float32))
        dY = np.full(shape, NAN, np.float32)
        d_logits = softmax_cross_entropy_loss_grad(dY, scores, labels, weights, **more)
        assert_same_bits(d_logits, np.zeros((2, 2), np.float32))


def test_weights_that_sum_to_0_do_not_divide() -> None:
    scores, labels, _ = samples((4, 2))
    labels = np.array([0, 1, 0, 1])
    for weights in (np.zeros(2), np.array([1.0, -1.0])):
        assert_same_bits(loss(scores, labels, weights), loss(scores, labels, weights, reduction="sum"))
        grads = [
            softmax_cross_entropy_loss_grad(ONE, scores, labels, weights, reduction=one) for one in ("mean", "sum")
        ]
        assert_same_bits(*grads)
    given = scores, labels, np.array([1.0, -1, 1, -1])
    assert_same_bits(sparse_softmax_cross_entropy(*given)[0], sparse_softmax_cross_entropy(*given, reduction="sum")[0])


def test_no_labels_at_all() -> None:
    for dtype, (shape, labels) in product(FLOAT_DTYPES, [((0, 3), (0,)), ((2, 3, 0), (2, 0)), ((0, 0), (0,))]):
        scores, none, one = np.empty(shape, dtype), np.empty(labels, np.int64), np.ones(1, dtype)
        for reduction in REDUCTIONS:
            output, log_prob = softmax_cross_entropy_loss(scores, none, reduction=reduction)
            assert_same_bits(output, np.zeros(labels if reduction == "none" else (), dtype))
            assert_same_bits(log_prob, scores)
            dY = np.ones(labels, dtype) if reduction == "none" else one
            assert_same_bits(softmax_cross_entropy_loss_grad(dY, scores, none, reduction=reduction), scores)
        rows = np.empty((0, 3), dtype)
        for output, _ in (softmax_cross_entropy(rows, rows), sparse_softmax_cross_entropy(rows, none.reshape(-1))):
            assert_same_bits(output, np.zeros((), dtype))
        assert_same_bits(softmax_cross_entropy_grad(one, rows, rows), rows)
        assert_same_bits(sparse_softmax_cross_entropy_grad(one, rows, none.reshape(-1)), rows)


def test_no_classes() -> None:
    scores = np.empty((2, 0))
    with pytest.raises(IndexOutOfRange, match=r"^labels\[0\] is 0, but scores has no classes$"):
        softmax_cross_entropy_loss(scores, np.zeros(2, np.int64))
    for weights in (None, np.empty(0)):
        assert_same_bits(loss(scores, np.full(2, -1), weights, ignore_index=-1), np.zeros(()))
    assert_same_bits(softmax_cross_entropy(scores, scores)[0], np.zeros(()))
    assert_same_bits(softmax_cross_entropy_grad(ONE, scores, scores), scores)


def test_a_label_outside_the_classes_is_named() -> None:
    scores, labels, weights = samples((2, 3, 4))
    for wrong in (-1, 3, -100, 1 << 40, -(1 << 63)):
        bad = labels.copy()
        bad[1, 2] = wrong
        for given in (None, weights):
            with pytest.raises(
                IndexOutOfRange, match=rf"^labels\[1\]\[2\] is {wrong}, but must be in \[0, 2\]$"
            ) as caught:
                loss(scores, bad, given)
            assert caught.value.context == {"tensor": "labels", "index": wrong}
            with pytest.raises(IndexOutOfRange, match=r"but must be in \[0, 2\]; only 5 is ignored$"):
                loss(scores, bad, given, ignore_index=5)
            with pytest.raises(IndexOutOfRange, match=r"^label\[1\]\[2\]"):
                softmax_cross_entropy_loss_grad(ONE, scores, bad, given)
        rows = np.moveaxis(scores, 1, 2)
        with pytest.raises(IndexOutOfRange, match=r"^label\[1\]\[2\]"):
            sparse_softmax_cross_entropy(rows, bad)
        with pytest.raises(IndexOutOfRange, match=r"^target\[1\]\[2\]"):
            negative_log_likelihood_loss_internal(scores, bad)
    with pytest.raises(IndexOutOfRange, match=r"^label is 3, but must be in \[0, 2\]$"):
        sparse_softmax_cross_entropy(np.ones(3), np.array(3))


# Tensor that is wrong -> its shape, and what the error says.
UNFIT: dict[str, tuple[str, tuple[int, ...], str]] = {
    "scalar": ("scores", (), r"\[\], but must have \[N, C\] or \[N, C, d1, ...\], where C is the number"),
    "vector": ("scores", (3,), r"\[3\], but must have \[N, C\] or"),
    "rank": ("labels", (4, 1), r"\[4, 1\], but must have \[4\]: that of scores without dimension 1, the classes"),
    "length": ("labels", (3,), r"\[3\], but must have \[4\]"),
    "scalar label": ("labels", (), r"\[\], but must have \[4\]"),
    "short weights": ("weights", (2,), r"\[2\], but must have \[3\]: a weight for each class of scores"),
    "weights of samples": ("weights", (4,), r"\[4\], but must have \[3\]"),
    "a matrix of weights": ("weights", (3, 1), r"\[3, 1\], but must have \[3\]"),
    "two ignored": ("ignore_index", (2,), r"\[2\], but must have one element"),
    "none ignored": ("ignore_index", (0,), r"\[0\], but must have one element"),
}


@pytest.mark.parametrize(("tensor", "shape", "reason"), UNFIT.values(), ids=UNFIT)
def test_shapes_that_do_not_fit(tensor: str, shape: tuple[int, ...], reason: str) -> None:
    kinds = {"scores": np.float32, "labels": np.int64, "weights": np.float32, "ignore_index": np.int64}
    shapes = {"scores": (4, 3), "labels": (4,), "weights": (3,), "ignore_index": (1,), tensor: shape}
    given = {name: np.zeros(shapes[name], kind) for name, kind in kinds.items()}
    with pytest.raises(Invalid, match=f"^{tensor} has shape {reason}") as caught:
        softmax_cross_entropy_loss_internal(*given.values())
    assert caught.value.context == {"tensor": tensor}
    assert type(caught.value) is (InvalidTensor if tensor == "ignore_index" else ShapeMismatch)
    theirs = {"scores": "log_prob", "labels": "label", "weights": "weight"}
    with pytest.raises(Invalid, match=f"^{theirs.get(tensor, tensor)} has shape"):
        softmax_cross_entropy_loss_internal_grad(np.ones(1, np.float32), *given.values())


@pytest.mark.parametrize("shape", [(0,), (2,), (4, 1), (1, 4)])
def test_dY_has_one_element_or_the_shape_of_the_labels(shape: tuple[int, ...]) -> None:
    log_prob, label, _ = samples((4, 3))
    for reduction in TOTALS:
        with pytest.raises(InvalidTensor, match="^dY has shape .*, but must have one element$"):
            softmax_cross_entropy_loss_grad(np.ones(shape), log_prob, label, reduction=reduction)
        with pytest.raises(InvalidTensor, match="^dY has shape .*, but must have one element$"):
            softmax_cross_entropy_grad(np.ones(shape), log_prob, log_prob, reduction=reduction)
    for given in (shape, ()):
        expected = r"^dY has shape .*, but must have \[4\]: that of the labels, with reduction none$"
        with pytest.raises(ShapeMismatch, match=expected):
            softmax_cross_entropy_loss_grad(np.ones(given), log_prob, label, reduction="none")


def test_a_bias_has_as_many_elements_as_log_prob() -> None:
    log_prob, label, _ = samples((4, 3))
    for count in (0, 1, 11, 24):
        with pytest.raises(ShapeMismatch, match=f"^bias has {count} elements, but must have as many as log_prob, 12$"):
            softmax_cross_entropy_loss_internal_grad(ONE, log_prob, label, None, None, np.ones(count))


def test_labels_and_weights_of_the_other_family() -> None:
    scores = numbers(4, 3)
    with pytest.raises(ShapeMismatch, match=r"^label has shape \[3\], but must have the shape of logits, \[4, 3\]$"):
        softmax_cross_entropy(scores, np.ones(3))
    with pytest.raises(ShapeMismatch, match=r"^weight has shape \[3\], but must have \[4\]: that of label$"):
        sparse_softmax_cross_entropy(scores, np.zeros(4, np.int64), np.ones(3))
    for kernel in (softmax_cross_entropy, sparse_softmax_cross_entropy):
        with pytest.raises(ShapeMismatch, match=r"^logits has shape \[\], but must have \[..., C\], where C"):
            kernel(ONE, np.array(0))


def test_a_mean_of_many_samples_is_exact() -> None:
    random = np.random.default_rng(3)
    scores = random.normal(size=(500_000, 2)).astype(np.float32)
    labels, weights = random.integers(0, 2, 500_000), np.array([0.3, 1.7], np.float32)
    for given in (None, weights):
        each = loss(scores, labels, given, reduction="none").astype(np.float64)
        total = each.sum() / (np.ones(2) if given is None else given.astype(np.float64))[labels].sum()
        assert loss(scores, labels, given) == pytest.approx(total, rel=6e-8)
        narrow = scores.astype(np.float16), labels, None if given is None else given.astype(np.float16)
        assert loss(*narrow) == pytest.approx(total, rel=2**-10)


def test_sums_over_many_classes_are_as_good_along_any_axis() -> None:
    wide = numbers(1, 60_000, 3).astype(np.float32)
    expected = log_softmax(wide.astype(np.float64), axis=1)
    labels = np.zeros((1, 3), np.int64)
    assert_close(softmax_cross_entropy_loss(wide, labels)[1], expected.astype(np.float32), rtol=3e-7)
    shares = np.abs(np.moveaxis(wide, 1, 2))
    got, _ = softmax_cross_entropy(np.ascontiguousarray(np.moveaxis(wide, 1, 2)), shares, reduction="sum")
    assert got == pytest.approx((shares.astype(np.float64) * -np.moveaxis(expected, 1, 2)).sum(), rel=1e-6)


def test_a_bad_row_leaves_the_others_alone() -> None:
    scores, labels, _ = samples((6, 5))
    expected, log_prob = softmax_cross_entropy_loss(scores, labels, reduction="none")
    for bad in (NAN, INF):
        spoiled = scores.copy()
        spoiled[2, 3] = bad
        got, logarithms = softmax_cross_entropy_loss(spoiled, labels, reduction="none")
        assert np.isnan(got[2])
        assert np.isnan(logarithms[2]).all()
        assert_same_bits(np.delete(got, 2), np.delete(expected, 2))
        assert_same_bits(np.delete(logarithms, 2, 0), np.delete(log_prob, 2, 0))


def test_an_impossible_class() -> None:
    scores, labels = np.array([[0.0, -INF], [-INF, 0.0]]), np.array([0, 0])
    got, log_prob = softmax_cross_entropy_loss(scores, labels, reduction="none")
    assert_same_bits(np.abs(got), np.array([0, INF]))
    assert_same_bits(
        softmax_cross_entropy_loss_grad(np.ones(2), log_prob, labels, reduction="none"),
        np.array([[0.0, 0.0], [-1.0, 1.0]]),
    )


def test_output_type() -> None:
    scores, labels, weights = samples((40, 7))
    for dtype in FLOAT_DTYPES:
        given = scores.astype(dtype), labels, weights.astype(dtype)
        wide = [one.astype(np.float32) if dtype.itemsize == 2 else one for one in given]
        for number, kind in {1: "float32", 10: "float16", 11: "float64", 16: "bfloat16"}.items():
            target = {str(one): one for one in FLOAT_DTYPES}[kind]
            got = softmax_cross_entropy_loss_internal(*given, output_type=number)  # type: ignore[arg-type]
            exact = softmax_cross_entropy_loss_internal(*wide)
            assert {one.dtype for one in got} == {target}
            assert_same_bits(got[1], cast(exact[1], target))
            assert_close(got[0], cast(exact[0], target), rtol=1e-7)
            dY = np.ones(1, dtype)
            grad = softmax_cross_entropy_loss_internal_grad(dY, *given, output_type=number)  # type: ignore[arg-type]
            assert_same_bits(
                grad, cast(softmax_cross_entropy_loss_internal_grad(dY.astype(wide[0].dtype), *wide), target)
            )


FORWARD: dict[str, tuple[Array, ...]] = {
    "SoftmaxCrossEntropyLoss": samples((300, 40, 9)),
    "SoftmaxCrossEntropyLossInternal": samples((2000, 100)),
    "SoftmaxCrossEntropy": (numbers(2000, 100), numbers(2000, 100, seed=1)),
    "SparseSoftmaxCrossEntropy": (numbers(3, 70_000), np.array([0, 7, 69_999])),
}


@pytest.mark.parametrize("name", FORWARD)
def test_bits_depend_on_neither_the_threads_nor_the_other_output(name: str) -> None:
    operator = OPERATORS[name]
    for dtype in ("float32", "float16"):
        given = [one.astype(dtype) if one.dtype == np.float64 else one for one in FORWARD[name]]
        tensors = dict(zip((one.name for one in operator.inputs), given, strict=False))
        whole = operator(tensors, {"reduction": "sum"})
        for output in operator.output_names:
            assert_same_bits(operator(tensors, {"reduction": "sum"}, [output])[output], whole[output])
        for count in (1, 2, 3):
            with threads(count):
                for output, array in operator(tensors, {"reduction": "sum"}).items():
                    assert_same_bits(array, whole[output])
        exact = operator(
            {
                key: np.asarray(one, np.float32 if one.dtype == np.float16 else one.dtype)
                for key, one in tensors.items()
            },
            {"reduction": "sum"},
        )
        for output, array in exact.items():
            assert_close(whole[output], array.astype(dtype), rtol=0 if output == "log_prob" else 1e-3)
