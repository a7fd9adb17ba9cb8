"""GRUGrad against ONNX Runtime's, PyTorch's and the bare matrix products: `python -m benchmarks.gru`.

All run in this process with two threads each, in float32, with B and H0. All run by turns, except the bare products.
PyTorch's time is the backward pass of `torch.nn.GRU`, which is GRUGrad with linear_before_reset = 1. The exit status is
1 if ONNX Runtime's answer differs.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

from benchmarks import LEFT_OUT
from benchmarks.ort import Kernel
from benchmarks.timing import alternate, table, verdict, watched
from service.dtypes import Array
from service.engine.engine import Engine
from service.host.system import keep_freed_memory
from service.kernels import OPERATORS
from service.limits import Limits

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # PyTorch's idle threads must not spin on a core that the next one needs

THREADS = 2
SECONDS = 4.0
MEMORY = 256 << 20
CALLS = 10
"""Calls in a row at each turn: the figure is the pace of repeated calls."""
Sizes = tuple[int, int, int, int, int]

LARGE = (64, 32, 256, 256, 1)
"""S, N, I, H and D of the large case."""

SMALL = (32, 16, 64, 64, 1)
"""S, N, I, H and D of the small case."""

BOTH_WAYS = (64, 32, 256, 256, 2)
"""S, N, I, H and D of the bidirectional case."""

TARGETS: dict[Sizes, dict[str, float]] = {
    LARGE: {"ort": 6.0, "torch": 1.0, "bare": 0.5},
    SMALL: {"ort": 4.0, "torch": 2.0},
}
"""The target ratios of GRUGrad's speed to each peer's, with linear_before_reset = 1."""
GROWTH: list[Sizes] = [(S, 32, 128, 128, 1) for S in (32, 64, 128, 256)] + [
    (32, N, 128, 128, 1) for N in (64, 128, 256)
]
GRADIENTS = ("dX", "dW", "dR", "dB", "dH0")


def sample(
    engine: Engine, sizes: Sizes, attributes: dict[str, Any], lengths: Array | None = None
) -> dict[str, Array | None]:
    """Return GRUGrad's inputs, with HAll and ZRH of a real forward pass. `lengths` of None means S steps for all."""
    S, N, I, H, D = sizes  # noqa: E741
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(H))

    given: dict[str, Array | None] = {
        "X": normal(S, N, I),
        "W": normal(D, 3 * H, I),
        "R": normal(D, 3 * H, H),
        "B": normal(D, 6 * H),
    }
    given |= {"SL": lengths, "H0": normal(D, N, H)}
    made = run(engine, "GRUTraining", given, attributes)
    back = {"grad_HAll": normal(S, D, N, H), "grad_Ht": normal(D, N, H)}
    everything = {**given, "HAll": made["HAll"], "ZRH": made["ZRH"], **back}
    return {one.name: everything.get(one.name) for one in OPERATORS["GRUGrad"].inputs}


def run(engine: Engine, op: str, given: Mapping[str, Any], attributes: dict[str, Any]) -> dict[str, Array]:
    """Run the operator and return its outputs."""
    tensors = {name: array for name, array in given.items() if array is not None}
    return engine.run(OPERATORS[op], tensors, attributes)


def gru_grad(
    engine: Engine, sizes: Sizes, linear_before_reset: int = 1, lengths: Array | None = None
) -> Callable[[], object]:
    """Return a call of GRUGrad."""
    attributes = {"linear_before_reset": linear_before_reset, "direction": direction(sizes)}
    return partial(run, engine, "GRUGrad", sample(engine, sizes, attributes, lengths), attributes)


def direction(sizes: Sizes) -> str:
    """Return the `direction` attribute for D directions."""
    return "forward" if sizes[-1] == 1 else "bidirectional"


def bare_products(sizes: Sizes, linear_before_reset: int) -> Callable[[], object]:
    """Return a call of the matrix products of GRUGrad alone, by NumPy."""
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

    return products


def torch_backward(sizes: Sizes) -> Callable[[], object]:
    """Return a call of the backward pass of torch.nn.GRU."""
    import torch  # here: torch reads OMP_WAIT_POLICY at import

    S, N, I, H, D = sizes  # noqa: E741
    torch.set_num_threads(THREADS)
    module = torch.nn.GRU(I, H, bidirectional=D == 2)
    X, H0 = (torch.randn(shape, requires_grad=True) for shape in ((S, N, I), (D, N, H)))
    outputs = module(X, H0)
    gradients = [torch.ones_like(output) for output in outputs]
    inputs = [X, H0, *module.parameters()]
    return partial(torch.autograd.grad, outputs, inputs, gradients, retain_graph=True)


def ort_kernel(
    engine: Engine, sizes: Sizes, given: dict[str, Array | None], linear_before_reset: int
) -> Callable[[], object]:
    """Return a call of ONNX Runtime's kernel. Exit if its answer differs from ours."""
    ours = run(engine, "GRUGrad", given, {"linear_before_reset": linear_before_reset})
    theirs = {name: np.empty_like(ours[name]) for name in GRADIENTS}
    attributes = {"hidden_size": sizes[3], "linear_before_reset": linear_before_reset}
    kernel = Kernel("GRUGrad", given, theirs, THREADS, **attributes)
    kernel.run()
    for name in GRADIENTS:
        if not np.allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-4):
            sys.exit(f"{title(sizes)}: ours and ONNX Runtime's {name} differ")
    return kernel.run


def title(sizes: Sizes) -> str:
    """Return sizes as the tables show them."""
    return " ".join(f"{name} {size}" for name, size in zip("SNIHD", sizes, strict=True))


def speeds(engine: Engine, bare: Mapping[tuple[Sizes, int], float]) -> str:
    """Return the table of speeds against the peers."""
    rows = []
    for sizes, lbr in bare:
        attributes = {"linear_before_reset": lbr, "direction": direction(sizes)}
        given = sample(engine, sizes, attributes)
        contenders: dict[str, Callable[[], object]] = {"ours": partial(run, engine, "GRUGrad", given, attributes)}
        if sizes != BOTH_WAYS:
            contenders["ort"] = ort_kernel(engine, sizes, given, lbr)
        if lbr:
            contenders["torch"] = torch_backward(sizes)
        medians = alternate(contenders, seconds=SECONDS, calls=CALLS)
        medians["bare"] = bare[sizes, lbr]
        targets = TARGETS.get(sizes, {}) if lbr else {}
        for peer in [name for name in medians if name != "ours"]:
            ratio = medians[peer] / medians["ours"]
            judged = [f">= {targets[peer]:g}", verdict(ratio >= targets[peer])] if peer in targets else ["-", "-"]
            times = [f"{1e3 * medians[name]:.2f}" for name in ("ours", peer)]
            rows.append([title(sizes), f"{peer}, lbr {lbr}", *times, f"{ratio:.2f}", *judged])
    return table(["sizes", "peer", "ours ms", "peer's ms", "ours / peer's speed", "target", "met"], rows)


def ways(engine: Engine) -> str:
    """Return the table that compares our own times."""
    rows = []
    lengths = np.random.default_rng(0).permutation(np.arange(LARGE[0], 0, -2))  # half of the steps are run
    pairs: list[tuple[str, tuple[Any, ...], tuple[Any, ...], float]] = [
        ("bidirectional / forward", (BOTH_WAYS, 1), (LARGE, 1), 2.0),
        ("bidirectional / forward, lbr 0", (BOTH_WAYS, 0), (LARGE, 0), 2.0),
        ("lbr 0 / 1", (LARGE, 0), (LARGE, 1), 1.5),
        ("lbr 0 / 1", (SMALL, 0), (SMALL, 1), 1.5),
        ("lbr 0 / 1", (BOTH_WAYS, 0), (BOTH_WAYS, 1), 1.5),
        ("lengths 2, 4, .. 64, in no order / all 64", (LARGE, 1, lengths), (LARGE, 1), 0.75),
    ]
    for what, one, other, limit in pairs:
        medians = alternate(
            {"one": gru_grad(engine, *one), "other": gru_grad(engine, *other)}, seconds=SECONDS, calls=CALLS
        )
        ratio = medians["one"] / medians["other"]
        times = [f"{1e3 * seconds:.2f}" for seconds in medians.values()]
        rows.append([what, title(one[0]), *times, f"{ratio:.2f}", f"<= {limit:g}", verdict(ratio <= limit)])
    return table(["what", "sizes", "ms", "against ms", "ratio", "limit", "met"], rows)


def growth(engine: Engine) -> str:
    """Return the table of times as S and N grow."""
    medians = alternate({title(sizes): gru_grad(engine, sizes) for sizes in GROWTH}, seconds=SECONDS, calls=CALLS)
    rows = [
        [
            title(sizes),
            "1",
            f"{1e3 * medians[title(sizes)]:.2f}",
            f"{1e6 * medians[title(sizes)] / sizes[0] / sizes[1]:.2f}",
        ]
        for sizes in GROWTH
    ]
    return table(["sizes", "lbr", "ms", "us per step and sequence"], rows)


def blas() -> str:
    """Return the BLAS library, and the environment variables that were removed for it."""
    (found,) = (one for one in threadpool_info() if one["user_api"] == "blas")
    left_out = "".join(f", without {name}={value}" for name, value in LEFT_OUT.items())
    return f"{found['internal_api']} {found['version']}, {found['architecture']} kernels{left_out}"


def main() -> None:
    """Print the tables."""
    keep_freed_memory(MEMORY)  # as the service does
    print(f"GRUGrad, float32, {THREADS} threads each, medians of runs by turns; lbr: linear_before_reset", flush=True)
    print(f"Products by {blas()}", flush=True)
    with watched():
        # First and alone: BLAS's own threads, which the engine does not use, spin after each product.
        with threadpool_limits(THREADS, user_api="blas"):
            cases = itertools.product((LARGE, SMALL, BOTH_WAYS), (1, 0))
            products = {case: bare_products(*case) for case in cases}
            bare = {case: alternate({"bare": run}, seconds=1.0)["bare"] for case, run in products.items()}
        engine = Engine(threads=THREADS, limits=Limits(1 << 30), reuse_bytes=MEMORY)
        for report in (partial(speeds, engine, bare), partial(ways, engine), partial(growth, engine)):
            # In a thread of the pool, as the service calls kernels: the pool's other thread helps.
            print(f"\n{engine.pool.submit(report).result()}", flush=True)
        engine.pool.close()


if __name__ == "__main__":
    main()
