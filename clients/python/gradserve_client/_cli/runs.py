"""The commands about runs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from gradserve_client._cli.options import Session
from gradserve_client._cli.output import console, print_json, table, time
from gradserve_client.models import RunInfo

app = typer.Typer(no_args_is_help=True, help="List, show and delete runs: what the workers of a training have alike.")

Name = Annotated[str, typer.Argument(metavar="RUN", help="The run.")]


@app.command("ls")
def list_(
    ctx: typer.Context,
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="Only runs whose names begin with this.")] = "",
) -> None:
    """List runs."""
    session: Session = ctx.obj
    with session.server() as server:
        runs = server.runs.list(prefix)
    if session.as_json:
        print_json([asdict(run) for run in runs])
        return
    columns = ["name", "state", "step", "members", "missing", "left out", "updated"]
    rows = [
        [run.name, state_of(run), str(run.step), *map(", ".join, (run.members, run.missing or (), run.left_out))]
        + [time(run.updated_at)]
        for run in runs
    ]
    optional = ["members", "missing", "left out"]
    console().print(table(columns, rows, wraps="name", numbers=["step"], optional=optional))


@app.command()
def show(ctx: typer.Context, run: Name) -> None:
    """Show a run: its workers, its state, and what they have alike."""
    session: Session = ctx.obj
    with session.server() as server:
        found = server.runs.info(run)
    if session.as_json:
        print_json(asdict(found))
        return
    lines = {
        "state": state_of(found),
        "step": str(found.step),
        "members": ", ".join(found.members),
        "missing": ", ".join(found.missing or ()),
        "left out": ", ".join(found.left_out),
        "buffers": f"{found.prefix}*",
        "life": found.life,
        "created": time(found.created_at),
        "updated": time(found.updated_at),
        **{f"form: {name}": str(value) for name, value in found.form.items()},
    }
    rows = [[name, value] for name, value in {"name": found.name, **lines}.items() if value]
    console().print(table(["", ""], rows, wraps="", header=False))


@app.command()
def delete(ctx: typer.Context, run: Name) -> None:
    """Delete a run with all its buffers. Its workers are refused from then on."""
    session: Session = ctx.obj
    with session.server() as server:
        server.runs.delete(run)
    if session.as_json:
        print_json({"name": run, "deleted": True})


def state_of(run: RunInfo) -> str:
    """Return how a run is, with the error of one that has failed."""
    ended = run.ended or {}
    return f"{run.state} ({ended['worker']}: {ended['error']})" if ended.get("error") else run.state
