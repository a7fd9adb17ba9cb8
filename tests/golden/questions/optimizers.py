"""Questions to the optimizers, to clipping and to the norm of all tensors.

ONNX Runtime answers for float32, PyTorch for float64, for several steps, and for norms that float32 cannot add up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from service.dtypes import Array
from service.errors import InvalidParameter, InvalidTensor, MissingTensor, ShapeMismatch
from tests.golden.store import Case
from tests.golden.values import generator

SHAPES: dict[str, tuple[int, ...]] = {"fc1.weight": (7, 5), "fc1.bias": (7,), "scale": (), "none": (0, 3), "one": (1,)}
ADAMW: dict[str, dict[str, Any]] = {
    "default": {},
    "hugging-face": {"adam_mode": 1, "epsilon": 1e-6, "weight_decay": 0.0},
    "hugging-face-decay": {"adam_mode": 1, "weight_decay": 0.1},
    "no-correction": {"adam_mode": 1, "correct_bias": 0},
    "all": {"alpha": 0.5, "beta": 0.75, "epsilon": 0.1, "weight_decay": 0.5},
}
ADAM: dict[str, dict[str, Any]] = {
    "default": {},
    "decay": {"lambda": 0.1},
    "decay-after": {"lambda": 0.1, "weight_decay_mode": 1},
    "no-correction": {"do_bias_correction": 0, "alpha": 0.5},
}

ROUNDED = {"alpha": 0.9, "beta": 0.999}
"""The defaults, asked as attributes: ONNX Runtime rounds its own defaults, too."""

REASONS = {
    "refused-shape": ShapeMismatch,
    "refused-count": MissingTensor,
    "adam_mode=0 without correct_bias": InvalidParameter,
    "step-of-several|lr-of-several|The process ends": InvalidTensor,
}


def tolerance(case: Case, output: str) -> Mapping[str, Any]:
    """Return the rounding of float32, and what ONNX Runtime loses where it subtracts powers from 1 in float32."""
    if case.source == "torch":
        return {"rtol": 1e-13, "atol": 1e-14}
    steps = case.inputs.get("step", case.inputs.get("T", np.array(1)))
    beta = float(np.float32(case.attributes.get("beta", 0.999)))
    lost = 1e-6 + 2.0**-24 / max(1 - beta ** max(int(steps.flat[0]), 1), 2.0**-24)
    before = {"new_gradients": "weights", "new_weights": "weights"}.get(output, output.removeprefix("updated_"))
    weights = case.inputs.get(before)
    if weights is None or "weights" not in before:
        return {"rtol": 5e-7, "atol": 1e-7}
    expected = case.outputs[output]
    change = np.abs(expected if output == "new_gradients" else expected - weights)
    return {"rtol": 5e-7, "atol": 1.5e-7 * np.abs(weights) + lost * change.max(initial=0)}


def ask() -> Iterator[Case]:
    """All questions of this module."""
    yield from _sgd()
    for number, (name, attributes) in enumerate(ADAMW.items()):
        for step in (2, 1, 1000)[: 1 if number else 3]:
            yield Case(
                "AdamWOptimizer", f"{name}-step={step}", _adamw(name, step), _ADAMW_OUTPUTS, ROUNDED | attributes
            )
    kept = {**_adamw("kept", 3), "update_signal": np.array(False)}
    yield Case("AdamWOptimizer", "no-update", kept, _ADAMW_OUTPUTS)
    for name in ("default", "all"):
        given = _adamw(name, 5, "float64")
        yield Case("AdamWOptimizer", f"torch-{name}", given, _ADAMW_OUTPUTS[1:], ADAMW[name], source="torch")
    for name, attributes in ADAM.items():
        for step in (-1, 0, 1, 20):
            yield Case("AdamOptimizer", f"{name}-T={step}", _adam(name, step), _ADAM_OUTPUTS, ROUNDED | attributes)
    yield from _norms()
    yield from _refused()


_ADAMW_OUTPUTS = ("updated_flag", "updated_weights", "updated_momentums_1", "updated_momentums_2")
_ADAM_OUTPUTS = ("new_T", "new_moment_1", "new_moment_2", "new_weights", "new_gradients")


def _group(name: str, group: str, dtype: str = "float32") -> dict[str, Array]:
    random = generator(name, group)
    return {f"{group}.{key}": np.asarray(random.normal(size=shape), dtype) for key, shape in SHAPES.items()}


def _adamw(name: str, step: int, dtype: str = "float32") -> dict[str, Array]:
    groups: dict[str, Array] = {}
    for group in ("weights", "gradients", "momentums_1"):
        groups |= _group(name, group, dtype)
    squares = {key: np.asarray(np.square(value)) for key, value in _group(name, "momentums_2", dtype).items()}
    return {"lr": np.array([0.01], dtype), "step": np.array([step]), **groups, **squares}


def _adam(name: str, step: int) -> dict[str, Array]:
    random = generator("AdamOptimizer", name)
    tensors = {one: random.normal(size=(3, 4)).astype(np.float32) for one in ("weights", "gradients", "moment_1")}
    moment_2 = np.square(random.normal(size=(3, 4)).astype(np.float32))
    return {"R": np.array([0.01], np.float32), "T": np.array([step]), **tensors, "moment_2": moment_2}


def _sgd() -> Iterator[Case]:
    random = generator("SGDOptimizer")
    W, G = (random.normal(size=(3, 4)).astype(np.float32) for _ in range(2))
    yield Case("SGDOptimizer", "matrix", {"ETA": np.array([0.25], np.float32), "W": W, "G": G}, ("NW", "NG"))
    groups = {**_group("sgd", "weights"), **_group("sgd", "gradients")}
    given = {"lr": np.array([0.25], np.float32), **groups}
    outputs = ("update_completed", "updated_weights")
    yield Case("SGDOptimizerV2", "update", given, outputs)
    yield Case("SGDOptimizerV2", "update-as-said", {**given, "update_signal": np.array(True)}, outputs)
    yield Case("SGDOptimizerV2", "no-update", {**given, "update_signal": np.array([False])}, outputs)


def _norms() -> Iterator[Case]:
    given = _group("clip", "gradients")
    for bound in (0.5, 1.0, 100.0, 0.0):
        yield Case("InplaceClipGradNorm", f"max_norm={bound}", given, ("clipped_gradients",), {"max_norm": bound})
    asked = ("clipped_gradients", "total_norm")
    yield Case("InplaceClipGradNorm", "torch", _group("clip", "gradients", "float64"), asked, source="torch")
    X = {name.replace("gradients", "X"): value for name, value in given.items()}
    yield Case("ReduceAllL2", "many", X, ("Y",))
    yield Case("ReduceAllL2", "nothing", {"X.0": np.zeros((0, 2), np.float32)}, ("Y",))
    infinite = {"X.0": np.array([1, np.inf], np.float32), "X.1": np.array([2], np.float32)}
    yield Case("ReduceAllL2", "infinite", infinite, ("Y",))
    yield Case("ReduceAllL2", "nan", {**infinite, "X.2": np.array([np.nan], np.float32)}, ("Y",))


def _refused() -> Iterator[Case]:
    given = {"lr": np.array([0.25], np.float32), **_group("sgd", "weights"), **_group("sgd", "gradients")}
    outputs = ("update_completed", "updated_weights")
    fewer = {name: value for name, value in given.items() if name != "gradients.one"}
    yield Case("SGDOptimizerV2", "refused-count", fewer, outputs)
    other = {**given, "gradients.fc1.bias": np.ones((8,), np.float32)}
    yield Case("SGDOptimizerV2", "refused-shape-mismatch", other, outputs)
    steps = {**_adamw("steps", 1), "step": np.zeros(0, np.int64)}
    yield Case("AdamWOptimizer", "refused-step-of-none", steps, _ADAMW_OUTPUTS)
    uncorrected = {"correct_bias": 0}
    yield Case(
        "AdamWOptimizer", "refused-adam_mode=0 without correct_bias", _adamw("mode", 1), _ADAMW_OUTPUTS, uncorrected
    )
