"""Nests of arrays: of dicts, lists and tuples, and whatever else is a pytree for JAX if the program uses JAX."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from gradserve_client.errors import InvalidInput

ALONE = "array"
"""The name of an array that is in no nest."""


@dataclass(frozen=True)
class Node:
    """A nest without its arrays: what it has by its keys, and how a nest of the same kind is made."""

    children: Mapping[str, Tree]
    make: Callable[[list[Any]], Any]


Tree: TypeAlias = Node | str | None
"""A nest, the name of an array, or None where the nest has None."""


def flattened(nest: Any) -> tuple[Tree, dict[str, Any]]:
    """Return a nest without its arrays, and the arrays by their paths: keys with dots between.

    Raises `InvalidInput` for two arrays of one name.
    """
    leaves: dict[str, Any] = {}
    return _flattened(nest, "", leaves), leaves


def _flattened(nest: Any, path: str, leaves: dict[str, Any]) -> Tree:
    if nest is None:
        return None
    if (found := _opened(nest)) is not None:
        pairs, make = found
        children = {key: _flattened(child, _joined(path, key), leaves) for key, child in pairs}
        if len(children) < len(pairs):
            raise InvalidInput(f"{_place(path)} has two keys that are written alike: {[key for key, _ in pairs]}")
        return Node(children, make)
    name = path or ALONE
    if name in leaves:
        raise InvalidInput(f"Two arrays of the tree are named {name!r}: rename a key")
    leaves[name] = nest
    return name


def leaves_of(tree: Tree, nest: Any) -> dict[str, Any]:
    """Return by their names what a nest has in the places of the arrays of a tree, without None.

    Raises `InvalidInput` if it has not the same keys.
    """
    return dict(_leaves(tree, nest, ""))


def _leaves(tree: Tree, nest: Any, path: str) -> Iterator[tuple[str, Any]]:
    if nest is None:
        return
    if tree is None:
        raise InvalidInput(f"{_place(path)} is {_type(nest)}, but its parameter is None")
    if isinstance(tree, str):
        yield tree, nest
        return
    pairs, _ = _opened(nest) or ([], None)
    children = dict(pairs)
    if children.keys() != tree.children.keys():
        raise InvalidInput(
            f"{_place(path)} is {_type(nest)} with the keys {sorted(children)}, but must have"
            f" {sorted(tree.children)}: give None for a parameter without a gradient"
        )
    for key, child in tree.children.items():
        yield from _leaves(child, children[key], _joined(path, key))


def filled(tree: Tree, values: Mapping[str, Any]) -> Any:
    """Return a nest of the same kind with these values by their names, and None for the others."""
    if isinstance(tree, Node):
        return tree.make([filled(child, values) for child in tree.children.values()])
    return None if tree is None else values.get(tree)


def _opened(nest: Any) -> tuple[list[tuple[str, Any]], Callable[[list[Any]], Any]] | None:
    """Return what a nest has by its keys, and what makes another of its kind; None for an array."""
    kind = type(nest)
    if kind is dict:
        keys = tuple(nest)
        return [(_text(key), child) for key, child in nest.items()], lambda new: dict(zip(keys, new, strict=True))
    if kind in (list, tuple):
        return [(str(number), child) for number, child in enumerate(nest)], kind
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return list(zip(nest._fields, nest, strict=True)), kind._make
    if "jax" in sys.modules and (found := _opened_by_jax(nest)) is not None:
        return found
    if isinstance(nest, Mapping):
        return _opened(dict(nest))
    return None


def _opened_by_jax(nest: Any) -> tuple[list[tuple[str, Any]], Callable[[list[Any]], Any]] | None:
    from jax import tree_util  # already imported by the program

    found, kind = tree_util.tree_flatten_with_path(nest, is_leaf=lambda one: one is not nest)
    if kind == tree_util.tree_structure(0):
        return None
    return [(_key(path[0]), child) for path, child in found], lambda new: tree_util.tree_unflatten(kind, new)


def _key(entry: Any) -> str:
    """Return a key of a path of JAX: of a mapping, a sequence, an attribute, or of a kind that names none."""
    return _text(next((getattr(entry, of) for of in ("key", "idx", "name") if hasattr(entry, of)), entry))


def _text(key: Any) -> str:
    """Return a key as text. A tuple is a path, as in flax's flat dicts."""
    return ".".join(map(str, key)) if isinstance(key, tuple) else str(key)


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _place(path: str) -> str:
    return repr(path) if path else "The tree"


def _type(nest: Any) -> str:
    return f"of type {type(nest).__name__}"
