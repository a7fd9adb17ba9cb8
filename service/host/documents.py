"""JSON documents in files that somebody may have edited: each member is checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Set
from typing import Any, TypeAlias

from service.errors import shown

Members: TypeAlias = dict[str, tuple[str, Callable[[Any], bool]]]
"""The rule of each member of an object, in words and as a check."""


class DocumentInvalid(ValueError):
    """A document is not JSON, or breaks a rule."""


def parse(subject: str, text: str) -> Any:
    """Return the value of a JSON text. Raises `DocumentInvalid`, also for two members of one name in an object."""
    try:
        return json.loads(text, object_pairs_hook=lambda pairs: _unique(subject, pairs))
    except DocumentInvalid:
        raise
    except RecursionError:
        raise DocumentInvalid(f"{subject} is nested too deeply") from None
    except ValueError as error:
        raise DocumentInvalid(f"{subject} is not JSON: {error}") from None


def _unique(subject: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise DocumentInvalid(f"{subject} has two members named {shown(name)} in one object")
        members[name] = value
    return members


def check(subject: str, value: Any, rules: Members, required: Set[str], prefix: str = "") -> None:
    """Raise `DocumentInvalid` unless the value is an object whose members are known, required and valid.

    `prefix` leads from the subject to this object, as in "spec.".
    """
    if not isinstance(value, dict):
        raise DocumentInvalid(f"{subject} is {shown(value)}, but must be an object")
    for name in sorted(required - value.keys()):
        raise DocumentInvalid(f"{subject} lacks {prefix}{name}")
    for name, member in value.items():
        if name not in rules:
            raise DocumentInvalid(f"{subject} has {shown(prefix + name)}, which this version does not know")
        rule, is_valid = rules[name]
        if not is_valid(member):
            raise DocumentInvalid(f"{subject} has {prefix}{name} {shown(member)}, but it must be {rule}")


def is_number(value: Any, least: float, most: float) -> bool:
    """Return whether a value is a number from `least` to `most`: no boolean, no NaN."""
    return type(value) in (int, float) and least <= value <= most
