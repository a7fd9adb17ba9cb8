"""GRU: the forward pass that keeps its gates, and its gradient.

S steps, N sequences, I inputs, H hidden units, D directions: 2 if bidirectional, then 0 is forward and 1 reverse. The
order of the gates is z, r, h everywhere, and `ZRH` holds them after their activations. float16 and bfloat16 are
computed in float32 and rounded once; NaN propagates. Source of the semantics: GRUTraining and GRUGrad of ONNX Runtime
1.19.2, and for reverse, bidirectional, sequence lengths and empty dimensions, which those refuse, ONNX's GRU. Where a
sequence has length 0, HFinal is H0 and dH0 is grad_Ht, as the recurrence says, while ONNX Runtime's inference gives 0.

How it is fast. What does not depend on the step before is one product over all steps: X with W in the forward pass, and
dX, dW, dR and the bias gradients in the backward pass. The loop over time holds one product with R per step. Sequences
do not depend on each other, so each block of them runs through time on its own, in whatever thread is free; where there
is one block only, one thread does, and others join in for the products, since many short calls of NumPy in two threads
would wait for the interpreter's lock more than they would work. What is little as a whole, one thread does alone.
Where sequences differ in length, they are sorted, and what is beyond the end of one is not computed: its steps are not
among the rows of any product.
Inside the engine BLAS runs with one thread: the pool's threads and those of BLAS never compete.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from service.dtypes import compute_dtype
from service.kernels._gru_backward import Backward
from service.kernels._gru_forward import Forward
from service.kernels._gru_layout import Direction, check_shape, layout_of, narrowed, results, widened
from service.kernels._op import T, TSize, op

_INPUTS = {
    "X": [[[1.0]], [[-0.5]]],
    "W": [[[0.5], [-0.25], [1.0]]],
    "R": [[[0.25], [0.5], [-1.0]]],
    "B": [[0.0, 0.25, -0.5, 0.5, 0.0, 0.25]],
    "SL": [2],
    "H0": [[[0.5]]],
}
_GATES = {"HAll": [[[[0.5]]], [[[0.0]]]], "ZRH": [[[[0.75, 0.5, 0.5]]], [[[0.5, 0.5, -0.5]]]]}
_GRADIENTS = {"grad_HAll": [[[[1.0]]], [[[0.5]]]], "grad_Ht": [[[1.0]]]}


@op("GRUTraining", outputs="HAll HFinal ZRH", example=_INPUTS, linear=False)
def gru_training(
    X: T,
    W: T,
    R: T,
    B: T | None = None,
    SL: TSize | None = None,
    H0: T | None = None,
    /,
    *,
    hidden_size: int | None = None,
    direction: Direction = "forward",
    linear_before_reset: int = 0,
    activations: list[str] | None = None,
    clip: float | None = None,
) -> tuple[T, T, T]:
    """H' = (1 - z) * h + z * H at every step, with the gates z and r and the candidate h kept in ZRH.

    z = sigmoid(X Wz' + H Rz' + bz), r = sigmoid(X Wr' + H Rr' + br), h = tanh(X Wh' + (r * H) Rh' + bh), or, with
    linear_before_reset = 1, h = tanh(X Wh' + r * (H Rh' + Rbh) + Wbh).

    X [S, N, I], W [D, 3H, I], R [D, 3H, H], B [D, 6H], SL [N], H0 [D, N, H] -> HAll [S, D, N, H], HFinal [D, N, H],
    ZRH [S, D, N, 3H]. B and H0 are zeros if left out. Sequence n runs SL[n] steps, all if SL is left out; reverse turns
    only those around; HAll and ZRH are zero at the steps beyond. `hidden_size` may be left out, `activations` can only
    be the default, and `clip` is refused. Raises `ShapeMismatch`, `InvalidTensor` and `InvalidParameter`.
    """
    layout = layout_of(
        X,
        R,
        SL,
        hidden_size=hidden_size,
        direction=direction,
        linear_before_reset=linear_before_reset,
        activations=activations,
        clip=clip,
    )
    S, N, H, D = layout.S, layout.N, layout.H, layout.D
    check_shape("W", W, D, 3 * H, layout.I)
    check_shape("B", B, D, 6 * H)
    check_shape("H0", H0, D, N, H)
    dtype = compute_dtype(X.dtype)
    made = results(X.dtype, (S, D, N, H), (D, N, H), (S, D, N, 3 * H))
    given = {name: widened(tensor, dtype) for name, tensor in {"W": W, "R": R, "B": B, "H0": H0}.items()}
    memory = {name: wide for name, (_, wide) in zip(("HAll", "HFinal", "ZRH"), made, strict=True)}
    Forward(layout, np.ascontiguousarray(X, dtype), given, memory).run()
    return tuple(narrowed(*one) for one in made)  # type: ignore[return-value]


@op("GRUGrad", outputs="dX dW dR dB dH0", example={**_INPUTS, **_GATES, **_GRADIENTS}, linear=False)
def gru_grad(
    X: T,
    W: T,
    R: T,
    B: T | None,
    SL: TSize | None,
    H0: T | None,
    HAll: T,
    ZRH: T,
    grad_HAll: T | None = None,
    grad_Ht: T | None = None,
    /,
    *,
    hidden_size: int | None = None,
    direction: Direction = "forward",
    linear_before_reset: int = 0,
    activations: list[str] | None = None,
    clip: float | None = None,
    wanted: Collection[str] = ("dX", "dW", "dR", "dB", "dH0"),
) -> tuple[T, T, T, T, T]:
    """The gradients of GRUTraining's inputs, from those of HAll and of HFinal, grad_HAll and grad_Ht.

    X [S, N, I], W [D, 3H, I], R [D, 3H, H], B [D, 6H], SL [N], H0 [D, N, H], HAll [S, D, N, H], ZRH [S, D, N, 3H],
    grad_HAll [S, D, N, H], grad_Ht [D, N, H] -> dX, dW, dR, dB, dH0, of the shapes of X, W, R, B, H0. HAll and ZRH are
    taken as GRUTraining gave them; B, H0 and the gradients are zeros if left out. Beyond a sequence's length SL[n],
    dX is zero and the incoming gradients are ignored. What is not asked for is not computed. The attributes are those
    of GRUTraining. Raises `ShapeMismatch`, `InvalidTensor` and `InvalidParameter`.
    """
    layout = layout_of(
        X,
        R,
        SL,
        hidden_size=hidden_size,
        direction=direction,
        linear_before_reset=linear_before_reset,
        activations=activations,
        clip=clip,
    )
    S, N, H, D = layout.S, layout.N, layout.H, layout.D
    shapes = {
        "W": (W, (D, 3 * H, layout.I)),
        "R": (R, (D, 3 * H, H)),
        "B": (B, (D, 6 * H)),
        "H0": (H0, (D, N, H)),
        "HAll": (HAll, (S, D, N, H)),
        "ZRH": (ZRH, (S, D, N, 3 * H)),
        "grad_HAll": (grad_HAll, (S, D, N, H)),
        "grad_Ht": (grad_Ht, (D, N, H)),
    }
    for name, (tensor, shape) in shapes.items():
        check_shape(name, tensor, *shape)
    dtype = compute_dtype(X.dtype)
    wide = {name: widened(tensor, dtype) for name, (tensor, _) in shapes.items()}
    x = np.ascontiguousarray(X, dtype)
    outputs = {"dX": X.shape, "dW": W.shape, "dR": R.shape, "dB": (D, 6 * H), "dH0": (D, N, H)}
    needed = [name for name in outputs if name in wanted or name == "dH0"]
    made = dict(zip(needed, results(X.dtype, *(outputs[name] for name in needed)), strict=True))
    Backward(layout, x, wide, {name: memory for name, (_, memory) in made.items()}).run()
    return tuple(  # type: ignore[return-value]
        narrowed(*made[name]) if name in wanted else None for name in outputs
    )
