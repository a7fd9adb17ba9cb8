"""Optimizer steps and clipping where ONNX Runtime is wrong, crashes, or has no kernel. Golden answers are elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from service.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, Array
from service.errors import GradserveError, InvalidParameter, InvalidTensor, MissingTensor, ShapeMismatch, UnknownTensor
from service.kernels import OPERATORS
from tests.kernels.equality import assert_same_bits
from tests.kernels.threads import threads

GROUPS = ("weights", "gradients", "momentums_1", "momentums_2")
SHAPES = {"a.weight": (3, 5), "b": (), "c": (0, 2)}


def tensors(**dtypes: Any) -> dict[str, Array]:
    random = np.random.default_rng(0)
    given: dict[str, Array] = {"lr": np.array([0.1], FLOAT32), "step": np.array(7)}
    for group in GROUPS:
        for name, shape in SHAPES.items():
            given[f"{group}.{name}"] = np.asarray(np.abs(random.normal(size=shape)), dtypes.get(group, FLOAT64))
    return given


def run(operator: str, given: Mapping[str, Array], **attributes: Any) -> dict[str, Array]:
    return OPERATORS[operator](given, attributes)


def adam_step(given: Mapping[str, Array], name: str, lr: float, step: int) -> tuple[Array, Array, Array]:
    """AdamW's defaults in float64."""
    w, g, m, v = (given[f"{group}.{name}"].astype(FLOAT64) for group in GROUPS)
    m, v = 0.9 * m + (1 - 0.9) * g, 0.999 * v + (1 - 0.999) * g * g
    return w * (1 - lr * 0.01) - lr * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8), m, v


@pytest.mark.parametrize(
    ("weights", "gradients", "moments"),
    [(FLOAT64,) * 3, (FLOAT32,) * 3, (BFLOAT16, BFLOAT16, FLOAT32), (FLOAT16,) * 3, (FLOAT16, FLOAT32, FLOAT64)],
)
def test_each_result_is_rounded_once_to_its_dtype(weights: Any, gradients: Any, moments: Any) -> None:
    given = tensors(weights=weights, gradients=gradients, momentums_1=moments, momentums_2=moments)
    results = run("AdamWOptimizer", given)
    assert results["updated_flag"].tolist() is True
    for name in SHAPES:
        exact = adam_step(given, name, float(np.float32(0.1)), 7)
        outputs = ("updated_weights", "updated_momentums_1", "updated_momentums_2")
        for output, expected, dtype in zip(outputs, exact, (weights, moments, moments), strict=True):
            got = results[f"{output}.{name}"]
            assert got.dtype == dtype
            assert got.shape == expected.shape
            eps = 2.0**-7 if dtype == BFLOAT16 else float(np.finfo(dtype).eps)
            np.testing.assert_allclose(got.astype(FLOAT64), expected, rtol=4 * eps, atol=4 * eps)


def test_inputs_stay_and_bits_do_not_depend_on_threads() -> None:
    random = np.random.default_rng(1)
    given: dict[str, Array] = {"lr": np.array(0.1), "step": np.array([3])}
    for group in GROUPS:
        for name, length in (("large", 300_001), ("small", 5)):
            given[f"{group}.{name}"] = np.abs(random.normal(size=length)).astype(FLOAT32)
    before = {name: array.copy() for name, array in given.items()}
    clip = {name: array for name, array in given.items() if name.startswith("gradients")}
    for operator, arrays in (("AdamWOptimizer", given), ("InplaceClipGradNorm", clip)):
        alone = run(operator, arrays)
        with threads(2):
            shared = run(operator, arrays)
        for name, array in shared.items():
            assert_same_bits(array, alone[name])
    for name, array in before.items():
        assert_same_bits(given[name], array)


@pytest.mark.parametrize("dtype", [FLOAT64, FLOAT32, BFLOAT16])
@pytest.mark.parametrize("attributes", [{}, {"adam_mode": 1, "correct_bias": 0, "weight_decay": 0.5}])
def test_each_weight_may_have_its_own_numbers(dtype: Any, attributes: Any) -> None:
    rates, decays = {"a.weight": 0.5, "c": 2.0}, {"b": 0.0, "c": 0.25, "a.weight": 0.125}
    given = tensors(**dict.fromkeys(GROUPS, dtype))
    own = {f"lrs.{name}": np.array([number], FLOAT32) for name, number in rates.items()}
    decay = {f"weight_decays.{name}": np.array(number, FLOAT32) for name, number in decays.items()}
    adam = run("AdamWOptimizer", {**given, **own, **decay}, **attributes)
    plain = {name: given[name] for name in given if name.startswith(("lr", "weights", "gradients"))}
    sgd = run("SGDOptimizerV2", {**plain, **own})
    for name in SHAPES:
        alone = {f"{group}.{name}": given[f"{group}.{name}"] for group in GROUPS}
        alone |= {"lr": np.array(rates.get(name, given["lr"][0]), FLOAT32), "step": given["step"]}
        for output, one in run("AdamWOptimizer", alone, **{**attributes, "weight_decay": decays[name]}).items():
            assert_same_bits(adam[output], one)
        plain = {key: alone[key] for key in ("lr", f"weights.{name}", f"gradients.{name}")}
        assert_same_bits(sgd[f"updated_weights.{name}"], run("SGDOptimizerV2", plain)[f"updated_weights.{name}"])


def test_nesterov_is_adamw_without_its_second_moment_and_then_sgd() -> None:
    """As docs/graphs.md says. The formula is that of PyTorch's SGD."""
    rate, momentum, chance = 0.25, 0.75, np.random.default_rng(3)
    as_momentum = {"beta": 1.0, "epsilon": 1.0, "weight_decay": 0.0, "adam_mode": 1, "correct_bias": 0}
    ours = {f"{group}.w": np.zeros(5) for group in ("momentums_1", "momentums_2")}
    weights = expected = chance.normal(size=5)
    kept = np.zeros(5)
    for _ in range(4):
        gradient = chance.normal(size=5)
        both = {"gradients.w": gradient, "step": np.array(1)}
        given = {**both, **ours, "weights.w": weights, "lr": np.array(momentum * rate / (1 - momentum))}
        first = run("AdamWOptimizer", given, alpha=momentum, **as_momentum)
        ours = {f"{group}.w": first[f"updated_{group}.w"] for group in ("momentums_1", "momentums_2")}
        given = {"gradients.w": gradient, "weights.w": first["updated_weights.w"], "lr": np.array(rate)}
        weights = run("SGDOptimizerV2", given)["updated_weights.w"]
        kept = momentum * kept + gradient
        expected = expected - rate * (gradient + momentum * kept)
        np.testing.assert_allclose(weights, expected, rtol=1e-12)


def test_no_update_changes_nothing() -> None:
    given = {**tensors(), "update_signal": np.array([False])}
    results = run("AdamWOptimizer", given)
    assert results["updated_flag"].tolist() is False
    for name in SHAPES:
        for group in ("weights", "momentums_1", "momentums_2"):
            assert_same_bits(results[f"updated_{group}.{name}"], given[f"{group}.{name}"])


ADAM = {
    "R": np.array(0.1),
    "T": np.array([4]),
    "weights": np.array([1.0, -2.0]),
    "gradients": np.array([0.5, 3.0]),
    "moment_1": np.array([0.1, -0.2]),
    "moment_2": np.array([0.3, 0.4]),
}


def test_adam_takes_the_inputs_that_onnx_runtime_ignores() -> None:
    plain = run("AdamOptimizer", ADAM)
    scaled = run("AdamOptimizer", {**ADAM, "gradients": 8 * ADAM["gradients"], "loss_scale": np.array(8.0)})
    assert_same_bits(scaled["new_weights"], plain["new_weights"])
    halved = run("AdamOptimizer", {**ADAM, "gradients": ADAM["gradients"] / 2})
    norm = {"global_gradient_norm": np.array(4.0)}
    assert_same_bits(run("AdamOptimizer", {**ADAM, **norm}, max_norm_clip=2.0)["new_weights"], halved["new_weights"])
    assert_same_bits(run("AdamOptimizer", {**ADAM, **norm}, max_norm_clip=4.0)["new_weights"], plain["new_weights"])
    kept = run("AdamOptimizer", {**ADAM, "update_signal": np.array(False)})
    assert kept["new_T"].tolist() == [4]
    for output, name in (("new_weights", "weights"), ("new_moment_1", "moment_1"), ("new_moment_2", "moment_2")):
        assert_same_bits(kept[output], ADAM[name])
    assert not kept["new_gradients"].any()
    assert plain["new_T"].tolist() == [5]
    assert plain["new_mixed_precision_weights"].dtype == FLOAT16
    mixed = run("AdamOptimizer", {**ADAM, "mixed_precision_weights": np.zeros(2, BFLOAT16)})
    assert_same_bits(mixed["new_mixed_precision_weights"], plain["new_weights"].astype(FLOAT32).astype(BFLOAT16))


def test_norms_that_float32_cannot_add_up() -> None:
    many = {"gradients.a": np.full(10_000_000, 0.1, FLOAT32)}
    clipped = run("InplaceClipGradNorm", many)
    assert clipped["total_norm"] == np.float32(np.sqrt(1e7) * float(np.float32(0.1)))
    assert run("ReduceAllL2", {"X.0": clipped["clipped_gradients.a"]})["Y"] == pytest.approx(1, rel=1e-6)
    large = {"gradients.a": np.full(4, 1e25, FLOAT32)}
    np.testing.assert_allclose(run("InplaceClipGradNorm", large)["clipped_gradients.a"], 0.5, rtol=1e-6)
    assert run("ReduceAllL2", {"X.0": np.full(4, 1e25, FLOAT32)})["Y"] == np.float32(2e25)
    assert run("ReduceAllL2", {"X.0": np.full(4, 1e-30, FLOAT32)})["Y"] == np.float32(2e-30)


@pytest.mark.parametrize(("dtype", "number"), [(FLOAT16, 60000), (BFLOAT16, 3e38)])
def test_a_norm_that_its_dtype_cannot_hold_is_infinite(dtype: Any, number: float) -> None:
    large = np.full(4, number, FLOAT32).astype(dtype)
    assert np.isposinf(run("ReduceAllL2", {"X.0": large})["Y"])
    results = run("InplaceClipGradNorm", {"gradients.a": large})
    assert np.isposinf(results["total_norm"])
    assert_same_bits(results["clipped_gradients.a"], np.full(4, 0.5, dtype))


def test_infinities_and_nan_in_a_norm() -> None:
    given = {"gradients.a": np.array([1.0, np.inf]), "gradients.b": np.array([2.0])}
    results = run("InplaceClipGradNorm", given)
    assert np.array_equal(results["clipped_gradients.a"], [0, np.nan], equal_nan=True)
    assert results["clipped_gradients.b"].tolist() == [0]
    given["gradients.b"] = np.array([np.nan])
    assert all(np.isnan(array).all() for array in run("InplaceClipGradNorm", given).values())


WRONG: list[tuple[str, dict[str, Any], dict[str, Any], type[GradserveError], str]] = [
    ("AdamWOptimizer", {"step": np.array(0)}, {}, InvalidTensor, "step is 0, but must be 1 or more"),
    ("AdamWOptimizer", {"step": np.zeros(0, int)}, {}, InvalidTensor, r"step has shape \[0\], but must have one"),
    ("AdamWOptimizer", {"lr": np.zeros(2)}, {}, InvalidTensor, "lr has shape"),
    ("AdamWOptimizer", {"lrs.b": np.zeros(2)}, {}, InvalidTensor, r"lrs\.b has shape \[2\], but must have one"),
    ("AdamWOptimizer", {"lrs.d": np.zeros(1)}, {}, UnknownTensor, r"lrs\.d has no weights\.d: lrs may have names of"),
    ("AdamWOptimizer", {"weight_decays.d": np.zeros(1)}, {}, UnknownTensor, r"weight_decays\.d has no weights\.d"),
    ("SGDOptimizerV2", {"lrs.d": np.zeros(1)}, {}, UnknownTensor, r"lrs\.d has no weights\.d"),
    ("AdamWOptimizer", {"update_signal": np.zeros(0, bool)}, {}, InvalidTensor, "update_signal has shape"),
    ("AdamWOptimizer", {}, {"correct_bias": 0}, InvalidParameter, "correct_bias is 0, which needs adam_mode 1"),
    ("AdamWOptimizer", {"gradients.b": np.zeros(1)}, {}, ShapeMismatch, r"gradients\.b has shape \[1\]"),
    ("AdamWOptimizer", {"momentums_1.d": np.zeros(1)}, {}, UnknownTensor, r"momentums_1\.d has no weights\.d"),
    ("AdamWOptimizer", {"weights.d": np.zeros(1)}, {}, MissingTensor, r"weights\.d has no gradients\.d"),
    ("InplaceClipGradNorm", {}, {"max_norm": -1.0}, InvalidParameter, "max_norm is -1.0, but must be 0 or more"),
    ("InplaceClipGradNorm", {}, {"max_norm": math.nan}, InvalidParameter, "max_norm is nan, but must be 0 or more"),
]


@pytest.mark.parametrize(("operator", "changed", "attributes", "error", "reason"), WRONG)
def test_mistakes(operator: str, changed: Any, attributes: Any, error: type[GradserveError], reason: str) -> None:
    inputs = OPERATORS[operator].inputs_by_name
    given = {name: array for name, array in tensors().items() if name.partition(".")[0] in inputs}
    with pytest.raises(error, match=reason):
        run(operator, {**given, **changed}, **attributes)


@pytest.mark.parametrize(
    "attributes", [{"alpha": 1.0}, {"beta": 1.0}, {"alpha": 1e300, "beta": -1e300}, {"epsilon": 0.0}]
)
def test_any_number_is_an_attribute(attributes: dict[str, float]) -> None:
    for operator, given in (("AdamWOptimizer", tensors(weights=FLOAT32)), ("AdamOptimizer", ADAM)):
        results = run(operator, {**given, "step" if "step" in given else "T": np.array(1 << 40)}, **attributes)
        assert len(results) > 5
