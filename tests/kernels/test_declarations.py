"""What `@op` reads from a kernel's signature, and what it refuses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import pytest

from service.dtypes import Array
from service.engine.engine import Engine
from service.errors import DtypeMismatch, MissingTensor, TensorTooLarge, UnknownTensor
from service.kernels import OPERATORS
from service.kernels._op import op
from service.kernels._types import Flag, Group, Positive, T, Tind
from service.limits import Limits

FAMILY = "Tests"


@pytest.fixture(autouse=True)
def own_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.kernels._op.OPERATORS", {})


def registered() -> Any:
    from service.kernels import _op

    (operator,) = _op.OPERATORS.values()
    return operator


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine(threads=1, limits=Limits(1 << 20), reuse_bytes=0)
    yield made
    made.pool.close()


def step() -> Any:
    @op(
        "Step",
        outputs="done updated:weights parts",
        example={"weights": {"a": [1.0], "b.c": [2.0]}, "gradients": {"a": [1.0], "b.c": [2.0]}, "rate": 2.0},
    )
    def step(
        weights: Group[T], gradients: Group[T], order: Tind | None = None, /, *, rate: float, size: Positive = 1
    ) -> tuple[Flag, Group[T], Group[T]]:
        """updated = weights - rate * gradients."""
        updated: Any = {name: weight - rate * gradients[name] for name, weight in weights.items()}
        parts: Any = {str(k): np.full(size, k) for k in range(2)}
        return np.array(True), updated, parts

    return registered()


def test_groups_are_mappings_for_the_kernel_and_flat_for_others(engine: Engine) -> None:
    operator = step()
    assert [tensor.group for tensor in operator.inputs] == [True, True, False]
    assert [tensor.like for tensor in operator.outputs] == [None, "weights", None]
    tensors = {name: np.array([2.0]) for name in ("weights.b.c", "gradients.b.c", "weights.a", "gradients.a")}
    results = engine.run(operator, tensors, {"rate": 0.5})
    assert list(results) == ["done", "updated.b.c", "updated.a", "parts.0", "parts.1"]
    assert results["updated.b.c"] == 1.0
    assert operator.outputs_for(tensors) == ["done", "updated.b.c", "updated.a", "parts"]
    chosen = engine.run(operator, tensors, {"rate": 0.5}, ["parts.1", "updated"])
    assert list(chosen) == ["parts.1", "updated.b.c", "updated.a"]
    with pytest.raises(UnknownTensor, match="no output 'parts.2' here"):
        engine.run(operator, tensors, {"rate": 0.5}, ["parts.2"])


def test_a_sequence_has_the_order_of_its_numbers() -> None:
    @op("Join", outputs="joined", example={"tensors": {"0": [1.0]}})
    def join(tensors: Group[T], /) -> T:
        """joined = concat(tensors)."""
        return np.concatenate(list(tensors.values()))  # type: ignore[return-value]

    given: dict[str, Array] = {f"tensors.{k}": np.array([k]) for k in (10, 2, 0)}
    assert registered()(given, {})["joined"].tolist() == [0, 2, 10]


def test_the_example_has_tensors_and_attributes() -> None:
    operator = step()
    assert operator.example_attributes == {"rate": 2.0}
    assert list(operator.example_tensors) == ["weights.a", "weights.b.c", "gradients.a", "gradients.b.c"]
    assert {array.dtype.name for array in operator.example_tensors.values()} == {"float32"}


def test_attributes() -> None:
    rate, size = step().attributes
    assert (rate.required, rate.type_name, rate.default) == (True, "float", inspect.Parameter.empty)
    assert (size.required, size.type_name, size.default) == (False, "int", 1)

    @op("Pool", outputs="dX", example={"dY": [1.0]})
    def pool(dY: T, /, *, pads: list[int] | None = None, ceil: Literal[0, 1] = 0, names: list[str] | None = None) -> T:
        """dX = dY."""
        return dY

    pads, ceil, names = OPERATORS_HERE()["Pool"].attributes
    assert (pads.type_name, pads.is_list, pads.item_type) == ("list[int] | None", True, int)
    assert (ceil.type_name, ceil.is_list) == ("0 | 1", False)
    assert (names.type_name, names.item_type) == ("list[str] | None", str)


def OPERATORS_HERE() -> dict[str, Any]:
    from service.kernels import _op

    return _op.OPERATORS


def with_star(dY: T, /, *gradients: T) -> T:
    return dY


def with_any_place(dY: T) -> T:
    return dY


def with_more(dY: T, /, **attributes: int) -> T:
    return dY


def with_a_tensor_attribute(dY: T, /, *, shape: Array) -> T:
    return dY


def with_a_dict(dY: T, /, *, sizes: dict[str, int] | None = None) -> T:
    return dY


def without_dtypes(dY: Array, /) -> Array:
    return dY


def with_an_unknown_example(Y: T, /) -> T:
    return Y


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (with_star, "gradients.* is variadic positional"),
        (with_any_place, "dY.* is positional or keyword"),
        (with_more, "attributes.* is variadic keyword"),
        (with_a_tensor_attribute, "The attribute shape is"),
        (with_a_dict, "The attribute sizes is"),
        (without_dtypes, "dY is .*, which has no dtypes"),
        (with_an_unknown_example, "no input or attribute dY"),
    ],
)
def test_what_has_no_meaning_is_refused(kernel: Callable[..., Any], reason: str) -> None:
    with pytest.raises(TypeError, match=reason):
        op("Wrong", outputs="dX", example={"dY": [1.0]})(kernel)
    assert OPERATORS_HERE() == {}


@pytest.mark.parametrize(
    ("names", "error", "reason"),
    [
        (["weights", "gradients.a"], UnknownTensor, "no input 'weights'|is no tensor of the group weights"),
        (["weights.", "gradients.a"], UnknownTensor, "is no tensor of the group weights"),
        (["weights.a\n", "gradients.a"], UnknownTensor, "1 to 100 printable"),
        (["weights." + "a" * 101, "gradients.a"], UnknownTensor, "1 to 100 printable"),
        (["weights.a"], MissingTensor, "needs the input 'gradients', as gradients.NAME"),
        (["weights.a", "gradients.a", "order.a"], UnknownTensor, "its inputs are weights.NAME, gradients.NAME, order"),
    ],
)
def test_names_of_members(engine: Engine, names: list[str], error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        engine.run(step(), {name: np.ones(1) for name in names}, {"rate": 1.0})


def test_all_tensors_of_a_variable_share_a_dtype(engine: Engine) -> None:
    tensors: dict[str, Array] = {
        "weights.a": np.ones(1),
        "weights.b": np.ones(1, np.float32),
        "gradients.a": np.ones(1),
    }
    with pytest.raises(DtypeMismatch, match=r"weights\.b is float32 and weights\.a is float64"):
        engine.run(step(), tensors, {"rate": 1.0})


def test_work_is_bounded_before_it_begins(engine: Engine) -> None:
    @op("Power", outputs="Y", example={"X": [1.0]}, multiply_adds=lambda X, times=1: X.size**times)
    def power(X: T, /, *, times: int = 1) -> T:
        """Y = X."""
        raise AssertionError("the kernel ran")

    with pytest.raises(TensorTooLarge, match=r"Power would take 1125899906842624 multiplications"):
        engine.run(registered(), {"X": np.ones(1 << 10)}, {"times": 5})
    assert set(OPERATORS).isdisjoint(OPERATORS_HERE())
