"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def check_chosen(name: str | None, prefix: str | None, everything: bool) -> None:
    """Raise `BadParameter` unless one of NAME, --prefix and --all is given. A shell's variable may be unset."""
    if prefix == "":
        raise typer.BadParameter("--prefix is empty, so that it would fit every buffer; if it must, give --all")
    if (name is not None) + (prefix is not None) + everything != 1:
        raise typer.BadParameter("give one of NAME, --prefix PREFIX and --all")


Name = Annotated[str, typer.Argument(metavar="NAME", help="The buffer.")]
SomeName = Annotated[str | None, typer.Argument(metavar="NAME", help="The buffer, if not --prefix or --all.")]
Prefix = Annotated[
    str | None, typer.Option(metavar="PREFIX", help="All buffers whose names begin with this, or none of them.")
]
All = Annotated[bool, typer.Option("--all", help="All buffers of the namespace, or none of them.")]
File = Annotated[Path, typer.Argument(metavar="FILE", help="A safetensors or .npy file.")]
Tensor = Annotated[str | None, typer.Option(metavar="NAME", help="The tensor of the file, if it has several.")]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Write the value to this safetensors or .npy file."),
]
Epoch = Annotated[int | None, typer.Option(help="Change it only while the buffer is in this epoch.")]
Weight = Annotated[float, typer.Option(help="The factor of the gradient.")]
Contributor = Annotated[str | None, typer.Option(metavar="NAME", help="Who adds. The epoch lists the name.")]
Wait = Annotated[float, typer.Option(metavar="SECONDS", help="How long to wait for the epoch to close.")]
Key = Annotated[
    str | None, typer.Option(metavar="KEY", help="A repetition with the same key counts once. New by default.")
]

Quorum = Annotated[int | None, typer.Option(help="The number of gradients that closes an epoch.")]
QuorumWeight = Annotated[float | None, typer.Option(help="The sum of the weights that closes an epoch.")]
Deadline = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="The time from its first gradient after which an epoch closes."),
]
MinCount = Annotated[
    int | None, typer.Option(help="The number of gradients without which the deadline closes no epoch.")
]
Contributors = Annotated[
    list[str] | None,
    typer.Option("--contributor", metavar="NAME", help="A contributor that each epoch expects. Repeat it for more."),
]
PerContributor = Annotated[
    int | None, typer.Option(help="The number of gradients that an epoch takes of each contributor.")
]
Ttl = Annotated[float | None, typer.Option(metavar="SECONDS", help="The time from the last change to deletion.")]
MaxNorm = Annotated[float | None, typer.Option(metavar="NORM", help="Refuse gradients whose 2-norm is larger.")]
