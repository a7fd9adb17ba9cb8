"""The rules of a run's buffers, in a form that can be compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradserve_client._wire.specs import rules_json
from gradserve_client.models import BufferRules

_DEFAULTS = {"min_count": 1, "per_contributor": 1}
"""The rules of a buffer that is created without any: the others are None."""

FOLLOWS = "The rules of %r have changed since its first worker gave them, and this worker follows: %s"
"""What the log says of a worker that gives other rules."""


def canonical(rules: Mapping[str, Any]) -> dict[str, Any]:
    """Return all rules that `set_rules` can change, of these or by default."""
    given = {name: rules.get(name) for name in sorted(BufferRules.__annotations__)}
    return rules_json({name: _DEFAULTS.get(name) if rule is None else rule for name, rule in given.items()})
