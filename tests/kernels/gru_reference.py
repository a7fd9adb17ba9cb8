"""A GRU written for reading: float64, one sequence and one step at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def gru(
    X: Array,
    W: Array,
    R: Array,
    B: Array | None = None,
    SL: Array | None = None,
    H0: Array | None = None,
    *,
    direction: str = "forward",
    linear_before_reset: int = 0,
) -> tuple[Array, Array, Array]:
    """HAll, HFinal and ZRH as ONNX's GRU defines them."""
    S, N, _ = X.shape
    D, _, H = R.shape
    reverse = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[direction]
    HAll, HFinal, ZRH = np.zeros((S, D, N, H)), np.zeros((D, N, H)), np.zeros((S, D, N, 3 * H))
    for d in range(D):
        Wz, Wr, Wh = np.split(W[d].astype(np.float64), 3)
        Rz, Rr, Rh = np.split(R[d].astype(np.float64), 3)
        bz, br, bh, cz, cr, ch = np.split(np.zeros(6 * H) if B is None else B[d].astype(np.float64), 6)
        for n in range(N):
            h = np.zeros(H) if H0 is None else H0[d, n].astype(np.float64)
            length = S if SL is None else int(SL[n])
            for t in reversed(range(length)) if reverse[d] else range(length):
                x = X[t, n].astype(np.float64)
                z = sigmoid(Wz @ x + Rz @ h + bz + cz)
                r = sigmoid(Wr @ x + Rr @ h + br + cr)
                if linear_before_reset:
                    candidate = np.tanh(Wh @ x + r * (Rh @ h + ch) + bh)
                else:
                    candidate = np.tanh(Wh @ x + Rh @ (r * h) + ch + bh)
                h = (1 - z) * candidate + z * h
                HAll[t, d, n], ZRH[t, d, n] = h, np.concatenate([z, r, candidate])
            HFinal[d, n] = h
    return HAll, HFinal, ZRH
