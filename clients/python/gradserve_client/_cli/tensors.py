"""The commands that move the tensors of whole files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradserve_client._cli.options import Contributor, File, Key, Session, Step, Tensor, Weight
from gradserve_client._cli.output import print_json, print_tensor, receipt_json, receipt_line, tensor_json

if TYPE_CHECKING:
    from gradserve_client.rows import Gradient


Prefix = Annotated[str, typer.Argument(metavar="PREFIX", help="What buffers' names have before tensors' names.")]


def add(
    ctx: typer.Context,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The buffer. Without it, those of the tensors' names.")
    ] = None,
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="A safetensors, .npz or .npy file.")] = None,
    tensor: Tensor = None,
    prefix: Annotated[
        str | None, typer.Option(metavar="PREFIX", help="What the buffers' names have before the tensors' names.")
    ] = None,
    weight: Weight = 1.0,
    step: Step = None,
    contributor: Contributor = None,
    key: Key = None,
) -> None:
    """Add a tensor of a file to the sum, or all tensors of a file to the buffers of their names, or to none of them.

    The rows NAME/rows at NAME/indices are the sparse gradient NAME.
    """
    from gradserve_client._wire import files

    session: Session = ctx.obj
    options: Any = {"weight": weight, "step": step, "contributor": contributor, "idempotency_key": key}
    if name is None:
        raise typer.BadParameter("give FILE, or NAME and FILE")
    if file is None:
        gradients = _of_whole_file(Path(name), tensor, prefix or "")
        with session.server() as server:
            found = server.buffers.accumulate(gradients, **options)
        receipts = [found[one] for one in gradients]
    else:
        if prefix is not None:
            raise typer.BadParameter("--prefix is for a whole file: omit NAME")
        gradient = files.read_gradient(file, tensor)
        with session.server() as server:
            receipts = [server.buffers[name].accumulate(gradient, **options)]
    if not session.as_json:
        typer.echo("\n".join(map(receipt_line, receipts)))
    else:
        print_json([*map(receipt_json, receipts)] if file is None else receipt_json(receipts[0]))


def _of_whole_file(file: Path, tensor: str | None, prefix: str) -> dict[str, Gradient]:
    """Return the gradients by the names of their buffers."""
    from gradserve_client._wire import files

    if tensor is not None:
        raise typer.BadParameter("--tensor needs the NAME of a buffer before FILE")
    return {f"{prefix}{name}": gradient for name, gradient in sorted(files.read_gradients(file).items())}


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
