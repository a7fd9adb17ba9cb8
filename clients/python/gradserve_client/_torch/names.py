"""The names of a model's parameters without those of wrappers."""

from __future__ import annotations

from collections.abc import Iterable

from gradserve_client.errors import InvalidInput

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""The names that torch.compile and activation checkpointing put into those of parameters, at any depth."""

_PARALLEL = "module."
"""The prefix that DistributedDataParallel, DataParallel and DeepSpeed put before the names of all parameters."""


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Return the names without wrappers, by the names in the model. A wrapped worker and a plain worker then meet."""
    plain = {name: ".".join(part for part in name.split(".") if part not in _WRAPPERS) for name in names}
    while plain and all(one.startswith(_PARALLEL) for one in plain.values()):
        plain = {name: one.removeprefix(_PARALLEL) for name, one in plain.items()}
    by_plain: dict[str, str] = {}
    for name, one in plain.items():
        if one in by_plain:
            raise InvalidInput(f"{by_plain[one]!r} and {name!r} are both {one!r} without wrappers: rename a module")
        by_plain[one] = name
    return plain
