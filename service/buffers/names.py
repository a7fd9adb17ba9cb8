"""Names of buffers: as clients know them, and as a store does, where namespaces keep them apart."""

from __future__ import annotations

import re

from service.errors import InvalidParameter, shown

LONGEST_NAME = 200
NAME = re.compile(rf"[A-Za-z0-9._:-]{{1,{LONGEST_NAME}}}")
"""Names of buffers: PyTorch's parameter names are, as they stand."""

_RESERVED = (".", "..", "__metadata__")
"""What a path or a safetensors file means something else by."""


def check_name(name: str) -> str:
    """`name`, which must be one that a buffer can have. Raises `InvalidParameter`."""
    if not NAME.fullmatch(name) or name in _RESERVED:
        raise InvalidParameter(
            f"{shown(name)} is not a buffer name: 1 to 200 characters of A-Z a-z 0-9 . _ : -, but not"
            f" {', '.join(_RESERVED)}",
            parameter="name",
        )
    return name


def check_length(name: str, longest: int) -> None:
    """Raise `InvalidParameter` for a name that is too long for a new buffer."""
    if len(name) > longest:
        raise InvalidParameter(
            f"{shown(name)} has {len(name)} characters; the longest buffer name has {longest}"
            " (GRADSERVE_MAX_NAME_LENGTH)",
            parameter="name",
            limit=longest,
        )


def namespace_of(name: str) -> str:
    """The namespace of a buffer by its name inside the store, as `namespaced.py` makes it.

    >>> namespace_of("layer.weight"), namespace_of("~ann/layer.weight")
    ('', 'ann')
    """
    return name[1:].partition("/")[0] if name.startswith("~") else ""


def bare_name(name: str) -> str:
    """The name that its namespace knows of a buffer by its name inside the store.

    >>> bare_name("~ann/layer.weight")
    'layer.weight'
    """
    return name.partition("/")[2] if name.startswith("~") else name
