"""The steps of a graph, and how they run: each once, in order. A tensor dies when its last reader has run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from service.dtypes import Array, DType
from service.errors import GradserveError, Invalid, TensorTooLarge, shown
from service.kernels import Workspace, claim, current_workspace, workspace

UNCOUNTED_BYTES = 1 << 16
"""A workspace may not count a claim of so few bytes, so smaller ones wait for others."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a model. An input that is left out is "", and so is an output that nobody reads."""

    op: str
    domain: str
    """"" is the domain of ONNX itself, whose other name is ai.onnx."""
    version: int
    """The opset of the domain that the model imports."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    """Python values: numbers, texts, lists of them, and arrays."""
    name: str = ""
    module: str = ""
    """The path of the module that the node is of, if the file says it."""
    rules: str = ""
    """The rules by which an exporter's optimizer has made the node."""

    @property
    def label(self) -> str:
        """The operator and the name, for errors."""
        return f"{self.op} {self.name}".strip()


class Step(NamedTuple):
    """A call of `function` with the tensors `inputs`, "" for one that is left out. It returns the tensors `outputs`.

    The function gets an array or None for each input. It returns an array, or a tuple if there are several outputs.
    """

    function: Callable[..., Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    label: str
    """The node, for errors."""


NODE_BYTES, STEP_BYTES = 1 << 10, 1 << 8
"""Bytes of memory for what a node becomes, and for a step's place in a plan."""

T = TypeVar("T")


def paced(items: Iterable[T], size: int = 0) -> Iterator[T]:
    """Yield the items. Now and then claim `size` bytes for each, and so learn whether anybody waits for the result."""
    for number, item in enumerate(items, 1):
        if number % 512 == 0:  # a second would be too long, and 64 KB too few to be counted
            claim(512 * size)
        yield item


class Plan:
    """The steps that the `outputs` need, in order. `constants` are tensors that every run has."""

    def __init__(self, steps: Iterable[Step], constants: Mapping[str, Any], outputs: Sequence[str]) -> None:
        self.outputs = tuple(outputs)
        needed, kept = set(outputs), list[tuple[Step, tuple[str, ...]]]()
        for step in paced(reversed([*steps]), STEP_BYTES):
            if needed.isdisjoint(step.outputs):
                continue
            # What no later step reads dies here: the inputs that are read last, and the outputs that nobody wants.
            dying = {name for name in (*step.inputs, *step.outputs) if name and name not in needed} - constants.keys()
            kept.append((step, (*dying,)))
            needed |= {*step.inputs}
        self.steps = kept[::-1]
        """Each step, and the tensors that die after it."""
        self.constants = {name: value for name, value in constants.items() if name in needed}
        self.inputs = frozenset(needed - {""} - constants.keys() - {name for step, _ in kept for name in step.outputs})
        """The tensors that a run must bring."""

    def run(self, tensors: Mapping[str, Array]) -> dict[str, Any]:
        """Return the outputs by name. `tensors` has all `inputs`; others are ignored. Raises what a step raises."""
        values: dict[str, Any] = {**self.constants, **{name: tensors[name] for name in self.inputs}}
        with metered(values.values()) as meter, np.errstate(all="ignore"):
            give_way, grow = current_workspace().give_way, meter.grow
            for step, dying in self.steps:
                give_way(grow)
                meter.catch_up()
                results = _run(step, [values[name] if name else None for name in step.inputs])
                for name, result in zip(step.outputs, results, strict=False):
                    if name:
                        values[name] = result
                        meter.add(result)
                for name in dying:
                    meter.drop(values.pop(name))
        return {name: values[name] for name in self.outputs}


def _run(step: Step, given: Sequence[Any]) -> tuple[Any, ...]:
    try:
        result = step.function(*given)
    except GradserveError as error:
        error.detail = f"{step.label}: {error.detail}"
        raise
    except MemoryError:
        raise TensorTooLarge(f"{step.label} needs more memory than there is") from None
    except Exception as error:  # NumPy's and the ONNX package's refusals of shapes and values have many classes
        inputs = ", ".join(map(_described, given))
        is_clear = isinstance(error, ValueError | IndexError) and not _OF_PYTHON.search(str(error))
        why = str(error) if is_clear else "the operator takes no such inputs"
        raise Invalid(f"{step.label} cannot be computed of {inputs or 'nothing'}: {why}") from error
    if len(step.outputs) == 1:
        return (result,)
    if len(result) < len(step.outputs):
        raise Invalid(f"{step.label} has {len(step.outputs)} outputs here, but computes {len(result)}")
    return tuple(result)


_OF_PYTHON = re.compile(r"tuple index|unpack|zip\(")
"""Words in messages that say nothing of tensors."""


def _described(value: Any) -> str:
    return f"{value.dtype} {[*value.shape]}" if isinstance(value, np.ndarray) else shown(value)


def _owner(value: Any) -> Any:
    """Return the array that owns the value's memory, and keeps all of it: itself, unless it is a view."""
    while isinstance(base := getattr(value, "base", None), np.ndarray):
        value = base
    return value


class Meter:
    """The bytes that a run holds. It claims its peak of the workspace: what dies makes room for what comes.

    A view holds all memory of its owner, which counts once, until the last of its views dies; never if it is `given`.
    """

    def __init__(self, space: Workspace, given: Iterable[Any]) -> None:
        self._space, self._held, self._growing, self._claimed = space, 0, 0, 0
        self._views = dict.fromkeys(map(id, map(_owner, given)), 1 << 62)
        """How many tensors are in the memory of each owner: in what is given, more than can die."""

    def grow(self, size: int) -> None:
        """Count memory that a step is about to allocate. Raises what the workspace raises."""
        more = 0
        if size:  # other threads call this with 0, to learn whether anybody waits for the outputs
            self._growing += size
            more = self._held + self._growing - self._claimed
        self._claim(more)

    def catch_up(self) -> None:
        """Claim what steps have left, in place of what they have allocated. Raises what the workspace raises."""
        self._growing = 0
        self._claim(self._held - self._claimed)

    def _claim(self, more: int) -> None:
        if more <= UNCOUNTED_BYTES:
            more = 0
        self._claimed += more
        self._space.claim(more)

    def add(self, value: Any) -> None:
        """Count a tensor that a step leaves."""
        owner = value if getattr(value, "base", None) is None else _owner(value)
        if (key := id(owner)) in self._views:
            self._views[key] += 1
        else:
            self._views[key] = 1
            self._held += getattr(owner, "nbytes", 0)

    def drop(self, value: Any) -> None:
        """Count a tensor no more."""
        owner = value if getattr(value, "base", None) is None else _owner(value)
        self._views[key := id(owner)] -= 1
        if not self._views[key]:
            del self._views[key]
            self._held -= getattr(owner, "nbytes", 0)

    def allocate(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """Return uninitialised memory, counted."""
        size = dtype.itemsize
        for length in shape:
            size *= length
        self.grow(size)
        return self._space.scratch(shape, dtype)


@contextmanager
def metered(given: Iterable[Any]) -> Iterator[Meter]:
    """Let the kernels and the steps inside claim together what they hold at their peak, beside what is given."""
    space = current_workspace()
    meter = Meter(space, given)
    with workspace(replace(space, allocate=meter.allocate, spare=meter.allocate, claim=meter.grow)):
        yield meter
