"""The contract of every store for gradients in 8 bits: they add as the numbers that they stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from service import errors
from service.buffers.changes import Add
from service.buffers.gradients import Coded
from service.buffers.store import Store
from service.codecs.codes import block_count, decode
from service.dtypes import NAMES, Array
from tests.buffers.calls import LARGE, add, create, fails_alone, part, value
from tests.kernels.calls import FLOAT_DTYPES, peak_bytes
from tests.kernels.equality import assert_same_bits


@pytest.fixture
def store(namespace: Store) -> Store:
    return namespace


def coded(shape: tuple[int, ...], seed: int = 1) -> Coded:
    chance = np.random.default_rng(seed)
    codes = chance.integers(-127, 128, shape).astype(np.int8)
    return Coded(codes, chance.standard_normal(block_count(codes.size), np.float32) ** 2)


def numbers(gradient: Coded) -> Array:
    return decode(gradient.codes.reshape(-1), gradient.scales).reshape(gradient.shape)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 3), (7, 300), (LARGE,), (0, 2), ()], ids=str)
def test_codes_add_as_their_numbers(store: Store, dtype: Any, shape: tuple[int, ...]) -> None:
    create(store, "coded", "dense", shape=shape, dtype=NAMES[dtype])
    calls: list[dict[str, Any]] = [{}, {"weight": -2.0}, {"overwrite": True, "weight": 0.5}, {"weight": 0.3}, {}]
    for seed, how in enumerate(calls):
        gradient = coded(shape, seed)
        one, other = add(store, "coded", gradient, **how), add(store, "dense", numbers(gradient), **how)
        assert {**one, "name": "dense"} == other
        assert_same_bits(value(store, "coded"), value(store, "dense"))


def test_codes_are_staged(store: Store) -> None:
    shapes = {"small": (3,), "middle": (90, 300), "large": (LARGE,)}
    for name, shape in shapes.items():
        create(store, name, f"{name} staged".replace(" ", "."), shape=shape)
    for push, weight in (("p", 1.0), ("q", 0.3)):
        gradients = {name: coded(shape, len(push + name)) for name, shape in shapes.items()}
        for number, (name, gradient) in enumerate(gradients.items(), 1):
            add(store, name, gradient, weight=weight)
            part(
                store,
                number,
                {f"{name}.staged": gradient},
                push=push,
                weight=weight,
                parts=4,
                request=f"{push}{number}",
            )
        part(store, 4, {}, push=push, weight=weight, parts=4)
    for name in shapes:
        assert_same_bits(value(store, f"{name}.staged"), value(store, name))


def test_codes_of_another_shape_are_refused(store: Store) -> None:
    create(store, "a", shape=(2, 300))
    for shape in ((600,), (300, 2), (2, 299), ()):
        error = fails_alone(store, errors.ShapeMismatch, Add(name="a", gradient=coded(shape)))
        assert "gradient/codes has shape" in error.detail


@pytest.mark.parametrize("scale", [np.nan, np.inf])
def test_scales_that_are_not_finite_follow_the_rule(store: Store, scale: float) -> None:
    create(store, "a", shape=(600,), nonfinite="reject")
    create(store, "limited", shape=(600,), max_norm=1e9)
    gradient = coded((600,))
    gradient.scales[1] = scale
    fails_alone(store, errors.NonfiniteGradient, Add(name="a", gradient=gradient))
    fails_alone(store, errors.NormTooLarge, Add(name="limited", gradient=gradient))


def test_no_copy_of_all_numbers_is_made(store: Store) -> None:
    create(store, "a", shape=(8 * LARGE,))
    gradient = coded((8 * LARGE,))
    add(store, "a", gradient)
    assert peak_bytes(lambda: add(store, "a", gradient)) < 4 * 8 * LARGE
