"""The commands: those about operators, and what all of them have in common."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from gradserve_client import _buffer_commands, _files, _watch
from gradserve_client._requests import DEFAULT_URL
from gradserve_client._session import (
    Session,
    console,
    document,
    receipt_fields,
    receipt_line,
    table,
    tensor_fields,
    tensor_lines,
)
from gradserve_client._tensors import Array
from gradserve_client.errors import NotFound
from gradserve_client.models import OperatorInfo, Receipt

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=(
        "--url, --api-key and --json may stand anywhere. Exit codes: 0 done, 1 another failure, 2 usage, "
        "3 no such buffer or operator, 4 the state of the buffer does not allow it, 5 invalid input or unauthorized, "
        "6 the server cannot be reached, is busy or took too long, 130 interrupted."
    ),
)
app.add_typer(_buffer_commands.app, name="buffers")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gradserve-client {version('gradserve-client')}")
        raise typer.Exit


@app.callback()
def everything(
    ctx: typer.Context,
    url: Annotated[str, typer.Option(envvar="GRADSERVE_URL", metavar="URL", help="Where the server is.")] = DEFAULT_URL,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="GRADSERVE_API_KEY", metavar="KEY", help="Others can see it here: prefer the variable."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.001, metavar="SECONDS", help="How long to try when the server is busy or away.")
    ] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, errors too.")] = False,
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Gradient kernels and gradient buffers of a gradserve server."""
    ctx.obj = Session(url, api_key, timeout, as_json)


@app.command()
def ops(
    ctx: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Say all about this one.")] = None,
) -> None:
    """List the operators, or show one: its formula, inputs, outputs and attributes."""
    session: Session = ctx.obj
    with session.server() as server:
        operators = server.operators()
    if name is None:
        if session.as_json:
            document([asdict(one) for one in operators])
        else:
            console().print(
                table(["operator", "formula"], ([one.name, one.formula] for one in operators), wraps="formula")
            )
        return
    operator = _find(name, operators)
    if session.as_json:
        document(asdict(operator))
    else:
        _show(operator)


@app.command()
def run(
    ctx: typer.Context,
    op: Annotated[str, typer.Argument(metavar="OP", help="The operator.")],
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="A safetensors file with its inputs by name; none if all are in buffers."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the outputs to this safetensors file.")
    ] = None,
    attributes: Annotated[
        list[str] | None,
        typer.Option("--set", "-a", metavar="NAME=VALUE", help="An attribute; a list by one of these per element."),
    ] = None,
    outputs: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Compute these only, separated by commas.")
    ] = None,
    into: Annotated[list[str] | None, typer.Option(metavar="OUTPUT:BUFFER", help="Add an output to a buffer.")] = None,
    sources: Annotated[
        list[str] | None, typer.Option("--from", metavar="INPUT:BUFFER", help="Take an input from a buffer.")
    ] = None,
    weight: Annotated[float | None, typer.Option(help="Of what is added to buffers; 1 by default.")] = None,
    epoch: Annotated[int | None, typer.Option(help="Add only while the buffers are in this one.")] = None,
    key: _buffer_commands.Key = None,
) -> None:
    """Run an operator. Without -o, the outputs are printed, large ones in part; so are receipts of buffers."""
    session: Session = ctx.obj
    if output is not None and _files.is_npy(output):
        raise typer.BadParameter("outputs have names, which .npy files have not: take .safetensors", ctx=ctx)
    given: dict[str, list[str]] = {}
    for name, value in _pairs("--set", "=", attributes):
        given.setdefault(name, []).append(value)
    targets, taken = dict(_pairs("--into", ":", into)), dict(_pairs("--from", ":", sources))
    tensors = {} if file is None else _files.read_all(file)
    with session.server() as server, _files.writing(output) as write:
        results = server.run(
            op,
            {**tensors, **{name: server.buffers[buffer] for name, buffer in taken.items()}},
            {name: values if len(values) > 1 else values[0] for name, values in given.items()},
            outputs=None if outputs is None else outputs.split(","),
            into=targets,
            weight=weight,
            epoch=epoch,
            idempotency_key=key,
        )
        receipts = {name: one for name, one in results.items() if isinstance(one, Receipt)}
        arrays = {name: one for name, one in results.items() if not isinstance(one, Receipt)}
        # What was added to buffers is said even if the file cannot be written.
        if not session.as_json:
            for name, receipt in receipts.items():
                typer.echo(f"{name} -> {receipt_line(receipt)}")
        write(arrays)
    if session.as_json:
        document(
            {
                "outputs": {name: tensor_fields(one, data=output is None) for name, one in arrays.items()},
                "receipts": {name: receipt_fields(one) for name, one in receipts.items()},
            }
        )
    else:
        _show_arrays(arrays, output)


@app.command()
def watch(
    ctx: typer.Context,
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="Only buffers whose names begin so.")] = "",
    interval: Annotated[float, typer.Option(min=0.05, metavar="SECONDS", help="Between two looks.")] = 1.0,
    count: Annotated[int | None, typer.Option(min=1, help="Look so often, and end.")] = None,
    norm: Annotated[
        bool, typer.Option(help="Show the norms of the sums, for which those that changed are fetched.")
    ] = True,
) -> None:
    """Watch buffers fill: a live table, or lines where there is no terminal. Ctrl-C ends it."""
    session: Session = ctx.obj
    with session.server(progress=False) as server:
        looks = _watch.looks(server, prefix, interval=interval, count=count, norms=norm)
        if session.as_json:
            _watch.print_json(looks)
        elif console().is_terminal:
            _watch.show_live(looks)
        else:
            _watch.print_lines(looks)


def _find(name: str, operators: Sequence[OperatorInfo]) -> OperatorInfo:
    for operator in operators:
        if operator.name == name:
            return operator
    near = difflib.get_close_matches(name, [one.name for one in operators], n=3)
    hint = f"; there is {', '.join(near)}" if near else ""
    raise NotFound(f"There is no operator {name}{hint}", code="unknown_operator")


def _show(operator: OperatorInfo) -> None:
    out = console()
    out.print(Text(operator.name, style="bold"))
    out.print(operator.formula)
    if operator.description:
        out.print()
        out.print(re.sub(r"(?<!\n)\n(?!\n)", " ", operator.description))
    sides = {"input": operator.inputs, "output": operator.outputs}
    rows = [
        [side if one is tensors[0] else "", one.name + "?" * one.optional, ", ".join(one.dtypes)]
        for side, tensors in sides.items()
        for one in tensors
    ]
    names = list(operator.attributes)
    rows += [
        ["attribute" if name is names[0] else "", name, "" if value is None else f"default {value}"]
        for name, value in operator.attributes.items()
    ]
    out.print()
    out.print(table(["", "name", "dtypes"], rows, wraps="dtypes", header=False))


def _pairs(option: str, between: str, texts: Sequence[str] | None) -> list[tuple[str, str]]:
    pairs = [text.partition(between) for text in texts or ()]
    for name, found, value in pairs:
        if not (name and found and value):
            raise typer.BadParameter(f"{option} {name}{found}{value}: write it as NAME{between}VALUE")
    return [(name, value) for name, _, value in pairs]


def _show_arrays(arrays: dict[str, Array], output: Path | None) -> None:
    for name, array in arrays.items():
        if output is None:
            typer.echo(tensor_lines(name, array))
        else:
            typer.echo(f"{output}: {name} {_described(array)}")


def _described(array: Array) -> str:
    known: dict[str, Any] = tensor_fields(array, data=False)
    return f"{known['dtype']} {known['shape']}"
