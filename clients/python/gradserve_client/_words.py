"""Errors in the words of the front end that was used: the server's in Python's, and Python's in the command line's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_ARGUMENTS = {
    "Idempotency-Key": "idempotency_key",
    "If-Match": "if_match",
    "PUT /v1/buffers/{name} creates one": "its create() makes one",
}
"""What the server calls a thing, and what the arguments of Python are called."""

_OPTIONS = {
    "min_count": "--min-count",
    "quorum_weight": "--quorum-weight",
    "per_contributor": "--per-contributor",
    "max_norm": "--max-norm",
    "deadline_seconds": "--deadline",
    "ttl_seconds": "--ttl",
    "idempotency_key": "--key",
    "api_key": "--api-key or GRADSERVE_API_KEY",
    "into=": "--into",
    "outputs=": "--outputs",
    "its create() makes one": "gradserve-client buffers create makes one",
}
"""Arguments of Python whose names are no words of a sentence, and their options."""

_PLAIN = {
    **{name: f"--{name}" for name in ("dtype", "epoch", "from", "into", "keep", "nonfinite", "outputs", "prefix")},
    **{name: f"--{name}" for name in ("contributor", "quorum", "reduce", "timeout", "weight")},
    "contributors": "--contributor",
}
"""Arguments whose names are words, too. Only the first word of an error is sure to be the argument."""

_ADDING = frozenset({"encoding", "from", "into", "weight", "epoch", "contributor", "outputs"})
"""Parameters of a request to run an operator that are not its attributes."""

_UNKNOWN = re.compile(r"The query parameter '([^']*)' is unknown; it must be one of (.*)")

_SPEC = re.compile(r"buffers\.(.+)\.(\w+): ")


def in_python(detail: str, context: Mapping[str, Any]) -> str:
    """Return the detail of a server's error in the words of the Python client."""
    for name, argument in _ARGUMENTS.items():
        detail = detail.replace(name, argument)
    if (unknown := _UNKNOWN.fullmatch(detail)) is not None and "op" in context:
        return _unknown_attribute(context["op"], *unknown.groups())
    return _SPEC.sub(r"The specification of '\1': \2: ", detail, count=1)


def _unknown_attribute(op: str, name: str, known: str) -> str:
    if name == "outputs":
        return f"{op} has a single output, so outputs= chooses nothing"
    attributes = [one for one in known.split(", ") if one not in _ADDING]
    return f"{op} has no attribute {name!r}" + (f"; its attributes are {', '.join(attributes)}" if attributes else "")


def in_options(detail: str, context: Mapping[str, Any]) -> str:
    """Return the detail of an error of the Python client in the words of the command line."""
    for name, option in _OPTIONS.items():
        detail = re.sub(rf"(?<![\w-]){re.escape(name)}(?!\w)", option, detail)
    first, rest = re.match(r"(\w*)(.*)", detail, re.DOTALL).groups()  # type: ignore[union-attr]
    if first in _PLAIN and re.match(r":| is (?!not an attribute)| has | cannot ", rest):
        return _PLAIN[first] + rest
    if first and first == context.get("parameter") and "op" in context:
        return f"--set {detail}"
    return detail
