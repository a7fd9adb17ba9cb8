"""Questions to the accumulators and ZeroGradient.

Gradients are float32, as the buffer is: bytes of another dtype would be reinterpreted. The second version is asked for
gradients of the buffer's shape only, because it writes out of bounds and returns the gradient's shape for others.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from service.dtypes import Array
from service.errors import ShapeMismatch
from tests.golden.store import Case
from tests.golden.values import generator, special, special_pairs

FLAGS: dict[str, Array | None] = {
    "absent": None,
    "true": np.array(True),
    "false": np.array(False),
    "first-true": np.array([True, False]),
    "first-false": np.array([[False, True]]),
}
SHAPES = [(), (1,), (5,), (2, 3), (2, 3, 4), (2, 1, 2, 3), (2, 1, 2, 1, 3), (0,), (2, 0), (0, 3)]
SMALLER = [
    ((2, 3), (3,)),
    ((2, 3), (2, 1)),
    ((2, 3), (1, 3)),
    ((2, 3), ()),
    ((2, 3), (1,)),
    ((2, 3), (1, 1)),
    ((0,), (1,)),
]
SIGNALS: dict[str, Array] = {
    "true": np.array(True),
    "false": np.array(False),
    "empty-int64": np.empty((0, 2), np.int64),
    "float16": np.zeros(3, np.float16),
}
REFUSED = [((1,), (3,)), ((3,), (2, 3)), ((1,), (1, 1)), ((), (1,)), ((2,), (3,)), ((2, 3), (2,)), ((2, 1), (1, 3))]

REASONS = {
    r"Attempting to broadcast an axis by a dimension other than 1": ShapeMismatch,
    r"OrtValue shape verification failed": ShapeMismatch,
}


def ask() -> Iterator[Case]:
    """All questions of this module."""
    for operator in ("InPlaceAccumulator", "InPlaceAccumulatorV2"):
        for shape in SHAPES:
            for flag in FLAGS:
                yield _random(operator, f"{list(shape)}-{flag}", shape, shape, flag)
        for flag in ("absent", "true", "false"):
            yield _case(operator, f"special-{flag}", *special_pairs(np.float32), flag)
    for buffer, gradient in SMALLER:
        for flag in FLAGS:
            yield _random("InPlaceAccumulator", f"{list(buffer)}-{list(gradient)}-{flag}", buffer, gradient, flag)
    for buffer, gradient in REFUSED:
        name = f"{list(buffer)}-{list(gradient)}"
        yield _random("InPlaceAccumulator", f"refused-{name}", buffer, gradient, "true")
        yield _random("InPlaceAccumulator", f"ignored-{name}", buffer, gradient, "false")
    yield from _peer()
    yield from _zero()


def _case(operator: str, name: str, buffer: Array, gradient: Array, flag: str) -> Case:
    inputs = {"gradient_buffer": buffer, "gradient": gradient}
    if (given := FLAGS[flag]) is not None:
        inputs["do_update" if operator == "InPlaceAccumulator" else "overwrite"] = given
    first = operator == "InPlaceAccumulator"
    return Case(operator, name, inputs, ("accumulated_gradient",) if first else ("updated", "accumulated_gradient"))


def _random(operator: str, name: str, buffer: tuple[int, ...], gradient: tuple[int, ...], flag: str) -> Case:
    random = generator(operator, name)
    old, new = (np.asarray(random.normal(size=shape), np.float32) for shape in (buffer, gradient))
    return _case(operator, name, old, new, flag)


def _peer() -> Iterator[Case]:
    old, value = (np.array(numbers, np.float32) for numbers in ([1, 2, 3], [4, 5, 6]))
    yield _case("InPlaceAccumulator", "peer-InPlaceAccumulatorFloat32", old, value, "absent")
    yield _random("InPlaceAccumulatorV2", "peer-InPlaceAccumulatorV2_CPU", (3,), (3,), "absent")
    yield _case("InPlaceAccumulatorV2", "peer-InPlaceAccumulatorV2Overwrite", old, value, "true")
    inputs = {"old_gradient": old, "reset_signal": np.array([1, 10, 100], np.float32)}
    yield Case("ZeroGradient", "peer-ZeroGradientFloat32", inputs, ("zero_gradient",))


def _zero() -> Iterator[Case]:
    for shape in SHAPES:
        old = np.asarray(generator("ZeroGradient").normal(size=shape), np.float32)
        inputs = {"old_gradient": old, "reset_signal": SIGNALS["true"]}
        yield Case("ZeroGradient", f"{list(shape)}", inputs, ("zero_gradient",))
    for name, signal in SIGNALS.items():
        inputs = {"old_gradient": special(np.float32), "reset_signal": signal}
        yield Case("ZeroGradient", f"special-{name}", inputs, ("zero_gradient",))
