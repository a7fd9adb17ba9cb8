"""The commands that create buffers and change their rules."""

from __future__ import annotations

from dataclasses import asdict
from enum import Enum
from typing import Annotated, Any, Literal

import typer

from gradserve_client._cli.options import All, Key, Name, Prefix, Session, SomeName, check_chosen, takes_rules
from gradserve_client._cli.output import buffers_text, count, print_info, print_json, receipt_json, shape


class Rule(Enum):
    """The rules that can be taken away, by their options."""

    quorum = "quorum"
    quorum_weight = "quorum-weight"
    deadline_seconds = "deadline"
    contributors = "contributor"
    ttl_seconds = "ttl"
    max_norm = "max-norm"


@takes_rules
def create(
    ctx: typer.Context,
    name: Name,
    dims: Annotated[str, typer.Argument(metavar="SHAPE", help="30000,256 or 30000x256, or [] for a scalar.")],
    rules: Any,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16, float32 or float64.")] = "float32",
    keep: Annotated[int, typer.Option(help="The number of closed steps that the server keeps.")] = 1,
    nonfinite: Annotated[
        Literal["allow", "reject"], typer.Option(help="Allow or reject gradients that are infinite or NaN.")
    ] = "allow",
    key: Key = None,
) -> None:
    """Create a buffer with zeros. An equal buffer may exist already."""
    session: Session = ctx.obj
    with session.server() as server:
        info = server.buffers[name].create(
            _dims(dims), dtype=dtype, keep=keep, nonfinite=nonfinite, idempotency_key=key, **rules
        )
    if session.as_json:
        print_json(asdict(info))
    else:
        typer.echo(f"{name}: {info.dtype} {shape(info.shape)}, step {info.step}, count {count(info)}")


@takes_rules
def set_rules(
    ctx: typer.Context,
    rules: Any,
    name: SomeName = None,
    prefix: Prefix = None,
    everything: All = False,
    unset: Annotated[list[Rule] | None, typer.Option(help="Take this rule away. Repeat it for more.")] = None,
    key: Key = None,
) -> None:
    """Change rules of a buffer, or of all with a prefix. A step that fulfils a new rule already closes at once."""
    session: Session = ctx.obj
    check_chosen(name, prefix, everything)
    for rule in unset or ():
        if rule.name in rules:
            raise typer.BadParameter(f"--{rule.value} is given and unset")
        rules[rule.name] = None
    if not rules:
        raise typer.BadParameter("give at least one rule")
    with session.server() as server:
        if name is not None:
            info = server.buffers[name].set_rules(idempotency_key=key, **rules)
        else:
            receipts = server.buffers.set_rules(prefix=prefix, all=everything, idempotency_key=key, **rules)
    if name is not None:
        if session.as_json:
            print_json(asdict(info))
        else:
            print_info(info)
    elif session.as_json:
        print_json([receipt_json(receipt) for receipt in receipts.values()])
    else:
        changed, closed = ([one for one in receipts.values() if getattr(one, what)] for what in ("updated", "closed"))
        typer.echo(f"changed {len(changed)} of {buffers_text(len(receipts))}; steps closed: {len(closed)}")


def _dims(text: str) -> list[int]:
    bare = text.strip(" []()")
    try:
        if not text.strip():  # an unset variable, not a scalar
            raise ValueError
        return [int(dim) for dim in bare.replace("x", ",").removesuffix(",").split(",")] if bare else []
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a shape: write 30000,256 or 30000x256, or [] for a scalar") from None
