"""Cross-entropy losses of scores, and their gradients.

There are two families. In the operators with `Loss` in their name, the classes are dimension 1 of the scores, a weight
belongs to a class, and samples can be ignored. In the others, the classes are the last dimension, and a weight belongs
to a sample. A loss is -weight * log_prob at the label, where log_prob = log_softmax(scores). A mean is the sum of the
losses divided by the sum of the weights of the samples that count; it is 0 if there are none. Sums are float64, and
rounded once. float16 and bfloat16 are computed in float32 and rounded once. Empty tensors give empty ones, and a loss
of 0. Every kernel raises `ShapeMismatch`, and `IndexOutOfRange` for a label that is no class and not ignored. Source of
the semantics: the CPU training kernels of ONNX Runtime 1.19.2.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

from service.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, Array, DType
from service.errors import ShapeMismatch
from service.kernels._blocks import new_output
from service.kernels._checks import one_element
from service.kernels._cross_entropy import Samples, gradient, log_softmax_losses, losses_of
from service.kernels._elementwise import apart
from service.kernels._op import op
from service.kernels._samples import samples_of_axis_1, samples_of_last_axis, samples_of_shares
from service.kernels._types import Rank0, Rank2, T, Tind, TSize, V

FAMILY = "Losses"

Reduction = Literal["mean", "sum", "none"]
Total = Literal["mean", "sum"]
OutputType = Literal[1, 10, 11, 16]

OUTPUT_TYPES: dict[int, DType] = {1: FLOAT32, 10: FLOAT16, 11: FLOAT64, 16: BFLOAT16}
"""The numbers of dtypes in ONNX's `TensorProto`."""

_SCORES = {"scores": [[1.0, 2.0, 3.0], [3.0, 1.0, 2.0]], "labels": [0, 2], "weights": [1.0, 2.0, 0.5]}
_LOG_PROB = {"dY": [1.0], "log_prob": [[-1.5, -1.25, -0.75], [-0.75, -1.5, -1.25]], "label": [0, 2]}
_WEIGHT = {"weight": [1.0, 2.0, 0.5]}


@op("SoftmaxCrossEntropyLoss", outputs="output log_prob", example=_SCORES)
def softmax_cross_entropy_loss(
    scores: Rank2[T],
    labels: Tind,
    weights: T | None = None,
    /,
    *,
    reduction: Reduction = "mean",
    ignore_index: int | None = None,
    wanted: Collection[str] = ("output", "log_prob"),
) -> tuple[Rank0[T], Rank2[T]]:
    """output = -weights[labels] * log_prob at labels, reduced. log_prob = log_softmax(scores).

    `scores` are [N, C, d1, ...] and `labels` [N, d1, ...]; `weights`, one for each class, are [C]. Samples with the
    label `ignore_index` do not count. `output` has the shape of the labels with reduction none, else it is one number.
    """
    samples = samples_of_axis_1(scores, labels, weights, ignore_index, ("scores", "labels", "weights"))
    return _loss(scores, samples, reduction, scores.dtype, wanted)


@op("SoftmaxCrossEntropyLossInternal", outputs="output log_prob", example={**_SCORES, "ignore_index": [-100]})
def softmax_cross_entropy_loss_internal(
    scores: Rank2[T],
    labels: Tind,
    weights: T | None = None,
    ignore_index: TSize | None = None,
    /,
    *,
    reduction: Reduction = "mean",
    output_type: OutputType | None = None,
    wanted: Collection[str] = ("output", "log_prob"),
) -> tuple[Rank0[T], Rank2[T]]:
    """output = -weights[labels] * log_prob at labels, reduced. log_prob = log_softmax(scores).

    Like SoftmaxCrossEntropyLoss, but `ignore_index` is a tensor with one element. `output_type` is the dtype of the
    outputs, by its number in ONNX: 1 float32, 10 float16, 11 float64, 16 bfloat16. By default, it is that of `scores`.
    """
    samples = samples_of_axis_1(scores, labels, weights, _ignored(ignore_index), ("scores", "labels", "weights"))
    return _loss(scores, samples, reduction, _output_dtype(output_type, scores), wanted)


@op("SoftmaxCrossEntropyLossGrad", outputs="d_logits", example={**_LOG_PROB, **_WEIGHT})
def softmax_cross_entropy_loss_grad(
    dY: T,
    log_prob: Rank2[T],
    label: Tind,
    weight: T | None = None,
    /,
    *,
    reduction: Reduction = "mean",
    ignore_index: int | None = None,
    out: T | None = None,
) -> Rank2[T]:
    """d_logits = dY * weight[label] * (exp(log_prob) - onehot(label)), divided by sum(weight[label]) for a mean.

    `log_prob` is [N, C, d1, ...] and `label` [N, d1, ...]; `weight`, one for each class, is [C]. `dY` has the shape of
    the labels with reduction none, else one element. Samples with the label `ignore_index` get +0, whatever they hold.
    """
    samples = samples_of_axis_1(log_prob, label, weight, ignore_index, ("log_prob", "label", "weight"))
    return _grad(dY, log_prob, samples, reduction, out)


@op(
    "SoftmaxCrossEntropyLossInternalGrad",
    outputs="d_logits",
    example={**_LOG_PROB, **_WEIGHT, "ignore_index": [-100], "bias": [[0.5, 0.0, 0.0], [0.0, 0.0, -0.5]]},
)
def softmax_cross_entropy_loss_internal_grad(
    dY: T,
    log_prob: Rank2[T],
    label: Tind,
    weight: T | None = None,
    ignore_index: TSize | None = None,
    bias: Rank2[V] | None = None,
    /,
    *,
    reduction: Reduction = "mean",
    output_type: OutputType | None = None,
    out: T | None = None,
) -> Rank2[T]:
    """d_logits = dY * weight[label] * (exp(log_prob) - onehot(label)) + bias, where a mean divides the first term.

    Like SoftmaxCrossEntropyLossGrad, but `ignore_index` is a tensor with one element. `bias` is a gradient that comes
    another way: it has as many elements as `log_prob`, and is added to ignored samples, too. `output_type` is the dtype
    of `d_logits`, by its number in ONNX: 1 float32, 10 float16, 11 float64, 16 bfloat16. By default, it is that of
    `log_prob`.
    """
    samples = samples_of_axis_1(log_prob, label, weight, _ignored(ignore_index), ("log_prob", "label", "weight"))
    return _grad(dY, log_prob, samples, reduction, out, bias, _output_dtype(output_type, log_prob))


_NLL = {"input": [[-1.5, -1.25, -0.75], [-0.75, -1.5, -1.25]], "target": [0, 2], **_WEIGHT, "ignore_index": [-100]}


@op("NegativeLogLikelihoodLossInternal", outputs="loss", example=_NLL)
def negative_log_likelihood_loss_internal(
    input: Rank2[T],
    target: Tind,
    weight: T | None = None,
    ignore_index: TSize | None = None,
    /,
    *,
    reduction: Reduction = "mean",
) -> Rank0[T]:
    """loss = -weight[target] * input at target, reduced.

    `input` holds logarithms of probabilities, [N, C, d1, ...]; `target` is [N, d1, ...]; `weight`, one for each class,
    is [C]. `ignore_index` has one element; samples with that target do not count. `loss` has the shape of the target
    with reduction none, else it is one number.
    """
    samples = samples_of_axis_1(input, target, weight, _ignored(ignore_index), ("input", "target", "weight"))
    return samples.reduce(losses_of(input, samples), reduction, input.dtype)  # type: ignore[return-value]


@op("NegativeLogLikelihoodLossInternal2", outputs="loss", example=_NLL)
def negative_log_likelihood_loss_internal2(
    input: Rank2[T],
    target: Tind,
    weight: T | None = None,
    ignore_index: TSize | None = None,
    /,
    *,
    reduction: Reduction = "mean",
) -> Rank0[T]:
    """loss = -weight[target] * input at target, reduced.

    Like NegativeLogLikelihoodLossInternal. ONNX Runtime has two names for two versions of ONNX.
    """
    return negative_log_likelihood_loss_internal(input, target, weight, ignore_index, reduction=reduction)


_SHARES = [[0.5, 0.25, 0.25], [0.0, 1.0, 0.0]]


@op("SoftmaxCrossEntropy", outputs="Y log_prob", example={"logits": _SCORES["scores"], "label": _SHARES})
def softmax_cross_entropy(
    logits: Rank2[T], label: Rank2[T], /, *, reduction: Total = "mean", wanted: Collection[str] = ("Y", "log_prob")
) -> tuple[Rank0[T], Rank2[T]]:
    """Y = -sum(label * log_prob), for a mean divided by the number of samples. log_prob = log_softmax(logits).

    `logits` are [..., C]; `label`, of the same shape, has the share of each class.
    """
    samples = samples_of_shares(logits, label, ("logits", "label"))
    return _loss(logits, samples, reduction, logits.dtype, wanted)


@op("SoftmaxCrossEntropyGrad", outputs="d_logits", example={**_LOG_PROB, "label": _SHARES})
def softmax_cross_entropy_grad(dY: T, log_prob: Rank2[T], label: Rank2[T], /, *, reduction: Total = "mean") -> Rank2[T]:
    """d_logits = dY * (exp(log_prob) * sum(label) - label), for a mean divided by the number of samples.

    `log_prob` and `label` are [..., C], and the sum is over the classes. ONNX Runtime leaves it out, which is right for
    labels that sum to 1. `dY` has one element.
    """
    samples = samples_of_shares(log_prob, label, ("log_prob", "label"))
    return _grad(dY, log_prob, samples, reduction)


_SAMPLE_WEIGHT = {"weight": [1.0, 0.5]}


@op(
    "SparseSoftmaxCrossEntropy",
    outputs="Y log_prob",
    example={"logits": _SCORES["scores"], "label": [0, 2], **_SAMPLE_WEIGHT},
)
def sparse_softmax_cross_entropy(
    logits: Rank2[T],
    label: Tind,
    weight: T | None = None,
    /,
    *,
    reduction: Total = "mean",
    wanted: Collection[str] = ("Y", "log_prob"),
) -> tuple[Rank0[T], Rank2[T]]:
    """Y = sum(-weight * log_prob at label), divided by sum(weight) for a mean. log_prob = log_softmax(logits).

    `logits` are [..., C]; `label` and `weight`, one for each sample, are [...].
    """
    samples = samples_of_last_axis(logits, label, weight, ("logits", "label", "weight"))
    return _loss(logits, samples, reduction, logits.dtype, wanted)


@op("SparseSoftmaxCrossEntropyGrad", outputs="d_logits", example={**_LOG_PROB, **_SAMPLE_WEIGHT})
def sparse_softmax_cross_entropy_grad(
    dY: T, log_prob: Rank2[T], label: Tind, weight: T | None = None, /, *, reduction: Total = "mean"
) -> Rank2[T]:
    """d_logits = dY * weight * (exp(log_prob) - onehot(label)), divided by sum(weight) for a mean.

    `log_prob` is [..., C]; `label` and `weight`, one for each sample, are [...]. `dY` has one element.
    """
    samples = samples_of_last_axis(log_prob, label, weight, ("log_prob", "label", "weight"))
    return _grad(dY, log_prob, samples, reduction)


def _ignored(ignore_index: Array | None) -> int | None:
    return None if ignore_index is None else int(one_element("ignore_index", ignore_index))


def _output_dtype(output_type: int | None, scores: Array) -> DType:
    return scores.dtype if output_type is None else OUTPUT_TYPES[output_type]


def _loss(scores: Array, samples: Samples, reduction: str, dtype: DType, wanted: Collection[str]) -> tuple[Any, Any]:
    log_prob = new_output(None, scores.shape, dtype) if "log_prob" in wanted else None
    losses = log_softmax_losses(scores, samples, log_prob)
    return samples.reduce(losses, reduction, dtype), log_prob


def _grad(
    dY: Array,
    log_prob: Array,
    samples: Samples,
    reduction: str,
    out: Array | None = None,
    bias: Array | None = None,
    dtype: DType | None = None,
) -> Any:
    if bias is not None and bias.size != log_prob.size:
        problem = f"bias has {bias.size} elements, but must have as many as log_prob, {log_prob.size}"
        raise ShapeMismatch(problem, tensor="bias")
    factors = samples.factors(dY, reduction)
    d_logits = new_output(out, log_prob.shape, dtype or log_prob.dtype)
    given, *added = apart((log_prob,) if bias is None else (log_prob, bias), d_logits)
    gradient(given, samples, factors, d_logits, *added)
    return d_logits
