"""The gradients of any graph: a rule for each operator says how the gradient of its outputs becomes that of its inputs.

A rule runs once, when the graph is planned. It adds steps to the tape, which later runs execute.
"""

import importlib
import pkgutil

from service.graphs.gradients.tape import RULES, Tape, differentiate

__all__ = ["RULES", "Tape", "differentiate"]

_families = [
    importlib.import_module(f"{__name__}.{module.name}")
    for module in pkgutil.iter_modules(__path__)
    if module.name != "tape"
]
