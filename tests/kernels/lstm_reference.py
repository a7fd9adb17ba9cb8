"""An LSTM and its back-propagation written for reading: float64, one sequence and one step at a time."""

from __future__ import annotations

import numpy as np

from service.dtypes import Array
from tests.kernels.gru_reference import REVERSE, sigmoid, times


def lstm(
    X: Array,
    W: Array,
    R: Array,
    B: Array | None = None,
    SL: Array | None = None,
    Ht0: Array | None = None,
    Ct0: Array | None = None,
    P: Array | None = None,
    *,
    direction: str = "forward",
) -> tuple[Array, Array, Array, Array, Array]:
    """HAll, HFinal, CFinal, CAll and iofc as ONNX's LSTM defines them.

    A floating input may have one more dimension, the first: then all outputs have it, with the result for each entry.
    """
    *_, S, N, _ = X.shape
    *_, D, _, H = R.shape
    B, P = np.zeros((D, 8 * H)) if B is None else B, np.zeros((D, 3 * H)) if P is None else P
    Ht0, Ct0 = (np.zeros((D, N, H)) if start is None else start for start in (Ht0, Ct0))
    more = np.broadcast_shapes(*(array.shape[:-3] for array in (X, W, R, Ht0, Ct0)), B.shape[:-2], P.shape[:-2])
    HFinal, CFinal = (np.zeros((*more, D, N, H)) for _ in range(2))
    HAll, CAll, iofc = (np.zeros((*more, S, D, N, count * H)) for count in (1, 1, 4))
    for d, reverse in enumerate(REVERSE[direction]):
        weights, recurrent = (array[..., d, :, :].astype(np.float64) for array in (W, R))
        bias = B[..., d, :].astype(np.float64)
        Pi, Po, Pf = np.split(P[..., d, :].astype(np.float64), 3, axis=-1)
        for n in range(N):
            h, c = (start[..., d, n, :].astype(np.float64) for start in (Ht0, Ct0))
            length = S if SL is None else int(SL[n])
            for t in reversed(range(length)) if reverse else range(length):
                x = X[..., t, n, :].astype(np.float64)
                sums = times(weights, x) + times(recurrent, h) + bias[..., : 4 * H] + bias[..., 4 * H :]
                to_i, to_o, to_f, to_candidate = np.split(sums, 4, axis=-1)
                i, f, candidate = sigmoid(to_i + Pi * c), sigmoid(to_f + Pf * c), np.tanh(to_candidate)
                c = f * c + i * candidate
                o = sigmoid(to_o + Po * c)
                h = o * np.tanh(c)
                HAll[..., t, d, n, :], CAll[..., t, d, n, :] = h, c
                iofc[..., t, d, n, :] = np.concatenate(np.broadcast_arrays(i, o, f, candidate), axis=-1)
            HFinal[..., d, n, :], CFinal[..., d, n, :] = h, c
    return HAll, HFinal, CFinal, CAll, iofc


def lstm_gradient(
    X: Array,
    W: Array,
    R: Array,
    SL: Array | None,
    Ht0: Array | None,
    Ct0: Array | None,
    HAll: Array,
    CAll: Array,
    iofc: Array,
    dHAll: Array,
    dHFinal: Array,
    dCFinal: Array,
    P: Array | None = None,
    *,
    direction: str = "forward",
) -> tuple[Array, ...]:
    """dX, dW, dR, dB, dH0, dC0 and dP, from what `lstm` gives for these inputs; all in float64."""
    S, N, _ = X.shape
    D, _, H = R.shape
    shapes = (X.shape, W.shape, R.shape, (D, 8 * H), (D, N, H), (D, N, H), (D, 3 * H))
    dX, dW, dR, dB, dH0, dC0, dP = (np.zeros(shape) for shape in shapes)
    for d, reverse in enumerate(REVERSE[direction]):
        Pi, Po, Pf = np.zeros((3, H)) if P is None else np.split(P[d], 3)
        for n in range(N):
            dh, dc = dHFinal[d, n].copy(), dCFinal[d, n].copy()
            length = S if SL is None else int(SL[n])
            order = list(reversed(range(length)) if reverse else range(length))
            hs = [np.zeros(H) if Ht0 is None else Ht0[d, n], *(HAll[t, d, n] for t in order)]
            cs = [np.zeros(H) if Ct0 is None else Ct0[d, n], *(CAll[t, d, n] for t in order)]
            for t, h, c in reversed(list(zip(order, hs, cs, strict=False))):
                i, o, f, candidate = np.split(iofc[t, d, n], 4)
                new = CAll[t, d, n]
                dh += dHAll[t, d, n]
                to_o = dh * np.tanh(new) * o * (1 - o)
                dc += dh * o * (1 - np.tanh(new) ** 2) + Po * to_o
                to_i, to_f = dc * candidate * i * (1 - i), dc * c * f * (1 - f)
                sums = np.concatenate([to_i, to_o, to_f, dc * i * (1 - candidate**2)])
                dX[t, n] += sums @ W[d]
                dW[d] += np.outer(sums, X[t, n])
                dR[d] += np.outer(sums, h)
                dB[d] += np.concatenate([sums, sums])
                dP[d] += np.concatenate([to_i * c, to_o * new, to_f * c])
                dh, dc = sums @ R[d], dc * f + Pi * to_i + Pf * to_f
            dH0[d, n], dC0[d, n] = dh, dc
    return dX, dW, dR, dB, dH0, dC0, dP
