"""A model as an operator: its inputs, its groups of parameters and gradients, and a plan for each choice of outputs."""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import numpy as np
from annotated_types import Ge, Lt

from service.dtypes import INT32, INT64, NAMES, Array, Kind
from service.errors import DtypeMismatch, InvalidGraph, InvalidParameter, MissingTensor, ShapeMismatch, shown
from service.graphs.doubts import doubts_of
from service.graphs.forward import training_of
from service.graphs.memory import bytes_of
from service.graphs.model import DEFAULT_LIMITS, GraphLimits, Value, name_of, read
from service.graphs.nodes import SEED
from service.graphs.nodes.shapes import contiguous
from service.graphs.plan import Node, Plan, paced
from service.graphs.trained import overwrite
from service.graphs.training import Program, program_of
from service.kernels import Attribute, Operator, Tensor, claim

MAX_PLANS = 3
"""Plans of a graph that are kept: one for each choice of outputs. Each takes up to a quarter of the graph's memory."""

MAX_COMPARED = 16
"""The most outputs of a graph whose plans say which inputs all of them need."""

MAX_MEMBER_CHARACTERS = 100
"""Characters of a tensor's name in a group. A buffer's name has it behind a prefix."""

Seed = Annotated[int, Ge(0), Lt(1 << 63)]

PARAMETERS, STATISTICS, GRADIENTS, LOSS = "parameters", "statistics", "gradients", "loss"


class Port(NamedTuple):
    """A tensor of a request or an answer: its name there, in its group if it has one, and what it is in the model."""

    name: str
    value: Value


class Graph:
    """A program that a client brought. A request may replace the tensors that the model has itself."""

    def __init__(self, kind: str, program: Program, nodes: Sequence[Node], doubts: Sequence[str] = ()) -> None:
        self.kind, self._program = kind, program
        self._plans: dict[tuple[str, ...], Plan] = {}
        running = [Value(name, program.initial[name].dtype, program.initial[name].shape) for name in program.statistics]
        parameters, statistics = _members(program.parameters), _members(running)
        loss = [Port(LOSS, program.loss)] if program.loss else []
        self._inputs = {
            "": [Port(one.name, one) for one in program.inputs],
            PARAMETERS: parameters,
            STATISTICS: statistics,
        }
        self._outputs = {
            "": loss + [Port(one.name, one) for one in program.outputs],
            STATISTICS: _replaced(statistics, program.statistics),
            GRADIENTS: _replaced(parameters, program.gradients),
        }
        for groups in (self._inputs, self._outputs):
            _check_apart(groups)
        ports = [port for ports in self._outputs.values() for port in ports]
        plan, known = self._plan([port.value.name for port in ports]), {*program.initial, SEED}
        known |= {port.value.name for ports in self._inputs.values() for port in ports}
        if missing := plan.inputs - known:
            raise InvalidGraph(f"nothing computes {shown(min(missing))}, which the outputs need")
        kinds = Counter(f"{node.domain}.{node.op}" if node.domain else node.op for node in nodes)
        self._signature = {
            "kind": kind,
            "inputs": _described(self._inputs[""]),
            PARAMETERS: _described(parameters),
            STATISTICS: _described(statistics),
            "outputs": _described(self._outputs[""]),
            GRADIENTS: _described(self._outputs[GRADIENTS]),
            "nodes": dict(kinds.most_common()),
            "doubts": [*doubts],
        }
        self._operator = self._declared(f"A graph of {len(nodes)} nodes.", is_random=SEED in plan.inputs)
        self._inference = Graph("inference", program.inference, nodes) if program.inference else None
        self.nbytes = 0
        """The bytes of memory that the graph holds, when it has one plan."""

    @classmethod
    def read(
        cls, content: Any, limits: GraphLimits = DEFAULT_LIMITS, *, loss: str | None = None, train: str | None = None
    ) -> Graph:
        """Return the graph in a file's bytes; with `loss`, its training (see `training_of`). Raises `InvalidGraph`."""
        model = read(content, limits)
        program = program_of(model, train) if loss is None else training_of(model, loss, train)
        doubts = doubts_of(model, [one.name for one in program.parameters])
        graph = cls("training" if program.gradients else "inference", program, model.nodes, doubts)
        graph.nbytes = bytes_of(graph)
        return graph

    @property
    def initial(self) -> Mapping[str, Array]:
        """The tensors that the model has itself, by the name in a request, like `parameters.fc1.weight`."""
        given = self._program.initial
        return {name: given[one.name] for name, one in self._weights().items() if one.name in given}

    def _weights(self) -> dict[str, Value]:
        return {f"{group}.{name}": value for group in (PARAMETERS, STATISTICS) for name, value in self._inputs[group]}

    def overwrite(self, content: bytearray, values: Mapping[str, Array]) -> None:
        """Write values over tensors in the graph's own file, by names like `parameters.fc1.weight`.

        Raises `DtypeMismatch`, `ShapeMismatch` and what `overwrite` raises.
        """
        weights = self._weights()
        pairs = [(weights[name], name, value) for name, value in values.items()]
        overwrite(content, {one.name: _checked(name, one, value, is_input=False) for one, name, value in pairs})

    def signature(self) -> dict[str, Any]:
        """Return what the graph takes and gives, as JSON: a length or a shape that is open is null."""
        return self._signature

    def operator(self, name: str) -> Operator:
        """Return the graph as an operator. It raises what its nodes raise.

        An input that all outputs need is required. With many outputs, only a run finds that an input is missing.
        """
        return replace(self._operator, name=name)

    def inference(self, name: str) -> Operator:
        """Return the graph as an operator without gradients, whose Dropout and BatchNormalization do not train.

        Raises `InvalidParameter` for a file that has its gradients.
        """
        if self._inference is None and self.kind == "training":
            problem = "The file itself has the gradients, so it has no other form: upload its eval_model.onnx"
            raise InvalidParameter(problem, parameter="form")
        return (self._inference or self).operator(name)

    def _declared(self, formula: str, *, is_random: bool) -> Operator:
        outputs = self._outputs[""] if len(self._outputs[""]) <= MAX_COMPARED else []
        every = [Plan(self._program.steps, {}, [port.value.name]).inputs for port in outputs]
        needed = frozenset.intersection(*every) if every else frozenset()
        return Operator(
            name="",
            family="Graphs",
            kernel=self._run,
            inputs=tuple(_tensors(self._inputs, needed - self._program.initial.keys())),
            outputs=tuple(_tensors(self._outputs, ())),
            attributes=(Attribute("seed", Seed | None, None, "seed"),) if is_random else (),
            formula=formula,
            description="",
            example={},
            example_attributes={},
            takes_wanted=True,
            multiply_adds=lambda *_, **__: 0,
            sparse=None,
        )

    def _plan(self, outputs: Sequence[str]) -> Plan:
        """Return the plan that computes these tensors of the model."""
        key = tuple(outputs)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            plan = self._plans[key] = Plan(self._program.steps, self._program.constants, outputs)
        return plan

    def _run(self, *given: Any, wanted: Collection[str] | None = None, seed: int | None = None) -> tuple[Any, ...]:
        """Return all outputs in order: a mapping for a group. One that is not wanted is None, or empty."""
        names = None if wanted is None else {*wanted}
        chosen = {
            group: [port for port in ports if names is None or (group or port.name) in names]
            for group, ports in self._outputs.items()
        }
        plan = self._plan([port.value.name for ports in chosen.values() for port in ports])
        results = plan.run(self._tensors(plan.inputs, given, seed))
        finished = {name: _finished(name, result) for name, result in results.items()}
        outputs = list[Any]()
        for group, ports in self._outputs.items():
            values = {port.name: finished[port.value.name] for port in chosen[group]}
            outputs += [values] if group and ports else [values.get(port.name) for port in ports] if not group else []
        return tuple(outputs)

    def _tensors(self, needed: Collection[str], given: Sequence[Any], seed: int | None) -> dict[str, Any]:
        """Return the tensors of the model that a plan needs, from those of the request. Raises what `_check` raises."""
        found = dict[str, Any]()
        values = iter(given)
        for group, ports in self._inputs.items():
            members = next(values) or {} if group and ports else {}
            for port in ports:
                array = members.get(port.name) if group else next(values)
                name = f"{group}.{port.name}" if group else port.name
                if array is not None:
                    array = _checked(name, port.value, array, is_input=not group)
                elif port.value.name in self._program.initial:
                    array = self._program.initial[port.value.name]
                elif port.value.name in needed:
                    raise MissingTensor(f"the graph needs the input {name!r}", tensor=name)
                found[port.value.name] = array
        found[SEED] = np.array(secrets.randbits(62) if seed is None else seed, INT64)
        return found


def _members(values: Iterable[Value]) -> list[Port]:
    """Return the tensors as members of a group. Their names are as buffers may have them."""
    names, numbers = dict[str, Value](), Counter[str]()
    for value in paced(values):
        name = re.sub(r"[^A-Za-z0-9._:-]", "_", value.name)[-MAX_MEMBER_CHARACTERS:] or "_"
        clean = name[: MAX_MEMBER_CHARACTERS - 8]
        while name in names:
            numbers[clean] += 1
            name = f"{clean}_{numbers[clean] + 1}"
        names[name] = value
    return [Port(*pair) for pair in names.items()]


def _replaced(ports: Iterable[Port], others: Mapping[str, str]) -> list[Port]:
    """Return the ports that another tensor replaces, of the same dtype and shape, with its name."""
    return [
        port._replace(value=port.value._replace(name=others[port.value.name]))
        for port in ports
        if others.get(port.value.name, port.value.name) != port.value.name
    ]


def _check_apart(groups: Mapping[str, Sequence[Port]]) -> None:
    """Raise `InvalidGraph` if a tensor outside of groups has the name of one, or of a member."""
    for port in groups[""]:
        head = port.name.partition(".")[0]
        if head and groups.get(head):
            raise InvalidGraph(f"{shown(port.name)} is an input or output, but {head} is a group here: rename it")
    names = [port.name for port in groups[""]]
    if len({*names}) < len(names):
        raise InvalidGraph(f"the loss has the name {LOSS} here, and so has another output: rename it")


def _tensors(groups: Mapping[str, Sequence[Port]], needed: Collection[str]) -> Iterable[Tensor]:
    """Yield the declaration of each tensor, and of each group that has any."""
    for group, ports in groups.items():
        optional = not any(port.value.name in needed for port in ports)
        if group and ports:
            dtypes = tuple(dict.fromkeys(NAMES[port.value.dtype] for port in ports))
            kind = Kind(" or ".join(dtypes), dtypes, dtypes[0])
            yield Tensor(group, kind, None, optional, 1, True, None, dict.fromkeys(port.name for port in ports))
            continue
        for port in ports:
            dtype, shape = NAMES[port.value.dtype], port.value.shape
            rank = 1 if shape is None else len(shape)
            kind = Kind(dtype, ("int64", "int32") if dtype == "int64" else (dtype,), dtype)
            yield Tensor(port.name, kind, None, port.value.name not in needed, rank)


def _described(ports: Iterable[Port]) -> dict[str, Any]:
    return {
        name: {"dtype": name_of(name, value.dtype), "shape": None if value.shape is None else [*value.shape]}
        for name, value in ports
    }


def _checked(name: str, expected: Value, array: Array, *, is_input: bool) -> Array:
    """Return the array as the model expects it. Raises `DtypeMismatch` and `ShapeMismatch`."""
    if is_input and (array.dtype, expected.dtype) == (INT32, INT64):
        claim(2 * array.nbytes)
        array = array.astype(INT64)
    if array.dtype != expected.dtype:
        raise DtypeMismatch(f"{name} is {array.dtype}, but must be {NAMES[expected.dtype]}", tensor=name)
    shape = array.shape if expected.shape is None else expected.shape
    fits = [length in (None, given) for length, given in zip(shape, array.shape, strict=False)]
    if len(array.shape) != len(shape) or not all(fits):
        problem = f"{name} has shape {shown([*array.shape])}, but must have {shown([*shape])}"
        problem += ", where null is any length" * (None in shape)
        if is_input and len(array.shape) == len(shape) and all(fits[1:]):
            problem += f": the model was exported for batches of {shape[0]}, without dynamic_axes or dynamic_shapes"
        raise ShapeMismatch(problem, tensor=name)
    return array


def _finished(name: str, result: Any) -> Array:
    """Return an output, row-major. Raises `DtypeMismatch` if no answer can have it."""
    array = np.asarray(result)
    if array.dtype not in NAMES:
        raise DtypeMismatch(
            f"the output {shown(name)} is {array.dtype}, but must be one of {', '.join(NAMES.values())}"
        )
    return contiguous(array)
