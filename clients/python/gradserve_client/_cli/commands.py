"""The commands about operators, `watch`, and the options of every command."""

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
from typer.main import get_command

from gradserve_client._cli.buffers import app as about_buffers
from gradserve_client._cli.graphs import app as about_graphs
from gradserve_client._cli.info import info
from gradserve_client._cli.options import Contributor, Key, Session, pairs
from gradserve_client._cli.output import (
    console,
    print_json,
    print_tensor,
    receipt_json,
    receipt_line,
    table,
    tensor_json,
)
from gradserve_client._cli.runs import app as about_runs
from gradserve_client._cli.watch import show_updates
from gradserve_client._http.words import DEFAULT_URL
from gradserve_client.errors import NotFound
from gradserve_client.models import BufferName, OperatorInfo, Receipt

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=(
        "--url, --api-key and --json may stand anywhere. Exit codes: 0 success, 1 another failure, 2 bad arguments, "
        "3 no such buffer or operator, 4 the state of the buffer does not allow it, 5 invalid input or unauthorized, "
        "6 the server cannot be reached, is busy, or took too long, 130 interrupted."
    ),
)
app.add_typer(about_buffers, name="buffers")
app.add_typer(about_graphs, name="graphs")
app.add_typer(about_runs, name="runs")
app.command()(info)


def command() -> Any:
    """Return the command. Its help names no type for flags, which take no value."""
    root = get_command(app)
    _hide_types_of_flags(root, None)
    return root


def _hide_types_of_flags(command: Any, parent: Any) -> None:
    context = typer.Context(command, parent=parent, **command.context_settings)
    for parameter in command.get_params(context):
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    for one in getattr(command, "commands", {}).values():
        _hide_types_of_flags(one, context)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gradserve-client {version('gradserve-client')}")
        raise typer.Exit


@app.callback()
def everything(
    ctx: typer.Context,
    url: Annotated[
        str, typer.Option(envvar="GRADSERVE_URL", metavar="URL", help="The server's URL, or unix:/path.")
    ] = DEFAULT_URL,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="GRADSERVE_API_KEY", metavar="KEY", help="Other users can see this option: prefer the variable."
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.001, metavar="SECONDS", help="How long to retry when the server is busy or away.")
    ] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, also for errors.")] = False,
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Use the gradient kernels and the gradient buffers of a gradserve server."""
    ctx.obj = Session(url, api_key, timeout, as_json)


@app.command()
def ops(
    ctx: typer.Context, name: Annotated[str | None, typer.Argument(metavar="NAME", help="Show this operator.")] = None
) -> None:
    """List the operators, or show an operator's formula, inputs, outputs and attributes."""
    from gradserve_client._wire import calls

    session: Session = ctx.obj
    with session.server() as server:
        operators = server.run(calls.operators())
    if name is None:
        if session.as_json:
            print_json([asdict(operator) for operator in operators])
        else:
            rows = ([operator.name, operator.formula] for operator in operators)
            console().print(table(["operator", "formula"], rows, wraps="formula"))
        return
    operator = _find(name, operators)
    if session.as_json:
        print_json(asdict(operator))
    else:
        _show(operator)


@app.command()
def run(
    ctx: typer.Context,
    op: Annotated[str, typer.Argument(metavar="OP", help="The operator.")],
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="A safetensors or .npz file of the inputs, unless all are in buffers."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the outputs to this safetensors or .npz file."),
    ] = None,
    attributes: Annotated[
        list[str] | None, typer.Option("--set", "-a", metavar="NAME=VALUE", help="An attribute. Repeat it for a list.")
    ] = None,
    outputs: Annotated[str | None, typer.Option(metavar="NAME,...", help="Compute only these outputs.")] = None,
    into: Annotated[list[str] | None, typer.Option(metavar="OUTPUT:BUFFER", help="Add an output to a buffer.")] = None,
    sources: Annotated[
        list[str] | None, typer.Option("--from", metavar="INPUT:BUFFER", help="Read an input from a buffer.")
    ] = None,
    weight: Annotated[float | None, typer.Option(help="The factor of outputs added to buffers, by default 1.")] = None,
    step: Annotated[int | None, typer.Option(help="Add only while the buffers are in this step.")] = None,
    contributor: Contributor = None,
    key: Key = None,
) -> None:
    """Run an operator. Without -o, print the outputs, and the corners of large ones. Receipts are always printed."""
    from gradserve_client._wire import calls, files

    session: Session = ctx.obj
    if output is not None and files.is_npy(output):
        raise typer.BadParameter("an .npy file cannot name its outputs: use .safetensors or .npz", ctx=ctx)
    values: dict[str, list[str]] = {}
    for name, value in pairs("--set", "=", attributes):
        values.setdefault(name, []).append(value)
    buffers = {name: BufferName(buffer) for name, buffer in pairs("--from", ":", sources)}
    targets = dict(pairs("--into", ":", into))
    with session.server() as server, files.writing(output) as write:
        try:
            tensors = {} if file is None else files.read_all(file)
        except OSError:
            known = server.run(calls.operators())
            _find(op, known)  # a wrong name comes before a wrong file
            raise
        call = calls.run(
            op,
            {**tensors, **buffers},
            {name: items if len(items) > 1 else items[0] for name, items in values.items()},
            outputs=None if outputs is None else outputs.split(","),
            into=targets,
            weight=weight,
            step=step,
            contributor=contributor,
            idempotency_key=key,
        )
        results = server.run(call)
        receipts = {name: result for name, result in results.items() if isinstance(result, Receipt)}
        arrays = {name: result for name, result in results.items() if not isinstance(result, Receipt)}
        if not session.as_json:  # before the file, which may fail, because the buffers have changed already
            for name, receipt in receipts.items():
                typer.echo(f"{name} -> {receipt_line(receipt)}")
        write(arrays)
    if session.as_json:
        shown = {name: tensor_json(array, data=output is None) for name, array in arrays.items()}
        print_json({"outputs": shown, "receipts": {name: receipt_json(item) for name, item in receipts.items()}})
    else:
        for name, array in arrays.items():
            print_tensor(name, array, output)


@app.command()
def watch(
    ctx: typer.Context,
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="Only buffers whose names begin with this.")] = "",
    interval: Annotated[float, typer.Option(min=0.05, metavar="SECONDS", help="The time between updates.")] = 1.0,
    count: Annotated[int | None, typer.Option(min=1, help="End after this number of updates.")] = None,
) -> None:
    """Watch buffers fill, in a live table, or in lines if the output is not a terminal. Ctrl-C ends it."""
    session: Session = ctx.obj
    with session.server() as server:
        show_updates(server, prefix, interval, count, as_json=session.as_json)


def _find(name: str, operators: Sequence[OperatorInfo]) -> OperatorInfo:
    for operator in operators:
        if operator.name == name:
            return operator
    similar = difflib.get_close_matches(name, [operator.name for operator in operators], n=3, cutoff=0.85)
    hint = f"; similar names: {', '.join(similar)}" if similar else ""
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
        [
            side if tensor is tensors[0] else "",
            tensor.name + ".*" * tensor.group + "?" * tensor.optional,
            ", ".join(tensor.dtypes),
        ]
        for side, tensors in sides.items()
        for tensor in tensors
    ]
    names = list(operator.attributes)
    notes = {name: "" if value is None else f"default {value}" for name, value in operator.attributes.items()}
    notes |= dict.fromkeys(operator.required, "required")
    rows += [["attribute" if name is names[0] else "", name, note] for name, note in notes.items()]
    out.print()
    out.print(table(["", "name", "dtypes"], rows, wraps="dtypes", header=False))
