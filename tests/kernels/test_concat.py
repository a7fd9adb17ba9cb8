from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from service.dtypes import DTYPES, Array
from service.engine.engine import Engine
from service.errors import AxisOutOfRange, DtypeMismatch, InvalidTensor, ShapeMismatch, TooManyTensors
from service.kernels import OPERATORS
from service.kernels.concat import MAX_PARTS, concat_training, split_training
from service.limits import Limits
from tests.kernels.equality import assert_same_bits
from tests.kernels.threads import threads


def concat(*parts: Array, axis: int = 0) -> tuple[Array, Array]:
    return concat_training({str(k): part for k, part in enumerate(parts)}, axis=axis)


def numbers(*shape: int, dtype: Any = np.float32) -> Array:
    return np.asarray(np.random.default_rng(0).integers(-9, 9, shape), dtype)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_split_takes_apart_what_concat_joined(dtype: Any) -> None:
    for shape in [(6,), (6, 2), (2, 6, 3), (0, 6), (6, 0)]:
        for axis in range(-len(shape), len(shape)):
            whole, size = numbers(*shape, dtype=dtype), shape[axis]
            for lengths in ([size], [0, size], [size, 0, 0], [size // 2, size - size // 2]):
                parts = np.split(whole, np.cumsum(lengths)[:-1], axis)
                joined, found = concat(*parts, axis=axis)
                assert_same_bits(joined, whole)
                assert_same_bits(found, np.array(lengths))
                split = split_training(whole, found, axis=axis)
                assert list(split) == [str(k) for k in range(len(lengths))]
                for one, part in zip(split.values(), parts, strict=True):
                    assert_same_bits(one, part)
                    assert not np.may_share_memory(one, whole)


def test_one_thread_and_several_copy_the_same() -> None:
    for shape, axis in [((3, 700_000), 0), ((3, 700_000), 1), ((700_000, 3), 1)]:
        whole = numbers(*shape)
        lengths = [1, 0, shape[axis] - 1]
        parts = np.split(whole, [1, 1], axis)
        for count in (1, 2, 3):
            with threads(count):
                assert_same_bits(concat(*parts, axis=axis)[0], whole)
                for one, part in zip(split_training(whole, np.array(lengths), axis=axis).values(), parts, strict=True):
                    assert_same_bits(one, part)


def test_strided_inputs() -> None:
    whole = numbers(4, 6)[::-1, ::2]
    joined, _ = concat(whole, whole, axis=1)
    assert_same_bits(joined, np.concatenate([whole, whole], 1))
    for one in split_training(whole, np.array([1, 3])).values():
        assert one.flags.c_contiguous


def test_nan_and_negative_zero_keep_their_bits() -> None:
    odd = np.array([np.nan, -0.0, np.inf], np.float32)
    odd.view(np.uint32)[0] |= 5
    assert concat(odd, odd)[0].tobytes() == 2 * odd.tobytes()


def test_tensors_of_no_elements_keep_their_lengths() -> None:
    joined, lengths = concat(np.empty((2, 0)), np.empty((3, 0)))
    assert (joined.shape, lengths.tolist()) == ((5, 0), [2, 3])
    joined, lengths = concat(np.empty((0, 2)))
    assert (joined.shape, lengths.tolist()) == ((0, 2), [0])


def test_inputs_whose_shapes_differ() -> None:
    for shape in [(3,), (2, 2), (2, 3, 1), ()]:
        expected = r"^inputs\.1 has shape .*, but must have that of inputs\.0, \[2, 3\], except along axis 0$"
        with pytest.raises(ShapeMismatch, match=expected) as caught:
            concat(np.ones((2, 3)), np.ones(shape))
        assert caught.value.context == {"tensor": "inputs.1"}
    with pytest.raises(ShapeMismatch, match="except along axis 1$"):
        concat(np.ones((2, 3)), np.ones(2), axis=1)
    with pytest.raises(ShapeMismatch, match="except along axis 1$"):  # an empty vector among matrices
        concat(np.ones((2, 3)), np.ones(0), axis=-1)


def test_axes_that_are_not_there() -> None:
    for axis in (2, -3, 1 << 70):
        with pytest.raises(AxisOutOfRange, match=rf"^axis {axis} is not in \[-2, 1\], the axes of inputs\.0"):
            concat(np.ones((2, 3)), axis=axis)
        with pytest.raises(AxisOutOfRange, match=rf"^axis {axis} is not in \[-2, 1\], the axes of input,"):
            split_training(np.ones((2, 3)), np.array([2]), axis=axis)
    with pytest.raises(AxisOutOfRange, match=r"^axis 0: inputs\.0 is a scalar"):
        concat(np.array(1.0), np.array(1.0))
    with pytest.raises(AxisOutOfRange, match="^axis 0: input is a scalar"):
        split_training(np.array(1.0), np.array([1]))


@pytest.mark.parametrize(
    ("split", "error", "reason"),
    [
        ([1, 2], ShapeMismatch, "The lengths in split sum to 3, but input has 2 along axis 0"),
        ([1 << 62, 1 << 62, 1 << 62, 1 << 62, 2], ShapeMismatch, f"The lengths in split sum to {(1 << 64) + 2}, but"),
        ([3, -1], InvalidTensor, r"split\[1\] is -1, but a length must be 0 or more"),
        ([[1, 1]], ShapeMismatch, r"split has shape \[1, 2\], but must have one dimension: a length for each output"),
        (2, ShapeMismatch, r"split has shape \[\], but must have one dimension"),
        ([0] * (MAX_PARTS + 1), TooManyTensors, "split has 16385 lengths, one for each output; the limit is 16384"),
    ],
)
def test_lengths_that_do_not_fit(split: Any, error: Any, reason: str) -> None:
    with pytest.raises(error, match=f"^{reason}") as caught:
        split_training(np.ones((2, 3)), np.array(split))
    assert caught.value.context["tensor"] == "split"


def test_no_lengths_at_all() -> None:
    for size in (0, 2):
        with pytest.raises(InvalidTensor, match="^split is empty, but must have the length of each output$"):
            split_training(numbers(size, 3), np.empty(0, np.int64))


def test_split_is_the_gradient_of_concat() -> None:
    parts = [np.random.default_rng(k).normal(size=(2, k + 1)) for k in range(3)]
    joined, lengths = concat(*parts, axis=1)
    dY: Array = np.asarray(np.random.default_rng(9).normal(size=joined.shape))
    split = split_training(dY, lengths, axis=1)
    assert np.vdot(dY, joined) == pytest.approx(sum(map(np.vdot, split.values(), parts)), rel=1e-14)


def test_the_inputs_share_a_dtype() -> None:
    engine = Engine(threads=1, limits=Limits(1 << 20), reuse_bytes=0)
    given: dict[str, Array] = {"inputs.0": np.ones(2, np.float32), "inputs.1": np.ones(2)}
    with pytest.raises(DtypeMismatch, match=r"^inputs\.1 is float64 and inputs\.0 is float32, but they must share"):
        engine.run(OPERATORS["ConcatTraining"], given, {"axis": 0})
    engine.pool.close()
