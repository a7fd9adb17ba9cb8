"""Import circles among source files, read from their syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path


def circles(files: Iterable[Path]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or through others, each group once.

    Every import counts: of a module, of a function, and for type checkers only.
    """
    modules = {module_name(path): path for path in files}
    return knots({name: set(_imported(path, modules.keys())) for name, path in modules.items()})


def knots(imports: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, from what each imports."""
    reached = {name: _reachable(name, imports) for name in imports}
    groups = {frozenset(other for other in reached[name] if name in reached[other]) for name in imports}
    return sorted(sorted(group) for group in groups if group)


def module_name(path: Path) -> str:
    """Return the dotted name of a module, from the outermost package on."""
    parts = [] if path.stem == "__init__" else [path.stem]
    folder = path.parent
    while (folder / "__init__.py").exists():
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts)


def _imported(path: Path, modules: Iterable[str]) -> Iterator[str]:
    """Yield the modules that a file imports. `from package import name` imports the module `name` if there is one."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                yield from [name for name in (f"{node.module}.{alias.name}", node.module) if name in modules][:1]


def _reachable(start: str, imports: dict[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = [*imports[start]]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += imports[name]
    return reached
