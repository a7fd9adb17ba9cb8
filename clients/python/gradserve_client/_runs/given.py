"""Checks of what a worker gives to its accumulator. Each raises `InvalidInput` before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradserve_client._wire.arguments import as_contributor
from gradserve_client.client import Client
from gradserve_client.errors import mistaken


def check_server(server: object) -> None:
    """Raise unless it is a client that does not need `await`."""
    if not isinstance(server, Client):
        raise mistaken("server", f"is of type {type(server).__name__}, but must be a Client, such as Client(url)")


def check_worker(worker: str | None, contributors: object) -> None:
    """Raise if the worker has no valid name, or is not among those that the steps expect."""
    if worker is not None:
        as_contributor(worker, "worker")
    if isinstance(contributors, list | tuple) and worker not in contributors:
        expected = ", ".join(map(repr, contributors[:3])) + ", ..." * (len(contributors) > 3)
        raise mistaken("worker", f"is {worker!r}, but must be one of the contributors, which are {expected}")


def check_rules(rules: Mapping[str, Any]) -> None:
    """Raise if the rules of a step contradict each other, as the server does when it creates a buffer."""
    quorum, least, names = (rules.get(name) for name in ("quorum", "min_count", "contributors"))
    if least is not None and least > 1 and rules.get("deadline_seconds") is None:
        raise mistaken("min_count", f"is {least}, but only a deadline asks for it: give deadline_seconds, too")
    if least is not None and quorum is not None and least > quorum:
        raise mistaken("min_count", f"is {least}, but the quorum of {quorum} closes a step before")
    for rule, count in (("quorum", quorum), ("min_count", least)):
        if count is not None and names is not None and count > len(names) * (each := rules["per_contributor"] or 1):
            most = f"{len(names) * each} pushes at most: {len(names)} of them, {each} each (per_contributor)"
            raise mistaken(rule, f"is {count}, but the contributors make {most}")
