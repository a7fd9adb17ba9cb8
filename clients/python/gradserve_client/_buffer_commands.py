"""The commands about buffers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from gradserve_client import _files
from gradserve_client._buffer_calls import Reduce
from gradserve_client._session import (
    Session,
    console,
    count,
    document,
    receipt_fields,
    receipt_line,
    shape,
    size,
    table,
    tensor_fields,
    tensor_lines,
)
from gradserve_client._tensors import Array
from gradserve_client.buffers import Buffer
from gradserve_client.errors import NotFound
from gradserve_client.models import BufferInfo, Receipt

app = typer.Typer(no_args_is_help=True, help="List, create, read, change and remove buffers.")


class Reduction(Enum):
    """What to give of the gradients."""

    sum = "sum"
    mean = "mean"


class Nonfinite(Enum):
    """What to do with gradients that are infinite or NaN."""

    allow = "allow"
    reject = "reject"


Name = Annotated[str, typer.Argument(metavar="NAME", help="The buffer.")]
File = Annotated[Path, typer.Argument(metavar="FILE", help="A safetensors or .npy file.")]
Tensor = Annotated[str | None, typer.Option(metavar="NAME", help="Which tensor of the file, if it has several.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write it to this safetensors or .npy file.")
]
Epoch = Annotated[int | None, typer.Option(help="Only while the buffer is in this one.")]
Weight = Annotated[float, typer.Option(help="What the gradient is multiplied by.")]
Reducing = Annotated[Reduction, typer.Option(help="mean: divide by the sum of the weights.")]
Key = Annotated[
    str | None, typer.Option(metavar="KEY", help="Repeated with the same key, this counts once. By default a new one.")
]


@app.command("ls")
def list_(
    ctx: typer.Context,
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="Only those whose names begin so.")] = "",
) -> None:
    """List buffers."""
    session: Session = ctx.obj
    with session.server() as server:
        found = server.buffers.list(prefix)
    if session.as_json:
        document([asdict(one) for one in found])
        return
    columns = ["name", "shape", "dtype", "epoch", "count", "weight", "size"]
    rows = (
        [one.name, shape(one.shape), one.dtype, str(one.epoch), count(one), f"{one.weight:g}", size(one.bytes)]
        for one in found
    )
    console().print(table(columns, rows, wraps="name", numbers=columns[3:]))


@app.command()
def show(ctx: typer.Context, name: Name) -> None:
    """Show all about a buffer but its value."""
    session: Session = ctx.obj
    with session.server() as server:
        info = server.buffers[name].info()
    if session.as_json:
        document(asdict(info))
    else:
        _show(info)


@app.command()
def create(
    ctx: typer.Context,
    name: Name,
    dims: Annotated[str, typer.Argument(metavar="SHAPE", help="30000,256 or 30000x256; of a scalar: []")],
    dtype: Annotated[str, typer.Option(help="float16, bfloat16, float32 or float64.")] = "float32",
    quorum: Annotated[int | None, typer.Option(help="So many gradients close an epoch.")] = None,
    keep: Annotated[int, typer.Option(help="How many closed epochs can be read.")] = 1,
    ttl: Annotated[float | None, typer.Option(metavar="SECONDS", help="Gone so long after its last change.")] = None,
    nonfinite: Annotated[
        Nonfinite, typer.Option(help="Take gradients that are infinite or NaN, or not.")
    ] = Nonfinite.allow,
    key: Key = None,
) -> None:
    """Create a buffer, with zeros. If it is there already and like this, nothing happens."""
    session: Session = ctx.obj
    with session.server() as server:
        info = server.buffers[name].create(
            _dims(dims),
            dtype=dtype,
            quorum=quorum,
            keep=keep,
            ttl_seconds=ttl,
            nonfinite=nonfinite.value,
            idempotency_key=key,
        )
    if session.as_json:
        document(asdict(info))
    else:
        typer.echo(f"{name}: {info.dtype} {shape(info.shape)}, epoch {info.epoch}, count {count(info)}")


@app.command()
def get(
    ctx: typer.Context,
    name: Name,
    output: Output = None,
    epoch: Annotated[int | None, typer.Option(help="A closed one, rather than the running one.")] = None,
    reduce: Reducing = Reduction.sum,
    dtype: Annotated[str | None, typer.Option(help="By default the buffer's.")] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Wait so long for the epoch to close.")] = 0.0,
) -> None:
    """Fetch the value. Without -o it is printed, a large one in part."""
    session: Session = ctx.obj
    with session.server() as server, _files.writing(output) as write:
        value = server.buffers[name].value(epoch=epoch, reduce=_reduce(reduce), dtype=dtype, timeout=timeout)
        write({name: value})
    if session.as_json:
        document({"name": name, **tensor_fields(value, data=output is None)})
    else:
        _show_value(name, value, output)


@app.command()
def put(
    ctx: typer.Context,
    name: Name,
    file: File,
    tensor: Tensor = None,
    make: Annotated[
        bool, typer.Option("--create", help="Create the buffer, like the tensor, if it is not there.")
    ] = False,
    epoch: Epoch = None,
    key: Key = None,
) -> None:
    """Replace the sum by a tensor of a file, as if it were the only gradient."""

    def change(buffer: Buffer) -> Receipt:
        gradient = _files.read_one(file, tensor)
        try:
            return buffer.accumulate(gradient, overwrite=True, epoch=epoch, idempotency_key=key)
        except NotFound:
            if not make:
                raise
        buffer.create(gradient.shape, dtype=gradient.dtype)
        return buffer.accumulate(gradient, overwrite=True, epoch=epoch, idempotency_key=key)

    _change(ctx, name, change)


@app.command()
def add(
    ctx: typer.Context,
    name: Name,
    file: File,
    tensor: Tensor = None,
    weight: Weight = 1.0,
    epoch: Epoch = None,
    key: Key = None,
) -> None:
    """Add a tensor of a file to the sum."""

    def change(buffer: Buffer) -> Receipt:
        gradient = _files.read_one(file, tensor)
        return buffer.accumulate(gradient, weight=weight, epoch=epoch, idempotency_key=key)

    _change(ctx, name, change)


@app.command()
def zero(ctx: typer.Context, name: Name, key: Key = None) -> None:
    """Discard the sum, and begin the next epoch."""
    _change(ctx, name, lambda buffer: buffer.zero(idempotency_key=key))


@app.command()
def take(
    ctx: typer.Context,
    name: Name,
    output: Output = None,
    min_count: Annotated[int, typer.Option(help="Only once so many gradients are in.")] = 0,
    epoch: Annotated[int | None, typer.Option(help="Only if the buffer is in this one.")] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Wait so long for them.")] = 0.0,
    reduce: Reducing = Reduction.sum,
    key: Key = None,
) -> None:
    """Close the epoch, and fetch its value. Without -o it is printed, a large one in part."""
    session: Session = ctx.obj
    with session.server() as server, _files.writing(output) as write:
        taken = server.buffers[name].take(
            min_count=min_count, epoch=epoch, timeout=timeout, reduce=_reduce(reduce), idempotency_key=key
        )
        try:
            write({name: taken.value})
        except OSError as error:
            again = f"the server still has the value: gradserve-client buffers get {name} --epoch {taken.epoch}"
            raise OSError(error.errno, f"{error.strerror}; {again}", error.filename) from error
    if session.as_json:
        document({**receipt_fields(taken), "value": tensor_fields(taken.value, data=output is None)})
    else:
        typer.echo(receipt_line(taken))
        _show_value(name, taken.value, output)


@app.command()
def rm(
    ctx: typer.Context,
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    key: Key = None,
) -> None:
    """Remove a buffer, its value and its closed epochs. On a terminal it asks first."""
    session: Session = ctx.obj
    with session.server() as server:
        buffer = server.buffers[name]
        if not yes and sys.stdin.isatty():
            info = buffer.info()
            question = f"Remove {name}, {info.dtype} {shape(info.shape)}, epoch {info.epoch}, count {info.count}?"
            typer.confirm(question, abort=True, err=True)
        buffer.delete(idempotency_key=key)
    if session.as_json:
        document({"name": name, "removed": True})


def _change(ctx: typer.Context, name: str, change: Callable[[Buffer], Receipt]) -> None:
    session: Session = ctx.obj
    with session.server() as server:
        receipt = change(server.buffers[name])
    if session.as_json:
        document(receipt_fields(receipt))
    else:
        typer.echo(receipt_line(receipt))


def _reduce(wanted: Reduction) -> Reduce:
    return "mean" if wanted is Reduction.mean else "sum"


def _dims(text: str) -> list[int]:
    bare = text.strip(" []()")
    try:
        if not text.strip():  # an unset variable, rather than a scalar
            raise ValueError
        return [int(dim) for dim in bare.replace("x", ",").removesuffix(",").split(",")] if bare else []
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is no shape: write it as 30000,256 or 30000x256, or [] for a scalar"
        ) from None


def _show(info: BufferInfo) -> None:
    shown = {
        "name": info.name,
        "shape": shape(info.shape),
        "dtype": info.dtype,
        "size": size(info.bytes),
        "epoch": str(info.epoch),
        "count": count(info),
        "weight": f"{info.weight:g}",
        "version": str(info.version),
        "nonfinite": info.nonfinite,
        "keep": str(info.keep),
        "closed epochs": ", ".join(map(str, info.closed_epochs)) or "none",
        "created": _time(info.created_at),
        "updated": _time(info.updated_at),
        "expires": "never" if info.expires_at is None else _time(info.expires_at),
    }
    console().print(table(["", "value"], list(shown.items()), wraps="value", header=False))


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")


def _show_value(name: str, value: Array, output: Path | None) -> None:
    if output is None:
        typer.echo(tensor_lines(name, value))
    else:
        typer.echo(f"{output}: {name} {value.dtype.name} {shape(value.shape)}")
