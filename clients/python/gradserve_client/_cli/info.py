"""The command `info`: which server this is, whether it is ready, and what it allows."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import typer

from gradserve_client._cli.options import Session
from gradserve_client._cli.output import console, print_json, size, table
from gradserve_client.errors import NotFound, ServerFailed, Unavailable

if TYPE_CHECKING:
    from gradserve_client._cli.server import Server

_BYTES = "bytes"
"""A part of the names of limits that are bytes."""


def info(ctx: typer.Context) -> None:
    """Show the server, its version and limits, whether it is ready, and whom it takes you for."""
    from gradserve_client._wire import calls

    session: Session = ctx.obj
    with session.server() as server:
        found: dict[str, Any] = {
            "url": server.place_of(""),
            "server": server.run(calls.version()),
            "client": version("gradserve-client"),
            "ready": _is_ready(server),
            "caller": _caller(server),
            "limits": server.run(calls.limits()),
        }
    if session.as_json:
        print_json(found)
        return
    rows = [
        ["url", found["url"]],
        ["server", found["server"]],
        ["client", f"gradserve-client {found['client']}"],
        ["ready", "yes" if found["ready"] else "no"],
        *([] if found["caller"] is None else [["caller", _described(found["caller"])]]),
        *([name, _limit(name, limit)] for name, limit in found["limits"].items()),
    ]
    console().print(table(["", "value"], rows, wraps="value", header=False))


def _limit(name: str, limit: Any) -> str:
    if not isinstance(limit, int):
        return str(limit)
    return size(limit) if _BYTES in name else f"{limit:,}"


def _is_ready(server: Server) -> bool:
    from gradserve_client._wire import calls

    try:
        server.run(calls.ready())
    except (ServerFailed, Unavailable):
        return False
    return True


def _caller(server: Server) -> dict[str, Any] | None:
    """Return whom the server takes the client for; None if the server does not say."""
    from gradserve_client._wire import calls

    with suppress(NotFound):
        return server.run(calls.caller())
    return None


def _described(caller: Mapping[str, Any]) -> str:
    if not caller.get("keys"):
        return "anyone: the server has no API keys"
    namespace = caller.get("namespace") or "the default namespace"
    return f"{caller.get('name')}, {namespace}, {', '.join(caller.get('scopes') or ['no scopes'])}"
