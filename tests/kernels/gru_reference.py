"""A GRU and its back-propagation written for reading: float64, one sequence and one step at a time."""

from __future__ import annotations

import numpy as np

from service.dtypes import Array

REVERSE = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def times(matrix: Array, vector: Array) -> Array:
    return np.asarray((matrix @ vector[..., None])[..., 0])


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
    """HAll, HFinal and ZRH as ONNX's GRU defines them.

    A floating input may have one more dimension, the first: then all outputs have it, with the result for each entry.
    """
    *_, S, N, _ = X.shape
    *_, D, _, H = R.shape
    B = np.zeros((D, 6 * H)) if B is None else B
    H0 = np.zeros((D, N, H)) if H0 is None else H0
    more = np.broadcast_shapes(X.shape[:-3], W.shape[:-3], R.shape[:-3], B.shape[:-2], H0.shape[:-3])
    HAll, HFinal, ZRH = (np.zeros((*more, *shape)) for shape in ((S, D, N, H), (D, N, H), (S, D, N, 3 * H)))
    for d, reverse in enumerate(REVERSE[direction]):
        Wz, Wr, Wh = np.split(W[..., d, :, :].astype(np.float64), 3, axis=-2)
        Rz, Rr, Rh = np.split(R[..., d, :, :].astype(np.float64), 3, axis=-2)
        bz, br, bh, cz, cr, ch = np.split(B[..., d, :].astype(np.float64), 6, axis=-1)
        for n in range(N):
            h = H0[..., d, n, :].astype(np.float64)
            length = S if SL is None else int(SL[n])
            for t in reversed(range(length)) if reverse else range(length):
                x = X[..., t, n, :].astype(np.float64)
                z = sigmoid(times(Wz, x) + times(Rz, h) + bz + cz)
                r = sigmoid(times(Wr, x) + times(Rr, h) + br + cr)
                if linear_before_reset:
                    candidate = np.tanh(times(Wh, x) + r * (times(Rh, h) + ch) + bh)
                else:
                    candidate = np.tanh(times(Wh, x) + times(Rh, r * h) + ch + bh)
                h = (1 - z) * candidate + z * h
                HAll[..., t, d, n, :], ZRH[..., t, d, n, :] = h, np.concatenate([z, r, candidate], axis=-1)
            HFinal[..., d, n, :] = h
    return HAll, HFinal, ZRH


def gru_gradient(
    X: Array,
    W: Array,
    R: Array,
    B: Array | None,
    SL: Array | None,
    H0: Array | None,
    HAll: Array,
    ZRH: Array,
    grad_HAll: Array,
    grad_Ht: Array,
    *,
    direction: str = "forward",
    linear_before_reset: int = 0,
) -> tuple[Array, Array, Array, Array, Array]:
    """dX, dW, dR, dB and dH0, from what `gru` gives for these inputs; all in float64."""
    S, N, _ = X.shape
    D, _, H = R.shape
    dX, dW, dR, dB, dH0 = (np.zeros(shape) for shape in (X.shape, W.shape, R.shape, (D, 6 * H), (D, N, H)))
    for d, reverse in enumerate(REVERSE[direction]):
        Rz, Rr, Rh = np.split(R[d], 3)
        ch = np.zeros(H) if B is None else B[d, 5 * H :]
        for n in range(N):
            dh = grad_Ht[d, n].copy()
            length = S if SL is None else int(SL[n])
            order = list(reversed(range(length)) if reverse else range(length))
            starts = [np.zeros(H) if H0 is None else H0[d, n], *(HAll[t, d, n] for t in order)]
            for t, h in reversed(list(zip(order, starts, strict=False))):
                dh += grad_HAll[t, d, n]
                z, r, candidate = np.split(ZRH[t, d, n], 3)
                to_z = dh * (h - candidate) * z * (1 - z)
                to_candidate = dh * (1 - z) * (1 - candidate**2)
                if linear_before_reset:
                    to_r = to_candidate * (Rh @ h + ch) * r * (1 - r)
                    of_h, seen_h = to_candidate * r, h  # of Rh @ h + ch
                    back = of_h @ Rh
                else:
                    to_r = (to_candidate @ Rh) * h * r * (1 - r)
                    of_h, seen_h = to_candidate, r * h  # of Rh @ (r * h) + ch
                    back = (of_h @ Rh) * r
                by_w, by_r = np.concatenate([to_z, to_r, to_candidate]), np.concatenate([to_z, to_r, of_h])
                dX[t, n] += by_w @ W[d]
                dW[d] += np.outer(by_w, X[t, n])
                dR[d] += np.concatenate([np.outer(to_z, h), np.outer(to_r, h), np.outer(of_h, seen_h)])
                dB[d] += np.concatenate([by_w, by_r])
                dh = dh * z + to_z @ Rz + to_r @ Rr + back
            dH0[d, n] = dh
    return dX, dW, dR, dB, dH0
