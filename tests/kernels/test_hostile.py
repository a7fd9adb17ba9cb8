"""Hostile calls of every operator, made from its declaration: a new operator needs no line here.

Each call ends with an answer or with an error of ours that says what was wrong. An answer has the declared outputs and
nothing of uninitialised memory. It has the same bits for one thread and two, and for each output alone. `make fuzz`
tries more calls.
"""

from __future__ import annotations

import itertools
import math
import os
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, get_args

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from service.dtypes import BOOL, DTYPES, Array, DType
from service.engine.engine import Engine
from service.errors import Busy, GradserveError, InvalidParameter, ShapeMismatch
from service.kernels import OPERATORS, Attribute, Operator, Workspace, _op, workspace
from service.kernels._blocks import new_output
from service.kernels._op import op
from service.kernels._types import Flag, Group, Positive, T
from service.limits import Limits
from tests.golden import store
from tests.kernels.calls import peak_bytes
from tests.kernels.equality import assert_same_bits

FAMILY = "Tests"

MANY = int(os.environ.get("GRADSERVE_FUZZ", "1"))
BASES = 1
"""Golden questions from which calls are made, beside the operator's example."""
USUAL_SIZE = 40
"""About how many elements such a question has."""
SINGLE = 120
"""Calls with one change, at most, for each base: at random, but as many of each tensor and of each kind of change."""
PAIRS = 12
"""Calls with two changes, for each base."""

MAX_TENSOR_BYTES = 1 << 22
MEMORY_BYTES = 1 << 25
"""What an operator may claim in a call: eight tensors and more."""
SCRATCH_BYTES = 1 << 24
"""What it may take without a claim."""
WORK = 1 << 24
"""Multiplications and additions in a call, at most."""
HUGE = MAX_TENSOR_BYTES >> 3

INTEGERS = (0, 1, 2, 3, -1, -2, 7, 1 << 16, 1 << 31, -(1 << 31), 1 << 40, (1 << 62) + 1, (1 << 63) - 1, -(1 << 63))
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 1e30, -1e300, math.inf, -math.inf, math.nan)
TEXTS = ("", "none", "mean", "nonsense")
LENGTHS = (0, 1, 2, 3, 4, 6, 100)


@dataclass(frozen=True)
class Call:
    """An operator with tensors and attributes, and how they came about."""

    operator: Operator
    tensors: Mapping[str, Array]
    attributes: Mapping[str, Any]
    story: str

    def with_tensor(self, name: str, make: Callable[[], Array], story: str) -> Call:
        return replace(self, tensors={**self.tensors, name: make()}, story=f"{self.story}, {name} {story}")

    def with_tensors(self, tensors: Mapping[str, Array], story: str) -> Call:
        return replace(self, tensors=tensors, story=f"{self.story}, {story}")

    def with_attributes(self, attributes: Mapping[str, Any]) -> Call:
        return replace(self, attributes=attributes, story=f"{self.story}, {dict(attributes)!r:.300}")


def bases(operator: Operator) -> list[Call]:
    """The operator's example, and golden questions with other inputs, attributes or ranks."""
    found = {"": Call(operator, operator.example_tensors, operator.example_attributes, "the example")}
    cases = [
        case
        for folder in (store.FOLDER, store.TORCH)
        if (folder / f"{operator.name}.npz").exists()
        for case in store.read(operator.name, folder=folder)
        if not case.error
    ]
    for case in sorted(cases, key=lambda case: abs(sum(array.size for array in case.inputs.values()) - USUAL_SIZE)):
        kind = f"{[(name, array.ndim, array.dtype) for name, array in case.inputs.items()]} {sorted(case.attributes)}"
        found.setdefault(kind, Call(operator, case.inputs, case.attributes, f"the golden question {case.name}"))
    return [*found.values()][: 1 + BASES * MANY]


def changes(call: Call) -> list[Callable[[], Call]]:
    """The call with each hostile change. They are not made yet: some take megabytes."""
    found: list[Callable[[], Call]] = [lambda: call]
    for name, array in call.tensors.items():
        change = partial(call.with_tensor, name)
        found.append(partial(without, call, name))
        found += [partial(change, partial(fitted, array, shape), f"of shape {list(shape)}") for shape in shapes(array)]
        found += [partial(change, partial(cast, array, dtype), f"as {dtype}") for dtype in DTYPES.values()]
        for value in values(array.dtype):
            for place in (slice(None), slice(1), slice(-1, None)):
                found.append(partial(change, partial(placed, array, place, value), f"with {value} at {place}"))
        found.append(partial(change, partial(turned, array), "with negative strides"))
        if array.dtype.kind == "i":
            for value in (0, -1, np.iinfo(array.dtype).max):
                found.append(partial(change, partial(np.full, HUGE, value, array.dtype), f"as {HUGE} times {value}"))
    found.append(partial(call.with_tensor, "nonsense", lambda: np.ones(1, np.float32), "of no meaning"))
    found += [*together(call), *groups(call)]
    for attribute in call.operator.attributes:
        found.append(partial(call.with_attributes, {k: v for k, v in call.attributes.items() if k != attribute.name}))
        for value in attribute_values(attribute):
            found.append(partial(call.with_attributes, {**call.attributes, attribute.name: value}))
    return found


def without(call: Call, name: str) -> Call:
    return call.with_tensors({one: array for one, array in call.tensors.items() if one != name}, f"without {name}")


def shapes(array: Array) -> Iterator[tuple[int, ...]]:
    """Shapes other than the array's."""
    shape = array.shape
    for rank in range(7):
        yield (2,) * rank
        yield (1,) * rank
    yield from ((0,) * len(shape), shape[::-1], (array.size,), (1, *shape), (*shape, 1), (0, 1 << 40))
    for axis, size in enumerate(shape):
        for other in (0, size - 1, size + 1, 2 * size, HUGE // max(1, array.size // max(1, size))):
            yield (*shape[:axis], max(0, other), *shape[axis + 1 :])
        yield (*shape[:axis], 0, *shape[axis + 1 :], 1 << 40)


def fitted(array: Array, shape: tuple[int, ...]) -> Array:
    """An array of this shape, with the numbers of the other. A large one repeats one number without its memory."""
    if math.prod(max(1, size) for size in shape) > 1 << 50 or math.prod(shape) > 2 * HUGE:
        return array  # NumPy has no such empty array, or the engine refuses it anyway
    if math.prod(shape) < HUGE >> 2:
        return repeated(array, shape) if array.size else np.zeros(shape, array.dtype)
    return np.broadcast_to(array.ravel()[:1] if array.size else np.zeros(1, array.dtype), shape)


def repeated(array: Array, shape: tuple[int, ...]) -> Array:
    """What `np.resize` returns, in a hundredth of its time for a large shape and few numbers."""
    size = math.prod(shape)
    rows = np.broadcast_to(array.ravel(), (-(-size // array.size), array.size))
    return rows.reshape(-1)[:size].reshape(shape)


def cast(array: Array, dtype: DType) -> Array:
    with np.errstate(all="ignore"):
        return array.astype(dtype)


def placed(array: Array, place: slice, value: Any) -> Array:
    """The array with the value in the place."""
    changed = array.copy()
    changed.reshape(-1)[place] = value
    return changed


def turned(array: Array) -> Array:
    """The same numbers, in memory from the last to the first."""
    return np.flip(np.flip(array).copy())


def values(dtype: DType) -> list[Any]:
    if dtype == BOOL:
        return [True, False]
    if dtype.kind == "i":
        limits = np.iinfo(dtype)
        return [value for value in INTEGERS if limits.min <= value <= limits.max] + [limits.min, limits.max]
    return list(cast(np.array(FLOATS), dtype))


def together(call: Call) -> Iterator[Callable[[], Call]]:
    """The call with all equal dimensions changed to another size, and with all tensors of a kind as another dtype."""
    sizes = sorted({size for array in call.tensors.values() for size in array.shape})
    for size in sizes:
        for other, counted in itertools.product((0, 1, size + 1, 1 << 10), counting(call)):
            yield partial(resized, call, size, other, counted)
        for longest, behind in itertools.product([None, *sizes], ((), (1 << 40,))):
            yield partial(emptied, call, size, longest, behind)
    for kinds, dtype in itertools.product(("fV", "i"), DTYPES.values()):
        if dtype.kind in kinds:
            yield partial(all_as, call, kinds, dtype)


def large(call: Call) -> Iterator[Callable[[], Call]]:
    """The call with each dimension as long as tensors of several blocks have it, which threads share."""
    for size in sorted({size for array in call.tensors.values() for size in array.shape}):
        lengths = []
        for array in call.tensors.values():
            if count := array.shape.count(size):
                rest = math.prod(one for one in array.shape if one != size) * array.itemsize
                lengths.append((MAX_TENSOR_BYTES * 3 // 4 / max(1, rest)) ** (1 / count))
        for counted in counting(call):
            yield partial(resized, call, size, int(min(lengths)), counted)


def counting(call: Call) -> Sequence[bool]:
    """Whether numbers change with a dimension: both ways if the call has integers."""
    return (False, True) if any(array.dtype.kind == "i" for array in call.tensors.values()) else (False,)


def resized(call: Call, size: int, other: int, counted: bool) -> Call:
    """The call with each dimension `size` of another size, and, if `counted`, also each number in integer tensors."""

    def changed(array: Array) -> Array:
        shape = tuple(other if one == size else one for one in array.shape)
        if size in array.shape and array.size and math.prod(shape) * array.itemsize <= MAX_TENSOR_BYTES:
            array = repeated(array, shape)
        if not counted or array.dtype.kind != "i":
            return array
        return np.where(array == size, other, array).astype(array.dtype)

    tensors = {name: changed(array) for name, array in call.tensors.items()}
    return call.with_tensors(tensors, f"each dimension{' and number' * counted} {size} is {other}")


def emptied(call: Call, size: int, longest: int | None, behind: tuple[int, ...]) -> Call:
    """The call without elements: each dimension `size` is 0, and each dimension `longest` huge, or one behind all."""

    def changed(array: Array) -> Array:
        shape = tuple(0 if one == size else 1 << 40 if one == longest else one for one in array.shape)
        shape += behind if 0 in shape else ()
        return np.zeros(shape, array.dtype) if 0 in shape and math.prod(filter(None, shape)) < 1 << 50 else array

    tensors = {name: changed(array) for name, array in call.tensors.items()}
    return call.with_tensors(tensors, f"each dimension {size} is 0, {longest} huge, and {list(behind)} behind them")


def all_as(call: Call, kinds: str, dtype: DType) -> Call:
    """The call with all tensors of the same kind of dtype in another dtype."""
    tensors = {name: cast(one, dtype) if one.dtype.kind in kinds else one for name, one in call.tensors.items()}
    return call.with_tensors(tensors, f"all as {dtype}")


def groups(call: Call) -> Iterator[Callable[[], Call]]:
    """The call with other members in its groups."""
    for group in (tensor.name for tensor in call.operator.inputs if tensor.group):
        members = {name: array for name, array in call.tensors.items() if name.partition(".")[0] == group}
        rest = {name: array for name, array in call.tensors.items() if name not in members}
        yield partial(call.with_tensors, rest, f"without {group}")
        first = next(iter(members.values()), np.ones(2, np.float32))
        turned = {name: members[name] for name in reversed(members)}
        renamed = {f"{group}.{place}": array for place, array in enumerate(members.values())}
        yield partial(call.with_tensors, rest | turned, f"{group} turned round")
        yield partial(call.with_tensors, rest | renamed, f"{group} with other names")
        yield partial(call.with_tensors, rest | {group: first}, f"{group} without members")
        for member in ("more", "0", "-1", "", ".", "a.b.c", "\n", "é", "x" * 101):
            yield partial(call.with_tensor, f"{group}.{member}", partial(np.copy, first), "more")


def attribute_values(attribute: Attribute) -> Iterator[Any]:
    yield None
    kinds: dict[Any, Sequence[Any]] = {int: (*INTEGERS, 1 << 70), float: FLOATS, str: TEXTS}
    items = kinds.get(attribute.item_type, (*get_args(attribute.item_type), "nonsense", 2, -1))
    yield from ([[item] * length for item in items for length in LENGTHS] if attribute.is_list else items)


@cache
def adapter(attribute: Attribute) -> TypeAdapter[Any]:
    return TypeAdapter(attribute.type)


def read_attributes(call: Call) -> dict[str, Any] | None:
    """The attributes as a request would have them, or None if the request would be refused."""
    if any(one.required and one.name not in call.attributes for one in call.operator.attributes):
        return None
    types = {one.name: adapter(one) for one in call.operator.attributes}
    try:
        return {name: types[name].validate_python(value) for name, value in call.attributes.items()}
    except ValidationError:
        return None


def filled(shape: tuple[int, ...], dtype: DType) -> Array:
    """Memory that holds something."""
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[...] = 0xA5
    return array


class Reserve:
    """What a call may allocate."""

    claimed = 0

    def __call__(self, size: int) -> None:
        self.claimed += size
        if self.claimed > MEMORY_BYTES:
            raise Busy("the call takes too much memory", limit=MEMORY_BYTES)


def attempt(engine: Engine, call: Call) -> bool:
    """Call the operator, and check the answer or the error. Return whether there is an answer."""
    attributes = read_attributes(call)
    if attributes is None:
        return False
    outputs: dict[str, Array] = {}
    refusal: GradserveError | None = None
    reserve = Reserve()

    def run() -> None:
        nonlocal refusal
        try:
            outputs.update(engine.run(call.operator, call.tensors, attributes, reserve=reserve))
        except GradserveError as error:
            refusal = error

    taken = peak_bytes(run)
    assert taken <= reserve.claimed + SCRATCH_BYTES, f"took {taken} bytes, and claimed {reserve.claimed}"
    if refusal is not None:
        named = {"tensor", "parameter", "axis", "limit"} & refusal.context.keys() or "output" in refusal.detail
        assert named, f"names nothing: {refusal}"
        return False
    check_answer(call, attributes, outputs)
    return True


def check_answer(call: Call, attributes: Mapping[str, Any], outputs: Mapping[str, Array]) -> None:
    """Check names and dtypes, and compare with answers in other memory, by one thread, and of each output alone."""
    operator = call.operator
    for name, output in outputs.items():
        assert output.dtype in dtypes_of(call, name.partition(".")[0]), f"{name} is {output.dtype}"
    with workspace(Workspace(allocate=filled, spare=filled, scratch=filled)):
        again = operator(call.tensors, attributes)
        alone = {name: operator(call.tensors, attributes, [name])[name] for name in outputs if len(outputs) > 1}
    assert list(again) == list(outputs)
    for name, output in outputs.items():
        assert_same_bits(again[name], output)
        assert_same_bits(alone.get(name, output), output)


def dtypes_of(call: Call, output: str) -> Collection[DType | None]:
    """The dtypes that the output may have: that of the inputs with its type variable, or those of its kind.

    An attribute `output_type` names the dtype, as in ONNX.
    """
    (declared,) = (one for one in call.operator.outputs if one.name == output)
    inputs = call.operator.inputs_by_name
    variables = {inputs[name.partition(".")[0]].variable: array.dtype for name, array in call.tensors.items()}
    if declared.variable in variables and declared.variable and call.attributes.get("output_type") is None:
        return [variables[declared.variable]]
    return [DTYPES[name] for name in declared.kind.dtypes]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(_op, "MAX_MULTIPLY_ADDS", WORK)
    made = Engine(threads=2, limits=Limits(MAX_TENSOR_BYTES), reuse_bytes=0)
    yield made
    made.pool.close()


def attack(engine: Engine, operator: Operator) -> tuple[int, int]:
    """Make the hostile calls of the operator. Return how many are answered, and how many refused."""
    random = np.random.default_rng(zlib.crc32(operator.name.encode()))
    answered = refused = 0
    for base in bases(operator):
        every = changes(base)
        parts = np.array_split(np.arange(len(every)), min(len(every), SINGLE * MANY))
        calls = [every[random.choice(part)] for part in parts]
        for _ in range(PAIRS * MANY):
            second = changes(every[random.integers(len(every))]())
            calls.append(second[random.integers(len(second))])
        for make in [*calls, *large(base)]:
            call = make()
            try:
                is_answered = attempt(engine, call)
            except BaseException as error:
                error.add_note(f"{operator.name}: {call.story}")
                raise
            answered += is_answered
            refused += not is_answered
    return answered, refused


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
def test_hostile_calls(engine: Engine, operator: Operator) -> None:
    assert min(attack(engine, operator)) > 10


def copied(X: Mapping[str, Array], shift: list[int]) -> dict[str, Array]:
    """What a right kernel does."""
    for name, array in X.items():
        if array.ndim != 1:
            raise ShapeMismatch("not 1-D", tensor=f"X.{name}")
        if len(shift) > len(array):
            raise InvalidParameter("too long", parameter="shift")
    return {name: array.copy() for name, array in X.items()}


def vague(X: Mapping[str, Array], shift: list[int]) -> dict[str, Array]:
    if len(X) > 2:
        raise ShapeMismatch("too many")
    return copied(X, shift)


WRONG: dict[str, Callable[[Mapping[str, Array], list[int]], Mapping[str, Array]]] = {
    "IndexError": lambda X, shift: {name: array[shift[0] :, None][: shift[-1]] for name, array in X.items()},
    "names nothing": vague,
    "is float64": lambda X, shift: {name: array.astype(np.float64) for name, array in copied(X, shift).items()},
    "took ": lambda X, shift: {name: np.repeat(array, 64)[::64] for name, array in copied(X, shift).items()},
    "are not equal": lambda X, shift: {
        name: new_output(None, one.shape, one.dtype) for name, one in copied(X, shift).items()
    },
}
"""What the attack finds, and a kernel that does it."""


@pytest.mark.parametrize("fault", [None, *WRONG])
def test_the_attack_finds(engine: Engine, monkeypatch: pytest.MonkeyPatch, fault: str | None) -> None:
    own: dict[str, Operator] = {}
    monkeypatch.setattr("service.kernels._op.OPERATORS", own)

    @op("Own", outputs="Y:X", example={"X": {"a": [1.0, 2.0], "b": [3.0]}, "flag": True, "shift": [1]})
    def kernel(X: Group[T], flag: Flag | None = None, /, *, shift: list[Positive]) -> Group[T]:
        return WRONG.get(fault or "", copied)(X, shift)  # type: ignore[return-value]

    if fault is None:
        assert min(attack(engine, own["Own"])) > 10
        return
    with pytest.raises((AssertionError, IndexError)) as caught:
        attack(engine, own["Own"])
    assert fault in repr(caught.value)
    assert caught.value.__notes__[0].startswith("Own: the example")
