from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from service.dtypes import BFLOAT16, Array, cast
from service.errors import InvalidTensor, ShapeMismatch
from service.kernels.accumulate import in_place_accumulator, in_place_accumulator_v2, zero_gradient
from tests.kernels.calls import FLOAT_DTYPES, NARROW_DTYPES
from tests.kernels.equality import assert_same_bits

INF, NAN = np.inf, np.nan
ONTO = [((2, 3), shape) for shape in [(2, 3), (3,), (2, 1), (1, 3), (1, 1), (1,), ()]]
FITTING: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    *ONTO,
    ((), ()),
    ((0,), (1,)),
    ((0,), ()),
    ((2, 0), (2, 1)),
    ((2, 0, 3), (3,)),
    ((4, 1, 2), (1, 2)),
]
UNFIT: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((1,), (3,)),
    ((3,), (2, 3)),
    ((1,), (1, 1)),
    ((), (1,)),
    ((2,), (3,)),
    ((2, 3), (2,)),
    ((2, 1), (1, 3)),
    ((2, 3), (6,)),
    ((1,), (0,)),
    ((0,), (2,)),
]


def add_v2(*inputs: Any, **keywords: Any) -> Array:
    accumulated: Array = in_place_accumulator_v2(*inputs, **keywords)[1]
    return accumulated


adders = pytest.mark.parametrize("add", [in_place_accumulator, add_v2], ids=["V1", "V2"])
every_dtype = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
every_pair = pytest.mark.parametrize(
    ("dtype", "gradient_dtype"), [(a, b) for a in FLOAT_DTYPES for b in FLOAT_DTYPES], ids=str
)


def numbers(shape: tuple[int, ...], dtype: Any, seed: int) -> Array:
    return np.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def summed(buffer: Array, gradient: Array) -> Array:
    """The sum as it is promised: in the buffer's dtype, which for 16 bits means in float32 and rounded once."""
    compute = np.float64 if buffer.dtype == np.float64 else np.float32
    return np.asarray((buffer.astype(compute) + gradient.astype(compute)).astype(buffer.dtype))


@every_pair
def test_gradient_is_converted_broadcast_and_added(dtype: Any, gradient_dtype: Any) -> None:
    for shape, gradient_shape in FITTING:
        buffer, gradient = numbers(shape, dtype, 1), numbers(gradient_shape, gradient_dtype, 2)
        for add in (in_place_accumulator, add_v2):
            assert_same_bits(add(buffer, gradient), summed(buffer, gradient))
            assert_same_bits(buffer, numbers(shape, dtype, 1))


@every_pair
def test_overwriting_converts_and_broadcasts(dtype: Any, gradient_dtype: Any) -> None:
    for shape, gradient_shape in FITTING:
        gradient = numbers(gradient_shape, gradient_dtype, 2)
        result = add_v2(np.full(shape, NAN, dtype), gradient, np.array(True))
        assert_same_bits(result, np.broadcast_to(gradient, shape).astype(dtype))


@adders
@pytest.mark.parametrize(("shape", "gradient_shape"), UNFIT)
def test_gradient_must_broadcast_into_the_buffer(
    add: Callable[..., Array], shape: tuple[int, ...], gradient_shape: tuple[int, ...]
) -> None:
    out = np.full(shape, 7, np.float32)
    with pytest.raises(ShapeMismatch) as caught:
        add(np.ones(shape, np.float32), np.ones(gradient_shape, np.float32), np.array(True), out=out)
    assert caught.value.detail.startswith(f"gradient has shape {list(gradient_shape)}, ")
    assert caught.value.detail.endswith(f"the shape of gradient_buffer, {list(shape)}")
    assert caught.value.context == {"tensor": "gradient"}
    assert (out == 7).all()


@pytest.mark.parametrize(("shape", "gradient_shape"), [*FITTING, *UNFIT])
def test_without_update_the_gradient_is_ignored(shape: tuple[int, ...], gradient_shape: tuple[int, ...]) -> None:
    buffer = numbers(shape, np.float32, 1)
    result = in_place_accumulator(buffer, np.full(gradient_shape, NAN), np.array(False))
    assert_same_bits(result, buffer)
    assert not np.shares_memory(result, buffer)


@every_dtype
def test_without_update_the_buffer_is_copied_bit_by_bit(dtype: Any) -> None:
    buffer = np.array([-0.0, 0.0, INF, -INF, NAN, 1.5], dtype)
    assert_same_bits(in_place_accumulator(buffer, np.ones(6, dtype), np.array(False)), buffer)


# What the flag holds, and what it says.
FLAGS: list[tuple[object, bool]] = [
    (True, True),
    (False, False),
    ([True], True),
    ([False], False),
    ([True, False], True),
    ([[False], [True]], False),
]


@pytest.mark.parametrize(("flag", "says"), FLAGS)
def test_first_element_of_a_flag_counts(flag: object, says: bool) -> None:
    buffer, gradient = np.ones(2, np.float32), np.full(2, 5, np.float32)
    assert in_place_accumulator(buffer, gradient, np.array(flag)).tolist() == ([6, 6] if says else [1, 1])
    assert add_v2(buffer, gradient, np.array(flag)).tolist() == ([5, 5] if says else [6, 6])


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
@pytest.mark.parametrize(("add", "flag"), [(in_place_accumulator, "do_update"), (add_v2, "overwrite")])
def test_empty_flag_is_refused(add: Callable[..., Array], flag: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidTensor, match=f"^{flag} is empty") as caught:
        add(np.ones(2), np.ones(2), np.empty(shape, np.bool_))
    assert caught.value.context == {"tensor": flag}


@every_dtype
@pytest.mark.parametrize("overwrite", [None, np.array(False), np.array(True)])
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)])
def test_updated_is_one_true(dtype: Any, overwrite: Array | None, shape: tuple[int, ...]) -> None:
    updated, result = in_place_accumulator_v2(np.ones(shape, dtype), np.array(1, dtype), overwrite)
    assert_same_bits(updated, np.array([True]))
    assert (result.shape, result.dtype) == (shape, dtype)


@adders
@every_dtype
def test_special_values_add_as_they_do(add: Callable[..., Array], dtype: Any) -> None:
    buffer = np.array([INF, INF, NAN, 1, -0.0, -0.0, 0], dtype)
    gradient = np.array([1, -INF, 1, NAN, -0.0, 0, -0.0], dtype)
    assert_same_bits(add(buffer, gradient), np.array([INF, NAN, NAN, NAN, -0.0, 0, 0], dtype))


@adders
def test_what_overflows_is_infinite(add: Callable[..., Array]) -> None:
    top = np.array([65504], np.float16)
    assert add(top, top).tolist() == [INF]
    assert add(top, np.array([-1e300])).tolist() == [-INF]
    assert add(np.array([3e38], np.float32), np.array([3e38])).tolist() == [INF]
    assert add_v2(top, np.array([1e300]), np.array(True)).tolist() == [INF]


@adders
@pytest.mark.parametrize("dtype", NARROW_DTYPES, ids=str)
def test_narrow_buffers_round_once(add: Callable[..., Array], dtype: Any) -> None:
    """Half an ulp and a little more rounds up; converted to the buffer's dtype first, the little more would be lost."""
    ulp = 2.0**-10 if dtype == np.float16 else 2.0**-7
    gradient = np.array([ulp * 0.5 * (1 + 2.0**-12)], np.float32)
    assert add(np.ones(1, dtype), gradient).tolist() == [1 + ulp]


@every_dtype
@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (0,), (2, 0, 3), (1, 2, 1, 2, 1)])
def test_zero_gradient_is_plus_zero(dtype: Any, shape: tuple[int, ...]) -> None:
    for value in (1, -1, -0.0, NAN, INF, -INF):
        old = np.full(shape, value, dtype)
        assert_same_bits(zero_gradient(old, np.array(True)), np.zeros(shape, dtype))
        assert_same_bits(old, np.full(shape, value, dtype))


@pytest.mark.parametrize("signal", [True, False, [], [[0, 1]], 0, [NAN], np.empty((0, 2), np.int32)], ids=repr)
def test_zero_gradient_ignores_the_signal(signal: Any) -> None:
    assert zero_gradient(np.ones(3, np.float32), np.array(signal)).tolist() == [0, 0, 0]


def test_overwriting_rounds_once() -> None:
    """By way of float32, both would be rounded to an even number that is farther away."""
    gradient = np.array([1.00390625000001, 1.01171874999999, np.inf, -np.nan, 1e300])
    buffer = np.zeros(5, BFLOAT16)
    _, result = in_place_accumulator_v2(buffer, gradient, np.array(True))
    with np.errstate(over="ignore"):
        assert_same_bits(result, cast(gradient, BFLOAT16))
    assert result[:2].tolist() == [1.0078125, 1.0078125]
