"""GRU: the forward pass that keeps its gates, and its gradient.

The dimensions are S steps, N sequences, I inputs, H hidden units and D directions. If bidirectional, D is 2, and
direction 0 is forward and 1 reverse. The order of the gates is z, r, h everywhere, and `ZRH` holds them after their
activations. float16 and bfloat16 are computed in float32 and rounded once; NaN propagates.

Source of the semantics: GRUTraining and GRUGrad of ONNX Runtime 1.19.2. These refuse reverse, bidirectional, sequence
lengths and empty dimensions, for which the source is ONNX's GRU. For a sequence of length 0, HFinal is H0 and dH0 is
grad_Ht, as the recurrence says, while ONNX Runtime's inference gives 0. `_recurrent_pass.py` says how it is fast.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from service.dtypes import Array
from service.kernels._blocks import scratch
from service.kernels._op import op
from service.kernels._recurrent_pass import Backward, Forward, run_pass, sigmoid
from service.kernels._recurrent_plan import Direction, make_plan, multiply_adds
from service.kernels._types import Rank2, Rank3, Rank4, T, TSize

FAMILY = "Recurrent networks"

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
_STATES, _SLOPES = "HAll HFinal ZRH", "dX dW dR dB dH0"


class _Forward(Forward):
    starts = {"HFinal": "H0"}
    histories = ("HAll", "ZRH")

    def __init__(self, *given: Any, linear_before_reset: int) -> None:
        super().__init__(*given)
        self.linear_before_reset = linear_before_reset
        joined = slice((2 if linear_before_reset else 3) * self.plan.H)
        self.input_bias[:, joined] += self.recurrent_bias[:, joined]

    def _through_time(self, d: int, steps: Iterable[tuple[Any, ...]]) -> None:
        H, R, candidate_bias = self.plan.H, self.inputs["R"][d], self.recurrent_bias[d, 2 * self.plan.H :]
        to_gates, to_candidate = R[: 2 * H].T, R[2 * H :].T
        for state, pre, h in steps:
            zr = np.matmul(h, to_gates)
            zr += pre[:, : 2 * H]
            sigmoid(zr)
            z, reset = zr[:, :H], zr[:, H:]
            if self.linear_before_reset:
                candidate = np.matmul(h, to_candidate)
                candidate += candidate_bias
                candidate *= reset
            else:
                candidate = np.matmul(reset * h, to_candidate)
            candidate += pre[:, 2 * H :]
            np.tanh(candidate, out=candidate)
            pre[:, : 2 * H] = zr
            pre[:, 2 * H :] = candidate
            np.multiply(z, h, out=state)
            state += (1 - z) * candidate
            h[...] = state


class _Backward(Backward):
    """`gates` holds z, r and h, as W sees them.

    With linear_before_reset, R sees another h: r times the h of W. It stands before z, so that the gates of R (h, z, r)
    are contiguous, and so are those of W (z, r, h).
    """

    starts = {"dH0": "grad_Ht"}
    gradient = "grad_HAll"

    def __init__(self, *given: Any, linear_before_reset: int) -> None:
        super().__init__(*given, kinds=4 if linear_before_reset else 3)
        self.linear_before_reset = linear_before_reset
        self.of_r = [(0, 2, self.of_w, self.previous), (2, 3, 0, self.previous)]
        R, H = self.inputs["R"], self.plan.H
        self.recurrent_weights = np.concatenate([R[:, 2 * H :], R[:, : 2 * H]], axis=1) if linear_before_reset else R
        if not linear_before_reset:
            self.of_r[1] = (2, 3, 2, self._empty_rows())  # r times the state

    def _factors(self, d: int, steps: slice, block: slice) -> list[Array | None]:
        """Return the gates, those of R in a row, z, and r where `_through_time` needs it."""
        H, inputs, rows = self.plan.H, self.inputs, self.rows
        zrh = rows.gather_history(inputs["ZRH"], d, steps, block)
        z, r, h = (zrh[..., k * H : (k + 1) * H] for k in range(3))
        update, reset, candidate, rest, part = scratch(0, 5 * z.size, z.dtype).reshape(5, *z.shape)
        gates, previous = (rows.view_rows(array[d], steps, block) for array in (self.gates, self.previous))
        to_z, to_r, to_h = (gates[..., self.of_w + k, :] for k in range(3))
        rows.gather_previous(inputs["HAll"], inputs["H0"], d, steps, block, previous, back=self.plan.reverse[d])
        update[...], reset[...], candidate[...] = z, r, h
        np.subtract(1, update, out=rest)
        np.subtract(previous, candidate, out=part)
        part *= update
        np.multiply(part, rest, out=to_z)
        candidate *= candidate
        np.subtract(1, candidate, out=part)
        part *= rest
        to_h[...] = part
        if self.linear_before_reset:
            part *= reset
            gates[..., 0, :] = part
            np.matmul(previous.reshape(-1, H), inputs["R"][d, 2 * H :].T, out=rest.reshape(-1, H))
            if inputs["B"] is not None:
                rest += inputs["B"][d, 5 * H :]
            part *= rest
        else:
            np.multiply(reset, previous, out=part)
            rows.view_rows(self.of_r[1][3][d], steps, block)[...] = part
        np.subtract(1, reset, out=rest)
        np.multiply(part, rest, out=to_r)
        row = gates.reshape(*gates.shape[:-2], -1)[..., : 3 * H if self.linear_before_reset else 2 * H]
        return [gates, row, update, None if self.linear_before_reset else reset]

    def _through_time(self, d: int, steps: Iterable[tuple[Any, ...]]) -> None:
        H, R = self.plan.H, self.recurrent_weights[d]
        for gradient, gate, row, z, r, state, state_of_gates, product in steps:
            if gradient is not None:
                state += gradient
            if self.linear_before_reset:
                gate *= state_of_gates
                np.matmul(row, R, out=product)
            else:
                gate[:, ::2] *= state_of_gates
                to_reset = np.matmul(gate[:, 2], R[2 * H :])
                gate[:, 1] *= to_reset
                np.matmul(row, R[: 2 * H], out=product)
                to_reset *= r
                product += to_reset
            state *= z
            state += product


def _multiply_adds(X: Array, W: Array, R: Array, B: Array | None, SL: Array | None, *_: object, **__: object) -> int:
    return multiply_adds(X, W, R, SL)


@op("GRUTraining", outputs=_STATES, example=_INPUTS, multiply_adds=_multiply_adds)
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
    plan = make_plan(
        X, R, SL, hidden_size, direction, activations, clip, gates=3, linear_before_reset=(linear_before_reset, (0, 1))
    )
    given = {"X": X, "W": W, "R": R, "B": B, "H0": H0}
    return run_pass(_Forward, plan, given, _STATES, _STATES.split(), linear_before_reset=linear_before_reset)


@op("GRUGrad", outputs=_SLOPES, example={**_INPUTS, **_GATES, **_GRADIENTS}, multiply_adds=_multiply_adds)
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
    wanted: Collection[str] = _SLOPES.split(),
) -> tuple[Rank3[T], Rank3[T], Rank3[T], Rank2[T], Rank3[T]]:
    """The gradients of GRUTraining's inputs, from those of HAll and of HFinal, grad_HAll and grad_Ht.

    X [S, N, I], W [D, 3H, I], R [D, 3H, H], B [D, 6H], SL [N], H0 [D, N, H], HAll [S, D, N, H], ZRH [S, D, N, 3H],
    grad_HAll [S, D, N, H], grad_Ht [D, N, H] -> dX, dW, dR, dB, dH0, of the shapes of X, W, R, B, H0. All hold the
    gates in GRUTraining's order: z, r, h, and of B the biases of W before those of R. HAll and ZRH must be
    GRUTraining's outputs; B, H0 and the gradients are zeros if left out. Beyond a sequence's length SL[n],
    dX is zero and the incoming gradients are ignored. Only the requested outputs are computed. The attributes are
    those of GRUTraining. Raises `ShapeMismatch`, `InvalidTensor`, `InvalidParameter` and `TensorTooLarge`.
    """
    plan = make_plan(
        X, R, SL, hidden_size, direction, activations, clip, gates=3, linear_before_reset=(linear_before_reset, (0, 1))
    )
    given = {"X": X, "W": W, "R": R, "B": B, "H0": H0, "HAll": HAll, "ZRH": ZRH}
    given |= {"grad_HAll": grad_HAll, "grad_Ht": grad_Ht}
    return run_pass(_Backward, plan, given, _SLOPES, wanted, linear_before_reset=linear_before_reset)
