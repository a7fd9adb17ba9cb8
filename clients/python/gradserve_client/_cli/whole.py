"""The commands that write all tensors of a file over buffers, and back."""

from __future__ import annotations

from typing import Annotated

import typer

from gradserve_client._cli.options import File, Key
from gradserve_client._cli.output import print_json, print_tensor, receipt_json, receipt_line, tensor_json
from gradserve_client._cli.session import Session

Prefix = Annotated[str, typer.Argument(metavar="PREFIX", help="What buffers' names have before tensors' names.")]


def set_(ctx: typer.Context, prefix: Prefix, file: File, key: Key = None) -> None:
    """Write all tensors of a safetensors or .npz file over the buffers of their names, and create those missing."""
    from gradserve_client._wire import files

    session: Session = ctx.obj
    tensors = files.read_all(file)
    with session.server() as server:
        receipts = server.buffers.set(tensors, prefix=prefix, idempotency_key=key)
    if session.as_json:
        print_json([*map(receipt_json, receipts.values())])
    else:
        typer.echo("\n".join(map(receipt_line, receipts.values())))


def save(ctx: typer.Context, prefix: Prefix, file: File) -> None:
    """Write the values of all buffers with a prefix into a file, each by the rest of its name."""
    from gradserve_client._wire import files

    session: Session = ctx.obj
    with session.server() as server, files.writing(file) as write:
        values = server.buffers.value(prefix=prefix)
        tensors = {name.removeprefix(prefix): value for name, value in values.items()}
        write(tensors)
    if session.as_json:
        print_json({name: tensor_json(value, data=False) for name, value in tensors.items()})
    else:
        for name, value in tensors.items():
            print_tensor(name, value, file)
