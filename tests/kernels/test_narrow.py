"""float16 and bfloat16 are computed in float32 and rounded once."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from service.dtypes import BFLOAT16, Array, cast
from service.kernels.accumulate import in_place_accumulator
from tests.cases import case
from tests.kernels.calls import CALLS, ELEMENTWISE, NARROW_DTYPES, Call
from tests.kernels.equality import assert_same_bits

every_dtype = pytest.mark.parametrize("dtype", NARROW_DTYPES, ids=str)


def widened(array: Array) -> Array:
    with np.errstate(invalid="ignore"):  # some NaN are signalling
        return array.astype(np.float32) if array.dtype in NARROW_DTYPES else array


def rounded(array: Array, dtype: Any) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(dtype)


@every_dtype
@pytest.mark.parametrize("shape", [(40, 50), (3, 1, 4), (2, 0)])
def test_is_the_float32_kernel_rounded(dtype: Any, shape: tuple[int, ...]) -> None:
    for name, make in CALLS.items():
        with case(name):
            call = make(shape, dtype)
            assert_same_bits(call.run(), rounded(call.on(widened).run(), dtype))


def every_number(dtype: Any, seed: int) -> Array:
    """All 65536 bit patterns, NaN and infinities among them, in random order."""
    return np.random.default_rng(seed).permutation(np.arange(1 << 16, dtype=np.uint16)).view(dtype)


@pytest.mark.parametrize("make", ELEMENTWISE.values(), ids=ELEMENTWISE)
@every_dtype
def test_on_every_number(make: Callable[..., Call], dtype: Any) -> None:
    call = make((1 << 16,), dtype)
    inputs = [every_number(dtype, k) if k in call.floats() else array for k, array in enumerate(call.inputs)]
    call = Call(call.operator, inputs, call.attributes)
    assert_same_bits(call.run(), rounded(call.on(widened).run(), dtype))


def finite_numbers(dtype: Any) -> Array:
    """All finite numbers of the dtype, both zeros among them."""
    numbers = every_number(dtype, 0)
    return numbers[np.isfinite(widened(numbers))]


@every_dtype
def test_every_finite_number_is_widened(dtype: Any) -> None:
    numbers = finite_numbers(dtype)
    added = in_place_accumulator(np.full(numbers.shape, -0.0, np.float32), numbers)  # -0 leaves both zeros as they are
    assert_same_bits(added, widened(numbers))


@every_dtype
@pytest.mark.parametrize("beyond", [False, True], ids=["finite", "beyond the range"])
def test_every_tie_and_its_neighbours_are_rounded(dtype: Any, beyond: bool) -> None:
    """Each number, the middle between it and the next, and the float32 on either side of these."""
    numbers = np.unique(widened(finite_numbers(dtype)))
    with np.errstate(over="ignore"):
        middles = ((numbers[1:].astype(np.float64) + numbers[:-1]) / 2).astype(np.float32)
        edges = np.concatenate([numbers, middles])
        near = np.concatenate(
            [edges, np.nextafter(edges, np.float32(np.inf)), np.nextafter(edges, np.float32(-np.inf))]
        )
    if beyond:
        largest = np.finfo(np.float32).max
        near = np.concatenate(
            [near, np.array([65504, 65519.996, 65520, 65536, 1e38, largest, np.inf, np.nan], np.float32)]
        )
        near = np.concatenate([near, -near])
    else:
        near = near[np.abs(near) < 65520]
    added = in_place_accumulator(np.full(near.shape, -0.0, dtype), near)
    assert_same_bits(added, rounded(near, dtype))


@every_dtype
def test_sums_do_not_round_on_the_way(dtype: Any) -> None:
    """1 and 4096 numbers too small to change it one by one."""
    grad = np.array([1.0] + [2.0**-12] * 4096, dtype)
    call = Call("GatherGrad", [np.array([1]), np.zeros(4097, np.int64), grad], {"axis": 0})
    assert call.run().tolist() == [2.0]
    probabilities = np.full(4097, 0.5, dtype)
    (first, *_) = Call("SoftmaxGrad", [grad, probabilities], {"axis": 0}).run().tolist()
    assert first == 0.0


@given(st.floats(allow_nan=False))
@example(1.00390625000001)
@example(1.00390625)
@example(-3.0e38)
@example(3.4e38)
@example(1e300)
@example(1e-41)
@example(5e-324)
def test_float64_becomes_the_nearest_bfloat16(number: float) -> None:
    with np.errstate(over="ignore"):
        made = cast(np.array([number]), BFLOAT16)
    assert np.signbit(made[0]) == np.signbit(number)
    place = int(made.view(np.uint16)[0]) & 0x7FFF

    def far(place: int) -> tuple[Fraction, int]:
        """How far that bfloat16 is, and whether it is odd: of two as far, it is the even one."""
        return abs(_value(place) - abs(_exactly(number))), place & 1

    assert far(place) == min(map(far, range(max(place - 1, 0), min(place + 2, 0x7F81))))


def _exactly(number: float) -> Fraction:
    """Infinity as the bfloat16 after the largest, from where on numbers are rounded to it."""
    return Fraction(number) if math.isfinite(number) else Fraction(2) ** 128


def _value(place: int) -> Fraction:
    """The `place`th bfloat16 from 0 up."""
    return _exactly(float(np.array([place], np.uint16).view(BFLOAT16)[0]))
