"""The commands about buffers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gradserve_client._cli.options import (
    All,
    File,
    Key,
    Name,
    Output,
    Prefix,
    Session,
    SomeName,
    Step,
    Tensor,
    Wait,
    check_chosen,
)
from gradserve_client._cli.output import (
    LATE_COLUMNS,
    buffers_text,
    console,
    contributors,
    count,
    late,
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
from gradserve_client._cli.pushes import forget_push, pushes, staged_for
from gradserve_client._cli.rules import create, set_rules
from gradserve_client._cli.tensors import add, save, set_
from gradserve_client.errors import NotFound
from gradserve_client.models import BufferInfo, Receipt

if TYPE_CHECKING:
    from gradserve_client.buffer import Buffer

app = typer.Typer(no_args_is_help=True, help="List, create, read, change and remove buffers.")


Reducing = Annotated[Literal["sum", "mean"], typer.Option(help="mean divides the sum by the sum of the weights.")]


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
    numbers = ["step", "count", "weight", "size"]
    columns = ["name", "shape", "dtype", *numbers, *LATE_COLUMNS]
    rows = [
        [
            *(info.name, shape(info.shape), info.dtype, str(info.step), count(info), f"{info.weight:g}"),
            *(size(info.bytes), *late(info)),
        ]
        for info in infos
    ]
    console().print(table(columns, rows, wraps="name", numbers=numbers, optional=LATE_COLUMNS))


@app.command()
def show(
    ctx: typer.Context,
    name: Name,
    step: Annotated[int | None, typer.Option(help="Show the receipt of this closed step instead.")] = None,
    timeout: Wait = 0.0,
) -> None:
    """Show the metadata of a buffer and what is staged for it, or who was in a closed step and what closed it."""
    session: Session = ctx.obj
    with session.server() as server:
        buffer = server.buffers[name]
        found = buffer.info() if step is None else buffer.info(step=step, timeout=timeout)
        parts = staged_for(server, name) if isinstance(found, BufferInfo) else []
    if isinstance(found, Receipt):
        if session.as_json:
            print_json(receipt_json(found))
        else:
            typer.echo(f"{receipt_line(found)}\ncontributors: {contributors(found.contributors)}")
    elif session.as_json:
        print_json({**asdict(found), "pushes": [asdict(push) for push in parts]})
    else:
        print_info(found, parts)


app.command("create")(create)
app.command("set-rules")(set_rules)
app.command("pushes")(pushes)
app.command("forget-push")(forget_push)


@app.command()
def get(
    ctx: typer.Context,
    name: Name,
    output: Output = None,
    step: Annotated[int | None, typer.Option(help="A closed step instead of the running one.")] = None,
    reduce: Reducing = "sum",
    dtype: Annotated[str | None, typer.Option(help="The dtype of the value, by default the buffer's.")] = None,
    timeout: Wait = 0.0,
) -> None:
    """Fetch the value. Without -o, print it, or the corners of a large one."""
    from gradserve_client._wire import files

    session: Session = ctx.obj
    with session.server() as server, files.writing(output) as write:
        value = server.buffers[name].value(step=step, reduce=reduce, dtype=dtype, timeout=timeout)
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
    step: Step = None,
    key: Key = None,
) -> None:
    """Replace the sum by a tensor of a file, which then counts as the only gradient."""
    from gradserve_client._wire import files

    def change(buffer: Buffer) -> Receipt:
        gradient = files.read_one(file, tensor)
        try:
            return buffer.accumulate(gradient, overwrite=True, step=step, idempotency_key=key)
        except NotFound:
            if not make:
                raise
        buffer.create(gradient.shape, dtype=gradient.dtype)
        return buffer.accumulate(gradient, overwrite=True, step=step, idempotency_key=key)

    _change(ctx, name, change)


app.command("add")(add)
app.command("set")(set_)
app.command("save")(save)


@app.command()
def zero(ctx: typer.Context, name: Name, key: Key = None) -> None:
    """Discard the sum, and begin the next step."""
    _change(ctx, name, lambda buffer: buffer.zero(idempotency_key=key))


@app.command()
def take(
    ctx: typer.Context,
    name: Name,
    output: Output = None,
    min_count: Annotated[int, typer.Option(help="The number of gradients to wait for.")] = 0,
    step: Annotated[int | None, typer.Option(help="Take it only if the buffer is in this step.")] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="How long to wait for the gradients.")] = 0.0,
    reduce: Reducing = "sum",
    key: Key = None,
) -> None:
    """Close the step, and fetch its value. Without -o, print it, or the corners of a large one."""
    from gradserve_client._wire import files

    session: Session = ctx.obj
    with session.server() as server, files.writing(output) as write:
        taken = server.buffers[name].take(
            min_count=min_count, step=step, timeout=timeout, reduce=reduce, idempotency_key=key
        )
        try:
            write({name: taken.value})
        except OSError as error:
            hint = f"the server still has the value: gradserve-client buffers get {name} --step {taken.step}"
            raise OSError(error.errno, f"{error.strerror}; {hint}", error.filename) from error
    if session.as_json:
        print_json({**receipt_json(taken), "value": tensor_json(taken.value, data=output is None)})
    else:
        typer.echo(receipt_line(taken))
        print_tensor(name, taken.value, output)


@app.command()
def rm(
    ctx: typer.Context,
    name: SomeName = None,
    prefix: Prefix = None,
    everything: All = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    key: Key = None,
) -> None:
    """Remove a buffer, or all with a prefix: their values and their closed steps. On a terminal, ask first."""
    session: Session = ctx.obj
    check_chosen(name, prefix, everything)
    asks = not yes and sys.stdin.isatty()
    with session.server() as server:
        if name is None:
            if asks:
                typer.confirm(_question(server.buffers.list(prefix or "")), abort=True, err=True)
            removed = server.buffers.delete(prefix=prefix, all=everything, idempotency_key=key)
        else:
            if asks:
                typer.confirm(_question([server.buffers[name].info()]), abort=True, err=True)
            server.buffers[name].delete(idempotency_key=key)
    if session.as_json:
        print_json({"name": name, "removed": True} if name is not None else {"removed": [*removed]})
    elif name is None:
        typer.echo(f"removed {buffers_text(len(removed))}")


def _question(infos: Sequence[BufferInfo]) -> str:
    if len(infos) == 1:
        (info,) = infos
        return f"Remove {info.name}, {info.dtype} {shape(info.shape)}, step {info.step}, count {info.count}?"
    named = f", from {infos[0].name} to {infos[-1].name}" if infos else ""
    return f"Remove {buffers_text(len(infos))}{named}?"


def _change(ctx: typer.Context, name: str, change: Callable[[Buffer], Receipt]) -> None:
    session: Session = ctx.obj
    with session.server() as server:
        receipt = change(server.buffers[name])
    if session.as_json:
        print_json(receipt_json(receipt))
    else:
        typer.echo(receipt_line(receipt))
