"""The output of the commands: tables and lines for people, JSON for programs."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from gradserve_client._http.words import named
from gradserve_client.models import BufferInfo, Receipt, StagedPush

if TYPE_CHECKING:
    from gradserve_client._wire.tensors import Array

_WIDE_COLUMNS = 10_000
"""Columns of an output that is not a terminal, so that its lines are never broken."""

_NO_LIMIT = 10**9
"""Gradients of each contributor, where a buffer takes any number: the largest number that the server allows."""

_PRINTED_ELEMENTS = 64
"""Elements of the largest tensor that is printed whole. Of a larger one, the corners are printed."""


LATE_COLUMNS = ["deadline", "missing"]
"""Columns of a table that have a value only for buffers with a deadline or with expected contributors."""


def console() -> Console:
    """Return a console that prints text as it is: a buffer's name may be ":+1:"."""
    width = None if sys.stdout.isatty() else _WIDE_COLUMNS
    return Console(width=width, markup=False, highlight=False, emoji=False)


def print_json(value: Any) -> None:
    """Print a line of JSON."""
    typer.echo(json.dumps(_plain(value), allow_nan=False))


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    wraps: str,
    numbers: Sequence[str] = (),
    optional: Sequence[str] = (),
    header: bool = True,
) -> Table:
    """Return a table. The column `wraps` breaks its lines if there is no room; `numbers` are aligned to the right.

    An `optional` column without any value is left out.
    """
    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_header=header)
    rows = [*rows]
    kept = [place for place, column in enumerate(columns) if column not in optional or any(row[place] for row in rows)]
    for column in (columns[place] for place in kept):
        justify: Literal["left", "right"] = "right" if column in numbers else "left"
        result.add_column(column, justify=justify, no_wrap=column != wraps, overflow="fold")
    for row in rows:
        result.add_row(*(row[place] for place in kept))
    return result


def shape(dims: Sequence[int]) -> str:
    """Return a shape as text: [30000, 256]."""
    return str(list(dims))


def count(info: BufferInfo) -> str:
    """Return the number of gradients as text, with the quorum: 3 of 8."""
    return str(info.count) if info.quorum is None else f"{info.count} of {info.quorum}"


def late(info: BufferInfo) -> list[str]:
    """Return when the deadline of the step ends, and who is missing, as text. In an empty step nobody is late yet."""
    missing = info.missing if info.count and info.missing else ()
    return ["" if info.deadline_at is None else time(info.deadline_at), named(missing)]


def contributors(counts: Mapping[str, int] | None) -> str:
    """Return the contributors as text, with the number of their gradients if that is not 1."""
    return ", ".join(name if count == 1 else f"{name} ({count})" for name, count in (counts or {}).items()) or "none"


def buffers_text(number: int) -> str:
    """Return a number of buffers as text: 1 buffer."""
    return f"{number} buffer{'' if number == 1 else 's'}"


def size(number: int) -> str:
    """Return a number of bytes as text: 30.7 MB."""
    amount = float(number)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 999.5:
            break
        amount, unit = amount / 1000, "TB"
    return f"{amount:.3g} {unit}"


def print_info(info: BufferInfo, pushes: Sequence[StagedPush] | None = None) -> None:
    """Print a buffer's metadata, a line for each field, and what is staged for it if that is known."""
    since = info.missing_since
    rows = {
        "name": info.name,
        "shape": shape(info.shape),
        "dtype": info.dtype,
        "size": size(info.bytes),
        "step": str(info.step),
        "count": count(info),
        "weight": f"{info.weight:g}" + ("" if info.quorum_weight is None else f" of {info.quorum_weight:g}"),
        "contributors": f"{contributors(info.contributors_in)}; {_most(info.per_contributor)} of each",
        "missing": "not known" if info.missing is None else ", ".join(info.missing) or "nobody",
        **({"missing since": ", ".join(f"{name} {time(at)}" for name, at in since.items())} if since else {}),
        "deadline": _deadline(info),
        "version": str(info.version),
        "nonfinite": info.nonfinite,
        "max norm": "none" if info.max_norm is None else f"{info.max_norm:g}",
        "keep": str(info.keep),
        "closed steps": ", ".join(map(str, info.closed_steps)) or "none",
        **({} if pushes is None else {"staged": _staged(pushes)}),
        "created": time(info.created_at),
        "updated": time(info.updated_at),
        "expires": "never" if info.expires_at is None else time(info.expires_at),
    }
    console().print(table(["", "value"], list(rows.items()), wraps="value", header=False))


def _most(count: int) -> str:
    return "any number" if count >= _NO_LIMIT else f"up to {count}"


def _deadline(info: BufferInfo) -> str:
    if info.deadline_seconds is None:
        return "none"
    rule = f"{info.deadline_seconds:g} s after the first gradient, if {info.min_count} are in"
    return rule if info.deadline_at is None else f"{time(info.deadline_at)}, {rule}"


def _staged(pushes: Sequence[StagedPush]) -> str:
    if not pushes:
        return "nothing"
    parts = sum(len(push.staged) for push in pushes)
    return f"{parts} part{'s' * (parts != 1)} of {len(pushes)} push{'es' * (len(pushes) != 1)}: see buffers pushes"


def time(seconds: float) -> str:
    """Return a time since 1970 as text."""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")


def receipt_line(receipt: Receipt) -> str:
    """Return a receipt for people, as a line."""
    line = f"{receipt.name}: step {receipt.step}, count {receipt.count}, weight {receipt.weight:g}"
    closed = f", closed by {receipt.closed_by}" if receipt.closed_by else ", closed" * receipt.closed
    return line + closed + ", done before" * receipt.replayed


def receipt_json(receipt: Receipt) -> dict[str, Any]:
    """Return a receipt for programs, without its value."""
    values = {field.name: getattr(receipt, field.name) for field in fields(receipt) if field.name != "value"}
    return {**values, "etag": receipt.etag}


def print_tensor(name: str, array: Array, output: Path | None) -> None:
    """Print a tensor, or only its dtype and shape if it was written to the file `output`."""
    import numpy as np

    if output is not None:
        typer.echo(f"{output}: {name} {array.dtype.name} {shape(array.shape)}")
        return
    values = np.array2string(array, threshold=_PRINTED_ELEMENTS, edgeitems=3, max_line_width=80)
    typer.echo(f"{name}: {array.dtype.name} {shape(array.shape)}\n{values}")


def tensor_json(array: Array, *, data: bool = True) -> dict[str, Any]:
    """Return a tensor for programs, or only its dtype and shape without `data`."""
    import numpy as np

    described = {"dtype": array.dtype.name, "shape": list(array.shape)}
    if not data:
        return described
    wide = array.astype(np.float64) if array.dtype.name == "bfloat16" else array
    return {**described, "data": wide.tolist()}


def _plain(value: Any) -> Any:
    """Replace numbers that JSON lacks by strings, as the server does: "NaN", "Infinity" and "-Infinity"."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
