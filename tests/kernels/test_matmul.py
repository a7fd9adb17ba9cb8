from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from service.dtypes import BFLOAT16, FLOAT16, Array
from service.errors import ShapeMismatch
from service.kernels import MAX_MULTIPLY_ADDS, OPERATORS
from service.kernels.matmul import fused_matmul
from tests.kernels.equality import assert_close, assert_same_bits
from tests.kernels.threads import threads

OPERATOR = OPERATORS["FusedMatMul"]


def normal(*shape: int, dtype: Any = np.float64) -> Array:
    return np.random.default_rng(sum(shape) + len(shape)).normal(size=shape).astype(dtype)


@pytest.mark.parametrize(
    ("a", "b", "attributes", "subscripts"),
    [
        ((4, 5), (5, 6), {}, "mk,kn->mn"),
        ((5, 4), (6, 5), {"transA": 1, "transB": 1}, "km,nk->mn"),
        ((2, 3, 4, 5), (5, 6), {}, "abmk,kn->abmn"),
        ((2, 3, 5, 4), (5, 6), {"transA": 1}, "abkm,kn->abmn"),
        ((4, 5), (2, 3, 5, 6), {}, "mk,abkn->abmn"),
        ((2, 4, 5), (3, 2, 6, 5), {"transB": 1}, "amk,bank->bamn"),
        ((4, 2, 3, 5), (2, 3, 5, 6), {"transBatchA": 1}, "mabk,abkn->abmn"),
        ((5, 2, 3, 4), (2, 3, 5, 6), {"transBatchA": 1, "transA": 1}, "kabm,abkn->abmn"),
        ((3, 4, 5), (5, 3, 6), {"transBatchB": 1}, "amk,kan->amn"),
        ((3, 4, 5), (6, 3, 5), {"transBatchB": 1, "transB": 1}, "amk,nak->amn"),
        ((5,), (5,), {"transA": 1, "transB": 1}, "k,k->"),
        ((5,), (5, 6), {"transA": 1}, "k,kn->n"),
        ((3, 4, 5), (5,), {"transB": 1}, "amk,k->am"),
    ],
)
def test_all_orders_of_dimensions(a: Any, b: Any, attributes: dict[str, Any], subscripts: str) -> None:
    A, B = normal(*a), normal(*b)
    expected = np.einsum(subscripts, A, B)
    assert_close(fused_matmul(A, B, **attributes), np.asarray(expected), rtol=1e-13, atol=1e-13)
    assert_close(fused_matmul(A, B, alpha=-0.5, **attributes), np.asarray(-0.5 * expected), rtol=1e-13, atol=1e-13)


def test_the_gradients_of_a_product_are_products() -> None:
    """<dY, A B> = <dA, A> = <dB, B>, as a backward graph computes dA and dB."""
    A, B, dY = normal(3, 4, 5), normal(3, 5, 6), normal(3, 4, 6)
    whole = float((dY * fused_matmul(A, B, alpha=0.25)).sum())
    dA, dB = fused_matmul(dY, B, alpha=0.25, transB=1), fused_matmul(A, dY, alpha=0.25, transA=1)
    np.testing.assert_allclose([(dA * A).sum(), (dB * B).sum()], whole, rtol=1e-12)


PIECES: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((64, 13, 13), (64, 13, 13), {}),
    ((1, 1300, 50), (50, 31), {}),
    ((50, 33), (50, 1300), {"transA": 1}),
    ((40, 60, 30), (30, 32), {}),
    ((300, 13, 8), (13, 8, 4), {"transBatchA": 1}),
]


@pytest.mark.parametrize(("a", "b", "attributes"), PIECES)
def test_bits_of_many_pieces_do_not_depend_on_threads(
    a: Any, b: Any, attributes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.kernels.matmul.PIECE_MULTIPLY_ADDS", 10_000)
    A, B = normal(*a, dtype=np.float32), normal(*b, dtype=np.float32)
    assert OPERATOR.work({"A": A, "B": B}, attributes) > 100_000
    alone = fused_matmul(A, B, **attributes)
    with threads(2):
        assert_same_bits(fused_matmul(A, B, **attributes), alone)
    exact = fused_matmul(A.astype(np.float64), B.astype(np.float64), **attributes)
    assert_close(alone.astype(np.float64), exact, atol=3e-5)


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
def test_16_bit_floats_are_rounded_once(dtype: Any) -> None:
    A, B = normal(70, 33, dtype=dtype), normal(33, 41, dtype=dtype)
    expected = fused_matmul(A.astype(np.float32), B.astype(np.float32), alpha=0.3)
    assert_same_bits(fused_matmul(A, B, alpha=0.3), expected.astype(dtype))


def test_without_terms_the_product_is_zero() -> None:
    assert_same_bits(fused_matmul(np.ones((2, 0)), np.ones((0, 3))), np.zeros((2, 3)))
    assert_same_bits(fused_matmul(np.ones((4, 2, 0)), np.ones((0, 3))), np.zeros((4, 2, 3)))
    assert fused_matmul(np.ones((0, 4, 5)), np.ones((5, 6))).shape == (0, 4, 6)
    assert fused_matmul(np.ones((2, 0, 5)), np.ones((1, 5, 0))).shape == (2, 0, 0)


def test_nan_and_infinity_stay_in_their_rows() -> None:
    A = np.array([[1, np.nan], [np.inf, 1], [1, 1]], np.float32)
    Y = fused_matmul(A, np.ones((2, 2), np.float32))
    assert np.isnan(Y[0]).all()
    assert np.isposinf(Y[1]).all()
    assert Y[2].tolist() == [2, 2]


@pytest.mark.parametrize(
    ("a", "b", "attributes", "tensor"),
    [
        ((4, 5), (4, 6), {}, "B"),
        ((4, 5), (5, 6), {"transA": 1}, "B"),
        ((4, 5), (5, 6), {"transB": 1}, "B"),
        ((2, 4, 5), (3, 5, 6), {}, "B"),
        ((0, 4, 5), (3, 5, 6), {}, "B"),
        ((4,), (5,), {}, "B"),
        ((), (5, 6), {}, "A"),
        ((4, 5), (), {}, "B"),
        ((4, 5), (5, 6), {"transBatchA": 1}, "B"),
        ((4, 3, 5), (5, 6), {"transBatchB": 1}, "B"),
        ((4, 3, 5), (2, 3, 5, 6), {"transBatchA": 1}, "B"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(a: Any, b: Any, attributes: dict[str, Any], tensor: str) -> None:
    with pytest.raises(ShapeMismatch) as caught:
        fused_matmul(np.ones(a), np.ones(b), **attributes)
    assert caught.value.context == {"tensor": tensor}
    assert OPERATOR.work({"A": np.ones(a), "B": np.ones(b)}, attributes) >= 0


def test_work_is_known_before_the_product() -> None:
    row = np.broadcast_to(np.float32(1), (1 << 21, 1))
    assert OPERATOR.work({"A": row, "B": row}, {"transB": 1}) == 1 << 42 > MAX_MULTIPLY_ADDS
    assert OPERATOR.work({"A": np.ones((7, 3, 4)), "B": np.ones((4, 5))}, {}) == 7 * 3 * 4 * 5
    assert OPERATOR.work({"A": np.ones((0, 3, 4)), "B": np.ones((1, 4, 5))}, {}) == 0
    assert OPERATOR.work({"A": np.ones((3, 0)), "B": np.ones((0, 5))}, {}) == 15
    assert set(inspect.signature(fused_matmul).parameters) == {
        *("A", "B", "alpha", "transA", "transB", "transBatchA", "transBatchB")
    }
