"""`@op`: a kernel's Python signature is its schema, and `OPERATORS` is the table of all operators.

Positional-only parameters are tensor inputs (`T | None = None`: optional). `Group[T]` is a group of tensors: a mapping
name -> array. Keyword-only parameters are attributes, except `out`, and `wanted`: the names of the outputs to compute,
for a kernel that can compute fewer. The annotation is the type constraint; parameters that share a type variable share
a dtype. `Rank3[T]` is a T with three dimensions. An attribute is an int, a float, a str or a `Literal`, or a list of
these, and may be None; one without a default is required.

Everywhere but in a kernel's arguments, the tensor `b` of the group `weights` has the name `weights.b`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from service import dtypes
from service.dtypes import DTYPES, Array
from service.errors import TensorTooLarge, UnknownTensor, shown
from service.kernels._types import Attribute, Tensor, read_attribute, read_tensor

F = TypeVar("F", bound=Callable[..., Any])

MAX_MULTIPLY_ADDS = 1 << 40
"""The most multiplications and additions of a call. They take a thread about a minute."""


@dataclass(frozen=True, eq=False)
class Operator:
    """Everything that the service knows about an operator, read from its kernel's declaration."""

    name: str
    family: str
    """The heading that lists show it under: `FAMILY` in its kernel's module."""
    kernel: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    attributes: tuple[Attribute, ...]
    formula: str
    description: str
    example: Mapping[str, Any]
    """Inputs as JSON: each a nested list, a scalar, or an object with dtype and data; a group is an object of them."""
    example_attributes: Mapping[str, Any]
    """The attributes of the example."""

    takes_wanted: bool
    """Whether the kernel has a parameter `wanted`, and computes only the outputs that it names."""
    multiply_adds: Callable[..., int] | None
    """A function with the kernel's parameters. It returns the multiplications and additions that a call takes.

    None if the bytes of the inputs bound the operator's time and memory.
    """
    sparse: Callable[..., Any] | None
    """A function with the kernel's parameters. It returns the only output as an object that computes pieces of it."""

    @cached_property
    def inputs_by_name(self) -> Mapping[str, Tensor]:
        """The inputs, name -> tensor."""
        return {tensor.name: tensor for tensor in self.inputs}

    @cached_property
    def needed_names(self) -> tuple[str, ...]:
        """The names of the inputs that are not optional."""
        return tuple(tensor.name for tensor in self.inputs if not tensor.optional)

    @cached_property
    def output_names(self) -> tuple[str, ...]:
        """The names of the outputs."""
        return tuple(tensor.name for tensor in self.outputs)

    @cached_property
    def needs_attributes(self) -> bool:
        """Whether any attribute is required."""
        return any(attribute.required for attribute in self.attributes)

    @cached_property
    def draws_a_seed(self) -> bool:
        """Whether a call without the attribute `seed` draws one."""
        return any(attribute.name == "seed" and attribute.default is None for attribute in self.attributes)

    @cached_property
    def groups(self) -> frozenset[str]:
        """The names of the inputs that are groups."""
        return frozenset(tensor.name for tensor in self.inputs if tensor.group)

    @cached_property
    def all_groups(self) -> frozenset[str]:
        """The names of the inputs and outputs that are groups."""
        return frozenset(tensor.name for tensor in (*self.inputs, *self.outputs) if tensor.group)

    @cached_property
    def has_groups(self) -> bool:
        """Whether any input or output is a group."""
        return bool(self.all_groups)

    @cached_property
    def example_tensors(self) -> dict[str, Array]:
        """The inputs of the example, name -> array."""

        def array(value: Any, kind: dtypes.Kind) -> Array:
            given = value if isinstance(value, Mapping) else {"data": value}
            return np.array(given["data"], DTYPES[given.get("dtype", kind.default)])

        tensors = {}
        for name, value in self.example.items():
            tensor = self.inputs_by_name[name]
            members = {f"{name}.{key}": item for key, item in value.items()} if tensor.group else {name: value}
            tensors.update({key: array(item, tensor.kind) for key, item in members.items()})
        return tensors

    def outputs_for(self, inputs: Iterable[str]) -> list[str]:
        """Return the names of the outputs that a call with these inputs has. A group of unknown length has one name."""
        names: dict[str, list[str]] = {}
        for name in inputs if self.has_groups else ():
            group, dot, member = name.partition(".")
            names.setdefault(group, []).append(dot + member)
        return [
            output.name + member
            for output in self.outputs
            for member in (
                names.get(output.like, []) if output.like else [f".{one}" for one in output.members or ()] or [""]
            )
        ]

    def __call__(
        self, tensors: Mapping[str, Array], attributes: Mapping[str, Any], wanted: Sequence[str] | None = None
    ) -> dict[str, Array]:
        """Run the kernel on `tensors`, input name -> array. Return the outputs by name, or only those in `wanted`.

        The name of a group there means all of its tensors.
        """
        selection = {}
        if wanted is not None and self.takes_wanted:
            known = {*self.output_names}  # a plain name may have a dot, too
            selection = {"wanted": [name if name in known else name.partition(".")[0] for name in wanted]}
        given = self._in_python(attributes) if self._renamed else attributes
        result = self.kernel(*self._in_order(tensors), **given, **selection)
        results = dict(zip(self.output_names, result if isinstance(result, tuple) else (result,), strict=True))
        if self.has_groups:
            results = _flat(results)
            if wanted is not None:
                return self._chosen(results, wanted)
        return results if wanted is None else {name: results[name] for name in wanted}

    def in_pieces(self, tensors: Mapping[str, Array], attributes: Mapping[str, Any]) -> Any:
        """Return the only output of a `sparse` operator as an object that computes pieces of it."""
        assert self.sparse is not None
        return self.sparse(*self._in_order(tensors), **self._in_python(attributes))

    def work(self, tensors: Mapping[str, Array], attributes: Mapping[str, Any]) -> int:
        """Return the multiplications and additions of a call beyond a few for each element of the inputs."""
        assert self.multiply_adds is not None
        given = self._in_order(tensors)
        if any(array is None and not tensor.optional for tensor, array in zip(self.inputs, given, strict=True)):
            return 0  # the call will be refused
        return self.multiply_adds(*given, **self._in_python(attributes))

    def _chosen(self, results: Mapping[str, Array], wanted: Sequence[str]) -> dict[str, Array]:
        """Return the results in `wanted`, where the name of a group means all of its tensors."""
        for name in wanted:
            if name not in results and name not in self.output_names:
                problem = f"{self.name} has no output {shown(name)} here; its outputs are {shown(', '.join(results))}"
                raise UnknownTensor(problem, tensor=name)
        chosen: dict[str, Array] = {}
        for name in wanted:
            members = [name] if name in results else [one for one in results if one.startswith(f"{name}.")]
            chosen.update({one: results[one] for one in members})
        return chosen

    @cached_property
    def _renamed(self) -> Mapping[str, str]:
        return {one.name: one.parameter for one in self.attributes if one.name != one.parameter}

    def _in_python(self, attributes: Mapping[str, Any]) -> Mapping[str, Any]:
        return {self._renamed.get(name, name): value for name, value in attributes.items()}

    def _in_order(self, tensors: Mapping[str, Array]) -> list[Any]:
        if not self.has_groups:
            return [tensors.get(tensor.name) for tensor in self.inputs]
        given: dict[str, Any] = {}
        for name, array in tensors.items():
            group, dot, member = name.partition(".")
            if dot and name not in self.inputs_by_name:
                given.setdefault(group, {})[member] = array
            else:
                given[name] = array
        return [_sorted(given.get(one.name)) if one.group else given.get(one.name) for one in self.inputs]


OPERATORS: dict[str, Operator] = {}


def check_work(name: str, work: int) -> None:
    """Raise `TensorTooLarge` if a call of the operator would take more than `MAX_MULTIPLY_ADDS`."""
    if work > MAX_MULTIPLY_ADDS:
        raise TensorTooLarge(
            f"{name} would take {work} multiplications and additions for these tensors; the limit is"
            f" {MAX_MULTIPLY_ADDS}: send fewer or smaller ones at a time",
            limit=MAX_MULTIPLY_ADDS,
        )


def op(
    name: str,
    *,
    outputs: str,
    example: Mapping[str, Any],
    multiply_adds: Callable[..., int] | None = None,
    sparse: Callable[..., Any] | None = None,
) -> Callable[[F], F]:
    """Declare the decorated kernel as the operator `name`, with the space-separated names of its `outputs`.

    `updated:weights` is a group of outputs with the names of the group of inputs `weights`. Pass `multiply_adds` if a
    few bytes of input can keep the kernel busy for long: a function with the kernel's parameters, which no one has
    checked yet, that returns how many multiplications and additions it takes. Pass `sparse` if most of the output may
    be zero: it computes the output piece by piece. The `example` has inputs, and attributes if they matter. The
    decorator returns the kernel unchanged. Raises `TypeError` for a declaration that has no meaning.
    """

    def register(kernel: F) -> F:
        hints = get_type_hints(kernel, include_extras=True)
        parameters = inspect.signature(kernel).parameters.values()
        for parameter in parameters:
            if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.KEYWORD_ONLY):
                problem = f"{name}: {parameter} is {parameter.kind.description}: neither a tensor nor an attribute"
                raise TypeError(problem)
        returned = hints["return"]
        returns = get_args(returned) if get_origin(returned) is tuple else (returned,)
        formula, _, description = (inspect.getdoc(kernel) or "").partition("\n")
        inputs = tuple(read_tensor(p.name, hints[p.name]) for p in parameters if p.kind is p.POSITIONAL_ONLY)
        attributes = tuple(
            read_attribute(p.name, hints[p.name], p.default)
            for p in parameters
            if p.kind is p.KEYWORD_ONLY and p.name not in ("out", "wanted")
        )
        operator = Operator(
            name=name,
            family=sys.modules[kernel.__module__].FAMILY,
            kernel=kernel,
            inputs=inputs,
            outputs=tuple(read_tensor(*pair) for pair in zip(outputs.split(), returns, strict=True)),
            attributes=attributes,
            formula=formula.strip(),
            description=description.strip(),
            example={tensor.name: example[tensor.name] for tensor in inputs if tensor.name in example},
            example_attributes={one.name: example[one.name] for one in attributes if one.name in example},
            takes_wanted="wanted" in hints,
            multiply_adds=multiply_adds,
            sparse=sparse,
        )
        if name in OPERATORS:
            raise TypeError(f"There are two operators {name}")
        unknown = example.keys() - operator.example.keys() - operator.example_attributes.keys()
        unknown |= {one.like for one in operator.outputs if one.like} - {one.name for one in inputs if one.group}
        if unknown:
            raise TypeError(f"{name} has no input or attribute {', '.join(sorted(unknown))}")
        OPERATORS[name] = operator
        return kernel

    return register


def _sorted(group: Mapping[str, Array] | None) -> Mapping[str, Array] | None:
    """Return a sequence in the order of its numbers, and other groups as they came."""
    if group is None or not all(map(str.isdecimal, group)):
        return group
    return {member: group[member] for member in sorted(group, key=int)}


def _flat(results: Mapping[str, Any]) -> dict[str, Array]:
    flat: dict[str, Array] = {}
    for name, result in results.items():
        flat.update(
            {f"{name}.{key}": one for key, one in result.items()} if isinstance(result, Mapping) else {name: result}
        )
    return flat
