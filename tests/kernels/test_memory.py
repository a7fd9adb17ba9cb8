"""What kernels read and write: read-only and strided inputs, `out`, and memory that the two share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from service.dtypes import Array
from service.errors import ShapeMismatch
from service.kernels import OPERATORS
from tests.cases import case
from tests.kernels.calls import CALLS, ELEMENTWISE, FLOAT_DTYPES, SOFTMAX, Call
from tests.kernels.equality import assert_same_bits

SHAPE = (3, 4, 5)

every_dtype = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)


def test_calls_cover_every_operator_with_out() -> None:
    with_out = {name for name, op in OPERATORS.items() if "out" in inspect.signature(op.kernel).parameters}
    assert {make(SHAPE, "float32").operator for make in CALLS.values()} == with_out


@every_dtype
def test_output_is_new_and_like_the_gradient(dtype: Any) -> None:
    for name, make in CALLS.items():
        with case(name):
            call = make(SHAPE, dtype)
            result = call.run()
            assert (result.shape, result.dtype) == (SHAPE, dtype)
            assert result.flags.c_contiguous
            assert not any(np.shares_memory(result, array) for array in call.inputs)


def frozen(array: Array) -> Array:
    array = array.copy()
    array.flags.writeable = False
    return array


@every_dtype
def test_read_only_inputs_stay_untouched(dtype: Any) -> None:
    for name, make in CALLS.items():
        with case(name):
            call = make(SHAPE, dtype)
            read_only = call.on(frozen)
            assert_same_bits(read_only.run(), call.run())
            for array, before in zip(read_only.inputs, call.inputs, strict=True):
                assert_same_bits(array, before)


def spread(array: Array) -> Array:
    """The same elements, every third of a larger array along each axis."""
    wide = np.zeros([3 * size + 2 for size in array.shape], array.dtype)
    places: Any = (..., *(slice(1, 3 * size + 1, 3) for size in array.shape))  # `...`: a view of a scalar too
    view: Array = wide[places]
    view[...] = array
    return view


def reversed_view(array: Array) -> Array:
    """The same elements with negative strides."""
    return np.flip(np.flip(array).copy())


@pytest.mark.parametrize("dtype", FLOAT_DTYPES[::3], ids=str)
@pytest.mark.parametrize("change", [spread, reversed_view, np.asfortranarray])
def test_strided_inputs(dtype: Any, change: Callable[[Array], Array]) -> None:
    for name, make in CALLS.items():
        with case(name):
            call = make(SHAPE, dtype)
            assert_same_bits(call.on(change).run(), call.run())


@pytest.mark.parametrize("make", [*ELEMENTWISE.values(), *SOFTMAX.values()], ids=[*ELEMENTWISE, *SOFTMAX])
def test_inputs_that_repeat_one_row(make: Callable[..., Call]) -> None:
    call = make((5,), np.float32)
    call = call.on(lambda array: np.broadcast_to(array, SHAPE) if array.dtype == np.float32 else array)
    assert_same_bits(call.run(), call.on(np.ascontiguousarray).run())


@every_dtype
def test_out_is_filled_and_returned(dtype: Any) -> None:
    for name, make in CALLS.items():
        with case(name):
            call = make(SHAPE, dtype)
            out = np.full(SHAPE, 77, dtype)
            assert call.run(out=out) is out
            assert_same_bits(out, call.run())


def read_only(shape: tuple[int, ...]) -> Array:
    out = np.zeros(shape, np.float32)
    out.flags.writeable = False
    return out


UNFIT = {
    "dtype": np.zeros(SHAPE, np.float64),
    "shape": np.zeros((3, 5, 4), np.float32),
    "rank": np.zeros((60,), np.float32),
    "fortran": np.zeros(SHAPE, np.float32, order="F"),
    "stepped": np.zeros((3, 4, 10), np.float32)[..., ::2],
    "read-only": read_only(SHAPE),
}


@pytest.mark.parametrize("out", UNFIT.values(), ids=UNFIT)
def test_unfit_out_is_refused(out: Array) -> None:
    for name, make in CALLS.items():
        with case(name):
            before = out.copy()
            with pytest.raises(ShapeMismatch, match=r"^out must be .* C-contiguous float32 array of shape \[3, 4, 5\]"):
                make(SHAPE, np.float32).run(out=out)
            np.testing.assert_array_equal(out, before)


WITHIN = {**ELEMENTWISE, **SOFTMAX}
"""Operators with inputs of the output's size; GatherGrad's is below."""


@pytest.mark.parametrize("make", WITHIN.values(), ids=WITHIN)
def test_out_overlaps_an_input(make: Callable[..., Call]) -> None:
    for dtype in FLOAT_DTYPES:
        for shift in (0, 1, -1, 7, -30):
            check_overlap(make(SHAPE, dtype), shift)


@pytest.mark.parametrize("make", WITHIN.values(), ids=WITHIN)
def test_out_overlaps_an_input_over_many_blocks(make: Callable[..., Call]) -> None:
    """A block must not be overwritten before another that needs it is done."""
    for shift in (0, 5000, -5000):
        check_overlap(make((400_000,), np.float32), shift)


def check_overlap(call: Call, shift: int) -> None:
    """Each input in turn shares memory with the output: all elements, or all but `shift` of them."""
    expected = call.run()
    size = expected.size
    for place in call.floats():
        memory = np.zeros(size + 2 * abs(shift), expected.dtype)
        starts = abs(shift), abs(shift) + shift
        shared, out = (memory[start : start + size].reshape(expected.shape) for start in starts)
        shared[...] = call.inputs[place]
        inputs = [shared if k == place else array.copy() for k, array in enumerate(call.inputs)]
        assert_same_bits(replace(call, inputs=inputs).run(out=out), expected)


@pytest.mark.parametrize("make", WITHIN.values(), ids=WITHIN)
def test_out_and_all_inputs_are_one_array(make: Callable[..., Call]) -> None:
    call = make(SHAPE, np.float32)
    shared = call.inputs[0].copy()
    inputs = [shared if k in call.floats() else array for k, array in enumerate(call.inputs)]
    expected = replace(call, inputs=[array.copy() for array in inputs]).run()
    assert_same_bits(replace(call, inputs=inputs).run(out=shared), expected)


@pytest.mark.parametrize("make", WITHIN.values(), ids=WITHIN)
def test_out_overlaps_a_reversed_input(make: Callable[..., Call]) -> None:
    call = make(SHAPE, np.float32)
    memory = call.inputs[0].copy()
    inputs = [np.flip(memory), *call.inputs[1:]]
    expected = replace(call, inputs=[array.copy() for array in inputs]).run()
    assert_same_bits(replace(call, inputs=inputs).run(out=memory), expected)
