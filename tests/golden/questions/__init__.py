"""The questions that other implementations are asked; `tests/golden/__init__.py` says what a module here has.

Names that begin with `peer` are the cases of ONNX Runtime's own tests. The numbers of a case depend on its name alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from service.errors import AxisOutOfRange, GradserveError
from service.kernels import Operator
from tests.golden.store import Case

REASONS: Mapping[str, type[GradserveError]] = {r"axis -?\d+ is not in valid range": AxisOutOfRange}
"""Refusals that several families have."""


def families() -> list[str]:
    """The names of the modules here. They are names of modules of kernels."""
    return sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py"))


def tolerance(operator: Operator, case: Case, output: str) -> Mapping[str, Any] | None:
    """How far the operator may be from the answer in this output; None: not by a bit."""
    allowed: Mapping[str, Any] | None = getattr(_family(operator), "tolerance", lambda *_: None)(case, output)
    return allowed


def reasons(operator: Operator) -> Mapping[str, type[GradserveError]]:
    """The texts of refusals, as patterns, and our errors in their place."""
    return {**REASONS, **getattr(_family(operator), "REASONS", {})}


def _family(operator: Operator) -> object:
    return import_module(f"{__name__}.{operator.kernel.__module__.rpartition('.')[2]}")
