"""Speed and memory of our kernels against ONNX Runtime's: `python -m benchmarks.kernels`.

All sides run in this process by turns, with two threads each, on the same inputs, and write to allocated memory. The
exit status is 1 if their answers disagree; the table shows missed targets. `--against DIRECTORY` adds the kernels of
another checkout, such as the version before a change, in a table of its own.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tracemalloc
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import geometric_mean
from types import ModuleType
from typing import TypeVar

import numpy as np
from scipy.special import expit, log_softmax, softmax

import service.kernels
from benchmarks.ort import Kernel
from benchmarks.timing import alternate, table, verdict, watched
from service.dtypes import DTYPES, Array
from service.kernels import OPERATORS, Workspace, workspace

R = TypeVar("R")

THREADS = 2
SHAPES = ((1024, 1024), (16384, 1024))
SECONDS = 3.0

FORWARD: dict[str, Callable[[Array], Array]] = {
    "ReluGrad": lambda X: X,
    "LeakyReluGrad": lambda X: np.where(X > 0, X, np.float32(0.01) * X),
    "SigmoidGrad": expit,
    "TanhGrad": np.tanh,
    "QuickGeluGrad": lambda X: X,
    "SoftmaxGrad_13": lambda X: softmax(X, axis=-1),
    "LogSoftmaxGrad_13": lambda X: log_softmax(X, axis=-1),
}
"""The second input of each operator, computed from standard normal forward inputs X."""

SPEED_TARGETS = {
    "ReluGrad": 6.0,
    "LeakyReluGrad": 6.0,
    "SigmoidGrad": 0.7,
    "TanhGrad": 0.7,
    "QuickGeluGrad": 0.6,
    "SoftmaxGrad_13": 1.6,
    "LogSoftmaxGrad_13": 6.0,
    "GatherGrad": 5.0,
}
"""The target ratios at the larger shape."""
MEAN_TARGET = 2.5
MEMORY_LIMIT = 4_000_000


def sample(op: str, shape: tuple[int, ...]) -> dict[str, Array]:
    """Return inputs as in training."""
    dY, X = np.random.default_rng(0).standard_normal((2, *shape), dtype=np.float32)
    return {"dY": dY, OPERATORS[op].inputs[1].name: FORWARD[op](X)}


def gather_sample() -> dict[str, Array]:
    """Return a gradient of 8192 rows of an embedding of 30,000. A quarter of the rows has one token, like padding."""
    rng = np.random.default_rng(0)
    indices = rng.integers(0, 30_000, 8192)
    indices[rng.permutation(8192)[:2048]] = 7
    grad = rng.standard_normal((8192, 256), dtype=np.float32)
    return {"shape": np.array([30_000, 256]), "indices": indices, "grad": grad}


def as_the_engine(work: Callable[[], R]) -> R:
    """Run `work` as the engine runs a kernel: in a thread of a new pool, whose other threads help."""
    with ThreadPoolExecutor(THREADS) as pool:

        def run() -> R:
            with workspace(Workspace(pool, THREADS)):
                return work()

        return pool.submit(run).result()


def race(
    op: str,
    inputs: Mapping[str, Array],
    out_shape: tuple[int, ...],
    *,
    ort_threads: tuple[int, ...],
    atol: float = 1e-5,
) -> list[float]:
    """Return the median seconds of our kernel and of ONNX Runtime's by number of threads. Exit if answers differ."""
    kernel = OPERATORS[op].kernel
    attributes = {attribute.name: attribute.default for attribute in OPERATORS[op].attributes}
    ours = np.full(out_shape, np.nan, np.float32)  # written, so that its pages exist
    contenders: dict[str, Callable[[], object]] = {"ours": lambda: kernel(*inputs.values(), out=ours, **attributes)}
    theirs = {}
    for threads in ort_threads:
        theirs[threads] = np.full(out_shape, np.nan, np.float32)
        contenders[str(threads)] = Kernel(op, inputs, {"output": theirs[threads]}, threads, **attributes).run
    as_the_engine(lambda: [run() for run in contenders.values()])
    for answer in theirs.values():
        if not np.allclose(ours, answer, rtol=1e-5, atol=atol):
            worst = np.abs(ours - answer).max()
            sys.exit(f"{op} {list(out_shape)}: ours and ONNX Runtime's answer differ by up to {worst}")
    return list(as_the_engine(lambda: alternate(contenders, seconds=SECONDS)).values())


def speed_row(op: str, elements: int, ours: float, theirs: float, target: float | None) -> list[str]:
    """Return a row of the table of speeds."""
    ratio = theirs / ours
    judged = ["-", "-"] if target is None else [f">= {target}", verdict(ratio >= target)]
    return [op, f"{elements:,}", f"{ours * 1e3:.3f}", f"{theirs * 1e3:.3f}", f"{ratio:.2f}", *judged]


def speeds() -> str:
    """Return the table of speeds."""
    rows, means, all_ratios = [], [], []
    for shape in SHAPES:
        ratios, elements = [], shape[0] * shape[1]
        for op in FORWARD:
            ours, theirs = race(op, sample(op, shape), shape, ort_threads=(THREADS,))
            rows.append(speed_row(op, elements, ours, theirs, SPEED_TARGETS[op] if shape == SHAPES[-1] else None))
            ratios.append(theirs / ours)
        means.append(["geometric mean", f"{elements:,}", "", "", f"{geometric_mean(ratios):.2f}", "-", "-"])
        all_ratios += ratios
    # One token has 2048 gradients, whose magnitudes add up to 1,700. With two threads ONNX Runtime adds them in an
    # order that changes from run to run, and float32 rounds by up to 2e-4. A lost gradient would make about 1.
    counts = (1, 2)
    ours, *each = race("GatherGrad", gather_sample(), (30_000, 256), ort_threads=counts, atol=1e-3)
    theirs, count = min(zip(each, counts, strict=True))
    rows.append(
        speed_row(f"GatherGrad (ORT threads: {count})", 30_000 * 256, ours, theirs, SPEED_TARGETS["GatherGrad"])
    )
    all_ratios.append(theirs / ours)
    mean = geometric_mean(all_ratios)
    total = ["geometric mean", "all rows", "", "", f"{mean:.2f}", f">= {MEAN_TARGET}", verdict(mean >= MEAN_TARGET)]
    header = ["operator", "elements", "ours ms", "ORT ms", "ours / ORT speed", "target", "met"]
    return table(header, [*rows, *means, total])


def kernels_of(checkout: Path) -> ModuleType:
    """Import `service.kernels` of another checkout beside ours."""

    def take_out() -> dict[str, ModuleType]:
        names = [name for name in sys.modules if name.partition(".")[0] == "service"]
        return {name: sys.modules.pop(name) for name in names}

    ours = take_out()
    sys.path.insert(0, str(checkout))
    try:
        kernels = importlib.import_module("service.kernels")
    finally:
        sys.path.remove(str(checkout))
        take_out()
        sys.modules.update(ours)
    if not Path(kernels.__file__ or "").is_relative_to(checkout.resolve()):
        sys.exit(f"{checkout} has no service/kernels")
    return kernels


def race_versions(op: str, inputs: Mapping[str, Array], before: ModuleType) -> tuple[float, float]:
    """Return the median seconds of our kernel and of the kernel of the version `before`. Exit if answers differ."""
    answers = {name: np.full_like(inputs["dY"], np.nan) for name in ("ours", "before")}

    def contender(version: ModuleType, pool: ThreadPoolExecutor, out: Array) -> Callable[[], None]:
        space = version.Workspace(pool, THREADS)

        def run() -> None:
            with version.workspace(space):
                version.OPERATORS[op].kernel(*inputs.values(), out=out)

        return run

    with ThreadPoolExecutor(THREADS) as pool:
        versions = {"ours": service.kernels, "before": before}
        contenders = {name: contender(version, pool, answers[name]) for name, version in versions.items()}
        times = pool.submit(alternate, contenders, seconds=SECONDS).result()
    ours, theirs = (answer.astype(np.float32) for answer in answers.values())
    if not np.allclose(ours, theirs, rtol=1e-5, atol=1e-5):
        sys.exit(f"{op} {inputs['dY'].dtype}: the versions' answers differ by up to {np.abs(ours - theirs).max()}")
    return times["ours"], times["before"]


def speeds_against(before: ModuleType) -> str:
    """Return the table of speeds against the version `before`, for float32 and, at the smaller shape, 16-bit floats."""
    rows, means = [], []
    for shape, dtype in [*((shape, "float32") for shape in SHAPES), (SHAPES[0], "float16"), (SHAPES[0], "bfloat16")]:
        ratios, elements = [], f"{shape[0] * shape[1]:,}"
        for op in FORWARD:
            inputs = {name: array.astype(DTYPES[dtype]) for name, array in sample(op, shape).items()}
            ours, theirs = race_versions(op, inputs, before)
            ratios.append(theirs / ours)
            rows.append([op, dtype, elements, f"{ours * 1e3:.3f}", f"{theirs * 1e3:.3f}", f"{ratios[-1]:.2f}"])
        means.append(["geometric mean", dtype, elements, "", "", f"{geometric_mean(ratios):.2f}"])
    header = ["operator", "dtype", "elements", "ours ms", "before ms", "ours / before speed"]
    return table(header, [*rows, *means])


def peak_bytes(op: str, inputs: Mapping[str, Array]) -> int:
    """Return the peak bytes of our kernel beyond inputs and output, in new threads, which own the scratch memory."""
    out = np.empty_like(inputs["dY"])

    def run() -> int:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        OPERATORS[op].kernel(*inputs.values(), out=out)
        return tracemalloc.get_traced_memory()[1] - before

    tracemalloc.start()
    try:
        return as_the_engine(run)
    finally:
        tracemalloc.stop()


def memory() -> str:
    """Return the table of peak memory."""
    shape = SHAPES[-1]
    peaks = {op: peak_bytes(op, sample(op, shape)) for op in FORWARD}
    header = ["operator", "elements", "peak MB over inputs and output", "limit MB", "met"]
    elements, limit = f"{shape[0] * shape[1]:,}", f"<= {MEMORY_LIMIT / 1e6:g}"
    return table(
        header,
        [[op, elements, f"{peak / 1e6:.2f}", limit, verdict(peak <= MEMORY_LIMIT)] for op, peak in peaks.items()],
    )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="DIRECTORY", help="another checkout")
    against = parser.parse_args().against
    print(f"Kernels, float32, {THREADS} threads each, medians of runs by turns\n", flush=True)
    with watched():
        print(speeds(), flush=True)
        if against is not None:
            print(f"\nAgainst the version in {against}\n", flush=True)
            print(speeds_against(kernels_of(against)), flush=True)
    print(f"\nMemory of our kernels, {THREADS} threads, 1 MB = 1,000,000 bytes\n")
    print(memory())


if __name__ == "__main__":
    main()
