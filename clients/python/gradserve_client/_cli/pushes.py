"""The commands about pushes in parts that are not complete."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from gradserve_client._cli.options import Session
from gradserve_client._cli.output import console, print_json, size, table, time
from gradserve_client.errors import NotFound
from gradserve_client.models import StagedPush

if TYPE_CHECKING:
    from gradserve_client._cli.server import Server

_OPTIONAL = ["step", "contributor", "refused"]


def staged_for(server: Server, name: str) -> Sequence[StagedPush]:
    """Return the pushes that have staged a gradient for a buffer; none if the server knows no such pushes."""
    with suppress(NotFound):
        found = server.buffers.pushes(name)
        return [push for push in found if name in push.buffers or push.count > len(push.buffers)]
    return []


def pushes(
    ctx: typer.Context,
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="Only for buffers whose names begin with this.")] = "",
) -> None:
    """List the pushes in parts that are not complete: what has come of each, and when the server forgets it."""
    session: Session = ctx.obj
    with session.server() as server:
        found = server.buffers.pushes(prefix)
    if session.as_json:
        print_json([asdict(push) for push in found])
        return
    numbers = ["buffers", "size", "weight", "step"]
    rows = [
        [
            *(push.push, f"{len(push.staged)} of {push.parts}", str(push.count), size(push.bytes), f"{push.weight:g}"),
            *("" if push.step is None else str(push.step), push.contributor or "", time(push.expires_at)),
            push.refused or "",
        ]
        for push in found
    ]
    columns = ["push", "parts", *numbers, "contributor", "expires", "refused"]
    console().print(table(columns, rows, wraps="push", numbers=numbers, optional=_OPTIONAL))


def forget_push(
    ctx: typer.Context, push: Annotated[str, typer.Argument(metavar="PUSH", help="The id of the push.")]
) -> None:
    """Forget a push in parts that is not complete, and free what it has staged."""
    session: Session = ctx.obj
    with session.server() as server:
        forgotten = server.buffers.forget_push(push)
    if session.as_json:
        print_json({"push": push, "forgotten": forgotten})
    else:
        typer.echo("forgotten" if forgotten else "nothing was staged")
