"""A question to the rule of an operator, and its answers: by the rule, by PyTorch's autograd, by finite differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from service.dtypes import BFLOAT16, Array, DType
from service.graphs.gradients import Tape, differentiate
from service.graphs.gradients.tape import completed
from service.graphs.nodes import SEED, step_of
from service.graphs.plan import Node, Plan

STEP = 1e-5


@dataclass
class Question:
    """An operator with its inputs, None for one that is left out, and the same function in PyTorch.

    All floating inputs are trained but those numbered in `frozen`. `reads` are the outputs that the loss reads.
    """

    op: str
    torch: Callable[..., Any]
    inputs: tuple[Array | None, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    frozen: Sequence[int] = ()
    reads: Sequence[int] = (0,)
    outputs: int = 1
    domain: str = ""
    opset: int = 21

    @property
    def trained(self) -> list[str]:
        return [
            f"x{k}"
            for k, one in enumerate(self.inputs)
            if one is not None and one.dtype.kind == "f" and k not in self.frozen
        ]

    def node(self) -> Node:
        names = tuple("" if one is None else f"x{k}" for k, one in enumerate(self.inputs))
        outputs = tuple(f"y{k}" for k in range(self.outputs))
        return completed(Node(self.op, self.domain, self.opset, names, outputs, self.attributes))

    def tensors(self, dtype: Any) -> dict[str, Any]:
        given = {f"x{k}": one for k, one in enumerate(self.inputs) if one is not None}
        return {name: one.astype(dtype) if one.dtype.kind == "f" else one for name, one in given.items()} | {SEED: 7}

    def outputs_of(self, tensors: dict[str, Any]) -> list[Array]:
        plan = Plan([step_of(self.node())], {}, [f"y{k}" for k in self.reads])
        return [np.asarray(one) for one in plan.run(tensors).values()]

    def factors(self) -> list[Array]:
        """Random numbers for the loss, the sum of their products with the outputs."""
        random = np.random.default_rng(11)
        shapes = [one.shape for one in self.outputs_of(self.tensors(np.float64))]
        return [np.asarray(random.integers(-16, 16, shape) / 8 + 0.0625) for shape in shapes]

    def by_rule(self, dtype: DType) -> dict[str, Array]:
        factors = {f"r{k}": one.astype(dtype) for k, one in zip(self.reads, self.factors(), strict=True)}
        nodes, sums = [self.node()], [f"s{k}" for k in self.reads]
        for k in self.reads:
            nodes.append(Node("Mul", "", 21, (f"y{k}", f"r{k}"), (f"p{k}",), {}))
            nodes.append(Node("ReduceSum", "", 21, (f"p{k}",), (f"s{k}",), {"keepdims": 0}))
        nodes.append(Node("Sum", "", 21, tuple(sums), ("loss",), {}))
        tape = Tape(map(step_of, nodes))
        names = differentiate(tape, nodes, "loss", self.trained)
        plan = Plan(tape.steps, {}, [*names.values()])
        results = plan.run({**self.tensors(dtype), **factors})
        return {name: results[names[name]] for name in self.trained}

    def by_torch(self) -> dict[str, Array]:
        given = {
            name: torch.from_numpy(np.array(one)) for name, one in self.tensors(np.float64).items() if name != SEED
        }
        for name in self.trained:
            given[name].requires_grad_()
        results = self.torch(*(given.get(f"x{k}") for k in range(len(self.inputs))))
        results = results if isinstance(results, tuple) else (results,)
        loss = sum((one * torch.from_numpy(r)).sum() for one, r in zip(results, self.factors(), strict=True))
        loss.backward()
        return {name: given[name].grad.numpy() for name in self.trained}

    def by_differences(self) -> dict[str, Array]:
        tensors, factors = self.tensors(np.float64), self.factors()
        return {name: self._slopes(name, tensors, factors) for name in self.trained}

    def _slopes(self, name: str, tensors: dict[str, Any], factors: list[Array]) -> Array:
        slopes: Array = np.empty_like(tensors[name])
        for place in np.ndindex(slopes.shape):
            ends = []
            for move in (STEP, -STEP):
                moved = tensors[name].copy()
                moved[place] += move
                results = self.outputs_of({**tensors, name: moved})
                ends.append(sum(float((y * r).sum()) for y, r in zip(results, factors, strict=True)))
            slopes[place] = (ends[0] - ends[1]) / (2 * STEP)
        return slopes


def tolerance(dtype: DType) -> float:
    """How far a gradient may be from the right one, as a part of its largest element."""
    return {np.dtype(np.float64): 1e-10, np.dtype(np.float32): 1e-5, BFLOAT16: 0.05}.get(dtype, 0.01)


def assert_close(got: Array, expected: Array, part: float) -> None:
    """Raise unless the tensors differ by at most this part of the largest element."""
    assert got.shape == expected.shape
    largest = np.abs(expected).max(initial=0)
    np.testing.assert_allclose(got.astype(np.float64), expected, rtol=0, atol=part * max(largest, 1e-3))
