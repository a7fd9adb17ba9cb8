"""Names of buffers: as clients know them, and with their namespace inside a store."""

from __future__ import annotations

import re
from typing import NamedTuple

from service.errors import InvalidParameter, shown

MAX_NAME_CHARACTERS = 200
"""Characters of a name: with its namespace it must fit into a key of LMDB, which has at most 511 bytes."""

NAME = re.compile(rf"[A-Za-z0-9._:-]{{1,{MAX_NAME_CHARACTERS}}}")
"""The names of buffers. PyTorch's names of parameters are among them."""

LIFE = re.compile(rf"{NAME.pattern}@[0-9a-f]{{16}}")
"""The lives of runs, each with the name of its run: none has been before, in no store."""

_RESERVED = (".", "..", "__metadata__")
"""Names that have another meaning in a path or in a safetensors file."""


def check_name(name: str, what: str = "buffer") -> str:
    """Return `name` if a buffer, or `what` else has names, can have it. Raises `InvalidParameter`."""
    if not NAME.fullmatch(name) or name in _RESERVED:
        raise InvalidParameter(
            f"{shown(name)} is not a {what} name: 1 to 200 characters of A-Z a-z 0-9 . _ : -, but not"
            f" {', '.join(_RESERVED)}",
            parameter="name",
        )
    return name


def check_length(name: str, longest: int, what: str = "buffer") -> None:
    """Raise `InvalidParameter` if the name is too long for a new buffer, or for what else has names."""
    if len(name) > longest:
        raise InvalidParameter(
            f"{shown(name)} has {len(name)} characters; the longest {what} name has {longest}"
            " (GRADSERVE_MAX_NAME_LENGTH)",
            parameter="name",
            limit=longest,
        )


HIDDEN = "+"
"""The first character of the namespaces of buffers that no client names. No namespace of a client has it."""

_GRAPHS, _PUSHES, _RUNS = (f"{HIDDEN}{what}{HIDDEN}" for what in ("graphs", "pushes", "runs"))


def graphs_of(namespace: str) -> str:
    """Return the namespace that has the graphs of a namespace, as buffers.

    >>> graphs_of("ann")
    '+graphs+ann'
    """
    return _GRAPHS + namespace


def pushes_of(namespace: str) -> str:
    """Return the namespace that has the incomplete pushes of a namespace, as buffers.

    >>> pushes_of("ann")
    '+pushes+ann'
    """
    return _PUSHES + namespace


def runs_of(namespace: str) -> str:
    """Return the namespace that has the runs of a namespace, as buffers.

    >>> runs_of("ann")
    '+runs+ann'
    """
    return _RUNS + namespace


class BufferName(NamedTuple):
    """The full name of a buffer: its namespace, "" by default, and the name that its clients know.

    >>> str(BufferName("ann", "layer.weight"))
    'layer.weight'
    """

    namespace: str
    name: str

    def __str__(self) -> str:
        return self.name

    @property
    def is_push(self) -> bool:
        """Whether the buffer is an incomplete push."""
        return self.namespace.startswith(_PUSHES)

    @property
    def kind(self) -> tuple[str, BufferName]:
        """What the buffer is for clients, and the name that they know, with the namespace of its clients.

        >>> BufferName("+graphs+ann", "mlp").kind
        ('graph', BufferName(namespace='ann', name='mlp'))
        """
        for what, hidden in (("push", _PUSHES), ("graph", _GRAPHS), ("run", _RUNS)):
            if self.namespace.startswith(hidden):
                return what, BufferName(self.namespace.removeprefix(hidden), self.name)
        return "buffer", self

    @property
    def shown(self) -> str:
        """The buffer in words, for an operator.

        >>> BufferName("+graphs+ann", "mlp").shown
        "the graph 'mlp' of the namespace 'ann'"
        """
        what, name = self.kind
        return f"the {what} {name.name!r}" + (f" of the namespace {name.namespace!r}" if name.namespace else "")

    @property
    def joined(self) -> str:
        """The full name as one text, as LMDB and files have it. The default namespace sorts first: no name has a `~`.

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
