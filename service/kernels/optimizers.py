"""Optimizer steps and clipping: pure functions, whose outputs are new tensors.

Source of the semantics: the CPU training kernels of ONNX Runtime 1.19.2, which change their inputs, and compute in
float32 alone. Here tensors of one call may have different floating dtypes: all arithmetic is in the widest of them, at
least float32, and each result is rounded once. Groups have the same names and shapes. Attributes stay float64, while
ONNX keeps them as float32, so a `beta` of 0.999 is 0.99900001 there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Annotated, Any, Literal, TypeVar

import numpy as np

from service import dtypes
from service.dtypes import FLOAT16, Array, DType, cast
from service.errors import InvalidParameter, InvalidTensor
from service.kernels._checks import numbers_of, one_element, same_members, same_shapes
from service.kernels._op import op
from service.kernels._types import T_GRAD, Bit, Flag, Group, Rank0, T, TSize, U, V
from service.kernels._updates import dtype_of, sum_of_squares, update

FAMILY = "Optimizers"

Weights = TypeVar("Weights", bound=Annotated[Array, dtypes.FLOATS])
Mixed = TypeVar("Mixed", bound=Annotated[Array, dtypes.FLOATS])

_STEP = {"weights": {"w": [1.0, 2.0]}, "gradients": {"w": [0.5, -0.5]}, "update_signal": True, "lrs": {"w": 0.25}}
_ADAMW = {"momentums_1": {"w": [0.0, 0.0]}, "momentums_2": {"w": [0.0, 0.0]}, "weight_decays": {"w": 0.5}}


@op("SGDOptimizer", outputs="NW NG", example={"ETA": 0.5, "W": [1.0, 2.0], "G": [0.5, -0.5]})
def sgd_optimizer(ETA: V, W: T, G: T_GRAD, /) -> tuple[T, T_GRAD]:
    """NW = W - ETA * G, NG = -ETA * G.

    `ETA` has one element. `G` has the shape of `W`. Raises `ShapeMismatch` and `InvalidTensor`.
    """
    rate = one_element("ETA", ETA)
    same_shapes(W=W, G=G)

    def formula(w: Array, g: Array, new: Array, change: Array) -> None:
        np.multiply(g, -rate, out=change)
        np.add(w, change, out=new)

    weights, changes = update({"": formula}, [{"": W}, {"": G}], [W.dtype, G.dtype])
    return weights[""], changes[""]


@op("SGDOptimizerV2", outputs="update_completed updated_weights:weights", example={"lr": 0.5, **_STEP})
def sgd_optimizer_v2(
    lr: V,
    weights: Group[T],
    gradients: Group[T_GRAD],
    update_signal: Flag | None = None,
    lrs: Group[V] | None = None,
    /,
) -> tuple[Flag, Group[T]]:
    """updated_weights = weights - lr * gradients, unless update_signal is false.

    `lr` and `update_signal` have one element each, and `update_completed` has the shape of `lr`. A weight that `lrs`
    names has its own rate there, one element, in place of `lr`. Without an update the weights stay as they are. Raises
    `MissingTensor`, `UnknownTensor`, `ShapeMismatch` and `InvalidTensor`.
    """
    rates, is_on = numbers_of("lrs", lrs, one_element("lr", lr), weights), _signal(update_signal)
    same_members(weights=weights, gradients=gradients)

    def formula(rate: float, w: Array, g: Array, new: Array) -> None:
        np.multiply(g, -rate, out=new)
        np.add(w, new, out=new)

    formulas = {name: partial(formula, one) for name, one in rates.items()}
    updated = update(formulas, [weights, gradients], [dtype_of(weights)]) if is_on else [weights]
    return np.full(lr.shape, is_on), updated[0]


def _adam(
    rate: float, count: int, mode: int, decay: float, alpha: float, beta: float, epsilon: float
) -> Callable[..., None]:
    """Return the formula of update number `count`, without correction if that is 0: new weights and moments.

    Its last array gets the change of the weights before their decay, negated. The correction of v is a factor of the
    rate and, in mode 0, of epsilon.
    """
    m_divisor, v_divisor = (_correction(alpha, count), _correction(beta, count)) if count > 0 else (1.0, 1.0)
    before, after = (0.0, rate * decay) if mode else (rate * decay, 0.0)
    deviation = _root(v_divisor)
    rate, epsilon = _divided(rate * deviation, m_divisor), epsilon if mode else epsilon * deviation

    def formula(
        w: Array, g: Array, m: Array, v: Array, new_w: Array, new_m: Array, new_v: Array, change: Array
    ) -> None:
        np.multiply(g, 1 - alpha, out=change)
        np.multiply(m, alpha, out=new_m)
        np.add(new_m, change, out=new_m)
        np.multiply(g, g, out=change)
        np.multiply(change, 1 - beta, out=change)
        np.multiply(v, beta, out=new_v)
        np.add(new_v, change, out=new_v)
        np.sqrt(new_v, out=change)
        np.add(change, epsilon, out=change)
        np.divide(new_m, change, out=change)
        np.multiply(change, rate, out=change)
        np.subtract(np.multiply(w, 1 - before, out=new_w) if before else w, change, out=new_w)
        if after:
            np.multiply(new_w, 1 - after, out=new_w)

    return formula


@op(
    "AdamWOptimizer",
    outputs=("updated_flag updated_weights:weights updated_momentums_1:momentums_1 updated_momentums_2:momentums_2"),
    example={"lr": 0.5, "step": 1, **_STEP, **_ADAMW, "alpha": 0.5, "beta": 0.75, "weight_decay": 0.0},
)
def adamw_optimizer(
    lr: V,
    step: TSize,
    weights: Group[T],
    gradients: Group[T_GRAD],
    momentums_1: Group[U],
    momentums_2: Group[U],
    update_signal: Flag | None = None,
    lrs: Group[V] | None = None,
    weight_decays: Group[V] | None = None,
    /,
    *,
    alpha: float = 0.9,
    beta: float = 0.999,
    epsilon: float = 1e-8,
    weight_decay: float = 0.01,
    adam_mode: Bit = 0,
    correct_bias: Bit = 1,
) -> tuple[Flag, Group[T], Group[U], Group[U]]:
    """m = alpha m + (1 - alpha) g, v = beta v + (1 - beta) g^2, weights -= lr m' / (sqrt(v') + epsilon).

    m' = m / (1 - alpha^step) and v' = v / (1 - beta^step). With adam_mode 0, as in PyTorch, weights lose
    lr * weight_decay of themselves before. With adam_mode 1, as in Hugging Face, epsilon is added to sqrt(v), the rate
    is lr sqrt(1 - beta^step) / (1 - alpha^step), or lr if correct_bias is 0, and the new weights lose
    lr * weight_decay of themselves.

    `step` counts from 1; the trainer increments it. `lr`, `step` and `update_signal` have one element each, and
    `updated_flag` has the shape of `step`. A weight that `lrs` or `weight_decays` names has its own number there, one
    element, in place of `lr` or `weight_decay`. If `update_signal` is false, nothing changes. Raises `MissingTensor`,
    `UnknownTensor`, `ShapeMismatch`, `InvalidTensor` and, for adam_mode 0 without correct_bias, `InvalidParameter`.
    """
    rates, is_on = numbers_of("lrs", lrs, one_element("lr", lr), weights), _signal(update_signal)
    decays = numbers_of("weight_decays", weight_decays, weight_decay, weights)
    count = int(one_element("step", step))
    if count < 1:
        raise InvalidTensor(f"step is {count}, but must be 1 or more: it counts from 1", tensor="step")
    if not (adam_mode or correct_bias):
        raise InvalidParameter(
            "correct_bias is 0, which needs adam_mode 1, but adam_mode is 0", parameter="correct_bias"
        )
    same_members(weights=weights, gradients=gradients, momentums_1=momentums_1, momentums_2=momentums_2)
    flag = np.full(step.shape, is_on)
    if not is_on:
        return flag, weights, momentums_1, momentums_2
    adam = cache(lambda rate, decay: _adam(rate, count * correct_bias, adam_mode, decay, alpha, beta, epsilon))
    formulas = {name: adam(rate, decays[name]) for name, rate in rates.items()}
    moment = dtype_of(momentums_1)
    groups: Any = [weights, gradients, momentums_1, momentums_2]
    return flag, *update(formulas, groups, [dtype_of(weights), moment, moment], temporaries=1)


@op(
    "AdamOptimizer",
    outputs="new_T new_moment_1 new_moment_2 new_weights new_gradients new_mixed_precision_weights",
    example={
        "R": 0.5,
        "T": 1,
        **dict.fromkeys(("weights", "mixed_precision_weights"), [1.0, 2.0]),
        "gradients": [0.5, -0.5],
        **dict.fromkeys(("moment_1", "moment_2"), [0.0, 0.0]),
        **dict.fromkeys(("loss_scale", "global_gradient_norm"), 1.0),
        "update_signal": True,
        "alpha": 0.5,
        "beta": 0.75,
    },
)
def adam_optimizer(
    R: V,
    T: TSize,
    weights: Weights,
    gradients: T_GRAD,
    moment_1: U,
    moment_2: U,
    mixed_precision_weights: Mixed | None = None,
    loss_scale: V | None = None,
    global_gradient_norm: V | None = None,
    update_signal: Flag | None = None,
    /,
    *,
    alpha: float = 0.9,
    beta: float = 0.999,
    lambda_: float = 0.0,
    epsilon: float = 1e-8,
    max_norm_clip: float = 1.0,
    do_bias_correction: Bit = 1,
    weight_decay_mode: Bit = 0,
) -> tuple[TSize, U, U, Weights, T_GRAD, Mixed]:
    """new_weights = weights - R (m' / (sqrt(v') + epsilon) + lambda weights), with the moments of AdamWOptimizer.

    `T` counts the updates: it is 1 at the first one, and new_T is T + 1. If T is 0 or less, or `do_bias_correction` is
    0, then m' = m and v' = v. With weight_decay_mode 1, epsilon is added to sqrt(v), the rate is
    R sqrt(1 - beta^T) / (1 - alpha^T), and the new weights lose R * lambda of themselves. `new_gradients` is the change
    of the weights. `new_mixed_precision_weights` are the new weights in the dtype of `mixed_precision_weights`, or in
    float16 without them.

    Gradients are divided by `loss_scale`, or, if `global_gradient_norm` is above loss_scale * max_norm_clip, by
    global_gradient_norm / max_norm_clip. If `update_signal` is false, nothing changes, and `new_gradients` is zero. The
    CPU kernel of ONNX Runtime ignores these three inputs; the rules are those of its GPU kernel. Tensors of weights
    have one shape, all other inputs one element. Raises `ShapeMismatch` and `InvalidTensor`.
    """
    rate, count, is_on = one_element("R", R), int(one_element("T", T)), _signal(update_signal)
    scale = 1.0 if loss_scale is None else one_element("loss_scale", loss_scale)
    norm = 0.0 if global_gradient_norm is None else one_element("global_gradient_norm", global_gradient_norm)
    given = {"gradients": gradients, "moment_1": moment_1, "moment_2": moment_2}
    if mixed_precision_weights is not None:
        given["mixed_precision_weights"] = mixed_precision_weights
    same_shapes(weights=weights, **given)
    mixed = FLOAT16 if mixed_precision_weights is None else mixed_precision_weights.dtype
    divisor = _divided(norm, max_norm_clip) if norm > scale * max_norm_clip else scale
    adam = _adam(rate, count * do_bias_correction, weight_decay_mode, lambda_, alpha, beta, epsilon)

    def formula(w: Array, g: Array, m: Array, v: Array, *outputs: Array) -> None:
        new_m, new_v, new_w, new_g, new_mixed, scaled = outputs
        adam(w, np.divide(g, divisor, out=scaled), m, v, new_w, new_m, new_v, new_g)
        np.copyto(new_mixed, new_w)
        np.subtract(new_w, w, out=new_g)

    def keep(w: Array, _: Array, m: Array, v: Array, *outputs: Array) -> None:
        for output, value in zip(outputs, (m, v, w, np.zeros_like(w), w), strict=False):
            np.copyto(output, value)

    inputs = [{"": tensor} for tensor in (weights, gradients, moment_1, moment_2)]
    dtypes = [moment_1.dtype, moment_2.dtype, weights.dtype, gradients.dtype, mixed]
    results = update({"": formula if is_on else keep}, inputs, dtypes, temporaries=1)
    return np.array(T + is_on, T.dtype), *(result[""] for result in results)


@op(
    "InplaceClipGradNorm",
    outputs="clipped_gradients:gradients total_norm",
    example={"gradients": {"w": [3.0, 0.0], "b": [4.0]}, "max_norm": 2.5},
)
def inplace_clip_grad_norm(
    gradients: Group[T], /, *, max_norm: float = 1.0, norm_type: Literal["fro"] = "fro"
) -> tuple[Group[T], Rank0[T]]:
    """clipped_gradients = gradients * min(max_norm / (total_norm + 1e-6), 1).

    `total_norm`, a scalar that ONNX Runtime does not give, is the square root of the sum of all squares, which are
    added in float64. A NaN makes all gradients NaN; with an infinity all others are 0, and it is NaN. Raises
    `InvalidParameter` for a negative `max_norm`.
    """
    if not max_norm >= 0:
        raise InvalidParameter(f"max_norm is {max_norm}, but must be 0 or more", parameter="max_norm")
    norm = _root(sum_of_squares(gradients))
    rounded = _number(norm, dtype_of(gradients))
    factor = _divided(max_norm, norm + 1e-6)
    if factor > 1:
        return gradients, rounded
    clipped = update(dict.fromkeys(gradients, partial(np.multiply, factor)), [gradients], [dtype_of(gradients)])
    return clipped[0], rounded


@op("ReduceAllL2", outputs="Y", example={"X": {"0": [3.0], "1": [4.0]}})
def reduce_all_l2(X: Group[T], /) -> Rank0[T]:
    """Y = sqrt(sum of all squares), a scalar.

    The squares are added in float64, and the root is rounded once. Zero-size tensors count as nothing.
    """
    return _number(_root(sum_of_squares(X)), dtype_of(X))


def _signal(update_signal: Flag | None) -> bool:
    return update_signal is None or bool(one_element("update_signal", update_signal))


def _correction(base: float, count: int) -> float:
    with np.errstate(all="ignore"):
        return float(1 - np.power(np.float64(base), float(count)))


def _divided(a: float, b: float) -> float:
    with np.errstate(all="ignore"):
        return float(np.divide(a, b))


def _number(number: float, dtype: DType) -> Any:
    with np.errstate(all="ignore"):
        return cast(np.array(number), dtype)


def _root(number: float) -> float:
    with np.errstate(all="ignore"):
        return float(np.sqrt(number))
