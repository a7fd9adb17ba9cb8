"""What the commands share: the server to ask, and how to say what came of it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

import httpx
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from gradserve_client._policy import Answer, Call, Patience
from gradserve_client._progress import ShowsProgress
from gradserve_client._tensors import Array
from gradserve_client.cli import INTERRUPTED
from gradserve_client.client import Client
from gradserve_client.errors import GradserveError
from gradserve_client.models import BufferInfo, Receipt

T = TypeVar("T")

_UNBOUNDED = 10_000
"""Columns of what is not a terminal: a line is never broken there."""


@dataclass(frozen=True)
class Session:
    """The options that every command has."""

    url: str | None
    api_key: str | None
    timeout: float
    as_json: bool

    def server(self, *, progress: bool = True) -> Client:
        """A client, which on a terminal shows how far large bodies are."""
        client = _Patient(self.url, api_key=self.api_key, timeout=self.timeout)
        if progress and sys.stderr.isatty():
            client._transport = ShowsProgress(client._transport)
        return client


class _Patient(Client):
    """A client that gives up what does not move for `timeout` seconds, not what is large and comes slowly."""

    def _run(self, call: Call[T], patience: Patience | None = None) -> T:
        try:
            return super()._run(call, patience)
        except KeyboardInterrupt:
            if call.key is None:
                raise
            raise GradserveError("Interrupted", code=INTERRUPTED, idempotency_key=call.key, maybe_done=True) from None

    def _send(self, request: httpx.Request, until: float) -> Answer | httpx.TransportError:
        request.extensions.pop("until", None)
        return super()._send(request, math.inf)


def console() -> Console:
    """Where to print, word for word: a buffer may be called ":+1:"."""
    width = None if sys.stdout.isatty() else _UNBOUNDED
    return Console(width=width, markup=False, highlight=False, emoji=False)


def document(value: Any) -> None:
    """Print a line of JSON."""
    typer.echo(json.dumps(_plain(value), allow_nan=False))


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    wraps: str,
    numbers: Sequence[str] = (),
    header: bool = True,
) -> Table:
    """A table. Where there is no room, the cells of `wraps` take several lines; `numbers` are set to the right."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_header=header)
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in numbers else "left"
        made.add_column(column, justify=justify, no_wrap=column != wraps, overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def shape(dims: Sequence[int]) -> str:
    """A shape as it is read: [30000, 256]."""
    return str(list(dims))


def count(info: BufferInfo) -> str:
    """How many gradients are in, of how many."""
    return str(info.count) if info.quorum is None else f"{info.count} of {info.quorum}"


def size(number: int) -> str:
    """A number of bytes: 30.7 MB."""
    amount = float(number)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 999.5:
            break
        amount, unit = amount / 1000, "TB"
    return f"{amount:.3g} {unit}"


def receipt_line(receipt: Receipt) -> str:
    """What a change left of a buffer, in a line."""
    said = f"{receipt.name}: epoch {receipt.epoch}, count {receipt.count}, weight {receipt.weight:g}"
    return said + ", closed" * receipt.closed + ", done before" * receipt.replayed


def receipt_fields(receipt: Receipt) -> dict[str, Any]:
    """The same for machines."""
    known = {field.name: getattr(receipt, field.name) for field in fields(receipt) if field.name != "value"}
    return {**known, "etag": receipt.etag}


def tensor_lines(name: str, array: Array) -> str:
    """A tensor for people: the corners of a large one."""
    values = np.array2string(array, threshold=64, edgeitems=3, max_line_width=80)
    return f"{name}: {array.dtype.name} {shape(array.shape)}\n{values}"


def tensor_fields(array: Array, *, data: bool = True) -> dict[str, Any]:
    """A tensor for machines."""
    said = {"dtype": array.dtype.name, "shape": list(array.shape)}
    if not data:
        return said
    wide = array.astype(np.float64) if array.dtype.name == "bfloat16" else array
    return {**said, "data": wide.tolist()}


def _plain(value: Any) -> Any:
    """The value as JSON knows it: what is not finite is a string, as the server has it."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value
