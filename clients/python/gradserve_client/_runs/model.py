"""What a run asks of a framework: the arrays of a model by the names of their buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from gradserve_client._runs.parts import Part
from gradserve_client._wire.tensors import Array
from gradserve_client.rows import Gradient


class Model(Protocol):
    """The trained parameters of a model, in buffers."""

    @property
    def parts(self) -> dict[str, Part]:
        """The buffers by their names."""

    def form(self) -> str:
        """Return what the models of all workers have alike."""

    def weights(self) -> str:
        """Return a hash of the trained parameters."""

    def frozen(self) -> str:
        """Return a hash of the parameters that are not trained."""

    def buffers(self) -> str:
        """Return a hash of what else the model has at the start, such as running statistics."""

    def numbers(self, gradients: Mapping[str, Any], weight: float) -> tuple[dict[str, Gradient], set[str]]:
        """Return the numbers of all buffers, and the buffers that have a gradient. Weight 0 has none."""


class State(Protocol):
    """All that a model has, also what is not trained, in buffers."""

    @property
    def parts(self) -> dict[str, Part]:
        """The buffers by their names."""

    def numbers(self) -> dict[str, Gradient]:
        """Return the numbers of all buffers."""

    def set(self, numbers: Mapping[str, Array]) -> None:
        """Set the model to these numbers, all or none."""
