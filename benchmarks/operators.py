"""Speed of the training operators against ONNX Runtime's kernels: `python -m benchmarks.operators [NAME ...]`.

Both sides run in this process by turns on the same inputs, one thread against one, then two against two. The ratio is
our time to ONNX Runtime's. Tensors are float32. The outputs of both are in memory that is used again. ONNX Runtime's
optimizers work in place, so their sequences are not asked for; those of clipping it copies.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks.timing import alternate, table, verdict, watched
from service.dtypes import Array
from service.engine.arena import Arena
from service.kernels import OPERATORS, Workspace, workspace
from tests.golden import ort

SECONDS = 2.0
RANDOM = np.random.default_rng(0)


@dataclass(frozen=True)
class Row:
    """A question of the table: an operator at a size, the outputs that both sides give, and the largest good ratio."""

    operator: str
    size: str
    inputs: Callable[[], dict[str, Array]]
    outputs: Sequence[str]
    target: float
    attributes: Mapping[str, Any] = field(default_factory=dict)


def normal(*shape: int) -> Array:
    """Return float32 numbers."""
    return RANDOM.standard_normal(shape, dtype=np.float32)


def layer_norm(*, rms: bool) -> dict[str, Array]:
    """Return the inputs of a norm over the last of 4096 x 768."""
    X = normal(4096, 768)
    deviation = 1 / np.sqrt(np.square(X if rms else X - X.mean(1, keepdims=True)).mean(1, keepdims=True) + 1e-5)
    head = {"Y_grad": normal(4096, 768), "X": X, "scale": normal(768)}
    if rms:
        return {**head, "inv_std_var": deviation}
    return {**head, "mean": X.mean(1, keepdims=True), "inv_std_dev": deviation}


def batch_norm() -> dict[str, Array]:
    """Return the inputs of a norm over 64 channels."""
    shape = (32, 64, 28, 28)
    ones = np.ones(64, np.float32)
    return {"dY": normal(*shape), "X": normal(*shape), "scale": normal(64), "mean": 0 * ones, "variance": ones}


def cross_entropy() -> dict[str, Array]:
    """Return logarithms of probabilities of 10,000 classes."""
    logits = normal(1024, 10_000)
    log_prob = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return {"dY": np.ones((), np.float32), "log_prob": log_prob, "label": RANDOM.integers(0, 10_000, 1024)}


def conv(images: int, channels: int, size: int, filters: int, kernel: int, *, stride: int = 1, group: int = 1) -> Row:
    """Return the row of a convolution of square images, which are padded to keep their size."""
    pad = kernel // 2
    out = (size + 2 * pad - kernel) // stride + 1

    def inputs() -> dict[str, Array]:
        return {
            "dY": normal(images, filters, out, out),
            "X": normal(images, channels, size, size),
            "W": normal(filters, channels // group, kernel, kernel),
        }

    name = f"{images}x{channels}x{size}x{size}, {filters} filters {kernel}x{kernel}"
    name += f" stride {stride}" * (stride > 1) + " depthwise" * (group > 1)
    attributes = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4, "group": group}
    targets = {(28, 64, 3, 1): 0.6, (56, 64, 3, 1): 1.2, (14, 256, 3, 1): 1.0, (28, 64, 1, 1): 1.2, (64, 3, 7, 1): 1.5}
    target = targets.get((size, channels, kernel, group), 1.3)
    return Row("ConvGrad", name, inputs, ("dX", "dW", "dB"), target, attributes)


def pool(*, largest: bool) -> dict[str, Array]:
    """Return the inputs of a pool of 2 x 2 windows of 16x64x56x56."""
    dY, shape = normal(16, 64, 28, 28), {"shape": np.array([16, 64, 56, 56])}
    if not largest:
        return {"dY": dY, **shape}
    corners = np.arange(16 * 64)[:, None, None] * 56 * 56 + np.arange(0, 56, 2)[:, None] * 56 + np.arange(0, 56, 2)
    offsets = RANDOM.choice([0, 1, 56, 57], corners.shape)
    return {"dY": dY, "Indices": (corners + offsets).reshape(dY.shape), **shape}


def optimizer(*groups: str) -> dict[str, Array]:
    """Return four parameters of 1.05 million numbers each, their moments not negative."""
    given: dict[str, Array] = {}
    if "weights" in groups:
        given["lr"] = np.array([1e-3], np.float32)
    if "momentums_1" in groups:
        given["step"] = np.array([7])
    for group in groups:
        given |= {f"{group}.{k}": np.abs(normal(1024, 1024)) for k in range(4)}
    return given


def gather_elements() -> dict[str, Array]:
    """Return a million elements of a table of 1024 x 1024."""
    indices = RANDOM.integers(0, 1024, (1024, 1024))
    return {"dY": normal(1024, 1024), "shape": np.array([1024, 1024]), "indices": indices}


def gather_nd() -> dict[str, Array]:
    """Return 8192 rows of 128 numbers of a table of 30,000."""
    return {
        "shape": np.array([30_000, 128]),
        "indices": RANDOM.integers(0, 30_000, (8192, 1)),
        "update": normal(8192, 128),
    }


def sliced() -> dict[str, Array]:
    """Return half of the rows, and all columns but the first and last 16."""
    given = {"shape": [2048, 1024], "starts": [0, 16], "ends": [2048, 1008], "axes": [0, 1], "steps": [2, 1]}
    return {"dY": normal(1024, 992), **{name: np.array(value) for name, value in given.items()}}


def gelu() -> dict[str, Array]:
    """Return a million numbers, and their gradient."""
    return {"dY": normal(1024, 1024), "X": normal(1024, 1024)}


def concat() -> dict[str, Array]:
    """Return four tensors, which stand beside each other afterwards."""
    return {f"inputs.{k}": normal(1024, 256) for k in range(4)}


def split() -> dict[str, Array]:
    """Return a tensor, and four equal lengths."""
    return {"input": normal(1024, 1024), "split": np.array([256] * 4)}


def lstm(S: int, N: int, I: int, H: int, target: float, *, gradient: bool) -> Row:  # noqa: E741
    """Return the row of a forward LSTM with bias and initial states, in the sizes of the rows of `benchmarks.gru`.

    The targets are the GRU's: those of GRUGrad, and what GRUTraining takes.
    """

    def inputs() -> dict[str, Array]:
        given = {"X": normal(S, N, I), "W": normal(1, 4 * H, I), "R": normal(1, 4 * H, H), "B": normal(1, 8 * H)}
        given = {name: one / np.float32(np.sqrt(H)) for name, one in given.items()}
        given |= {"Ht0": normal(1, N, H), "Ct0": normal(1, N, H)}
        if gradient:
            made = OPERATORS["LSTMTraining"](given, {})
            given |= {name: made[name] for name in ("HAll", "CAll", "iofc")}
            given |= {f"d{name}": normal(*made[name].shape) for name in ("HAll", "HFinal", "CFinal")}
        return {name: given[name] for name in OPERATORS[operator].inputs_by_name if name in given}

    operator = "LSTMGrad" if gradient else "LSTMTraining"
    outputs = ("dX", "dW", "dR", "dB", "dH0", "dC0") if gradient else ("HAll", "HFinal", "CFinal", "CAll", "iofc")
    return Row(operator, f"S {S} N {N} I {I} H {H}", inputs, outputs, target, {"hidden_size": H})


ADAMW = ("weights", "gradients", "momentums_1", "momentums_2")
POOL = {"kernel_shape": [2, 2], "strides": [2, 2]}

NORM = ("X_grad", "scale_grad", "bias_grad")

ROWS = (
    Row("LayerNormalizationGrad", "4096x768", lambda: layer_norm(rms=False), NORM, 0.25),
    Row("SimplifiedLayerNormalizationGrad", "4096x768", lambda: layer_norm(rms=True), NORM[:2], 0.25),
    Row("BatchNormalizationGrad", "32x64x28x28", batch_norm, NORM, 0.6, {"epsilon": 1e-5}),
    Row("SoftmaxCrossEntropyLossInternalGrad", "1024x10000", cross_entropy, ("d_logits",), 0.95),
    Row("GeluGrad", "1 M", gelu, ("dX",), 1.0),
    Row("FastGeluGrad", "1 M", gelu, ("dX",), 1.0),
    Row("BiasGeluGrad_dX", "1 M", lambda: {**gelu(), "B": normal(1024)}, ("dX",), 1.0),
    conv(8, 64, 28, 64, 3),
    conv(8, 64, 56, 64, 3),
    conv(8, 256, 14, 256, 3),
    conv(8, 64, 28, 128, 1),
    conv(8, 3, 64, 32, 7, stride=2),
    conv(8, 64, 28, 64, 3, group=64),
    Row("MaxPoolGrad", "16x64x56x56", lambda: pool(largest=True), ("dX",), 0.4, POOL),
    Row("AveragePoolGrad", "16x64x56x56", lambda: pool(largest=False), ("dX",), 0.6, POOL),
    lstm(64, 32, 256, 256, 2.0, gradient=False),
    lstm(32, 16, 64, 64, 2.5, gradient=False),
    lstm(64, 32, 256, 256, 1 / 6, gradient=True),
    lstm(32, 16, 64, 64, 1 / 4, gradient=True),
    Row("AdamWOptimizer", "4.2 M", lambda: optimizer(*ADAMW), ("updated_flag",), 0.55),
    Row("SGDOptimizerV2", "4.2 M", lambda: optimizer("weights", "gradients"), ("update_completed",), 0.55),
    Row("InplaceClipGradNorm", "4.2 M", lambda: optimizer("gradients"), ("clipped_gradients",), 0.55),
    Row("GatherElementsGrad", "4 MB", gather_elements, ("dX",), 1.0),
    Row("GatherNDGrad", "4 MB", gather_nd, ("output",), 1.0),
    Row("SliceGrad", "4 MB", sliced, ("dX",), 1.0),
    Row("ConcatTraining", "4 MB", concat, ("concat_result", "per_input_length"), 1.0, {"axis": 1}),
    Row("SplitTraining", "4 MB", split, tuple(f"outputs.{k}" for k in range(4)), 1.0, {"axis": 1}),
)


def onnx_runtime(row: Row, inputs: dict[str, Array], threads: int) -> Callable[[], object]:
    """Return a call of ONNX Runtime's kernel."""
    session, given = ort.prepared(row.operator, inputs, row.outputs, row.attributes, threads)
    if any(isinstance(value, list) for value in given.values()):
        return lambda: session.run(list(row.outputs), given)
    binding = session.io_binding()
    for name, array in given.items():
        binding.bind_cpu_input(name, array)
    for name in row.outputs:
        binding.bind_output(name)
    return lambda: session.run_with_iobinding(binding)


def race(row: Row, threads: int) -> tuple[float, float]:
    """Return the median seconds of our kernel and of ONNX Runtime's."""
    operator, inputs = OPERATORS[row.operator], row.inputs()
    theirs, arena = onnx_runtime(row, inputs, threads), Arena(1 << 30)

    def ours() -> dict[str, Array]:
        return operator(inputs, row.attributes, row.outputs if operator.takes_wanted else None)

    with ThreadPoolExecutor(threads) as pool:

        def turns() -> dict[str, float]:
            with workspace(Workspace(pool, threads, arena.allocate, arena.allocate, arena.allocate)):
                return alternate({"ours": ours, "theirs": theirs}, seconds=SECONDS)

        times = pool.submit(turns).result()
    return times["ours"], times["theirs"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*", metavar="NAME", help="by default all")
    chosen = parser.parse_args().operators
    rows = []
    # As in the engine: threads of BLAS beside the pool's would wait for each other.
    with watched(), threadpool_limits(1, user_api="blas"):
        for row in ROWS:
            if row.operator in (chosen or OPERATORS):
                for threads in (1, 2):
                    ours, theirs = race(row, threads)
                    ratio = ours / theirs
                    times = [f"{ours * 1e3:.2f}", f"{theirs * 1e3:.2f}", f"{ratio:.2f}"]
                    judged = [f"<= {row.target:.3g}", verdict(ratio <= row.target)]
                    rows.append([row.operator, row.size, str(threads), *times, *judged])
                    print(" ".join(rows[-1]), flush=True)
        print()
        print(table(["operator", "size", "threads", "ours ms", "ORT ms", "ours / ORT", "target", "met"], rows))


if __name__ == "__main__":
    main()
