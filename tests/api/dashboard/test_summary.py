"""Statistics of tensors against NumPy in float64, and against exact sums."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from service.api.dashboard.summary import BLOCK_ELEMENTS, MAX_BINS, Summary, heat_map, of_zeros, summarize
from service.dtypes import BFLOAT16, DTYPES, FLOAT16, FLOAT32, FLOAT64, FLOATS, Array, DType

DTYPES_OF_FLOATS = [DTYPES[name] for name in FLOATS.dtypes]
SIZES = [1, 7, BLOCK_ELEMENTS, 2 * BLOCK_ELEMENTS + 5]


def mixed(size: int, dtype: DType) -> Array:
    """Return normal numbers of many magnitudes, with zeros of both signs, infinities and NaN."""
    chance = np.random.default_rng(size)
    numbers = chance.normal(size=size) * 10.0 ** chance.integers(-6, 4, size)
    for special in (0.0, -0.0, np.inf, -np.inf, np.nan):
        numbers[chance.random(size) < 0.05] = special
    return numbers.astype(dtype)


def check(summary: Summary, value: Array) -> None:
    """Compare a summary with what NumPy and exact sums say."""
    wide = value.astype(np.float64).reshape(-1)
    finite = wide[np.isfinite(wide)]
    counted = (summary.size, summary.nan, summary.infinite, summary.zeros)
    assert counted == (wide.size, np.isnan(wide).sum(), np.isinf(wide).sum(), (wide == 0).sum())
    assert len(summary.counts) == len(summary.bounds) + 1
    assert [*summary.bounds] == sorted(summary.bounds)
    magnitudes = np.abs(finite[finite != 0])
    places = np.searchsorted(np.array(summary.bounds), magnitudes, "right")
    assert np.bincount(places, minlength=len(summary.counts)).tolist() == [*summary.counts]
    if not finite.size:
        assert (summary.least, summary.most, summary.mean, summary.norm) == (None, None, None, None)
        return
    assert (summary.least, summary.most) == (finite.min(), finite.max())
    assert summary.mean is not None
    scale = math.fsum(map(abs, finite.tolist())) / finite.size
    assert abs(summary.mean - math.fsum(finite.tolist()) / finite.size) <= 1e-14 * scale
    assert summary.norm == pytest.approx(math.hypot(*finite.tolist()), rel=1e-14)


@pytest.mark.parametrize("dtype", DTYPES_OF_FLOATS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_a_summary_equals_that_of_numpy(dtype: DType, size: int) -> None:
    value = mixed(size, dtype)
    check(summarize(value), value)


@pytest.mark.parametrize("dtype", DTYPES_OF_FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3, 4)])
def test_every_shape_has_a_summary(dtype: DType, shape: tuple[int, ...]) -> None:
    value = np.random.default_rng(1).normal(size=shape)
    check(summarize(np.asarray(value).astype(dtype)), np.asarray(value).astype(dtype))


@pytest.mark.parametrize("shape", [(), (0,), (5,), (BLOCK_ELEMENTS + 1,)])
def test_zeros_have_the_summary_of_zeros(shape: tuple[int, ...]) -> None:
    zeros = np.zeros(shape, np.float32)
    assert summarize(zeros) == of_zeros(zeros.size)


def test_nothing_finite_has_no_numbers() -> None:
    summary = summarize(np.array([np.nan, np.inf, -np.inf, np.nan], np.float32))
    assert summary == Summary(4, nan=2, infinite=2)


@pytest.mark.parametrize(
    ("numbers", "mean", "norm"),
    [
        ([1.7e308], 1.7e308, 1.7e308),
        ([1e308, -1e308], 0.0, math.sqrt(2) * 1e308),
        ([1e308] * 3, 1e308, math.sqrt(3) * 1e308),
        ([np.finfo(np.float64).max] * 4, np.finfo(np.float64).max, None),
        ([5e-324] * 4, 5e-324, 1e-323),
        ([3e-200, 4e-200], 3.5e-200, 5e-200),
        ([3e200, 4e-200], 1.5e200, 3e200),
    ],
)
def test_no_square_overflows_or_vanishes(numbers: list[float], mean: float, norm: float | None) -> None:
    summary = summarize(np.array(numbers))
    assert summary.mean == pytest.approx(mean, rel=1e-15)
    assert summary.norm == (None if norm is None else pytest.approx(norm, rel=1e-15))


def test_blocks_of_different_magnitudes_add_up() -> None:
    value = np.concatenate([np.full(BLOCK_ELEMENTS, 1e-300), np.full(BLOCK_ELEMENTS, 1e300), np.full(1, 2e-300)])
    check(summarize(value), value)
    check(summarize(value[::-1].copy()), value)


@pytest.mark.parametrize("dtype", DTYPES_OF_FLOATS, ids=str)
def test_every_magnitude_is_in_a_histogram_of_few_bins(dtype: DType) -> None:
    info = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    numbers = [float(info.smallest_subnormal), float(info.tiny), 1.0, -1.0, float(info.max)]
    value = np.array(numbers).astype(dtype)
    summary = summarize(value)
    check(summary, value)
    assert len(summary.counts) <= MAX_BINS + 2
    assert sum(summary.counts) == len(numbers)


def test_a_bin_begins_with_its_bound() -> None:
    summary = summarize(np.array([0.5, 0.75, -1.0, 0.0], np.float32))
    assert (summary.bounds, summary.counts) == ((0.5, 1.0, 2.0), (0, 2, 1, 0))


def test_the_value_stays_as_it_is() -> None:
    value = mixed(BLOCK_ELEMENTS + 3, FLOAT64)
    before = value.tobytes()
    summarize(value)
    heat_map(value, 8)
    assert value.tobytes() == before


# ----- the heat map -----


def cells_of(value: Array, cells: int) -> list[list[float]]:
    """Return the means of cells as loops say: the definition of a heat map."""
    grid = value.reshape(math.prod(value.shape[:-1]), value.shape[-1] if value.ndim else 1).astype(np.float64)
    (height, width), rows, columns = grid.shape, min(cells, grid.shape[0]), min(cells, grid.shape[1])
    means = []
    for row in range(rows):
        band = grid[row * height // rows : (row + 1) * height // rows]
        parts = [band[:, at * width // columns : (at + 1) * width // columns] for at in range(columns)]
        found = [part[np.isfinite(part)].tolist() for part in parts]
        means.append([math.fsum(one) / len(one) if one else math.nan for one in found])
    return means


SHAPES = [(), (5,), (3, 4), (70, 130), (2, 3, 50), (4, BLOCK_ELEMENTS + 9), (3 * BLOCK_ELEMENTS, 1), (1, 0), (0, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16, FLOAT32, FLOAT64], ids=str)
@pytest.mark.parametrize("cells", [1, 64])
def test_a_cell_is_the_mean_of_its_finite_elements(shape: tuple[int, ...], dtype: DType, cells: int) -> None:
    value = mixed(math.prod(shape), dtype).reshape(shape)
    height, width = math.prod(shape[:-1]), shape[-1] if shape else 1
    expected = np.array(cells_of(value, cells)).reshape(min(cells, height), min(cells, width))
    found = heat_map(value, cells)
    assert found.shape == expected.shape
    largest = float(np.abs(expected[np.isfinite(expected)]).max(initial=0)) or 1.0
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12 * largest)


def test_a_cell_of_the_largest_numbers_is_finite() -> None:
    largest = float(np.finfo(np.float64).max)
    found = heat_map(np.full((6, 6), largest), 2)
    np.testing.assert_allclose(found, np.full((2, 2), largest), rtol=1e-15)
    assert np.isfinite(found).all()
