"""Points within a commit at which a test may stop the writer thread, fail it, or kill the process."""

from __future__ import annotations

from collections.abc import Callable

action: Callable[[str], None] | None = None
"""What a test wants done at each point; None in every server."""


def hit(point: str) -> None:
    """Do what a test has put into `action`; nothing without one."""
    if action is not None:
        action(point)
