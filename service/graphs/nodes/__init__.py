"""The operators of a graph: for each, a function that makes the function of a node."""

import importlib
import pkgutil

from service.graphs.nodes.table import NODES, SEED, maker, step_of

__all__ = ["NODES", "SEED", "maker", "step_of"]

_families = [
    importlib.import_module(f"{__name__}.{module.name}")
    for module in pkgutil.iter_modules(__path__)
    if module.name != "table"
]
