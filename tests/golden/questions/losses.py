"""Questions to the cross-entropy losses and their gradients.

Not asked of ONNX Runtime: no labels at all, which ends the process with reductions where the answer is clear, and -100
as an ignored label with weights, which reads before the weights. PyTorch answers the second, and the gradient of dense
labels that do not sum to 1. NegativeLogLikelihoodLossInternal's mean over no samples is NaN there, and 0 here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np
from scipy.special import log_softmax

from service.dtypes import Array
from service.errors import IndexOutOfRange, ShapeMismatch
from tests.golden.store import Case
from tests.golden.values import FLOAT16_ULP, generator

SHAPES = [(4, 5), (3, 4, 2), (2, 3, 2, 2), (1, 1)]
REDUCTIONS = ["mean", "sum", "none"]
INF, NAN = np.inf, np.nan
SPECIAL = [[1, 2, 3], [NAN, 1, 2], [INF, 1, 2], [-INF, -INF, -INF], [-INF, 0, 1], [1e30, -1e30, 0], [88, 0, -88]]

LOSS, INTERNAL = "SoftmaxCrossEntropyLoss", "SoftmaxCrossEntropyLossInternal"
NLL = ["NegativeLogLikelihoodLossInternal", "NegativeLogLikelihoodLossInternal2"]
NAMES = {
    LOSS: ("scores", "labels", "weights"),
    INTERNAL: ("scores", "labels", "weights"),
    f"{LOSS}Grad": ("log_prob", "label", "weight"),
    f"{INTERNAL}Grad": ("log_prob", "label", "weight"),
    NLL[0]: ("input", "target", "weight"),
    NLL[1]: ("input", "target", "weight"),
    "SparseSoftmaxCrossEntropy": ("logits", "label", "weight"),
    "SparseSoftmaxCrossEntropyGrad": ("log_prob", "label", "weight"),
    "SoftmaxCrossEntropy": ("logits", "label", ""),
    "SoftmaxCrossEntropyGrad": ("log_prob", "label", ""),
}
"""What each operator calls its scores, labels and weights."""

REASONS = {
    r"refused-(label|no-classes).*The process ends": IndexOutOfRange,
    r"refused-scalar-label.*The process ends": ShapeMismatch,
    r"refused-(weight|label-shape)": ShapeMismatch,
}


def ask() -> Iterator[Case]:
    """All questions of this module."""
    for operator in (LOSS, INTERNAL, f"{LOSS}Grad", f"{INTERNAL}Grad", *NLL):
        yield from _by_class(operator)
    for operator in ("SparseSoftmaxCrossEntropy", "SparseSoftmaxCrossEntropyGrad"):
        yield from _by_sample(operator)
    for operator in ("SoftmaxCrossEntropy", "SoftmaxCrossEntropyGrad"):
        yield from _dense(operator)


def tolerance(case: Case, output: str) -> Mapping[str, Any]:
    """The order of the sums is not the same, nor is the exponential, and a probability of almost 1 cancels."""
    scores = case.inputs[NAMES[case.operator][0]]
    dtype = np.dtype("float16") if case.attributes.get("output_type") == 10 else scores.dtype
    if case.source.startswith("torch"):
        return {"rtol": 1e-12, "atol": 1e-14} if dtype == np.float64 else {"rtol": 1e-6, "atol": 1e-6}
    # Rounded shares do not sum to 1, as ONNX Runtime assumes.
    atol = FLOAT16_ULP if case.operator == "SoftmaxCrossEntropyGrad" else 1e-6
    return {
        "float16": {"rtol": 2 * FLOAT16_ULP, "atol": atol},
        "float32": {"rtol": 2e-6, "atol": 1e-6},
        "float64": {"rtol": 1e-12, "atol": 1e-14},
    }[dtype.name]


def _case(operator: str, name: str, inputs: dict[str, Array], more: Mapping[str, Any], source: str) -> Case:
    """The question whose inputs, in order, are the scores, the labels and perhaps the weights; and dY before them."""
    if operator.endswith("Grad"):
        outputs: tuple[str, ...] = ("d_logits",)
        none = more.get("reduction") == "none"
        dY = generator(name).normal(size=inputs["label"].shape if none else ()).astype(inputs["log_prob"].dtype)
        inputs = {"dY": dY, **inputs}
    elif operator in NLL:
        outputs = ("loss",)
    else:
        outputs = ("output" if operator in (LOSS, INTERNAL) else "Y", "log_prob")
    return Case(operator, name, inputs, outputs, more, source=source)


def _scores(operator: str, name: str, shape: tuple[int, ...], dtype: str, axis: int = 1) -> Array:
    """Scores, or for an operator that takes them, their log_softmax."""
    scores = generator(operator, name, "scores").normal(0, 2, shape)
    if scores.size and NAMES[operator][0] not in ("scores", "logits"):
        scores = log_softmax(scores, axis=axis)
    return scores.astype(dtype)


def _classes(
    operator: str,
    name: str,
    shape: tuple[int, ...] = (4, 5),
    dtype: str = "float32",
    *,
    integers: str = "int64",
    labels: Array | None = None,
    weights: bool | Array = False,
    ignored: int | None = None,
    source: str = "onnxruntime",
    **more: Any,
) -> Case:
    """A question to an operator whose classes are dimension 1."""
    random, names = generator(operator, name), NAMES[operator]
    if labels is None:
        labels = random.integers(0, shape[1], (shape[0], *shape[2:]))
    inputs = {names[0]: _scores(operator, name, shape, dtype), names[1]: labels.astype(integers)}
    if weights is not False:
        given = random.uniform(0.1, 2, shape[1]) if weights is True else weights
        inputs[names[2]] = np.asarray(given).astype(dtype)
    if ignored is not None and operator in (LOSS, f"{LOSS}Grad"):
        more["ignore_index"] = ignored
    elif ignored is not None:
        inputs["ignore_index"] = np.array(ignored)
    return _case(operator, name, inputs, more, source)


def _by_class(operator: str) -> Iterator[Case]:
    for shape, reduction, weights in product(SHAPES, REDUCTIONS, (False, True)):
        name = f"float32-{list(shape)}-{reduction}-weights={weights}"
        yield _classes(operator, name, shape, weights=weights, reduction=reduction)
    for reduction, weights in product(REDUCTIONS, (False, True)):
        name = f"float32-ignored-{reduction}-weights={weights}"
        yield _classes(operator, name, (6, 3), weights=weights, ignored=1, integers="int32", reduction=reduction)
        name = f"float64-ignored--100-{reduction}-weights={weights}"
        labels = np.array([0, -100, 2, 1, -100])
        if operator not in NLL:
            yield _classes(
                operator,
                name,
                (5, 3),
                "float64",
                labels=labels,
                weights=weights,
                ignored=-100,
                source="torch",
                reduction=reduction,
            )
        if operator not in NLL or reduction != "mean":
            yield _classes(
                operator,
                f"float32-all-ignored-{reduction}-weights={weights}",
                (3, 4),
                labels=np.full(3, 2),
                weights=weights,
                ignored=2,
                reduction=reduction,
            )
    yield _classes(operator, "float32-default", (4, 5))
    if operator in NLL:
        return
    yield _classes(operator, "float32-weights-0", (4, 3), weights=np.zeros(3))
    for dtype, reduction in product(("float16", "float64"), REDUCTIONS):
        yield _classes(operator, f"{dtype}-{reduction}", (5, 4, 2), dtype, weights=True, reduction=reduction)
    yield from _refused_by_class(operator)
    if operator in (LOSS, INTERNAL):
        inputs = {"scores": np.array(SPECIAL, np.float32), "labels": np.array([0, 1, 2, 0, 0, 1, 2])}
        yield _case(operator, "float32-special", inputs, {"reduction": "none"}, "onnxruntime")
    if operator == f"{INTERNAL}Grad":
        for reduction in REDUCTIONS:
            one = _classes(operator, f"float32-bias-{reduction}", (3, 4, 2), ignored=1, reduction=reduction)
            bias = generator(operator, reduction, "bias").normal(size=(6, 4)).astype(np.float32)
            yield Case(operator, one.name, {**one.inputs, "bias": bias}, one.asked, one.attributes)
    if operator in (INTERNAL, f"{INTERNAL}Grad"):
        for output_type in (1, 10, 11):
            yield _classes(operator, f"float32-output-type-{output_type}", (3, 4), output_type=output_type)


def _refused_by_class(operator: str) -> Iterator[Case]:
    yield _classes(operator, "refused-label-far-outside", labels=np.array([0, 1, 1 << 40, 2]), weights=True)
    yield _classes(operator, "refused-no-classes", (2, 0), labels=np.zeros(2, np.int64))
    yield _classes(operator, "refused-weight-matrix", weights=np.ones((5, 1)))


def _by_sample(operator: str) -> Iterator[Case]:
    names = NAMES[operator]
    for shape, reduction, weights in product([(4, 5), (2, 3, 4), (3,), (1, 1)], REDUCTIONS[:2], (False, True)):
        name = f"float32-{list(shape)}-{reduction}-weights={weights}"
        random = generator(operator, name)
        inputs = {
            names[0]: _scores(operator, name, shape, "float32", -1),
            names[1]: np.asarray(random.integers(0, shape[-1], shape[:-1])),
        }
        if weights:
            inputs[names[2]] = np.asarray(random.uniform(0.1, 2, shape[:-1]), np.float32)
        yield _case(operator, name, inputs, {"reduction": reduction}, "onnxruntime")


def _dense(operator: str) -> Iterator[Case]:
    names = NAMES[operator]
    for dtype, shape, reduction in product(("float32", "float16"), [(4, 5), (2, 3, 4), (3,)], REDUCTIONS[:2]):
        name = f"{dtype}-{list(shape)}-{reduction}"
        shares = generator(operator, name).dirichlet(np.ones(shape[-1]), shape[:-1]).astype(dtype)
        inputs = {names[0]: _scores(operator, name, shape, dtype, -1), names[1]: shares}
        yield _case(operator, name, inputs, {"reduction": reduction}, "onnxruntime")
    for reduction in REDUCTIONS[:2]:
        name = f"float64-any-labels-{reduction}"
        shares = generator(operator, name).normal(size=(4, 5))
        inputs = {names[0]: _scores(operator, name, (4, 5), "float64", -1), names[1]: shares}
        yield _case(operator, name, inputs, {"reduction": reduction}, "torch")
