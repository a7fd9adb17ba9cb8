"""Names of buffers: as clients know them, and inside a store, where namespaces keep them apart."""

from __future__ import annotations

import re
from typing import NamedTuple

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


class BufferName(NamedTuple):
    """A buffer inside a store: its namespace, "" for the one without a name, and the name that its clients know.

    >>> str(BufferName("ann", "layer.weight"))
    'layer.weight'
    """

    namespace: str
    name: str

    def __str__(self) -> str:
        return self.name

    @property
    def joined(self) -> str:
        """Both as one text, as it stands in LMDB and in files. Names without a namespace come first: none has a `~`.

        >>> BufferName("", "layer.weight").joined, BufferName("ann", "layer.weight").joined
        ('layer.weight', '~ann/layer.weight')
        """
        return f"~{self.namespace}/{self.name}" if self.namespace else self.name

    @classmethod
    def split(cls, joined: str) -> BufferName:
        """Return the name whose `joined` is this text.

        >>> BufferName.split("~ann/layer.weight")
        BufferName(namespace='ann', name='layer.weight')
        """
        if not joined.startswith("~"):
            return cls("", joined)
        namespace, _, name = joined[1:].partition("/")
        return cls(namespace, name)
