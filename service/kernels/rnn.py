"""The simple RNN and its gradient: H' = f(X W' + H R' + Wb + Rb), where f is tanh or relu.

The dimensions are those of the LSTM: S steps, N sequences, I inputs, H hidden units and D directions. float16 and
bfloat16 are computed in float32 and rounded once; NaN propagates. Source of the semantics: ONNX's RNN, with HFinal of a
sequence of length 0 as in the LSTM. `_recurrent_pass.py` says how it is fast.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from service.dtypes import Array
from service.errors import InvalidParameter, shown
from service.kernels._op import check_work
from service.kernels._recurrent_pass import Backward, Forward, run_pass
from service.kernels._recurrent_plan import Plan, make_plan, multiply_adds


class _Forward(Forward):
    """`gates` is HAll, which holds X W' and the biases before a step."""

    starts = {"HFinal": "H0"}
    histories = ("HAll",)

    def __init__(self, *given: Any, activations: Sequence[str]) -> None:
        super().__init__(*given)
        self.activations = activations
        self.input_bias += self.recurrent_bias

    def _through_time(self, d: int, steps: Iterable[tuple[Any, ...]]) -> None:
        R, is_tanh = self.inputs["R"][d].T, self.activations[d] == "tanh"
        for state, h in steps:
            state += np.matmul(h, R)
            h[...] = np.tanh(state, out=state) if is_tanh else np.maximum(state, 0, out=state)


class _Backward(Backward):
    """`gates` holds the slopes of f."""

    starts = {"dH0": "dHFinal"}
    gradient = "dHAll"

    def __init__(self, *given: Any, activations: Sequence[str]) -> None:
        super().__init__(*given, kinds=1)
        self.activations = activations
        self.of_r = [(0, 1, 0, self.previous)]

    def _factors(self, d: int, steps: slice, block: slice) -> list[Array | None]:
        """Return the slopes."""
        rows, inputs = self.rows, self.inputs
        H = rows.gather_history(inputs["HAll"], d, steps, block)
        slopes, previous = (rows.view_rows(array[d], steps, block) for array in (self.gates[..., 0, :], self.previous))
        rows.gather_previous(inputs["HAll"], inputs["H0"], d, steps, block, previous, back=self.plan.reverse[d])
        slopes[...] = 1 - H * H if self.activations[d] == "tanh" else H > 0
        return [slopes]

    def _through_time(self, d: int, steps: Iterable[tuple[Any, ...]]) -> None:
        for gradient, slopes, h, *_ in steps:
            if gradient is not None:
                h += gradient
            slopes *= h
            np.matmul(slopes, self.inputs["R"][d], out=h)


def rnn(
    X: Array, W: Array, R: Array, B: Any = None, SL: Any = None, H0: Any = None, /, **attributes: Any
) -> tuple[Array, ...]:
    """Return HAll [S, D, N, H] and HFinal [D, N, H], from X [S, N, I], W [D, H, I], R [D, H, H], B [D, 2H], SL [N], H0.

    The attributes are those of GRUTraining; `activations` has tanh or relu, in any letter case, for each direction.
    Raises what GRUTraining raises.
    """
    plan, activations = _plan(X, W, R, SL, **attributes)
    given = {"X": X, "W": W, "R": R, "B": B, "H0": H0}
    return run_pass(_Forward, plan, given, "HAll HFinal", ("HAll", "HFinal"), activations=activations)


def rnn_grad(
    X: Array, W: Array, R: Array, SL: Any, H0: Any, HAll: Array, dHAll: Any, dHFinal: Any, /, wanted: Any, **kind: Any
) -> tuple[Array, ...]:
    """Return dX, dW, dR, dB and dH0, or None for those not wanted, from the gradients of what `rnn` returned."""
    plan, activations = _plan(X, W, R, SL, **kind)
    given = {"X": X, "W": W, "R": R, "H0": H0, "HAll": HAll, "dHAll": dHAll, "dHFinal": dHFinal}
    return run_pass(_Backward, plan, given, "dX dW dR dB dH0", wanted, activations=activations)


def _plan(
    X: Array,
    W: Array,
    R: Array,
    SL: Any,
    *,
    hidden_size: Any = None,
    direction: str = "forward",
    activations: Any = None,
    clip: Any = None,
) -> tuple[Plan, list[str]]:
    """Return the sizes, and the activation of each direction."""
    check_work("RNN", multiply_adds(X, W, R, SL))
    plan = make_plan(X, R, SL, hidden_size, direction, None, clip, gates=1)
    names = [name.lower() for name in activations or ["tanh"] * plan.D]
    if len(names) != plan.D or not {*names} <= {"tanh", "relu"}:
        problem = f"activations is {shown(list(names))}, but must be {plan.D} of tanh and relu, in any letter case"
        raise InvalidParameter(problem, parameter="activations")
    return plan, names
