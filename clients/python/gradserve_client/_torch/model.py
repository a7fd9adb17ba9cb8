"""A PyTorch model between its gradients and the buffers of their sums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradserve_client._runs.names import buffer_name
from gradserve_client._runs.parts import Layout, Part
from gradserve_client._runs.summed import Summed
from gradserve_client._torch import torch
from gradserve_client._torch.hashes import described, hashed, kept_buffers
from gradserve_client._torch.parameters import Trained, changed, gradient_of, named_parameters, set_gradients, trained
from gradserve_client.errors import InvalidInput, mistaken
from gradserve_client.rows import Gradient


class Model(Layout):
    """The trained parameters of a model, and their buffers, each of at most `limit` bytes.

    Raises `InvalidInput` for a model that cannot be accumulated.
    """

    def __init__(self, model: torch.nn.Module, prefix: str, wire: Any, pulled: Any, limit: int) -> None:
        self._model, self._wire = model, wire
        if not isinstance(model, torch.nn.Module):
            raise mistaken("model", f"is of type {type(model).__name__}, but must be a torch.nn.Module")
        by_name = sorted(trained(model), key=lambda one: one.name)  # layers may have another order in another worker
        self._trained = {buffer_name(prefix, one.name): one for one in by_name}
        if not self._trained:
            raise InvalidInput("The model has no parameter that requires a gradient")
        super().__init__(
            {name: Part(one.shape, one.sum_dtype, one.answered(pulled)) for name, one in self._trained.items()}, limit
        )

    def form(self) -> str:
        """Return what the models of all workers have alike."""
        own = [(one.name, one.shape, str(one.parameter.dtype)) for one in self._trained.values()]
        others = [described(some) for some in (self._frozen(), kept_buffers(self._model))]
        return repr((own, self.parts, others))

    def weights(self) -> str:
        """Return a hash of the trained parameters. All ranks of a DTensor call this, and the next two."""
        return hashed({one.name: one.parameter for one in self._trained.values()})

    def frozen(self) -> str:
        """Return a hash of the parameters that are not trained."""
        return hashed(self._frozen())

    def buffers(self) -> str:
        """Return a hash of the model's own buffers."""
        return hashed(kept_buffers(self._model))

    def _frozen(self) -> dict[str, Any]:
        """Return the parameters that were frozen when the accumulator was made."""
        trained = {one.name for one in self._trained.values()}
        return {name: one for name, one in named_parameters(self._model).items() if name not in trained}

    def gradients(self) -> dict[str, Any]:
        """Return the gradients that are not None."""
        return {name: one.parameter.grad for name, one in self._trained.items() if one.parameter.grad is not None}

    def elsewhere(self) -> str:
        """Return where the gradients are, as the end of a sentence, if Megatron keeps them apart."""
        if all(getattr(one.parameter, "main_grad", None) is None for one in self._trained.values()):
            return ""
        return ". Parameters have main_grad, as with Megatron: set p.grad = p.main_grad.to(p.dtype) before push"

    def numbers(self, gradients: Mapping[str, Any], weight: float) -> tuple[dict[str, Gradient], set[str]]:
        """Return the numbers of all buffers, and the buffers that have a gradient. Weight 0 has none."""
        wholes = {  # at weight 0 too: all ranks of a DTensor do this
            name: gradient_of(gradient, self._trained[name].name, self._wire) for name, gradient in gradients.items()
        }
        return self.spread(wholes if weight else {})

    def clear(self, sent: Mapping[str, Any]) -> None:
        """Set the gradients to None after these were sent."""
        for name, gradient in sent.items():
            self._trained[name].sent(gradient)
        for one in self._trained.values():
            one.parameter.grad = None

    def set(self, summed: Summed, *, zeros: bool) -> None:
        """Set the gradients, all or none. Those that nobody had become None, or `zeros`."""
        set_gradients(
            {
                name: (one, self._gradient(name, one, summed, zeros))
                for name, one in self._trained.items()
                if one.parameter.requires_grad
            }
        )

    def _gradient(self, name: str, one: Trained, summed: Summed, zeros: bool) -> Any:
        if not summed.has(self.names(name), zeros=zeros):
            return None
        return one.gradient(self.joined(name, summed.values).reshape(one.shape))

    def check(self) -> None:
        """Raise `InvalidInput` if the model trains other parameters than before, or the same as a wider dtype."""
        current = named_parameters(self._model)
        before = {one.name: one.parameter for one in self._trained.values()}
        for name, parameter in current.items():
            if parameter.requires_grad and name not in before:
                raise changed(f"{name!r} requires a gradient now, but did not")
            if parameter.requires_grad and parameter is not before[name]:
                raise changed(f"{name!r} is another parameter than")
        for name in before.keys() - current.keys():
            raise changed(f"{name!r} is not in the model any more, but was")
        for one in self._trained.values():
            one.check_dtype()
