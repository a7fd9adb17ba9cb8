"""GRU: the forward pass that keeps its gates, and its gradient.

The dimensions are S steps, N sequences, I inputs, H hidden units and D directions. If bidirectional, D is 2, and
direction 0 is forward and 1 reverse. The order of the gates is z, r, h everywhere, and `ZRH` holds them after their
activations. float16 and bfloat16 are computed in float32 and rounded once; NaN propagates.

Source of the semantics: GRUTraining and GRUGrad of ONNX Runtime 1.19.2. These refuse reverse, bidirectional, sequence
lengths and empty dimensions, for which the source is ONNX's GRU. For a sequence of length 0, HFinal is H0 and dH0 is
grad_Ht, as the recurrence says, while ONNX Runtime's inference gives 0.

How it is fast:
- Everything that does not depend on the previous step is one product over all steps: X with W in the forward pass, and
  dX, dW, dR and the bias gradients in the backward pass. The loop over time has one product with R per step.
- Sequences do not depend on each other, so each block of sequences runs through time on its own, in any idle thread.
- A single block runs through time in one thread, and other threads join in for the products. Many short NumPy calls in
  two threads would spend more time on waiting for the interpreter's lock than on work. One thread does all small work.
- Sequences of different lengths are sorted. No product has rows for the steps beyond a sequence's end.
- Inside the engine BLAS runs with one thread, so its threads never compete with the pool's.
"""

from __future__ import annotations

from collections.abc import Collection

from service.dtypes import Array, compute_dtype
from service.kernels._gru_backward import Backward
from service.kernels._gru_forward import Forward
from service.kernels._gru_plan import (
    Direction,
    check_shape,
    make_outputs,
    make_plan,
    multiply_adds,
    round_output,
    widen_input,
    widen_tensor,
)
from service.kernels._op import op
from service.kernels._types import Rank2, Rank3, Rank4, T, TSize

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


def _multiply_adds(X: Array, W: Array, R: Array, B: Array | None, SL: Array | None, *_: object, **__: object) -> int:
    return multiply_adds(X, W, R, SL)


@op("GRUTraining", outputs="HAll HFinal ZRH", example=_INPUTS, multiply_adds=_multiply_adds)
def gru_training(
    X: Rank3[T],
    W: Rank3[T],
    R: Rank3[T],
    B: Rank2[T] | None = None,
    SL: TSize | None = None,
    H0: Rank3[T] | None = None,
    /,
    *,
    hidden_size: int | None = None,
    direction: Direction = "forward",
    linear_before_reset: int = 0,
    activations: list[str] | None = None,
    clip: float | None = None,
) -> tuple[Rank4[T], Rank3[T], Rank4[T]]:
    """H' = (1 - z) * h + z * H at every step, with the gates z and r and the candidate h kept in ZRH.

    z = sigmoid(X Wz' + H Rz' + bz), r = sigmoid(X Wr' + H Rr' + br), h = tanh(X Wh' + (r * H) Rh' + bh), or, with
    linear_before_reset = 1, h = tanh(X Wh' + r * (H Rh' + Rbh) + Wbh).

    W, R and ZRH hold the gates in the order z, r, h, which is ONNX's. PyTorch's order is another: r, z, n. B holds the
    biases Wbz, Wbr, Wbh, Rbz, Rbr, Rbh, those of W before those of R, and bz is Wbz + Rbz.

    X [S, N, I], W [D, 3H, I], R [D, 3H, H], B [D, 6H], SL [N], H0 [D, N, H] -> HAll [S, D, N, H], HFinal [D, N, H],
    ZRH [S, D, N, 3H]. B and H0 are zeros if left out. Sequence n runs SL[n] steps, or all steps if SL is left out.
    Reverse turns only those steps around, and HAll and ZRH are zero at later steps. `hidden_size` may be left out,
    `activations` must be the default, and `clip` is refused. Raises `ShapeMismatch`, `InvalidTensor`,
    `InvalidParameter`, and `TensorTooLarge` for work of more than about a minute.
    """
    plan = make_plan(X, R, SL, hidden_size, direction, linear_before_reset, activations, clip)
    S, N, H, D = plan.S, plan.N, plan.H, plan.D
    check_shape("W", W, D, 3 * H, plan.I)
    check_shape("B", B, D, 6 * H)
    check_shape("H0", H0, D, N, H)
    dtype = compute_dtype(X.dtype)
    outputs = make_outputs(X.dtype, (S, D, N, H), (D, N, H), (S, D, N, 3 * H))
    inputs = {name: widen_input(tensor, dtype) for name, tensor in {"W": W, "R": R, "B": B, "H0": H0}.items()}
    memory = {name: wide for name, (_, wide) in zip(("HAll", "HFinal", "ZRH"), outputs, strict=True)}
    Forward(plan, widen_tensor(X, dtype), inputs, memory).run()
    return tuple(round_output(*pair) for pair in outputs)  # type: ignore[return-value]


@op("GRUGrad", outputs="dX dW dR dB dH0", example={**_INPUTS, **_GATES, **_GRADIENTS}, multiply_adds=_multiply_adds)
def gru_grad(
    X: Rank3[T],
    W: Rank3[T],
    R: Rank3[T],
    B: Rank2[T] | None,
    SL: TSize | None,
    H0: Rank3[T] | None,
    HAll: Rank4[T],
    ZRH: Rank4[T],
    grad_HAll: Rank4[T] | None = None,
    grad_Ht: Rank3[T] | None = None,
    /,
    *,
    hidden_size: int | None = None,
    direction: Direction = "forward",
    linear_before_reset: int = 0,
    activations: list[str] | None = None,
    clip: float | None = None,
    wanted: Collection[str] = ("dX", "dW", "dR", "dB", "dH0"),
) -> tuple[Rank3[T], Rank3[T], Rank3[T], Rank2[T], Rank3[T]]:
    """The gradients of GRUTraining's inputs, from those of HAll and of HFinal, grad_HAll and grad_Ht.

    X [S, N, I], W [D, 3H, I], R [D, 3H, H], B [D, 6H], SL [N], H0 [D, N, H], HAll [S, D, N, H], ZRH [S, D, N, 3H],
    grad_HAll [S, D, N, H], grad_Ht [D, N, H] -> dX, dW, dR, dB, dH0, of the shapes of X, W, R, B, H0. All hold the
    gates in GRUTraining's order: z, r, h, and of B the biases of W before those of R. HAll and ZRH must be
    GRUTraining's outputs; B, H0 and the gradients are zeros if left out. Beyond a sequence's length SL[n],
    dX is zero and the incoming gradients are ignored. Only the requested outputs are computed. The attributes are
    those of GRUTraining. Raises `ShapeMismatch`, `InvalidTensor`, `InvalidParameter` and `TensorTooLarge`.
    """
    plan = make_plan(X, R, SL, hidden_size, direction, linear_before_reset, activations, clip)
    S, N, H, D = plan.S, plan.N, plan.H, plan.D
    shapes = {
        "W": (W, (D, 3 * H, plan.I)),
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
    inputs = {name: widen_input(tensor, dtype) for name, (tensor, _) in shapes.items()}
    x = widen_tensor(X, dtype)
    gradients = {"dX": X.shape, "dW": W.shape, "dR": R.shape, "dB": (D, 6 * H), "dH0": (D, N, H)}
    computed = [name for name in gradients if name in wanted or name == "dH0"]
    outputs = dict(zip(computed, make_outputs(X.dtype, *(gradients[name] for name in computed)), strict=True))
    Backward(plan, x, inputs, {name: memory for name, (_, memory) in outputs.items()}).run()
    return tuple(  # type: ignore[return-value]
        round_output(*outputs[name]) if name in wanted else None for name in gradients
    )
