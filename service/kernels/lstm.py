"""LSTM: the forward pass that keeps its cells and gates, and its gradient.

The dimensions are S steps, N sequences, I inputs, H hidden units and D directions. If bidirectional, D is 2, and
direction 0 is forward and 1 reverse. The order of the gates is i, o, f, c everywhere, where c is the candidate, and
`iofc` holds them after their activations. float16 and bfloat16 are computed in float32 and rounded once; NaN
propagates.

Source of the semantics: LSTMTraining and LSTMGrad of ONNX Runtime 1.19.2. These refuse reverse, bidirectional, sequence
lengths and empty dimensions, for which the source is ONNX's LSTM, and LSTMGrad has no peepholes. For a sequence of
length 0, HFinal is Ht0 and CFinal is Ct0, as the recurrence says, while ONNX Runtime's inference gives 0.
`_recurrent_pass.py` says how it is fast.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np

from service.dtypes import Array
from service.kernels._blocks import scratch, spare_memory
from service.kernels._op import op
from service.kernels._recurrent_pass import Backward, Forward, run_pass, sigmoid
from service.kernels._recurrent_plan import Direction, make_plan, multiply_adds
from service.kernels._types import Rank2, Rank3, Rank4, T, TSize

FAMILY = "Recurrent networks"

_WEIGHTS = {"X": [[[1.0]], [[-0.5]]], "W": [[[0.5], [-0.25], [1.0], [0.75]]], "R": [[[0.25], [0.5], [-1.0], [0.5]]]}
_STARTS = {"SL": [2], "Ht0": [[[0.5]]], "Ct0": [[[-0.25]]]}
_KEPT = {
    "HAll": [[[[0.125]]], [[[0.0]]]],
    "CAll": [[[[0.25]]], [[[0.0]]]],
    "iofc": [[[[0.75, 0.5, 0.5, 0.5]]], [[[0.5, 0.5, 0.25, -0.25]]]],
}
_GRADIENTS = {"dHAll": [[[[1.0]]], [[[0.5]]]], "dHFinal": [[[1.0]]], "dCFinal": [[[0.5]]]}
_PEEPHOLES = {"P": [[0.25, -0.5, 0.5]]}
_STATES, _SLOPES = "HAll HFinal CFinal CAll iofc", "dX dW dR dB dH0 dC0 dP"


class _Forward(Forward):
    starts = {"HFinal": "Ht0", "CFinal": "Ct0"}
    histories = ("HAll", "CAll", "iofc")

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.input_bias += self.recurrent_bias
        self.turned = spare_memory((self.plan.D, self.plan.H, 4 * self.plan.H), self.x.dtype)
        """R', whose products with a few rows are faster than those with a view of R."""
        self.turned[...] = self.inputs["R"].swapaxes(1, 2)

    def _through_time(self, d: int, steps: Iterable[tuple[Any, ...]]) -> None:
        H, P = self.plan.H, self.inputs["P"]
        p_i, p_o, p_f = (None, None, None) if P is None else np.split(P[d], 3)
        to_gates, to_candidate = self.turned[d, :, : 3 * H], self.turned[d, :, 3 * H :]
        for state, cells, pre, h, c in steps:
            iof, candidate = np.matmul(h, to_gates), np.matmul(h, to_candidate)
            iof += pre[:, : 3 * H]
            candidate += pre[:, 3 * H :]
            i, o, f = (iof[:, k * H : (k + 1) * H] for k in range(3))
            if P is None:
                sigmoid(iof)
            else:
                i += p_i * c
                f += p_f * c
                sigmoid(i)
                sigmoid(f)
            np.tanh(candidate, out=candidate)
            pre[:, 3 * H :] = candidate
            candidate *= i
            c *= f
            c += candidate
            if P is not None:
                o += p_o * c
                sigmoid(o)
            pre[:, : 3 * H] = iof
            np.tanh(c, out=h)
            h *= o
            state[...], cells[...] = h, c


class _Backward(Backward):
    """`gates` holds i, o, f and c."""

    starts = {"dH0": "dHFinal", "dC0": "dCFinal"}
    gradient = "dHAll"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given, kinds=4)
        self.of_r = [(0, 4, 0, self.previous)]
        self.previous_cells = self._empty_rows()
        """The cells before each step."""
        self.cells = self._empty_rows() if "dP" in self.outputs else None

    def _factors(self, d: int, steps: slice, block: slice) -> list[Array | None]:
        """Return the gates, those of a sequence in a row, f, and the factor by which H's gradient adds to C's."""
        rows, inputs, H, back = self.rows, self.inputs, self.plan.H, self.plan.reverse[d]
        iofc, C = (rows.gather_history(inputs[name], d, steps, block) for name in ("iofc", "CAll"))
        iofc = iofc.reshape(*C.shape[:-1], 4, H)
        i, o, f, c = (iofc[..., k, :] for k in range(4))
        arrays = (self.gates, self.previous, self.previous_cells)
        gates, previous, previous_cells = (rows.view_rows(array[d], steps, block) for array in arrays)
        rows.gather_previous(inputs["HAll"], inputs["Ht0"], d, steps, block, previous, back=back)
        rows.gather_previous(inputs["CAll"], inputs["Ct0"], d, steps, block, previous_cells, back=back)
        if self.cells is not None:
            rows.view_rows(self.cells[d], steps, block)[...] = C
        forget, through, squashed = scratch(0, 3 * C.size, C.dtype).reshape(3, *C.shape)
        forget[...] = f
        np.tanh(C, out=squashed)
        np.subtract(1, iofc[..., :3, :], out=gates[..., :3, :])
        gates[..., :3, :] *= iofc[..., :3, :]
        for k, factor in enumerate((c, squashed, previous_cells)):
            gates[..., k, :] *= factor
        for values, gate, out in ((c, i, gates[..., 3, :]), (squashed, o, through)):
            np.multiply(values, values, out=out)
            np.subtract(1, out, out=out)
            out *= gate
        return [gates, gates.reshape(*C.shape[:-1], 4 * H), forget, through]

    def _through_time(self, d: int, steps: Iterable[tuple[Any, ...]]) -> None:
        R, P = self.inputs["R"][d], self.inputs["P"]
        p_i, p_o, p_f = (None, None, None) if P is None else np.split(P[d], 3)
        for gradient, gate, row, forget, through, h, c, c_of_gates, _ in steps:
            if gradient is not None:
                h += gradient
            gate[:, 1] *= h
            through *= h
            c += through
            if P is not None:
                c += p_o * gate[:, 1]
            gate[:, 0] *= c
            gate[:, 2:] *= c_of_gates
            np.matmul(row, R, out=h)
            c *= forget
            if P is not None:
                c += p_i * gate[:, 0]
                c += p_f * gate[:, 2]

    def _products(self, d: int, steps: slice) -> Iterator[tuple[object, Callable[[bool], None]]]:
        yield from super()._products(d, steps)
        if "dP" in self.outputs:
            yield ("dP", d), partial(self._to_peepholes, d, steps)

    def _to_peepholes(self, d: int, steps: slice, fresh: bool) -> None:
        assert self.cells is not None
        rows, H, total = self.rows.chunk_rows(steps), self.plan.H, self.outputs["dP"][d].reshape(3, -1)
        gates = self.gates[d, rows].reshape(-1, 4, H)
        if fresh:
            total[...] = 0
        for k, cells in enumerate((self.previous_cells, self.cells, self.previous_cells)):
            total[k] += np.einsum("nh,nh->h", gates[:, k], cells[d, rows].reshape(-1, H))


_FORWARD_EXAMPLE = {**_WEIGHTS, "B": [[0.0, 0.25, -0.5, 0.5, 0.0, 0.25, 0.5, -0.25]], **_STARTS, **_PEEPHOLES}


@op(
    "LSTMTraining",
    outputs=_STATES,
    example=_FORWARD_EXAMPLE,
    multiply_adds=lambda X, W, R, B=None, SL=None, *_, **__: multiply_adds(X, W, R, SL),
)
def lstm_training(
    X: Rank3[T],
    W: Rank3[T],
    R: Rank3[T],
    B: Rank2[T] | None = None,
    SL: TSize | None = None,
    Ht0: Rank3[T] | None = None,
    Ct0: Rank3[T] | None = None,
    P: Rank2[T] | None = None,
    /,
    *,
    hidden_size: int | None = None,
    direction: Direction = "forward",
    activations: list[str] | None = None,
    clip: float | None = None,
    input_forget: int = 0,
) -> tuple[Rank4[T], Rank3[T], Rank3[T], Rank4[T], Rank4[T]]:
    """C' = f * C + i * c and H' = o * tanh(C') at every step; iofc keeps the gates i, o, f and the candidate c.

    i = sigmoid(X Wi' + H Ri' + bi + Pi * C), f = sigmoid(X Wf' + H Rf' + bf + Pf * C), c = tanh(X Wc' + H Rc' + bc),
    and o = sigmoid(X Wo' + H Ro' + bo + Po * C'), which sees the cells of its own step.

    W, R and iofc hold the gates in the order i, o, f, c, which is ONNX's. PyTorch's order is another: i, f, g, o, where
    g is c. B holds the biases Wbi, Wbo, Wbf, Wbc, Rbi, Rbo, Rbf, Rbc, those of W before those of R, and bi is
    Wbi + Rbi. P holds the peepholes Pi, Po, Pf.

    X [S, N, I], W [D, 4H, I], R [D, 4H, H], B [D, 8H], SL [N], Ht0 and Ct0 [D, N, H], P [D, 3H] -> HAll [S, D, N, H],
    HFinal and CFinal [D, N, H], CAll [S, D, N, H], iofc [S, D, N, 4H]. B, Ht0, Ct0 and P are zeros if left out.
    Sequence n runs SL[n] steps, or all steps if SL is left out. Reverse turns only those steps around, and HAll, CAll
    and iofc are zero at later steps. `hidden_size` may be left out, `activations` and `input_forget` must be the
    default, and `clip` is refused. Raises `ShapeMismatch`, `InvalidTensor`, `InvalidParameter`, and `TensorTooLarge`
    for work of more than about a minute.
    """
    forget = {"input_forget": (input_forget, (0,))}
    plan = make_plan(X, R, SL, hidden_size, direction, activations, clip, gates=4, **forget)
    given = {"X": X, "W": W, "R": R, "B": B, "Ht0": Ht0, "Ct0": Ct0, "P": P}
    return run_pass(_Forward, plan, given, _STATES, _STATES.split())


@op(
    "LSTMGrad",
    outputs=_SLOPES,
    example={**_WEIGHTS, **_STARTS, **_KEPT, **_GRADIENTS, **_PEEPHOLES},
    multiply_adds=lambda X, W, R, SL, *_, **__: multiply_adds(X, W, R, SL),
)
def lstm_grad(
    X: Rank3[T],
    W: Rank3[T],
    R: Rank3[T],
    SL: TSize | None,
    Ht0: Rank3[T] | None,
    Ct0: Rank3[T] | None,
    HAll: Rank4[T],
    CAll: Rank4[T],
    iofc: Rank4[T],
    dHAll: Rank4[T] | None = None,
    dHFinal: Rank3[T] | None = None,
    dCFinal: Rank3[T] | None = None,
    P: Rank2[T] | None = None,
    /,
    *,
    hidden_size: int | None = None,
    direction: Direction = "forward",
    activations: list[str] | None = None,
    clip: float | None = None,
    input_forget: int = 0,
    wanted: Collection[str] = _SLOPES.split(),
) -> tuple[Rank3[T], Rank3[T], Rank3[T], Rank2[T], Rank3[T], Rank3[T], Rank2[T]]:
    """The gradients of LSTMTraining's inputs, from those of HAll, HFinal and CFinal: dHAll, dHFinal and dCFinal.

    X [S, N, I], W [D, 4H, I], R [D, 4H, H], SL [N], Ht0 and Ct0 [D, N, H], HAll and CAll [S, D, N, H],
    iofc [S, D, N, 4H], dHAll [S, D, N, H], dHFinal and dCFinal [D, N, H], P [D, 3H] -> dX, dW, dR, dB [D, 8H], dH0,
    dC0, dP, of the shapes of X, W, R, B, Ht0, Ct0, P. All hold the gates in LSTMTraining's order: i, o, f, c, and dB
    the biases of W before those of R. HAll, CAll and iofc must be LSTMTraining's outputs, and P what it had; Ht0, Ct0,
    P and the gradients are zeros if left out. Beyond a sequence's length SL[n], dX is zero and the incoming gradients
    are ignored. Only the requested outputs are computed. The attributes are those of LSTMTraining. Raises
    `ShapeMismatch`, `InvalidTensor`, `InvalidParameter` and `TensorTooLarge`.
    """
    forget = {"input_forget": (input_forget, (0,))}
    plan = make_plan(X, R, SL, hidden_size, direction, activations, clip, gates=4, **forget)
    given = {"X": X, "W": W, "R": R, "Ht0": Ht0, "Ct0": Ct0, "HAll": HAll, "CAll": CAll, "iofc": iofc}
    given |= {"dHAll": dHAll, "dHFinal": dHFinal, "dCFinal": dCFinal, "P": P}
    return run_pass(_Backward, plan, given, _SLOPES, wanted)
