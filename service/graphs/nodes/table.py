"""The table of the operators that a graph may have, which the modules beside it fill."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any, TypeAlias, TypeVar

import numpy as np

from service.dtypes import BFLOAT16, DType
from service.errors import GradserveError, InvalidGraph
from service.graphs.plan import Node, Step

Function: TypeAlias = Callable[..., Any]
"""A function of a node's inputs, in order; None stands for one that is left out, and those at the end may be missing.

It returns an array, or a tuple of the outputs, at least those that the node has. It has `claim`ed the memory that it
takes beyond what kernels allocate, and does not write to its inputs. A result may be a view of an input.
"""

Maker: TypeAlias = Callable[[Node], Function]
"""A function that reads a node's attributes once, when the graph is planned. Raises classes of `errors.py`."""

F = TypeVar("F", bound=Function)
M = TypeVar("M", bound=Maker)

NODES: dict[tuple[str, str], Maker] = {}
"""The maker of each operator, by domain and name."""

SEED = "~seed"
"""The tensor that random operators read behind their own inputs: an int, the seed of the run."""

RANDOM: set[tuple[str, str]] = set()
"""The random operators. Their functions have a parameter `generator`, whose numbers depend on the run and the node."""


ONNX_DTYPES: dict[int, DType] = {
    number: np.dtype(name)
    for number, name in enumerate("f4 u1 i1 u2 i2 i4 i8 O ? f2 f8 u4 u8 O O O".split(), start=1)
    if name != "O"
} | {16: BFLOAT16}
"""The dtype of each of ONNX's numbers of types, of those that graphs may use."""


def dtype_of(number: int) -> DType:
    """Return the dtype with this number in ONNX. Raises `InvalidGraph`."""
    if number not in ONNX_DTYPES:
        from onnx import TensorProto

        names = {value: name for name, value in TensorProto.DataType.items()}
        problem = f"the type {names.get(number, f'with the number {number}')} is none of"
        raise InvalidGraph(f"{problem} {', '.join(map(str, ONNX_DTYPES.values()))}")
    return ONNX_DTYPES[number]


def maker(*ops: str, domain: str = "", random: bool = False) -> Callable[[M], M]:
    """Make the decorated function the maker of these operators. Raises `TypeError` if one has a maker already."""

    def register(function: M) -> M:
        for key in ((domain, op) for op in ops):
            if key in NODES:
                raise TypeError(f"There are two makers of {key}")
            NODES[key] = function
            if random:
                RANDOM.add(key)
        return function

    return register


def function_of(*ops: str, random: bool = False) -> Callable[[F], F]:
    """Make the decorated function that of these operators' nodes. Its keyword-only parameters are attributes."""

    def register(function: F) -> F:
        maker(*ops, random=random)(partial(with_attributes, function))
        return function

    return register


def with_attributes(function: Function, node: Node) -> Function:
    """Return the function with those of the node's attributes that are its keyword-only parameters."""
    keywords = {one.name for one in signature(function).parameters.values() if one.kind is one.KEYWORD_ONLY}
    given = {name: value for name, value in node.attributes.items() if name in keywords}
    return partial(function, **given) if given else function


def step_of(node: Node) -> Step:
    """Return the step that computes a node whose operator is in `NODES`. Raises `InvalidGraph`."""
    key = node.domain, node.op
    try:
        function = NODES[key](node)
    except GradserveError as error:
        raise InvalidGraph(f"{node.label}: {error.detail}", node=node.name) from None
    except Exception as error:  # the ONNX package refuses attributes with many classes
        raise InvalidGraph(f"{node.label} has attributes that do not fit: {error}", node=node.name) from error
    inputs = node.inputs
    if key in RANDOM:
        function, inputs = partial(_seeded, function, zlib.crc32("\0".join(node.outputs).encode())), (*inputs, SEED)
    if len(node.outputs) == 1:
        function = partial(_first, function)
    return Step(function, inputs, node.outputs, node.label)


def _seeded(function: Function, number: int, *given: Any) -> Any:
    *inputs, seed = given
    return function(*inputs, generator=np.random.Generator(np.random.PCG64([int(seed), number])))


def _first(function: Function, *given: Any) -> Any:
    result = function(*given)
    return result[0] if isinstance(result, tuple) else result
