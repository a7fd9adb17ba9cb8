"""The commands about buffers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from gradserve_client import _files
from gradserve_client._buffer_calls import Reduce
from gradserve_client._output import (
    console,
    count,
    print_info,
    print_json,
    print_tensor,
    receipt_json,
    receipt_line,
    shape,
    size,
    table,
    tensor_json,
)
from gradserve_client._session import Session
from gradserve_client.buffer import Buffer
from gradserve_client.errors import NotFound
from gradserve_client.models import Receipt

app = typer.Typer(no_args_is_help=True, help="List, create, read, change and remove buffers.")


class Reduction(Enum):
    """The value of the gradients: their weighted sum or mean."""

    sum = "sum"
    mean = "mean"


class Nonfinite(Enum):
    """Whether the server accepts gradients that are infinite or NaN."""

    allow = "allow"
    reject = "reject"


Name = Annotated[str, typer.Argument(metavar="NAME", help="The buffer.")]
File = Annotated[Path, typer.Argument(metavar="FILE", help="A safetensors or .npy file.")]
Tensor = Annotated[str | None, typer.Option(metavar="NAME", help="The tensor of the file, if it has several.")]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Write the value to this safetensors or .npy file."),
]
Epoch = Annotated[int | None, typer.Option(help="Change it only while the buffer is in this epoch.")]
Weight = Annotated[float, typer.Option(help="The factor of the gradient.")]
Reducing = Annotated[Reduction, typer.Option(help="mean divides the sum by the sum of the weights.")]
Key = Annotated[
    str | None, typer.Option(metavar="KEY", help="A repetition with the same key counts once. New by default.")
]


@app.command("ls")
def list_(
    ctx: typer.Context,
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="Only buffers whose names begin with this.")] = "",
) -> None:
    """List buffers."""
    session: Session = ctx.obj
    with session.server() as server:
        infos = server.buffers.list(prefix)
    if session.as_json:
        print_json([asdict(info) for info in infos])
        return
    columns = ["name", "shape", "dtype", "epoch", "count", "weight", "size"]
    rows = (
        [info.name, shape(info.shape), info.dtype, str(info.epoch), count(info), f"{info.weight:g}", size(info.bytes)]
        for info in infos
    )
    console().print(table(columns, rows, wraps="name", numbers=columns[3:]))


@app.command()
def show(ctx: typer.Context, name: Name) -> None:
    """Show the metadata of a buffer."""
    session: Session = ctx.obj
    with session.server() as server:
        info = server.buffers[name].info()
    if session.as_json:
        print_json(asdict(info))
    else:
        print_info(info)


@app.command()
def create(
    ctx: typer.Context,
    name: Name,
    dims: Annotated[str, typer.Argument(metavar="SHAPE", help="30000,256 or 30000x256, or [] for a scalar.")],
    dtype: Annotated[str, typer.Option(help="float16, bfloat16, float32 or float64.")] = "float32",
    quorum: Annotated[int | None, typer.Option(help="The number of gradients that closes an epoch.")] = None,
    keep: Annotated[int, typer.Option(help="The number of closed epochs that the server keeps.")] = 1,
    ttl: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="The time from the last change to deletion.")
    ] = None,
    nonfinite: Annotated[
        Nonfinite, typer.Option(help="Allow or reject gradients that are infinite or NaN.")
    ] = Nonfinite.allow,
    max_norm: Annotated[
        float | None, typer.Option(metavar="NORM", help="Refuse gradients whose 2-norm is larger.")
    ] = None,
    key: Key = None,
) -> None:
    """Create a buffer with zeros. An equal buffer may exist already."""
    session: Session = ctx.obj
    with session.server() as server:
        info = server.buffers[name].create(
            _dims(dims),
            dtype=dtype,
            quorum=quorum,
            keep=keep,
            ttl_seconds=ttl,
            nonfinite=nonfinite.value,
            max_norm=max_norm,
            idempotency_key=key,
        )
    if session.as_json:
        print_json(asdict(info))
    else:
        typer.echo(f"{name}: {info.dtype} {shape(info.shape)}, epoch {info.epoch}, count {count(info)}")


@app.command()
def get(
    ctx: typer.Context,
    name: Name,
    output: Output = None,
    epoch: Annotated[int | None, typer.Option(help="A closed epoch instead of the running one.")] = None,
    reduce: Reducing = Reduction.sum,
    dtype: Annotated[str | None, typer.Option(help="The dtype of the value, by default the buffer's.")] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="How long to wait for the epoch to close.")] = 0.0,
) -> None:
    """Fetch the value. Without -o, print it, or the corners of a large one."""
    session: Session = ctx.obj
    with session.server() as server, _files.writing(output) as write:
        value = server.buffers[name].value(epoch=epoch, reduce=_reduce(reduce), dtype=dtype, timeout=timeout)
        write({name: value})
    if session.as_json:
        print_json({"name": name, **tensor_json(value, data=output is None)})
    else:
        print_tensor(name, value, output)


@app.command()
def put(
    ctx: typer.Context,
    name: Name,
    file: File,
    tensor: Tensor = None,
    make: Annotated[bool, typer.Option("--create", help="Create the buffer if it does not exist.")] = False,
    epoch: Epoch = None,
    key: Key = None,
) -> None:
    """Replace the sum by a tensor of a file, which then counts as the only gradient."""

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
    min_count: Annotated[int, typer.Option(help="The number of gradients to wait for.")] = 0,
    epoch: Annotated[int | None, typer.Option(help="Take it only if the buffer is in this epoch.")] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="How long to wait for the gradients.")] = 0.0,
    reduce: Reducing = Reduction.sum,
    key: Key = None,
) -> None:
    """Close the epoch, and fetch its value. Without -o, print it, or the corners of a large one."""
    session: Session = ctx.obj
    with session.server() as server, _files.writing(output) as write:
        taken = server.buffers[name].take(
            min_count=min_count, epoch=epoch, timeout=timeout, reduce=_reduce(reduce), idempotency_key=key
        )
        try:
            write({name: taken.value})
        except OSError as error:
            hint = f"the server still has the value: gradserve-client buffers get {name} --epoch {taken.epoch}"
            raise OSError(error.errno, f"{error.strerror}; {hint}", error.filename) from error
    if session.as_json:
        print_json({**receipt_json(taken), "value": tensor_json(taken.value, data=output is None)})
    else:
        typer.echo(receipt_line(taken))
        print_tensor(name, taken.value, output)


@app.command()
def rm(
    ctx: typer.Context,
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    key: Key = None,
) -> None:
    """Remove a buffer, its value and its closed epochs. On a terminal, ask first."""
    session: Session = ctx.obj
    with session.server() as server:
        buffer = server.buffers[name]
        if not yes and sys.stdin.isatty():
            info = buffer.info()
            question = f"Remove {name}, {info.dtype} {shape(info.shape)}, epoch {info.epoch}, count {info.count}?"
            typer.confirm(question, abort=True, err=True)
        buffer.delete(idempotency_key=key)
    if session.as_json:
        print_json({"name": name, "removed": True})


def _change(ctx: typer.Context, name: str, change: Callable[[Buffer], Receipt]) -> None:
    session: Session = ctx.obj
    with session.server() as server:
        receipt = change(server.buffers[name])
    if session.as_json:
        print_json(receipt_json(receipt))
    else:
        typer.echo(receipt_line(receipt))


def _reduce(reduction: Reduction) -> Reduce:
    return "mean" if reduction is Reduction.mean else "sum"


def _dims(text: str) -> list[int]:
    bare = text.strip(" []()")
    try:
        if not text.strip():  # an unset variable, not a scalar
            raise ValueError
        return [int(dim) for dim in bare.replace("x", ",").removesuffix(",").split(",")] if bare else []
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a shape: write 30000,256 or 30000x256, or [] for a scalar") from None
