"""GRU: the forward pass that keeps its gates, and its gradient.

S steps, N sequences, I inputs, H hidden units, D directions: 2 if bidirectional, then 0 is forward and 1 reverse. The
order of the gates is z, r, h everywhere, and `ZRH` holds them after their activations. float16 and bfloat16 are
computed in float32 and rounded once; NaN propagates. Source of the semantics: GRUTraining and GRUGrad of ONNX Runtime
1.19.2, and for reverse, bidirectional, sequence lengths and empty dimensions, which those refuse, ONNX's GRU. Where a
sequence has length 0, HFinal is H0 and dH0 is grad_Ht, as the recurrence says, while ONNX Runtime's inference gives 0.

How it is fast. What does not depend on the step before is one product over all steps: X with W in the forward pass, and
dX, dW, dR and the bias gradients in the backward pass. The loop over time holds one product with R per step. Sequences
do not depend on each other, so each block of them runs through time on its own, in a thread of its own. Inside the
engine BLAS runs with one thread: the pool's threads and those of BLAS never compete.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from functools import partial

import numpy as np

from service.dtypes import compute_dtype
from service.kernels._blocks import new_output, scratch, share_out
from service.kernels._gru_layout import Direction, Layout, check_shape, layout_of, widened
from service.kernels._op import Array, T, TSize, op

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


@op("GRUTraining", outputs="HAll HFinal ZRH", example=_INPUTS)
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
    check_shape("R", R, D, 3 * H, H)
    check_shape("B", B, D, 6 * H)
    check_shape("H0", H0, D, N, H)
    dtype = compute_dtype(X.dtype)
    HAll: Array = new_output(None, (S, D, N, H), dtype)
    HFinal: Array = new_output(None, (D, N, H), dtype)
    ZRH: Array = new_output(None, (S, D, N, 3 * H), dtype)
    x, w, r = (np.ascontiguousarray(tensor, dtype) for tensor in (X, W, R))
    b, h0 = widened(B, dtype), widened(H0, dtype)
    bias = np.zeros((D, 6 * H), dtype) if b is None else b
    inputs = bias[:, : 3 * H].copy()  # what is added to X W', for all steps alike
    inputs[:, : 2 * H] += bias[:, 3 * H : 5 * H]
    if not layout.linear_before_reset:
        inputs[:, 2 * H :] += bias[:, 5 * H :]
    blocks, sequences = layout.step_blocks(), layout.sequence_blocks()

    def project(number: int) -> None:
        steps = blocks[number]
        for d in range(D):
            gates = np.matmul(x[steps], w[d].T)
            np.add(gates, inputs[d], out=ZRH[steps, d])

    def run(number: int) -> None:
        d, block = sequences[number]
        start = np.zeros_like(HFinal[d, block]) if h0 is None else h0[d, block]
        HFinal[d, block] = _forward(layout, d, block, start, r[d], bias[d, 5 * H :], HAll, ZRH)

    share_out(project, len(blocks))
    share_out(run, len(sequences))
    return tuple(made.astype(X.dtype, copy=False) for made in (HAll, HFinal, ZRH))  # type: ignore[return-value]


def _forward(
    layout: Layout, d: int, block: slice, h: Array, r: Array, candidate_bias: Array, HAll: Array, ZRH: Array
) -> Array:
    """Run a block of sequences through time: ZRH goes in as X W' + bias and comes out as gates."""
    H, gates_r, candidate_r = layout.H, r[: 2 * layout.H].T, r[2 * layout.H :].T
    for t in layout.steps(d):
        pre, state = ZRH[t, d, block], HAll[t, d, block]
        zr = np.matmul(h, gates_r)
        zr += pre[:, : 2 * H]
        np.negative(zr, out=zr)
        np.exp(zr, out=zr)
        zr += 1
        np.divide(1, zr, out=zr)
        z, reset = zr[:, :H], zr[:, H:]
        if layout.linear_before_reset:
            candidate = np.matmul(h, candidate_r)
            candidate += candidate_bias
            candidate *= reset
        else:
            candidate = np.matmul(reset * h, candidate_r)
        candidate += pre[:, 2 * H :]
        np.tanh(candidate, out=candidate)
        pre[:, : 2 * H] = zr
        pre[:, 2 * H :] = candidate
        np.multiply(z, h, out=state)
        state += (1 - z) * candidate
        idle = layout.idle(t, block)
        if idle is None:
            h = state
        else:
            after = state.copy()
            after[idle] = h[idle]
            h = after
            pre[idle] = 0
            state[idle] = 0
    return h


@op("GRUGrad", outputs="dX dW dR dB dH0", example={**_INPUTS, **_GATES, **_GRADIENTS})
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
    dX is zero and the incoming gradients are ignored. What is not `wanted` is not computed. The attributes are those of
    GRUTraining. Raises `ShapeMismatch`, `InvalidTensor` and `InvalidParameter`.
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
    if layout.padded is not None:
        x = np.where(layout.padded[:, :, None], dtype.type(0), x)
    made: dict[str, Array] = {
        name: new_output(None, shape, dtype)
        for name, shape in {
            "dX": X.shape,
            "dW": W.shape,
            "dR": R.shape,
            "dB": (D, 6 * H),
            "dH0": (D, N, H),
        }.items()
        if name in wanted or name == "dH0"
    }
    _Backward(layout, x, wide, made).run()
    return tuple(  # type: ignore[return-value]
        made[name].astype(X.dtype, copy=False) if name in wanted else None for name in ("dX", "dW", "dR", "dB", "dH0")
    )


class _Backward:
    """The gradient, in three phases: coefficients of all steps, time, products over all steps.

    `gates` holds what turns the gradient of the state into those of the pre-activations, and after the second phase
    these: z, r and h, as W sees them. With linear_before_reset, R sees another h, r times it, which stands before them,
    so that what belongs to R is contiguous, h, z, r, and what belongs to W is as well.
    """

    def __init__(self, layout: Layout, x: Array, given: Mapping[str, Array | None], made: Mapping[str, Array]) -> None:
        self.layout, self.x, self.given, self.made = layout, x, given, made
        S, N, H, D, dtype = layout.S, layout.N, layout.H, layout.D, x.dtype
        self.first = 1 if layout.linear_before_reset else 0  # where z stands
        self.gates: Array = new_output(None, (D, S, N, 3 + self.first, H), dtype)
        self.previous: Array = new_output(None, (D, S, N, H), dtype)  # the state before each step
        self.reset: Array | None = None  # r * previous, where R sees that instead
        if not layout.linear_before_reset:
            self.reset = new_output(None, (D, S, N, H), dtype)

    def run(self) -> None:
        layout, steps, sequences = self.layout, self.layout.step_blocks(), self.layout.sequence_blocks()
        share_out(lambda number: self._prepare(steps[number]), len(steps))
        share_out(lambda number: self._through_time(*sequences[number]), len(sequences))
        products: list[Callable[[], None]] = []
        for d, gate in itertools.product(range(layout.D), range(3)):
            if {"dR", "dB"} & self.made.keys():
                products.append(partial(self._recurrent, d, gate))
            if {"dW", "dB"} & self.made.keys():
                products.append(partial(self._input, d, gate))
        if "dX" in self.made:
            products += [partial(self._to_x, block) for block in steps]
        share_out(lambda number: products[number](), len(products))

    def _array(self, name: str) -> Array:
        array = self.given[name]
        assert array is not None
        return array

    def _prepare(self, steps: slice) -> None:
        layout, H, first = self.layout, self.layout.H, self.first
        for d in range(layout.D):
            previous, gates = self.previous[d, steps], self.gates[d, steps]
            self._fill_previous(d, steps, previous)
            z, r, h = (self._array("ZRH")[steps, d, :, k * H : (k + 1) * H] for k in range(3))
            to_z, to_r, to_h = (gates[:, :, first + k] for k in range(3))
            rest = np.subtract(1, z, out=scratch(0, z.size, z.dtype).reshape(z.shape))
            np.subtract(previous, h, out=to_z)
            to_z *= z
            to_z *= rest
            np.multiply(h, h, out=to_h)
            np.subtract(1, to_h, out=to_h)
            to_h *= rest
            np.subtract(1, r, out=to_r)
            if self.reset is None:
                np.multiply(to_h, r, out=gates[:, :, 0])
                product = np.matmul(previous, self._array("R")[d, 2 * H :].T, out=rest)
                if self.given["B"] is not None:
                    product += self._array("B")[d, 5 * H :]
                to_r *= product
                to_r *= gates[:, :, 0]
            else:
                np.multiply(r, previous, out=self.reset[d, steps])
                to_r *= self.reset[d, steps]
            if layout.padded is not None:
                gates[layout.padded[steps]] = 0
                if self.reset is not None:
                    self.reset[d, steps][layout.padded[steps]] = 0

    def _fill_previous(self, d: int, steps: slice, previous: Array) -> None:
        HAll, H0 = self._array("HAll"), self.given["H0"]
        start = 0 if H0 is None else H0[d]
        first, last = steps.start, steps.start + len(previous)
        if self.layout.reverse[d]:
            previous[:-1] = HAll[first + 1 : last, d]
            previous[-1] = HAll[last, d] if last < self.layout.S else start
        else:
            previous[1:] = HAll[first : last - 1, d]
            previous[0] = HAll[first - 1, d] if first else start
        lengths = self.layout.lengths
        if lengths is not None:
            if self.layout.reverse[d]:
                for n in np.flatnonzero((lengths > first) & (lengths <= last)):
                    previous[lengths[n] - 1 - first, n] = 0 if H0 is None else H0[d, n]
            previous[np.arange(first, last)[:, None] >= lengths] = 0

    def _through_time(self, d: int, block: slice) -> None:
        layout, H, R, ZRH = self.layout, self.layout.H, self._array("R")[d], self._array("ZRH")
        grad_HAll, grad_Ht = self.given["grad_HAll"], self.given["grad_Ht"]
        G = self.made["dH0"][d, block]  # the gradient of the state, step by step, until it is that of H0
        G[...] = 0 if grad_Ht is None else grad_Ht[d, block]
        if layout.linear_before_reset:
            R = np.concatenate([R[2 * H :], R[: 2 * H]])
        product = np.empty_like(G)
        for t in reversed(layout.steps(d)):
            idle = layout.idle(t, block)
            waiting = None if idle is None else G[idle]
            if grad_HAll is not None:
                G += grad_HAll[t, d, block]
            gates = self.gates[d, t, block]
            if layout.linear_before_reset:
                gates *= G[:, None, :]
                np.matmul(gates[:, :3].reshape(len(G), 3 * H), R, out=product)
            else:
                gates[:, ::2] *= G[:, None, :]
                through_reset = np.matmul(gates[:, 2], R[2 * H :])
                gates[:, 1] *= through_reset
                np.matmul(gates[:, :2].reshape(len(G), 2 * H), R[: 2 * H], out=product)
                through_reset *= ZRH[t, d, block, H : 2 * H]
                product += through_reset
            G *= ZRH[t, d, block, :H]
            G += product
            if idle is not None:
                G[idle] = waiting
                gates[idle] = 0

    def _recurrent(self, d: int, gate: int) -> None:
        H, rows = self.layout.H, self.layout.S * self.layout.N
        place = (0 if gate == 2 else gate + 1) if self.first else gate
        gradient = self.gates[d, :, :, place].reshape(rows, H)
        state = self.previous if self.reset is None or gate < 2 else self.reset
        if "dR" in self.made:
            columns = slice(gate * H, (gate + 1) * H)
            np.matmul(gradient.T, state[d].reshape(rows, H), out=self.made["dR"][d, columns])
        if "dB" in self.made:
            np.matmul(np.ones(rows, gradient.dtype), gradient, out=self.made["dB"].reshape(-1, 6, H)[d, 3 + gate])

    def _input(self, d: int, gate: int) -> None:
        H, rows = self.layout.H, self.layout.S * self.layout.N
        gradient = self.gates[d, :, :, self.first + gate].reshape(rows, H)
        if "dW" in self.made:
            columns = slice(gate * H, (gate + 1) * H)
            np.matmul(gradient.T, self.x.reshape(rows, self.layout.I), out=self.made["dW"][d, columns])
        if "dB" in self.made:
            np.matmul(np.ones(rows, gradient.dtype), gradient, out=self.made["dB"].reshape(-1, 6, H)[d, gate])

    def _to_x(self, steps: slice) -> None:
        W, dX = self._array("W"), self.made["dX"][steps]
        rows, K, inputs = len(dX) * self.layout.N, 3 * self.layout.H, self.layout.I
        flat = dX.reshape(rows, inputs)
        for d in range(self.layout.D):
            part = flat if d == 0 else scratch(0, flat.size, flat.dtype).reshape(flat.shape)
            np.matmul(self.gates[d, steps, :, self.first :].reshape(rows, K), W[d], out=part)
            if d:
                flat += part
