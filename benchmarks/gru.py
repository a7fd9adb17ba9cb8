"""GRUGrad against ONNX Runtime's, PyTorch's and the bare matrix products: `python -m benchmarks.gru`.

All in this process with two threads each, by turns but for the bare products, float32, B and H0 given. PyTorch's time
is that of the backward pass of `torch.nn.GRU`, which is GRUGrad with linear_before_reset = 1; without PyTorch its
column is empty. The exit status is 1 only where ONNX Runtime's answer is another.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from benchmarks.ort import Array, Kernel
from benchmarks.timing import alternate, table, watched
from service.engine import Engine
from service.kernels import OPERATORS
from service.limits import Limits

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # PyTorch's idle threads must not spin on a core that the next one needs

THREADS = 2
SECONDS = 4.0
SIZES = [(64, 32, 256, 256, 1), (32, 16, 64, 64, 1), (64, 32, 256, 256, 2)]
"""S, N, I, H, D."""
GRADIENTS = ("dX", "dW", "dR", "dB", "dH0")


def sample(engine: Engine, sizes: tuple[int, ...], attributes: dict[str, Any]) -> dict[str, Array | None]:
    """GRUGrad's inputs, with HAll and ZRH of a real forward pass."""
    S, N, I, H, D = sizes  # noqa: E741
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(H))

    given = {"X": normal(S, N, I), "W": normal(D, 3 * H, I), "R": normal(D, 3 * H, H), "B": normal(D, 6 * H)}
    given["H0"] = normal(D, N, H)
    made = run(engine, "GRUTraining", given, attributes)
    back = {"grad_HAll": normal(S, D, N, H), "grad_Ht": normal(D, N, H)}
    everything = {**given, "HAll": made["HAll"], "ZRH": made["ZRH"], **back}
    return {one.name: everything.get(one.name) for one in OPERATORS["GRUGrad"].inputs}


def run(engine: Engine, op: str, given: dict[str, Any], attributes: dict[str, Any]) -> dict[str, Array]:
    """The operator's outputs, as a request gets them."""
    tensors = {name: array for name, array in given.items() if array is not None}
    return engine.submit(lambda: engine.run(OPERATORS[op], tensors, attributes)).result()


def bare_products(sizes: tuple[int, ...], linear_before_reset: int) -> Callable[[], object]:
    """Nothing but the matrix products of GRUGrad, by NumPy, with BLAS's own threads."""
    S, N, I, H, D = sizes  # noqa: E741
    rng = np.random.default_rng(0)
    gates, x, state, R, step = (
        rng.standard_normal(shape, dtype=np.float32)
        for shape in ((S * N, 3 * H), (S * N, I), (S * N, H), (3 * H, H), (N, 3 * H))
    )
    W = rng.standard_normal((3 * H, I), dtype=np.float32)

    def products() -> None:
        for _ in range(D):
            if linear_before_reset:
                state @ R[2 * H :].T
            for _ in range(S):
                if linear_before_reset:
                    step @ R
                else:
                    step[:, 2 * H :] @ R[2 * H :]
                    step[:, : 2 * H] @ R[: 2 * H]
            gates.T @ state
            gates.T @ x
            gates @ W

    controller = ThreadpoolController()

    def run() -> None:
        with controller.limit(limits=THREADS, user_api="blas"):
            products()

    return run


def torch_backward(sizes: tuple[int, ...]) -> Callable[[], object] | None:
    """The backward pass of torch.nn.GRU; None where PyTorch is not installed."""
    try:
        import torch
    except ImportError:
        return None
    S, N, I, H, D = sizes  # noqa: E741
    torch.set_num_threads(THREADS)
    module = torch.nn.GRU(I, H, bidirectional=D == 2)
    X, H0 = (torch.randn(shape, requires_grad=True) for shape in ((S, N, I), (D, N, H)))
    outputs = module(X, H0)
    gradients = [torch.ones_like(output) for output in outputs]
    inputs = [X, H0, *module.parameters()]
    return partial(torch.autograd.grad, outputs, inputs, gradients, retain_graph=True)


def row(engine: Engine, sizes: tuple[int, ...], linear_before_reset: int) -> list[str]:
    """One row of the table. Exits where ONNX Runtime's answer is another."""
    S, N, I, H, D = sizes  # noqa: E741
    attributes = {"linear_before_reset": linear_before_reset, "direction": "forward" if D == 1 else "bidirectional"}
    given = sample(engine, sizes, attributes)
    contenders: dict[str, Callable[[], object]] = {"ours": partial(run, engine, "GRUGrad", given, attributes)}
    if D == 1:
        ours = run(engine, "GRUGrad", given, attributes)
        theirs = {name: np.empty_like(ours[name]) for name in GRADIENTS}
        kernel = Kernel("GRUGrad", given, theirs, THREADS, hidden_size=H, linear_before_reset=linear_before_reset)
        kernel.run()
        for name in GRADIENTS:
            if not np.allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-4):
                sys.exit(f"{sizes}: ours and ONNX Runtime's {name} differ")
        contenders["ort"] = kernel.run
    backward = torch_backward(sizes) if linear_before_reset else None
    if backward is not None:
        contenders["torch"] = backward
    medians = alternate(contenders, seconds=SECONDS)
    # By themselves: BLAS's own threads go on spinning for some milliseconds after each product.
    medians |= alternate({"bare": bare_products(sizes, linear_before_reset)}, seconds=SECONDS / 4)

    def against(name: str) -> str:
        return f"{medians[name] / medians['ours']:.2f}" if name in medians else "-"

    times = [f"{1e3 * medians[name]:.2f}" if name in medians else "-" for name in ("ours", "ort", "torch", "bare")]
    return [
        f"S {S} N {N} I {I} H {H} D {D}",
        str(linear_before_reset),
        *times,
        against("ort"),
        against("torch"),
        f"{medians['ours'] / medians['bare']:.2f}",
    ]


def main() -> None:
    """Print the table."""
    engine = Engine(threads=THREADS, limits=Limits(1 << 30), reuse_bytes=1 << 28)
    header = [
        "sizes",
        "lbr",
        "ours ms",
        "ORT ms",
        "torch ms",
        "bare ms",
        "ours / ORT speed",
        "ours / torch speed",
        "ours / bare time",
    ]
    print(f"GRUGrad, float32, {THREADS} threads each, medians of runs by turns\n", flush=True)
    with watched():
        print(table(header, [row(engine, sizes, lbr) for sizes in SIZES for lbr in (1, 0)]), flush=True)
    engine.close()


if __name__ == "__main__":
    main()
