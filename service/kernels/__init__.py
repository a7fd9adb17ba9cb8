"""The operators' kernels: NumPy in, NumPy out, no knowledge of the web. Importing this package fills `OPERATORS`."""

import importlib
import pkgutil

from service.kernels._blocks import Workspace, claim, current_workspace, share_out, spare_memory, workspace
from service.kernels._op import MAX_MULTIPLY_ADDS, OPERATORS, Operator, check_work
from service.kernels._types import Attribute, Tensor, check_dtypes

__all__ = [
    "MAX_MULTIPLY_ADDS",
    "OPERATORS",
    "Attribute",
    "Operator",
    "Tensor",
    "Workspace",
    "check_dtypes",
    "check_work",
    "claim",
    "current_workspace",
    "share_out",
    "spare_memory",
    "workspace",
]

_families = [
    importlib.import_module(f"{__name__}.{module.name}")
    for module in pkgutil.iter_modules(__path__)
    if not module.name.startswith("_")
]
