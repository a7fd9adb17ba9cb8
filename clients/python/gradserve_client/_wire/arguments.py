"""Checks of the arguments that calls share. Each raises `InvalidInput` before anything is sent."""

from __future__ import annotations

import math
import operator
import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from gradserve_client.errors import InvalidInput, mistaken
from gradserve_client.models import BufferName

MAX_CONTRIBUTOR_CHARACTERS = 100
"""Characters of a contributor's name: the most that the server allows."""


def as_key(key: str | None) -> str:
    """Return the idempotency key of a change: a new one for None."""
    if key is None:
        return uuid.uuid4().hex
    if not isinstance(key, str) or not re.fullmatch(r"[!-~]([ -~]{0,253}[!-~])?", key):
        raise mistaken(
            "idempotency_key",
            f"is {key!r}, but must be 1 to 255 printable ASCII characters, without a space at either end",
        )
    return key


def as_name(buffer: str | BufferName) -> str:
    """Return the name of a buffer."""
    name = buffer.name if isinstance(buffer, BufferName) else buffer
    fits = isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9._:-]{1,200}", name)
    if not fits or name in (".", ".."):  # a URL resolves these two to other paths
        raise InvalidInput(
            f"{name!r} is not a buffer name: use 1 to 200 of the characters A-Z a-z 0-9 . _ : -, but not . or .. alone",
            code="invalid_parameter",
        )
    return name


def as_target(buffer: str | BufferName) -> str:
    """Return the name of a buffer for an output, or a prefix and `*` for those of a group."""
    name = buffer.name if isinstance(buffer, BufferName) else buffer
    if isinstance(name, str) and name.endswith("*"):
        return as_name(f"{name[:-1]}x")[:-1] + "*"
    return as_name(name)


def as_query(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that are not None, in the form of a URL's query."""
    query = {name: value for name, value in parameters.items() if value is not None}
    for name, value in query.items():
        if isinstance(value, list | tuple) and not value:  # in a URL, an empty list looks like an omitted one
            raise mistaken(name, "is empty: omit it, or give it a value")
    return {name: str(value).lower() if isinstance(value, bool | np.bool_) else value for name, value in query.items()}


def as_float(name: str, number: float) -> float:
    """Return an argument that is a number."""
    try:
        return float(number)
    except (OverflowError, TypeError, ValueError) as error:
        raise mistaken(name, f"cannot be a float: {error}") from None


def as_finite(name: str, number: float) -> float:
    """Return an argument that is a finite number: JSON has no others."""
    if not math.isfinite(value := as_float(name, number)):
        raise mistaken(name, f"is {number!r}, but must be a finite number")
    return value


def check_some(name: str, items: Collection[object]) -> None:
    """Raise if an argument is empty."""
    if not items:
        raise mistaken(name, "is empty, but must have at least one")


def check_mapping(name: str, items: object, of: str) -> None:
    """Raise if an argument is no dict, or is empty: `of` says what its names are of."""
    if not isinstance(items, Mapping):
        raise mistaken(name, f"is of type {type(items).__name__}, but must be a dict: {of} by the names of the buffers")
    check_some(name, items)


def as_whole(name: str, number: SupportsIndex) -> int:
    """Return an argument that is an integer."""
    try:
        return operator.index(number)
    except TypeError:
        raise mistaken(name, f"is {number!r}, but must be an integer") from None


def check_choice(name: str, value: object, known: Sequence[object]) -> None:
    """Raise unless an argument is one of the known values."""
    if value not in known:
        raise mistaken(name, f"is {value!r}, but must be one of {', '.join(map(repr, known))}")


def as_contributor(name: str, argument: str = "contributor") -> str:
    """Return the name of a contributor."""
    if not (isinstance(name, str) and 0 < len(name) <= MAX_CONTRIBUTOR_CHARACTERS and name.isprintable()):
        raise mistaken(argument, f"is {name!r}, but must be 1 to {MAX_CONTRIBUTOR_CHARACTERS} printable characters")
    return name


def as_contributors(argument: str, names: Sequence[str]) -> list[str]:
    """Return the names of contributors."""
    if isinstance(names, str):
        raise mistaken(argument, f"is {names!r}, but must be a list of names")
    return [as_contributor(name, argument) for name in names]


def answered(dtype: npt.DTypeLike | None, wire_dtype: str | None = None) -> dict[str, str | None]:
    """Return the parameters of values that are answered in this dtype, or that travel in 8 bits."""
    check_choice("wire_dtype", wire_dtype, (None, "int8"))
    if wire_dtype is not None and dtype is not None:
        raise mistaken("dtype", f"is {dtype!r}, but values that travel in 8 bits are float32")
    return {"dtype": as_dtype(dtype)} if wire_dtype is None else {"encoding": wire_dtype}


def as_dtype(dtype: npt.DTypeLike | None) -> str | None:
    """Return the name of a dtype, None for None."""
    if dtype is None or dtype == "bfloat16":  # NumPy has no such name, only the class of ml_dtypes
        return None if dtype is None else "bfloat16"
    try:
        return np.dtype(dtype).name
    except TypeError as error:
        raise mistaken("dtype", f"is {dtype!r}: {error}") from error
