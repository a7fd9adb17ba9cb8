"""The results of an operator's method: a tensor, a named tuple of tensors, or a dict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradserve_client._http.outcomes import Answer
from gradserve_client._http.policy import Call
from gradserve_client._wire.calls import Input, Inputs, Into, T, flat, outputs_in, running
from gradserve_client._wire.defaults import DEFAULTS, GROUPS


def of(
    op: str,
    tensors: Mapping[str, Input | Inputs | None],
    attributes: Mapping[str, Any],
    kind: Any,
    groups: Mapping[str, Inputs | None] | None = None,
    *,
    outputs: Sequence[str] | None = None,
    into: Any = None,
    **add: Any,
) -> Call[T]:
    """Run an operator, and return its only output, named `kind`, or its outputs as a named tuple, the class `kind`.

    With `outputs` or `into`, several are a dict. An output in `groups` is a dict if its input is one, else a list.
    """
    is_single, groups = isinstance(kind, str), groups or {}
    fields: Sequence[str] = (kind,) if is_single else kind._fields
    buffers: Mapping[str, Into] | None = {kind: into} if is_single and into is not None else into

    def read(answer: Answer) -> Any:
        results = _grouped(outputs_in(answer), groups)
        if outputs is None and results.keys() != {*fields}:
            raise LookupError(f"the outputs are {', '.join(results) or 'none'}, but must be {', '.join(fields)}")
        if is_single:
            return results[kind]
        return results if outputs is not None or into is not None else kind(**results)

    inputs = flat(tensors, GROUPS.get(op, ()))
    path, dtypes = f"/v1/ops/{op}", DEFAULTS.get(op, {})
    return running(path, inputs, dtypes, read, attributes, outputs=outputs, into=buffers, **add)


def _grouped(results: Mapping[str, Any], groups: Mapping[str, Inputs | None]) -> dict[str, Any]:
    """Return the outputs with the members of each group together."""
    found: dict[str, Any] = {}
    for name, result in results.items():
        group, _, member = name.partition(".")
        if group in groups:
            found.setdefault(group, {})[member] = result
        else:
            found[name] = result
    for name in groups.keys() & found.keys():
        if not isinstance(groups[name], Mapping):
            found[name] = [found[name][number] for number in sorted(found[name], key=int)]
    return found
