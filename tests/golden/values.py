"""Numbers to ask with: the special values of a dtype, and random ones that depend on a name alone."""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

from service.dtypes import Array

FLOAT16_ULP = 2.0**-10
"""How far apart two neighbours are, relative to them, at most."""


def generator(*names: str) -> np.random.Generator:
    """Random numbers that are the same for the same names, whatever else is asked before."""
    return np.random.default_rng(_seed(names))


def uniform(shape: tuple[int, ...], *names: str) -> Array:
    """float32 in [0, 1], the same for the same names for ever: NumPy keeps RandomState's numbers as they are."""
    return np.random.RandomState(_seed(names)).random_sample(shape).astype(np.float32)


def _seed(names: tuple[str, ...]) -> int:
    return zlib.crc32("/".join(names).encode())


def special(dtype: npt.DTypeLike) -> Array:
    """Zeros of both signs, subnormal and least normal numbers, common, large, infinite and NaN."""
    info = np.finfo(np.dtype(dtype))
    one_sided = [0.0, info.smallest_subnormal, info.smallest_normal, 0.5, 1.0, 3.0, 100.0, info.max, np.inf]
    both = np.array(one_sided, dtype)
    return np.concatenate([both, -both, np.array([np.nan], dtype)])


def special_pairs(dtype: npt.DTypeLike) -> tuple[Array, Array]:
    """Two matrices that hold, element by element, every pair of special values."""
    values = special(dtype)
    columns, rows = np.meshgrid(values, values)
    return rows, columns
