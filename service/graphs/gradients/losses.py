"""The gradients of losses and of Dropout."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from service.dtypes import Array
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


@rule("NegativeLogLikelihoodLoss")
def _negative_log_likelihood(tape: Tape, node: Node, dY: str) -> list[str]:
    def gradient(dY: Array, shape: tuple[int, ...], *given: Any) -> Array:
        """Return that of SoftmaxCrossEntropyLoss, where the probabilities are 0: what the labels add to it."""
        log_prob = np.broadcast_to(dY.dtype.type(-np.inf), shape)
        return softmax_cross_entropy_loss_grad(dY, log_prob, *given, **node.attributes)

    return [tape.call(gradient, dY, tape.shape(node.inputs[0]), *node.inputs[1:])]


@gradient_of("Dropout", outputs=2)
def _dropout(dY: Array, Z: Array, B: Array | None, C: Array | None) -> Array:
    return dropout_grad(dY, Z, B, C)
