"""The commands about graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradserve_client._cli.options import Key, Session, pairs
from gradserve_client._cli.output import console, print_json, print_tensor, size, table, tensor_json, time
from gradserve_client.models import BufferName

if TYPE_CHECKING:
    from gradserve_client.graph_models import GraphInfo

app = typer.Typer(no_args_is_help=True, help="Upload, list, run and remove graphs: ONNX models.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The graph.")]
SIDES = ("inputs", "parameters", "statistics", "outputs", "gradients")


@app.command()
def put(
    ctx: typer.Context,
    name: Name,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An ONNX model.")],
    loss: Annotated[str | None, typer.Option(help="The loss: differentiate the model.")] = None,
    train: Annotated[str | None, typer.Option(metavar="PATTERN,...", help="The parameters to train.")] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="GROUP:PREFIX*", help="Write the model's own weights into new buffers."),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse a model whose parameters an exporter seems to have changed.")
    ] = False,
    key: Key = None,
) -> None:
    """Upload an ONNX model, and show what it takes and gives."""
    session: Session = ctx.obj
    buffers = dict(pairs("--set", ":", weights))
    with session.server() as server:
        info = server.graphs.put(name, file, loss=loss, train=train, set=buffers, strict=strict, idempotency_key=key)
    _print(session, info)


@app.command("ls")
def list_(
    ctx: typer.Context,
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="Only graphs whose names begin with this.")] = "",
) -> None:
    """List graphs."""
    session: Session = ctx.obj
    with session.server() as server:
        heads = server.graphs.list(prefix)
    if session.as_json:
        print_json([asdict(head) for head in heads])
        return
    rows = [[one.name, one.options.get("loss", ""), size(one.bytes), time(one.created_at)] for one in heads]
    console().print(table(["name", "loss", "size", "created"], rows, wraps="name", numbers=["size"], optional=["loss"]))


@app.command()
def show(ctx: typer.Context, name: Name) -> None:
    """Show what a graph takes and gives, and its nodes."""
    session: Session = ctx.obj
    with session.server() as server:
        info = server.graphs[name].info()
    _print(session, info)


@app.command()
def download(
    ctx: typer.Context,
    name: Name,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write the ONNX model.")],
    parameters: Annotated[
        str | None, typer.Option(metavar="PREFIX*", help="With the parameters in these buffers, as m.p.*")
    ] = None,
    statistics: Annotated[
        str | None, typer.Option(metavar="PREFIX*", help="With the running statistics in these buffers, as m.s.*")
    ] = None,
) -> None:
    """Write the model as it was uploaded, or with other weights."""
    from gradserve_client._wire import files

    session: Session = ctx.obj
    with session.server() as server, files.writing(file) as write:
        content = server.graphs[name].download(parameters=parameters, statistics=statistics)
        write(content)
    if session.as_json:
        print_json({"name": name, "bytes": len(content)})


@app.command()
def rm(ctx: typer.Context, name: Name, key: Key = None) -> None:
    """Remove a graph. Buffers stay."""
    session: Session = ctx.obj
    with session.server() as server:
        server.graphs[name].delete(idempotency_key=key)
    if session.as_json:
        print_json({"name": name, "removed": True})


@app.command()
def run(
    ctx: typer.Context,
    name: Name,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A safetensors or .npz file of the inputs.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the outputs to this safetensors or .npz file."),
    ] = None,
    outputs: Annotated[str | None, typer.Option(metavar="NAME,...", help="Compute only these outputs.")] = None,
    sources: Annotated[
        list[str] | None,
        typer.Option("--from", metavar="GROUP:PREFIX*", help="Take parameters from buffers, as parameters:m.p.*"),
    ] = None,
    evaluate: Annotated[
        str | None, typer.Option(metavar="RUN", help="Compute the loss with the weights of this run, without Dropout.")
    ] = None,
) -> None:
    """Run a graph. Without -o, print the outputs, and the corners of large ones."""
    from gradserve_client._wire import files

    session: Session = ctx.obj
    buffers: Mapping[str, Any] = {group: BufferName(buffer) for group, buffer in pairs("--from", ":", sources)}
    tensors = {**files.read_all(file), **buffers}
    wanted = None if outputs is None else outputs.split(",")
    with session.server() as server, files.writing(output) as write:
        graph = server.graphs[name]
        if evaluate is None:
            arrays = graph.run(tensors, outputs=wanted)
        else:
            arrays = graph.join(evaluate).evaluate(tensors, outputs=wanted or ())
        write(arrays)
    if session.as_json:
        print_json({one: tensor_json(array, data=output is None) for one, array in arrays.items()})
    else:
        for one, array in arrays.items():
            print_tensor(one, array, output)


def _print(session: Session, info: GraphInfo) -> None:
    if session.as_json:
        print_json(asdict(info))
        return
    rows = [
        [side if name == next(iter(tensors)) else "", name, tensor.dtype, _shape(tensor.shape)]
        for side in SIDES
        for tensors in [getattr(info, side)]
        for name, tensor in tensors.items()
    ]
    nodes = ", ".join(f"{count} {kind}" for kind, count in info.nodes.items())
    typer.echo(f"{info.name}: {info.kind}, {size(info.bytes)}, {nodes}")
    console().print(table(["", "name", "dtype", "shape"], rows, wraps="name", header=False))
    for doubt in info.doubts:
        typer.echo(f"doubt: {doubt}")


def _shape(shape: tuple[int | None, ...] | None) -> str:
    """Return a shape as text: [?, 256]."""
    return "?" if shape is None else str(["?" if length is None else length for length in shape]).replace("'", "")
