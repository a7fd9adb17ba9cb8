"""The samples of cross-entropy operators, from tensors that are checked here. Each error names the operator's tensor.

An operator passes `names`: those of its scores, its labels and its weights.
"""

from __future__ import annotations

import math

import numpy as np

from service.dtypes import FLOAT64, INT64, Array
from service.errors import IndexOutOfRange, ShapeMismatch
from service.kernels._blocks import claim
from service.kernels._checks import has_shape, same_shape
from service.kernels._cross_entropy import ClassLabels, Samples, SharedLabels

SAMPLE_BYTES = 64
"""Bytes that a sample takes: its class, weight and loss or factor, and what NumPy takes to check and to round them."""

Names = tuple[str, str, str]


def samples_of_axis_1(scores: Array, label: Array, weight: Array | None, ignored: int | None, names: Names) -> Samples:
    """Return the samples of scores [N, C, d1, ...] with labels [N, d1, ...] and the weight of each class, [C].

    Samples with the label `ignored` do not count.
    """
    _has_classes(names[0], scores, 2)
    outer, classes, *inner = scores.shape
    has_shape(names[1], label, (outer, *inner), f"that of {names[0]} without dimension 1, the classes")
    if weight is not None:
        has_shape(names[2], weight, (classes,), f"a weight for each class of {names[0]}")
    return _of_classes((outer, classes, math.prod(inner)), label, weight, ignored, names)


def samples_of_last_axis(scores: Array, label: Array, weight: Array | None, names: Names) -> Samples:
    """Return the samples of scores [..., C] with labels [...] and the weight of each sample, [...]."""
    _has_classes(names[0], scores, 1)
    *outer, classes = scores.shape
    has_shape(names[1], label, tuple(outer), f"that of {names[0]} without the last dimension, the classes")
    if weight is not None:
        has_shape(names[2], weight, label.shape, f"that of {names[1]}")
    samples = _of_classes((math.prod(outer), classes, 1), label, None, None, names)
    if weight is None:
        return samples
    return Samples(samples.shape, label.shape, samples.labels, weight.astype(FLOAT64).reshape(samples.weights.shape))


def samples_of_shares(scores: Array, label: Array, names: tuple[str, str]) -> Samples:
    """Return the samples of scores [..., C], whose labels are the share of each class."""
    _has_classes(names[0], scores, 1)
    same_shape(**{names[0]: scores, names[1]: label})
    *outer, classes = scores.shape
    shape = math.prod(outer), classes, 1
    claim(SAMPLE_BYTES * shape[0])
    return Samples(shape, tuple(outer), SharedLabels(label.reshape(shape)), np.ones((shape[0], 1)))


def _has_classes(name: str, scores: Array, rank: int) -> None:
    if scores.ndim < rank:
        expected = "[N, C] or [N, C, d1, ...]" if rank == 2 else "[..., C]"
        problem = f"{name} has shape {list(scores.shape)}, but must have {expected}, where C is the number of classes"
        raise ShapeMismatch(problem, tensor=name)


def _of_classes(
    shape: tuple[int, int, int], label: Array, weight: Array | None, ignored: int | None, names: Names
) -> Samples:
    claim(SAMPLE_BYTES * label.size)
    kept = None if ignored is None else np.asarray(label != ignored)
    _check_labels(names, label, shape[1], kept, ignored)
    numbers = (label if kept is None else np.where(kept, label, 0)).astype(INT64, copy=False)
    if weight is None or not shape[1]:
        weights = np.ones(label.shape)
    else:
        weights = weight.astype(FLOAT64)[numbers]
    if kept is not None:
        weights = np.where(kept, weights, 0)
        kept = kept.reshape(shape[::2])
    return Samples(shape, label.shape, ClassLabels(numbers.reshape(shape[::2])), weights.reshape(shape[::2]), kept)


def _check_labels(names: Names, label: Array, classes: int, kept: Array | None, ignored: int | None) -> None:
    outside = (label < 0) | (label >= classes)
    if kept is not None:
        outside &= kept
    if outside.any():
        place = np.unravel_index(int(outside.argmax()), label.shape)
        subscripts, index = "".join(f"[{k}]" for k in place), int(label[place])
        allowed = f"must be in [0, {classes - 1}]" if classes else f"{names[0]} has no classes"
        also = "" if ignored is None else f"; only {ignored} is ignored"
        raise IndexOutOfRange(f"{names[1]}{subscripts} is {index}, but {allowed}{also}", tensor=names[1], index=index)
