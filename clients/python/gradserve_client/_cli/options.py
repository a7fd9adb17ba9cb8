"""The options of every command, and arguments and options that several commands have."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from gradserve_client._cli.server import Server


@dataclass(frozen=True)
class Session:
    """The options of every command."""

    url: str | None
    api_key: str | None = field(repr=False)
    timeout: float
    as_json: bool

    def server(self) -> contextlib.closing[Server]:
        """Return the server, to be closed after a `with`."""
        from gradserve_client._cli.server import Server

        return contextlib.closing(Server(self.url, self.api_key, self.timeout))


def check_chosen(name: str | None, prefix: str | None, everything: bool) -> None:
    """Raise `BadParameter` unless one of NAME, --prefix and --all is given. A shell's variable may be unset."""
    if prefix == "":
        raise typer.BadParameter("--prefix is empty and would match every buffer; if you mean that, use --all")
    if (name is not None) + (prefix is not None) + everything != 1:
        raise typer.BadParameter("give one of NAME, --prefix PREFIX and --all")


def pairs(option: str, separator: str, texts: Sequence[str] | None) -> list[tuple[str, str]]:
    """Return the names and values in texts like `NAME=VALUE`. Raises `BadParameter`."""
    pairs = [text.partition(separator) for text in texts or ()]
    for name, separated, value in pairs:
        if not (name and separated and value):
            raise typer.BadParameter(f"{option} is {name}{separated}{value}: write it as NAME{separator}VALUE")
    return [(name, value) for name, _, value in pairs]


Name = Annotated[str, typer.Argument(metavar="NAME", help="The buffer.")]
SomeName = Annotated[str | None, typer.Argument(metavar="NAME", help="The buffer, if not --prefix or --all.")]
Prefix = Annotated[
    str | None, typer.Option(metavar="PREFIX", help="All buffers whose names begin with this, or none of them.")
]
All = Annotated[bool, typer.Option("--all", help="All buffers of the namespace, or none of them.")]
File = Annotated[Path, typer.Argument(metavar="FILE", help="A safetensors, .npz or .npy file.")]
Tensor = Annotated[str | None, typer.Option(metavar="NAME", help="The tensor of the file, if it has several.")]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Write the value to this safetensors, .npz or .npy file."),
]
Step = Annotated[int | None, typer.Option(help="Change it only while the buffer is in this step.")]
Weight = Annotated[float, typer.Option(help="The factor of the gradient.")]
Contributor = Annotated[str | None, typer.Option(metavar="NAME", help="Who adds. The step lists the name.")]
Wait = Annotated[float, typer.Option(metavar="SECONDS", help="How long to wait for the step to close.")]
Key = Annotated[
    str | None, typer.Option(metavar="KEY", help="A repetition with the same key counts once. New by default.")
]

RULES: dict[str, Any] = {
    "quorum": Annotated[int | None, typer.Option(help="The number of gradients that closes a step.")],
    "quorum_weight": Annotated[float | None, typer.Option(help="The sum of the weights that closes a step.")],
    "deadline_seconds": Annotated[
        float | None,
        typer.Option("--deadline", metavar="SECONDS", help="The time after its first gradient at which a step closes."),
    ],
    "min_count": Annotated[
        int | None, typer.Option(help="The number of gradients without which the deadline closes no step.")
    ],
    "contributors": Annotated[
        list[str] | None,
        typer.Option("--contributor", metavar="NAME", help="A contributor that each step expects. May be repeated."),
    ],
    "per_contributor": Annotated[
        int | None, typer.Option(help="The number of gradients that a step takes of each contributor.")
    ],
    "ttl_seconds": Annotated[
        float | None, typer.Option("--ttl", metavar="SECONDS", help="The time from the last change to deletion.")
    ],
    "max_norm": Annotated[float | None, typer.Option(metavar="NORM", help="Refuse gradients whose 2-norm is larger.")],
}
"""The options of the rules of a buffer, by the names of the rules."""


def takes_rules(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each rule. Its parameter `rules` gets the rules that are given."""

    @functools.wraps(function)
    def command(**given: Any) -> None:
        rules = {name: given.pop(name) for name in RULES}
        function(**given, rules={name: rule for name, rule in rules.items() if rule not in (None, [])})

    own = inspect.signature(function, eval_str=True)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    options = [inspect.Parameter(name, kind, default=None, annotation=option) for name, option in RULES.items()]
    parameters = [options if one.name == "rules" else [one] for one in own.parameters.values()]
    command.__signature__ = own.replace(parameters=[*itertools.chain(*parameters)])  # type: ignore[attr-defined]
    return command
