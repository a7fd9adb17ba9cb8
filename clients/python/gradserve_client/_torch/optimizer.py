"""The state of a PyTorch optimizer as numbers, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from gradserve_client._runs.parts import Part
from gradserve_client._torch import torch
from gradserve_client._torch.parameters import dtype_name, is_distributed, tensor_of
from gradserve_client._torch.state import State
from gradserve_client._wire.tensors import Array, as_array
from gradserve_client.errors import InvalidInput, mistaken
from gradserve_client.rows import Gradient

_SENT = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes that are sent as they are. Others, and numbers of Python, travel as float64."""

_NUMBERS = {"int": int, "float": float}
"""The numbers of Python that an optimizer keeps, by their names."""


MOMENTS = 2
"""Arrays of a parameter's size that an optimizer may keep, before it keeps any: AdamW has two."""


class OptimizerState:
    """What an optimizer keeps for each parameter, such as moments, in flat pieces of at most `limit` bytes.

    The name of a piece says the place of the parameter, the key, the dtype, the shape and its own place:
    `0.exp_avg:float32:3x4:0`. So a worker whose optimizer has kept nothing yet can read all pieces.
    """

    def __init__(self, optimizer: Any, prefix: str, limit: int) -> None:
        self._optimizer, self._prefix, self._limit = optimizer, prefix, limit

    def numbers(self) -> dict[str, Array]:
        """Return the pieces by their names. Raises `InvalidInput` for what no buffer can hold."""
        return {name: piece for place, value in self._values() for name, piece in self._pieces(place, value)}

    def _values(self) -> Iterator[tuple[str, Any]]:
        for parameter, kept in self._optimizer.state_dict()["state"].items():
            for key, value in kept.items():
                if value is None:
                    continue
                if not isinstance(value, (torch.Tensor, int, float)) or is_distributed(value):
                    raise InvalidInput(
                        f"The optimizer keeps {key!r} of the type {type(value).__name__}, which the server cannot:"
                        " leave out optimizer=, and use checkpoints with state_dict()"
                    )
                yield f"{parameter}.{key}", value

    def _pieces(self, place: str, value: Any) -> Iterator[tuple[str, Array]]:
        if isinstance(value, torch.Tensor):
            dtype, dims = dtype_name(value.dtype), "x".join(map(str, value.shape))
            flat = value.detach().reshape(-1)
            numbers = as_array(flat if value.dtype in _SENT else flat.to(torch.float64), place)
        else:
            dtype, dims, numbers = type(value).__name__, "", np.array([value], np.float64)
        length = max(self._limit // numbers.itemsize, 1)
        for number, start in enumerate(range(0, max(numbers.size, 1), length)):
            yield f"{self._prefix}{place}:{dtype}:{dims}:{number}", numbers[start : start + length]

    def set(self, found: Mapping[str, Array]) -> None:
        """Let the optimizer keep what these pieces have, and nothing else."""
        wholes: dict[str, dict[int, Array]] = {}
        for name, piece in found.items():
            whole, _, number = name.removeprefix(self._prefix).rpartition(":")
            wholes.setdefault(whole, {})[int(number)] = piece
        state: dict[int, dict[str, Any]] = {}
        for whole, pieces in wholes.items():
            place, dtype, dims = whole.split(":")
            parameter, _, key = place.partition(".")
            flat = np.concatenate([pieces[number] for number in sorted(pieces)])
            if dtype in _NUMBERS:
                value: Any = _NUMBERS[dtype](flat[0])
            else:
                kind = getattr(torch, dtype)
                shape = [int(length) for length in dims.split("x")] if dims else []
                value = tensor_of(flat, kind).to(kind).reshape(shape)
            state.setdefault(int(parameter), {})[key] = value
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})


class Source:
    """A model and its optimizer, as the server keeps them."""

    def __init__(self, model: Any, optimizer: Any, prefix: str, limit: int) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise mistaken("optimizer", f"is of type {type(optimizer).__name__}, but must be an optimizer of PyTorch")
        self._model, self._optimizer, self._prefix, self._limit = model, optimizer, prefix, limit

    @property
    def nbytes(self) -> int:
        """About how many bytes it has, also before the first step."""
        size: int = sum(one.numel() * one.element_size() for one in self._model.parameters())
        return (1 + MOMENTS) * size

    def _halves(self) -> tuple[State, OptimizerState]:
        optimizer = OptimizerState(self._optimizer, f"{self._prefix}optimizer.", self._limit)
        return State(self._model, f"{self._prefix}model.", self._limit), optimizer

    def content(self) -> tuple[dict[str, Part], dict[str, Gradient]]:
        """Return the buffers by their names, and their numbers."""
        model, optimizer = self._halves()
        pieces = optimizer.numbers()
        parts = {name: Part(piece.shape, piece.dtype.name, None) for name, piece in pieces.items()}
        return {**model.parts, **parts}, {**model.numbers(), **pieces}

    def restore(self, numbers: Mapping[str, Array]) -> None:
        """Set the model and the optimizer to these numbers."""
        model, optimizer = self._halves()
        model.set({name: numbers[name] for name in model.parts})
        optimizer.set({name: one for name, one in numbers.items() if name not in model.parts})
