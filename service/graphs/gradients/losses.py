"""The gradients of losses and of Dropout."""

from __future__ import annotations

from functools import partial

import numpy as np

from service.dtypes import FLOAT64, Array
from service.graphs.gradients.arrays import rounded_once
from service.graphs.gradients.tape import Tape, gradient_of, rule
from service.graphs.plan import Node
from service.kernels.dropout import dropout_grad
from service.kernels.losses import softmax_cross_entropy_loss_grad
from service.kernels.softmax import log_softmax_grad_13


@rule("SoftmaxCrossEntropyLoss", outputs=2)
def _softmax_cross_entropy(tape: Tape, node: Node, dY: str, d_log_prob: str = "") -> list[str]:
    _, labels, *weights = node.inputs
    log_prob, step = node.outputs[1], partial(softmax_cross_entropy_loss_grad, **node.attributes)
    of_loss = tape.call(step, dY, log_prob, labels, *weights) if dY else ""
    of_log_prob = tape.call(partial(log_softmax_grad_13, axis=1), d_log_prob, log_prob) if d_log_prob else ""
    return [tape.call(np.add, of_loss, of_log_prob) if of_loss and of_log_prob else of_loss or of_log_prob]


@gradient_of("NegativeLogLikelihoodLoss")
@rounded_once
def _at_targets(
    dY: Array,
    shape: tuple[int, ...],
    B: Array,
    C: Array | None,
    *,
    reduction: str = "mean",
    ignore_index: int | None = None,
) -> Array:
    """Return -dY times the weight at the target of each sample, divided by the sum of the weights for a mean."""
    counts = B != ignore_index
    classes = np.where(counts, B, 0)
    weights = np.where(counts, dY.dtype.type(1) if C is None else C[classes], 0)
    divisor = weights.sum(dtype=FLOAT64) if reduction == "mean" else 1
    dX = np.zeros(shape, dY.dtype)
    np.put_along_axis(dX, classes[:, None], (-dY * weights / (divisor or 1))[:, None], 1)
    return dX


@gradient_of("Dropout", outputs=2)
def _dropout(dY: Array, Z: Array, B: Array | None, C: Array | None) -> Array:
    return dropout_grad(dY, Z, B, C)
